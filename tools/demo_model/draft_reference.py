"""The drafter with every rounding point of the served one, a block at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .drafter import Drafter
from .model import DemoModel
from .quantization import q8_grid
from .reference import (
    attend,
    bf16,
    collapse,
    expand,
    latent,
    linear,
    mix,
    mixture_of_experts,
    norm,
    output,
    product,
    queries,
)
from .rope import rope_table


@torch.no_grad()
def features(drafter: Drafter, taps: list[Tensor]) -> Tensor:
    """taps: [positions, hidden] each. [positions, hidden] on the bf16 grid."""
    projected = linear(q8_grid(torch.cat(taps, -1)), drafter.main_proj.grid())
    return norm(projected, drafter.main_norm)


@torch.no_grad()
def draft(
    model: DemoModel, drafter: Drafter, context: Tensor, anchor: int, position: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One block, greedy. context: features of at least the positions before `position`, which is the
    anchor's. Returns K drafted tokens, their confidences before the sigmoid, and logits [K, vocab].
    """
    c = model.config
    size = c.dspark_block_size
    first = max(0, position - c.sliding_window)
    table = rope_table(torch.arange(first, position + size), drafter.frequencies)
    before, own = table[: position - first], table[position - first :]
    rows = q8_grid(context[first:position])
    tokens = torch.full((size,), c.dspark_noise_token_id)
    tokens[0] = anchor
    h = bf16(model.embed.weight)[tokens][:, None, :].expand(-1, c.hc_mult, -1)
    pre = F.one_hot(torch.zeros(size, dtype=torch.long), c.hc_mult).float()
    everything = torch.arange(position - first + size).expand(size, -1)
    for stage in drafter.stages:
        next_pre, post, comb = mix(stage.hc_attn, h)
        x_grid = q8_grid(norm(collapse(h, pre), stage.attn_norm))
        q, _ = queries(stage.attn, x_grid, own)
        keys = torch.cat((latent(stage.attn, rows, before), latent(stage.attn, x_grid, own)))
        o = attend(q, keys, everything, stage.attn.attn_sink, stage.attn.scale)
        h = expand(output(stage.attn, o, own), h, post, comb)
        pre, post, comb = mix(stage.hc_ffn, h)
        y, _ = mixture_of_experts(stage.ffn, norm(collapse(h, next_pre), stage.ffn_norm))
        h = expand(y, h, post, comb)
    x = collapse(h, pre)
    base = product(norm(x, drafter.norm), bf16(model.head.weight))
    embed, head = bf16(drafter.markov_embed.weight), bf16(drafter.markov_head.weight)
    weight = bf16(drafter.confidence.weight)
    previous, drafted, confidences, logits = anchor, [], [], []
    for slot in range(size):
        logits.append(base[slot] + product(embed[previous], head))
        confidences.append(product(torch.cat((x[slot], embed[previous])), weight)[0])
        previous = int(logits[-1].argmax())
        drafted.append(previous)
    return torch.tensor(drafted), torch.stack(confidences), torch.stack(logits)
