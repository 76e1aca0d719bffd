"""The draft network: a few layers over the target's features that propose a block of tokens.

A block starts at an anchor, a token that is known but that the target has not run yet. Its slots
hold the anchor and noise; every slot sees the context before the anchor and the whole block.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention
from .config import ModelConfig
from .hyper_connection import collapse, expand
from .layers import Linear, Norm, QuantizedLinear, rms_norm
from .model import Layer
from .quantization import q8
from .rope import rope_table, rotate, window_frequencies


@dataclasses.dataclass
class Blocks:
    """Blocks of one pass. The block of an anchor at position s predicts positions s + 1 ... s + K."""

    anchors: Tensor  # [blocks] row of the anchor in the flattened [sequences * positions]
    positions: Tensor  # [blocks] position of the anchor in its row
    context: Tensor  # [blocks, window] rows of the positions before it
    visible: Tensor  # [blocks, window] bool: they exist and belong to the anchor's document


def make_blocks(anchors: Tensor, documents: Tensor, window: int) -> Blocks:
    """anchors: [blocks] flattened rows; documents: [sequences, positions]."""
    width = documents.shape[1]
    positions = anchors % width
    offset = torch.arange(-window, 0, device=anchors.device)
    at = positions[:, None] + offset
    context = anchors[:, None] + offset
    inside = at >= 0
    context = torch.where(inside, context, anchors[:, None])
    flat = documents.flatten()
    visible = inside & (flat[context] == flat[anchors][:, None])
    return Blocks(anchors, positions, context, visible)


class Drafter(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        c = config
        self.config = c
        self.main_proj = QuantizedLinear(
            c.hidden_size, len(c.dspark_target_layer_ids) * c.hidden_size
        )
        self.main_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.stages = nn.ModuleList(Layer(c, None) for _ in range(c.num_nextn_predict_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.markov_embed = Linear(c.vocab_size, c.dspark_markov_rank)
        self.markov_head = Linear(c.vocab_size, c.dspark_markov_rank)
        self.confidence = Linear(1, c.hidden_size + c.dspark_markov_rank)
        self.register_buffer("frequencies", window_frequencies(c), False)

    def features(self, taps: list[Tensor]) -> Tensor:
        """What every stage's context keys are made of: [tokens, hidden] bf16 on the q8 grid."""
        return q8(self.main_norm(self.main_proj(q8(torch.cat(taps, -1)))))

    def forward(
        self, features: Tensor, blocks: Blocks, anchor_tokens: Tensor, embed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """anchor_tokens: [blocks]; embed: the target's table, bf16.

        Returns h [blocks, K, hidden] bf16, not normalised, and the experts' loads [stages, experts].
        """
        c = self.config
        count, size = anchor_tokens.shape[0], c.dspark_block_size
        slots = torch.arange(size, device=embed.device)
        positions = blocks.positions[:, None] + slots
        table = rope_table(positions.flatten(), self.frequencies).view(count, size, -1, 2)
        before = torch.arange(-c.sliding_window, 0, device=embed.device)
        context_positions = (blocks.positions[:, None] + before).clamp(min=0)
        context_table = rope_table(context_positions.flatten(), self.frequencies)
        context_table = context_table.view(count, c.sliding_window, -1, 2)
        tokens = torch.where(slots == 0, anchor_tokens[:, None], c.dspark_noise_token_id)
        h = F.embedding(tokens, embed).flatten(0, 1)
        h = h[:, None, :].expand(-1, c.hc_mult, -1).contiguous()
        pre = torch.zeros(h.shape[0], c.hc_mult, device=h.device)
        pre[:, 0] = 1
        pre.requires_grad_(torch.is_grad_enabled())  # like those of later sites
        loads = []
        for stage in self.stages:
            _, x_grid, next_pre, post, comb = stage.hc_attn(h, pre, stage.attn_norm.weight)
            y = block_attention(
                stage.attn,
                x_grid.view(count, size, -1),
                table,
                features,
                blocks,
                context_table,
            )
            h = expand(y.flatten(0, 1), h, post, comb)
            x, x_grid, pre, post, comb = stage.hc_ffn(h, next_pre, stage.ffn_norm.weight)
            y, load = stage.ffn(x, x_grid)
            h = expand(y, h, post, comb)
            loads.append(load)
        return collapse(h, pre).view(count, size, -1), torch.stack(loads)

    def logits(self, h: Tensor, previous: Tensor, head: Tensor) -> Tensor:
        """previous: [blocks, K] the token before the one that a slot predicts. fp32."""
        base = F.linear(rms_norm(h, self.norm.weight, self.config.rms_norm_eps), head).float()
        embedded = F.embedding(previous, self.markov_embed.grid())
        return base + F.linear(embedded, self.markov_head.grid()).float()

    def confidences(self, h: Tensor, previous: Tensor) -> Tensor:
        """[blocks, K] logits of the chance that a slot survives if those before it do.

        Learns nothing but its own weights: its loss must not move the network.
        """
        embedded = F.embedding(previous, self.markov_embed.grid())
        x = torch.cat((h, embedded), -1).detach().float()
        return F.linear(x, self.confidence.grid().float())[..., 0]


def block_attention(
    attn: Attention,
    x_grid: Tensor,
    table: Tensor,
    features: Tensor,
    blocks: Blocks,
    context_table: Tensor,
) -> Tensor:
    """x_grid: [blocks, K, hidden]. Every slot sees the visible context and the whole block."""
    q, _, own = attn.project(x_grid, table)
    # The projection and its norm do not depend on the block; rotation follows after the gather.
    plain = attn.kv_norm(attn.wkv(features))[blocks.context]
    context = q8(rotate(plain, context_table).to(torch.bfloat16))
    keys = torch.cat((context, own), 1)
    count, size, heads, _ = q.shape
    scores = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2)).view(count, size, heads, -1)
    scores = scores.float() * attn.scale
    seen = F.pad(blocks.visible, (0, size), value=True)
    scores = torch.where(seen[:, None, None, :], scores, -torch.inf)
    sinks = attn.attn_sink[:, None].expand(count, size, -1, -1)
    p = torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1].to(torch.bfloat16)
    out = torch.bmm(p.flatten(1, 2), keys).view(q.shape)
    return attn.output(out, table)
