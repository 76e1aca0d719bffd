"""The model with every rounding point of the served one ("production" in `deepinfer logits`), one
sequence at a time. The plain reference beside model.py, and what the engine is compared with.

Activations are fp32 tensors whose values lie on the grid that the served model rounds to. Matrix
products are summed in double: products of quantised values are exact, so only the rounding of the
sum remains, as in the engine.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import Attention
from .config import Role
from .hyper_connection import HyperConnection
from .layers import Norm
from .model import DemoModel, Layer
from .moe import MixtureOfExperts
from .quantization import q4e_grid, q4p_grid, q8_grid
from .rope import rope_table, rotate
from .sinkhorn import sinkhorn_plain

_BLOCK = 64  # keys between two rescalings of the softmax


def bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in fp32 with the sum in double."""
    return (x.double() @ weight.double().T).float()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return bf16(product(x, weight.float()))


def norm(x: Tensor, module: Norm) -> Tensor:
    scale = torch.rsqrt(x.double().square().mean(-1, keepdim=True).float() + module.eps)
    return bf16(bf16(module.weight) * (x * scale))


@dataclasses.dataclass
class Trace:
    """What the layers of one pass computed, for stage-by-stage comparison."""

    streams: list[Tensor] = dataclasses.field(default_factory=list)  # [positions, 4, hidden]
    experts: list[Tensor] = dataclasses.field(default_factory=list)  # [positions, active]
    selected: dict[int, Tensor] = dataclasses.field(default_factory=dict)  # [positions, topk]
    taps: list[Tensor] = dataclasses.field(default_factory=list)  # [positions, hidden]
    hidden: Tensor | None = None  # [positions, hidden]: normalised


class Selection:
    """Compressed keys and choices that layers hand on."""

    compressed: Tensor
    index: Tensor
    selected: Tensor
    candidates: Tensor


@torch.no_grad()
def logits(model: DemoModel, tokens: Tensor, trace: Trace | None = None) -> Tensor:
    """[positions] ids to [positions, vocab_size] fp32."""
    c = model.config
    trace = trace or Trace()
    positions = tokens.shape[0]
    place = torch.arange(positions)
    plain_table = rope_table(place, model.window_frequencies)
    table = rope_table(place, model.compressed_frequencies)
    h = bf16(model.embed.weight)[tokens][:, None, :].expand(-1, c.hc_mult, -1)
    pre = F.one_hot(torch.zeros(positions, dtype=torch.long), c.hc_mult).float()
    selection = Selection()
    for index, layer in enumerate(model.layers):
        if hasattr(layer, "engram"):
            h = _engram(layer, model, h, tokens)
        if index in c.dspark_target_layer_ids:
            trace.taps.append(bf16(h.mean(1)))
        next_pre, post, comb = mix(layer.hc_attn, h)
        x = norm(collapse(h, pre), layer.attn_norm)
        entry_table = None
        if c.role(index) is Role.FULL:
            ratio = c.compress_ratios[index]
            entry_table = table[: positions // ratio * ratio : ratio]
        y = _attention(
            model,
            index,
            x,
            plain_table if c.compress_ratios[index] == 0 else table,
            entry_table,
            selection,
        )
        h = expand(y, h, post, comb)
        if index in c.index_source_layer_ids:
            trace.selected[index] = selection.selected
        pre, post, comb = mix(layer.hc_ffn, h)
        x = norm(collapse(h, next_pre), layer.ffn_norm)
        y, experts = mixture_of_experts(layer.ffn, x)
        h = expand(y, h, post, comb)
        trace.streams.append(h)
        trace.experts.append(experts)
    trace.hidden = norm(collapse(h, pre), model.norm)
    return product(trace.hidden, bf16(model.head.weight))


def mix(site: HyperConnection, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    v = h.flatten(-2)
    r = torch.rsqrt(v.double().square().mean(-1, keepdim=True).float() + site.norm_eps)
    m = product(v, site.fn) * r
    n = site.streams
    scale = site.scale.repeat_interleave(torch.tensor([n, n, n * n]))
    pre, post, comb = (m * scale + site.base).split((n, n, n * n), -1)
    comb = sinkhorn_plain(comb.unflatten(-1, (n, n)), site.iterations, site.eps)
    return torch.sigmoid(pre) + site.eps, 2 * torch.sigmoid(post), comb


def collapse(h: Tensor, pre: Tensor) -> Tensor:
    return bf16((pre[..., None] * h).sum(-2))


def expand(y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    out = post[..., None] * y[..., None, :]
    for i in range(h.shape[-2]):
        out = out + comb[..., i, :, None] * h[..., i, None, :]
    return bf16(out)


def _engram(layer: Layer, model: DemoModel, h: Tensor, tokens: Tensor) -> Tensor:
    documents = torch.zeros_like(tokens)[None]
    rows = layer.engram_hash(tokens[None], documents, model.token_map)[0]
    engram = layer.engram
    embedding = engram.table().float()[rows].flatten(-2)
    kv = linear(embedding, engram.wkv.grid()).unflatten(-1, (engram.streams + 1, -1))
    return engram.add(h, kv[:, :-1], kv[:, -1]).float()


def queries(attn: Attention, x_grid: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    qr = q8_grid(norm(linear(x_grid, attn.wq_a.grid()), attn.q_norm))
    q = linear(qr, attn.wq_b.grid()).unflatten(-1, (attn.heads, -1))
    return bf16(rotate(q, table[:, None])), qr


def latent(attn: Attention, x_grid: Tensor, table: Tensor) -> Tensor:
    kv = norm(linear(x_grid, attn.wkv.grid()), attn.kv_norm)
    return q8_grid(bf16(rotate(kv, table)))


def output(attn: Attention, o: Tensor, table: Tensor) -> Tensor:
    """o: [positions, heads, head_dim] fp32, not yet rounded."""
    o = q8_grid(rotate(o, table[:, None], inverse=True))
    o = o.flatten(-2).unflatten(-1, (attn.groups, -1))
    weights = attn.wo_a.grid().unflatten(0, (attn.groups, -1))
    u = torch.cat([linear(o[:, g], weights[g]) for g in range(attn.groups)], -1)
    return linear(q8_grid(u), attn.wo_b.grid())


def _attention(model, index, x, table, entry_table, selection: Selection) -> Tensor:
    c = model.config
    attn = model.layers[index].attn
    x_grid = q8_grid(x)
    q, qr = queries(attn, x_grid, table)
    kv = latent(attn, x_grid, table)
    role = c.role(index)
    if role is Role.FULL:
        _compress(attn, x, entry_table, selection)
    if role in (Role.FULL, Role.REINDEX):
        _select(model, index, x, qr, table, selection)
    positions = x.shape[0]
    offset = torch.arange(c.sliding_window) - c.sliding_window + 1
    window = torch.arange(positions)[:, None] + offset
    if role is Role.WINDOW_ONLY:
        keys, chosen = kv, window
    else:
        keys = torch.cat((kv, selection.compressed))
        entries = torch.where(selection.selected >= 0, selection.selected + positions, -1)
        chosen = torch.cat((window, entries), -1)
    return output(attn, attend(q, keys, chosen, attn.attn_sink, attn.scale), table)


def attend(q: Tensor, keys: Tensor, chosen: Tensor, sink: Tensor, scale: float) -> Tensor:
    """q: [positions, heads, dim]; keys: [all, dim]; chosen: [positions, list] rows of keys in
    order, negative where there is none. fp32 result, not rounded.

    Blocks of the list update a running maximum; the numerator adds bf16 probabilities, the
    denominator unrounded ones.
    """
    order = torch.sort((chosen < 0).long(), dim=-1, stable=True).indices
    chosen = chosen.gather(-1, order)
    maximum = torch.full(q.shape[:2], -1e30)
    denominator = torch.zeros(q.shape[:2])
    out = torch.zeros_like(q)
    for begin in range(0, chosen.shape[-1], _BLOCK):
        block = chosen[:, begin : begin + _BLOCK]
        rows = keys[block.clamp(min=0)]
        score = torch.einsum("phd,pkd->phk", q.double(), rows.double()).float() * scale
        score = score.masked_fill((block < 0)[:, None, :], -torch.inf)
        top = torch.maximum(maximum, score.amax(-1))
        rescale = torch.exp(maximum - top)
        p = torch.exp(score - top[..., None])
        denominator = denominator * rescale + p.sum(-1)
        out = out * rescale[..., None] + torch.einsum("phk,pkd->phd", bf16(p), rows)
        maximum = top
    denominator = denominator + torch.exp(sink - maximum)
    return out / denominator[..., None]


def _compress(attn: Attention, x: Tensor, table: Tensor, selection: Selection) -> None:
    compressor = attn.compressor
    if compressor.ratio == 1:
        pooled = linear(x, compressor.wkv.grid())
    else:
        x = x[: table.shape[0] * compressor.ratio]
        keys = product(x, compressor.wkv.grid().float()).unflatten(0, (-1, compressor.ratio))
        gates = product(x, compressor.wgate.grid().float()).unflatten(0, (-1, compressor.ratio))
        pooled = bf16((torch.softmax(gates, 1) * keys).sum(1))
    latents = norm(pooled, compressor.norm)
    index = norm(linear(latents, attn.index_keys.wk.grid()), attn.index_keys.k_norm)
    selection.index = q4p_grid(bf16(rotate(index, table)))
    selection.compressed = q4e_grid(bf16(rotate(latents, table)))


def _select(model, index, x, qr, table, selection: Selection) -> None:
    c = model.config
    indexer = model.layers[index].attn.index_queries
    q = linear(qr, indexer.wq_b.grid()).unflatten(-1, (indexer.heads, -1))
    q = q4p_grid(bf16(rotate(q, table[:, None])))
    weights = linear(x, indexer.weights_proj.grid()) * indexer.factor
    entries = selection.index.shape[0]
    products = F.relu(torch.einsum("phd,kd->phk", q.double(), selection.index.double()).float())
    scores = (products * weights[..., None]).sum(1)
    visible = (torch.arange(x.shape[0]) + 1) // c.compress_ratios[index]
    scores = scores.masked_fill(torch.arange(entries) >= visible[:, None], -torch.inf)
    if index > c.candidate_source_layer_id >= 0:
        scores = scores.masked_fill(~selection.candidates, -torch.inf)
    selection.selected = _best(scores, c.index_topk)
    if index == c.candidate_source_layer_id:
        size = c.candidate_block_size
        padded = F.pad(scores, (0, -entries % size), value=-torch.inf)
        blocks = padded.unflatten(-1, (-1, size)).amax(-1)
        newest = (visible - 1).div(size, rounding_mode="floor")
        blocks[torch.arange(x.shape[0]), newest] = torch.inf
        best = _best(blocks, c.candidate_topk_blocks)
        kept = torch.zeros(blocks.shape[0], blocks.shape[1] + 1, dtype=torch.bool)
        kept = kept.scatter(-1, best.remainder(blocks.shape[1] + 1), True)[:, :-1]
        selection.candidates = kept.repeat_interleave(size, -1)[:, :entries]


def _best(scores: Tensor, count: int) -> Tensor:
    """The indices of the best scores, ascending, -1 behind them; ties go to the lowest index."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True)
    kept = order.indices[:, :count].masked_fill(
        order.values[:, :count] == -torch.inf, scores.shape[-1]
    )
    kept = torch.sort(kept, dim=-1).values
    kept = kept.masked_fill(kept == scores.shape[-1], -1)
    return F.pad(kept, (0, count - kept.shape[-1]), value=-1)


def mixture_of_experts(ffn: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output [positions, hidden], and experts [positions, active] by descending biased score."""
    scores = F.softplus(product(x, ffn.gate.grid().float())).sqrt()
    biased = scores + ffn.gate.bias
    experts = torch.sort(biased, dim=-1, descending=True, stable=True).indices[:, : ffn.active]
    weights = scores.gather(-1, experts)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * ffn.route_scale
    x_grid = q8_grid(x)
    shared = ffn.shared_experts
    y = _expert(ffn, x_grid, shared.w1.grid(), shared.w2.grid(), shared.w3.grid(), 1.0)
    w1, w2, w3 = ffn.experts.grids()
    outputs = []
    for e in range(w1.shape[0]):
        weight = (weights * (experts == e)).sum(-1, keepdim=True)
        outputs.append(_expert(ffn, x_grid, w1[e], w2[e], w3[e], weight))
    stacked = torch.stack(outputs, 1)
    for slot in range(ffn.active):
        y = y + stacked[torch.arange(x.shape[0]), experts[:, slot]]
    return bf16(y), experts


def _expert(ffn, x_grid, w1, w2, w3, weight) -> Tensor:
    g = linear(x_grid, w1).clamp(max=ffn.limit)
    u = linear(x_grid, w3).clamp(-ffn.limit, ffn.limit)
    return linear(q8_grid(weight * (F.silu(g) * u)), w2)
