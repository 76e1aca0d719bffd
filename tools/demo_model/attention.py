"""Attention of one layer: low-rank queries, one latent per token as key and value, a window of them
and compressed ones, a sink per head, grouped output projection.

In training the scores of all compressed entries are computed and masked. At these sizes that is
faster than gathering the selected ones, and gradients need no scatter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig, Role
from .indexer import Compressor, IndexKeys, IndexQueries, candidate_entries, select
from .layers import Norm, QuantizedLinear, rms_norm
from .quantization import q4e, q8, q8_blocks
from .regions import Region
from .rope import rotate


class _JointSoftmax(torch.autograd.Function):
    """One softmax over window and compressed scores and a sink.

    Keeps only the probabilities, in bf16: at 8,192 positions a second copy of the scores would be
    the largest tensor of the model.
    """

    @staticmethod
    def forward(ctx, window, compressed, window_mask, compressed_mask, sink, scale):
        sw = torch.where(window_mask[:, :, None], window.float() * scale, -torch.inf)
        sc = torch.where(compressed_mask[:, :, None], compressed.float() * scale, -torch.inf)
        sinks = sink[:, None].expand(sw.shape[:-1] + (1,))
        top = torch.maximum(torch.maximum(sw.amax(-1, True), sc.amax(-1, True)), sinks)
        pw, pc, ps = torch.exp(sw - top), torch.exp(sc - top), torch.exp(sinks - top)
        total = pw.sum(-1, True) + pc.sum(-1, True) + ps
        pw, pc = (pw / total).to(torch.bfloat16), (pc / total).to(torch.bfloat16)
        ps = (ps / total)[..., 0]
        ctx.save_for_backward(pw, pc, ps)
        ctx.scale = scale
        return pw, pc

    @staticmethod
    def backward(ctx, gw, gc):
        pw, pc, ps = ctx.saved_tensors
        mean = (pw.float() * gw.float()).sum(-1, True) + (pc.float() * gc.float()).sum(-1, True)
        dw = (pw.float() * (gw.float() - mean) * ctx.scale).to(torch.bfloat16)
        dc = (pc.float() * (gc.float() - mean) * ctx.scale).to(torch.bfloat16)
        sink = -(ps * mean[..., 0]).sum((0, 1))
        return dw, dc, None, None, sink, None


class _WindowSoftmax(torch.autograd.Function):
    """The same without compressed entries."""

    @staticmethod
    def forward(ctx, window, window_mask, sink, scale):
        sw = torch.where(window_mask[:, :, None], window.float() * scale, -torch.inf)
        sinks = sink[:, None].expand(sw.shape[:-1] + (1,))
        top = torch.maximum(sw.amax(-1, True), sinks)
        pw, ps = torch.exp(sw - top), torch.exp(sinks - top)
        total = pw.sum(-1, True) + ps
        pw = (pw / total).to(torch.bfloat16)
        ps = (ps / total)[..., 0]
        ctx.save_for_backward(pw, ps)
        ctx.scale = scale
        return pw

    @staticmethod
    def backward(ctx, gw):
        pw, ps = ctx.saved_tensors
        mean = (pw.float() * gw.float()).sum(-1, True)
        dw = (pw.float() * (gw.float() - mean) * ctx.scale).to(torch.bfloat16)
        return dw, None, -(ps * mean[..., 0]).sum((0, 1)), None


@Region
def window_attention(q, kv, mask, sink, scale):
    """q: [S, P, heads, dim], kv: [S, P, dim], mask: [S, P, 2 * window]; bf16 result like q."""
    keys = _chunk_keys(kv, mask.shape[-1] // 2)
    p = _WindowSoftmax.apply(_chunk_scores(q, keys), mask, sink, scale)
    return _chunk_values(p, keys)


@Region
def joint_attention(q, kv, latents, window_mask, compressed_mask, sink, scale):
    """latents: [S, entries, dim]. Also returns the attention mass on each entry, summed over heads
    and without gradient: [S, P, entries] fp32."""
    keys = _chunk_keys(kv, window_mask.shape[-1] // 2)
    scores = torch.bmm(q.flatten(1, 2), latents.transpose(1, 2)).view(*q.shape[:3], -1)
    pw, pc = _JointSoftmax.apply(
        _chunk_scores(q, keys), scores, window_mask, compressed_mask, sink, scale
    )
    out = _chunk_values(pw, keys) + torch.bmm(pc.flatten(1, 2), latents).view(q.shape)
    return out, pc.detach().float().sum(2)


def _chunk_keys(kv: Tensor, window: int) -> Tensor:
    """[S * chunks, 2 * window, dim]: each chunk's keys and those of the chunk before."""
    chunks = kv.unflatten(1, (-1, window))
    before = F.pad(chunks[:, :-1], (0, 0, 0, 0, 1, 0))
    return torch.cat((before, chunks), 2).flatten(0, 1)


def _chunk_scores(q: Tensor, keys: Tensor) -> Tensor:
    return torch.bmm(q.reshape(keys.shape[0], -1, q.shape[-1]), keys.transpose(1, 2)).view(
        *q.shape[:3], -1
    )


def _chunk_values(p: Tensor, keys: Tensor) -> Tensor:
    return torch.bmm(p.view(keys.shape[0], -1, keys.shape[1]), keys).view(*p.shape[:3], -1)


@Region
def project(x_grid, table, wq_a, q_norm, wq_b, wkv, kv_norm, heads: int, eps: float):
    """Rotated queries [..., heads, head_dim] bf16, the low-rank ones on the q8 grid, and the window
    key of every position: [..., head_dim] bf16 on the q8 grid."""
    qr = q8(rms_norm(F.linear(x_grid, q8_blocks(wq_a)), q_norm, eps))
    q = F.linear(qr, q8_blocks(wq_b)).unflatten(-1, (heads, -1))
    q = rotate(q, table[..., None, :, :]).to(torch.bfloat16)
    kv = rms_norm(F.linear(x_grid, q8_blocks(wkv)), kv_norm, eps)
    return q, qr, q8(rotate(kv, table).to(torch.bfloat16))


@Region
def output_projection(o, table, wo_a, wo_b, groups: int):
    """o: [..., heads, head_dim]: rotated back, quantised, projected per group and as a whole."""
    o = q8(rotate(o, table[..., None, :, :], inverse=True))
    o = o.flatten(-2).unflatten(-1, (groups, -1))
    weights = q8_blocks(wo_a).unflatten(0, (groups, -1))
    u = torch.einsum("...gi,goi->...go", o, weights).flatten(-2)
    return F.linear(q8(u), q8_blocks(wo_b))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int | None):
        """layer: of the backbone, or None for a draft layer."""
        super().__init__()
        c = config
        role = Role.WINDOW_ONLY if layer is None else c.role(layer)
        self.ratio = 0 if layer is None else c.compress_ratios[layer]
        self.heads = c.num_attention_heads
        self.scale = c.head_dim**-0.5
        self.wq_a = QuantizedLinear(c.q_lora_rank, c.hidden_size)
        self.q_norm = Norm(c.q_lora_rank, c.rms_norm_eps)
        self.wq_b = QuantizedLinear(c.num_attention_heads * c.head_dim, c.q_lora_rank)
        self.wkv = QuantizedLinear(c.head_dim, c.hidden_size)
        self.kv_norm = Norm(c.head_dim, c.rms_norm_eps)
        group = c.num_attention_heads // c.o_groups * c.head_dim
        self.groups = c.o_groups
        self.wo_a = QuantizedLinear(c.o_groups * c.o_lora_rank, group)
        self.wo_b = QuantizedLinear(c.hidden_size, c.o_groups * c.o_lora_rank)
        self.attn_sink = nn.Parameter(torch.empty(c.num_attention_heads))
        if role is Role.FULL:
            self.compressor = Compressor(c, self.ratio)
            self.index_keys = IndexKeys(c)
        if role in (Role.FULL, Role.REINDEX):
            self.index_queries = IndexQueries(c)

    def project(self, x_grid: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return project(
            x_grid,
            table,
            self.wq_a.weight,
            self.q_norm.weight,
            self.wq_b.weight,
            self.wkv.weight,
            self.kv_norm.weight,
            self.heads,
            self.q_norm.eps,
        )

    def compress(self, x: Tensor, entry_table: Tensor) -> tuple[Tensor, Tensor]:
        """Compressed keys on the q4e grid, and index keys. Gradients of the indexer stay in it."""
        latents = self.compressor(x)
        compressed = q4e(rotate(latents, entry_table).to(torch.bfloat16))
        return compressed, self.index_keys(latents.detach(), entry_table)

    def output(self, o: Tensor, table: Tensor) -> Tensor:
        return output_projection(o, table, self.wo_a.weight, self.wo_b.weight, self.groups)

    def attend_window(self, x_grid, table, window_mask):
        """A layer without compressed keys. Tensors here are [S, P, ...]; table: [P, pairs, 2]."""
        q, _, kv = self.project(x_grid, table)
        return self.output(
            window_attention(q, kv, window_mask, self.attn_sink, self.scale), table
        )

    def attend_full(self, x, x_grid, table, entry_table, window_mask, visible, topk, candidates):
        """A layer with keys and a selection of its own.

        topk: entries to select, 0 for all that are visible. candidates: (block size, blocks) if
        this layer also narrows the choice of later ones.
        Returns the output, what later layers use (compressed keys, index keys, selected entries,
        candidate entries), the scores, and the attention mass.
        """
        q, qr, kv = self.project(x_grid, table)
        compressed, keys = self.compress(x, entry_table)
        scores = self.index_queries(x.detach(), qr.detach(), keys, table)
        selected = select(scores.detach(), visible, topk) if topk else visible
        kept = visible
        if topk and candidates:
            kept = candidate_entries(scores.detach(), visible, *candidates)
        y, mass = self._joint(q, kv, table, compressed, window_mask, selected)
        return y, compressed, keys, selected, kept, scores, mass

    def attend_reindex(self, x, x_grid, table, window_mask, compressed, keys, candidates, topk):
        """A layer with a selection of its own among the candidates, over earlier keys."""
        q, qr, kv = self.project(x_grid, table)
        scores = self.index_queries(x.detach(), qr.detach(), keys, table)
        selected = select(scores.detach(), candidates, topk) if topk else candidates
        y, mass = self._joint(q, kv, table, compressed, window_mask, selected)
        return y, selected, scores, mass

    def attend_reuse(self, x_grid, table, window_mask, compressed, selected):
        q, _, kv = self.project(x_grid, table)
        return self._joint(q, kv, table, compressed, window_mask, selected)

    def _joint(self, q, kv, table, compressed, window_mask, selected):
        out, mass = joint_attention(
            q, kv, compressed, window_mask, selected, self.attn_sink, self.scale
        )
        return self.output(out, table), mass
