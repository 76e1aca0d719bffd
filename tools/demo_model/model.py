"""The model as it is trained: whole rows of documents, all positions at once.

reference.py computes the same function one sequence at a time with every rounding point of the
served model; what is here leaves out the roundings that have no effect on learning.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention
from .config import ModelConfig, Role
from .engram import Engram, EngramHash
from .hyper_connection import HyperConnection, collapse, expand
from .indexer import index_loss
from .layers import Linear, Norm, rms_norm
from .masks import Masks, make_masks
from .moe import MixtureOfExperts
from .regions import Region
from .rope import compressed_frequencies, rope_table, window_frequencies


class Layer(nn.Module):
    """layer: of the backbone, or None for a draft layer."""

    def __init__(self, config: ModelConfig, layer: int | None):
        super().__init__()
        draft = layer is None
        self.attn_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, layer)
        self.hc_attn = HyperConnection(config)
        self.hc_ffn = HyperConnection(config)
        self.ffn = MixtureOfExperts(
            config,
            config.dspark_n_routed_experts if draft else config.n_routed_experts,
            config.dspark_num_experts_per_tok if draft else config.num_experts_per_tok,
        )
        if layer in config.engram_layer_ids:
            self.engram = Engram(config, layer)
            self.engram_hash = EngramHash(config, layer)


@dataclasses.dataclass
class Output:
    hidden: Tensor  # [tokens, hidden] bf16: normalised, the input of the head
    taps: list[Tensor]  # [tokens, hidden] bf16 each: what the drafter reads
    index_losses: list[Tensor]  # [sequences, positions] each
    loads: Tensor  # [layers, experts]: each expert's share of the tokens


class DemoModel(nn.Module):
    def __init__(self, config: ModelConfig, token_map: Tensor):
        """token_map: [vocab_size] ids of the Engram's compressed vocabulary."""
        super().__init__()
        self.config = config
        self.embed = Linear(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(config.vocab_size, config.hidden_size)
        self.register_buffer("token_map", token_map.long(), False)
        self.register_buffer("window_frequencies", window_frequencies(config), False)
        self.register_buffer("compressed_frequencies", compressed_frequencies(config), False)

    def forward(self, tokens: Tensor, documents: Tensor, selecting: bool) -> Output:
        """tokens, documents: [sequences, positions]; a row's documents are numbered ascending.

        selecting: attend to the indexers' choices; otherwise to all visible entries.
        """
        c = self.config
        sequences, positions = tokens.shape
        masks = make_masks(documents, c.sliding_window, c.compress_ratios)
        place = torch.arange(positions, device=tokens.device)
        plain_table = rope_table(place, self.window_frequencies)
        table = rope_table(place, self.compressed_frequencies)
        h = F.embedding(tokens, self.embed.grid()).flatten(0, 1)
        h = h[:, None, :].expand(-1, c.hc_mult, -1).contiguous()
        pre = torch.zeros(h.shape[0], c.hc_mult, device=h.device)
        pre[:, 0] = 1
        pre.requires_grad_(torch.is_grad_enabled())  # like those of later sites
        keys = Selection()
        taps, loads = [], []
        for index, layer in enumerate(self.layers):
            if hasattr(layer, "engram"):
                rows = layer.engram_hash(tokens, documents, self.token_map)
                h = layer.engram(h, rows.flatten(0, 1))
            if index in c.dspark_target_layer_ids:
                taps.append(h.float().mean(1).to(torch.bfloat16))
            x, x_grid, next_pre, post, comb = layer.hc_attn(h, pre, layer.attn_norm.weight)
            x, x_grid = (v.view(sequences, positions, -1) for v in (x, x_grid))
            if c.compress_ratios[index] == 0:
                y = layer.attn.attend_window(x_grid, plain_table, masks.window)
            else:
                y = self._attend(index, x, x_grid, table, masks, selecting, keys)
            h = expand(y.flatten(0, 1), h, post, comb)
            x, x_grid, pre, post, comb = layer.hc_ffn(h, next_pre, layer.ffn_norm.weight)
            y, load = layer.ffn(x, x_grid)
            h = expand(y, h, post, comb)
            loads.append(load)
        self._finish_selection(keys)
        hidden = self.final(h, pre)
        return Output(hidden, taps, keys.losses, torch.stack(loads))

    def _attend(self, index, x, x_grid, table, masks: Masks, selecting: bool, keys: "Selection"):
        c = self.config
        attn = self.layers[index].attn
        role = c.role(index)
        topk = c.index_topk if selecting else 0
        if role is Role.FULL:
            self._finish_selection(keys)
            ratio = c.compress_ratios[index]
            visible = masks.compressed[ratio]
            entry_table = table[: visible.shape[-1] * ratio : ratio]
            candidates = None
            if index == c.candidate_source_layer_id:
                candidates = (c.candidate_block_size, c.candidate_topk_blocks)
            y, keys.compressed, keys.index, keys.selected, keys.candidates, keys.scores, mass = (
                attn.attend_full(
                    x, x_grid, table, entry_table, masks.window, visible, topk, candidates
                )
            )
            keys.mass = mass
        elif role is Role.REINDEX:
            self._finish_selection(keys)
            y, keys.selected, keys.scores, mass = attn.attend_reindex(
                x, x_grid, table, masks.window, keys.compressed, keys.index, keys.candidates, topk
            )
            keys.mass = mass
        else:
            y, mass = attn.attend_reuse(x_grid, table, masks.window, keys.compressed, keys.selected)
            keys.mass = keys.mass + mass
        return y

    def _finish_selection(self, keys: "Selection") -> None:
        """All layers that share a selection have attended: what its indexer should have chosen."""
        if keys.scores is not None:
            keys.losses.append(index_loss(keys.scores, keys.mass, keys.selected))
        keys.scores = keys.mass = None

    def final(self, h: Tensor, pre: Tensor) -> Tensor:
        return rms_norm(collapse(h, pre), self.norm.weight, self.config.rms_norm_eps)


@dataclasses.dataclass
class Selection:
    """What the layers of one pass hand on."""

    compressed: Tensor | None = None  # [sequences, entries, head_dim]
    index: Tensor | None = None  # [sequences, entries, index_head_dim]
    selected: Tensor | None = None  # [sequences, positions, entries] bool
    candidates: Tensor | None = None  # the same
    scores: Tensor | None = None  # the same, fp32
    mass: Tensor | None = None  # the same, fp32, of the layers so far
    losses: list[Tensor] = dataclasses.field(default_factory=list)


@Region
def head_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Per token: cross-entropy, and whether the target is the best. targets: [tokens]."""
    logits = F.linear(hidden, head).float()
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets
