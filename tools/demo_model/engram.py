"""Engram: rows of a table, looked up by hashes of the last tokens, added to the streams by a gate."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .layers import Linear, QuantizedLinear
from .quantization import q8
from .regions import Region


def _is_prime(n: int) -> bool:
    return n >= 2 and all(n % p for p in range(2, int(n**0.5) + 1))


def engram_primes(config: ModelConfig) -> list[list[int]]:
    """Table sizes per layer: consecutive primes, n-gram sizes ascending, heads inside."""
    primes = []
    n = config.engram_vocab_size
    while len(primes) < len(config.engram_layer_ids) * config.engram_rows_per_token:
        if _is_prime(n):
            primes.append(n)
        n += 1
    width = config.engram_rows_per_token
    return [primes[i : i + width] for i in range(0, len(primes), width)]


def engram_table_rows(config: ModelConfig) -> list[int]:
    return [sum(primes) for primes in engram_primes(config)]


def engram_multipliers(config: ModelConfig, layer: int) -> list[int]:
    """Odd factors, one per token of an n-gram, from NumPy's PCG64 seeded with 10007 * layer."""
    bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    generator = np.random.Generator(np.random.PCG64(10007 * layer))
    draws = generator.integers(0, bound, size=config.engram_max_ngram_size, dtype=np.uint64)
    return [2 * int(v) + 1 for v in draws]


class EngramHash(nn.Module):
    """Token ids to table rows. Depends on the tokenizer through the compression map alone."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        primes = engram_primes(config)[config.engram_layer_ids.index(layer)]
        offsets = np.concatenate(([0], np.cumsum(primes)[:-1]))
        self.heads = config.engram_n_heads
        self.pad_token_id = config.engram_pad_token_id
        self.register_buffer("multipliers", torch.tensor(engram_multipliers(config, layer)), False)
        self.register_buffer("primes", torch.tensor(primes), False)
        self.register_buffer("offsets", torch.tensor(offsets), False)

    @torch.no_grad()
    def forward(self, tokens: Tensor, documents: Tensor, token_map: Tensor) -> Tensor:
        """[sequences, positions] ids and document numbers to [sequences, positions, rows per token].

        A look-back that leaves the document reads the padding token, from there on.
        """
        compressed = token_map[tokens]
        pad = token_map[self.pad_token_id]
        rows = []
        r = compressed * self.multipliers[0]
        for shift in range(1, len(self.multipliers)):
            earlier = F.pad(compressed, (shift, 0))[:, :-shift]
            inside = F.pad(documents, (shift, 0), value=-1)[:, :-shift] == documents
            r = r ^ (torch.where(inside, earlier, pad) * self.multipliers[shift])
            at = slice((shift - 1) * self.heads, shift * self.heads)
            rows.append(r[..., None] % self.primes[at] + self.offsets[at])
        return torch.cat(rows, -1)


class Engram(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        rows = engram_table_rows(config)[config.engram_layer_ids.index(layer)]
        width = config.hidden_size
        self.streams = config.hc_mult
        self.eps = config.rms_norm_eps
        self.embed = Linear(rows, config.engram_head_dim)
        self.wkv = QuantizedLinear(
            (config.hc_mult + 1) * width, config.engram_rows_per_token * config.engram_head_dim
        )
        self.q_weight = nn.Parameter(torch.empty(config.hc_mult, width))
        self.k_weight = nn.Parameter(torch.empty(config.hc_mult, width))

    def table(self) -> Tensor:
        return q8(self.embed.weight)

    def forward(self, h: Tensor, rows: Tensor) -> Tensor:
        """h: [tokens, 4, hidden] bf16; rows: [tokens, rows per token]."""
        embedding = F.embedding(rows, self.table()).flatten(-2)
        kv = self.wkv(embedding).unflatten(-1, (self.streams + 1, -1))
        return self.add(h, kv[:, :-1], kv[:, -1])

    def add(self, h: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return add_rows(h, key, value, self.q_weight, self.k_weight, self.eps)


@Region
def add_rows(h, key, value, q_weight, k_weight, eps: float):
    """h: [tokens, 4, hidden]; key: the same and value: [tokens, hidden], rounded to bf16."""
    weight = q_weight.to(torch.bfloat16).float() * k_weight.to(torch.bfloat16).float()
    x, key = h.float(), key.float()
    dot = ((x * weight) * key).sum(-1)
    dot = dot * torch.rsqrt(x.square().mean(-1) + eps)
    dot = dot * torch.rsqrt(key.square().mean(-1) + eps) * h.shape[-1] ** -0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
    return (x + gate[..., None] * value.float()[:, None, :]).to(torch.bfloat16)
