"""Compressed keys, index keys, scores and the selection of entries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .layers import Linear, Norm, QuantizedLinear
from .quantization import q4p, q8_blocks
from .regions import Region
from .rope import rotate


class Compressor(nn.Module):
    """One latent per `ratio` tokens; with ratio 2 a softmax of two gates weighs them per channel."""

    def __init__(self, config: ModelConfig, ratio: int):
        super().__init__()
        self.ratio = ratio
        self.wkv = Linear(config.head_dim, config.hidden_size)
        if ratio > 1:
            self.wgate = Linear(config.head_dim, config.hidden_size)
        self.norm = Norm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """[sequences, positions, hidden] to [sequences, entries, head_dim] bf16, not yet rotated."""
        if self.ratio == 1:
            return self.norm(self.wkv(x))
        positions = x.shape[1] // self.ratio * self.ratio
        x = x[:, :positions]
        keys = self.wkv(x).float().unflatten(1, (-1, self.ratio))
        gates = self.wgate(x).float().unflatten(1, (-1, self.ratio))
        pooled = (torch.softmax(gates, 2) * keys).sum(2)
        return self.norm(pooled.to(torch.bfloat16))


class IndexKeys(nn.Module):
    """The part of an indexer that belongs to the owner of the compressed keys."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.wk = Linear(config.index_head_dim, config.head_dim)
        self.k_norm = Norm(config.index_head_dim, config.rms_norm_eps)

    def forward(self, latents: Tensor, table: Tensor) -> Tensor:
        """[sequences, entries, index_head_dim] bf16 on the q4p grid."""
        return q4p(rotate(self.k_norm(self.wk(latents)), table).to(torch.bfloat16))


class IndexQueries(nn.Module):
    """The part of an indexer that every layer with a selection of its own has."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.index_n_heads
        self.factor = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self.wq_b = QuantizedLinear(config.index_n_heads * config.index_head_dim, config.q_lora_rank)
        self.weights_proj = Linear(config.index_n_heads, config.hidden_size)

    def forward(self, x: Tensor, qr_grid: Tensor, keys: Tensor, table: Tensor) -> Tensor:
        """Scores [sequences, positions, entries] fp32 of all entries, visible or not."""
        return index_scores(
            x,
            qr_grid,
            keys,
            table,
            self.wq_b.weight,
            self.weights_proj.weight,
            self.heads,
            self.factor,
        )


@Region
def index_scores(x, qr_grid, keys, table, wq_b, weights_proj, heads: int, factor: float):
    sequences, positions = x.shape[:2]
    q = F.linear(qr_grid, q8_blocks(wq_b)).unflatten(-1, (heads, -1))
    q = q4p(rotate(q, table[:, None]).to(torch.bfloat16))
    weights = F.linear(x, weights_proj.to(torch.bfloat16)).float() * factor
    products = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2))
    products = products.view(sequences, positions, heads, -1)
    return (F.relu(products.float()) * weights[..., None]).sum(2)


def select(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """[..., entries] bool: the `count` best visible entries, more where scores tie at the end."""
    masked = torch.where(visible, scores, -torch.inf)
    if scores.shape[-1] <= count:
        return visible
    last = masked.topk(count, sorted=False).values.amin(-1, keepdim=True)
    return visible & (masked >= last)


def candidate_entries(scores: Tensor, visible: Tensor, block: int, blocks: int) -> Tensor:
    """[..., entries] bool: the entries of the best blocks. The newest visible block is one."""
    entries = scores.shape[-1]
    padding = -entries % block
    masked = F.pad(torch.where(visible, scores, -torch.inf), (0, padding), value=-torch.inf)
    best = masked.unflatten(-1, (-1, block)).amax(-1)
    if best.shape[-1] <= blocks:
        return visible
    index = torch.arange(entries, device=scores.device)
    newest = torch.where(visible, index, -block).amax(-1, keepdim=True) // block
    number = torch.arange(best.shape[-1], device=scores.device)
    best = torch.where(number == newest, torch.inf, best)
    last = best.topk(blocks, sorted=False).values.amin(-1, keepdim=True)
    kept = best >= last
    return visible & kept.repeat_interleave(block, -1)[..., :entries]


@Region
def index_loss(scores: Tensor, mass: Tensor, entries: Tensor) -> Tensor:
    """[sequences, positions]: KL from the attention mass over `entries` to the scores' softmax.

    mass: [sequences, positions, entries] fp32, summed over heads and layers; no gradient.
    """
    total = mass.sum(-1, keepdim=True)
    target = mass / total.clamp(min=1e-9)
    predicted = torch.log_softmax(torch.where(entries, scores, -1e9), -1)
    kl = (torch.xlogy(target, target) - target * predicted).sum(-1)
    return torch.where(total[..., 0] > 0, kl, 0.0)
