"""Linear layers and the norm. Masters are fp32; what is computed with is on the stored grid, in bf16."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .quantization import q4p, q8_blocks


class QuantizedLinear(nn.Module):
    """An FP8 matrix with one scale per 32 x 32 block. Its input must be on the q8 grid."""

    def __init__(self, outputs: int, inputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def grid(self) -> Tensor:
        return q8_blocks(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.grid())


class Linear(nn.Module):
    """A bf16 matrix; its input is not quantised."""

    def __init__(self, outputs: int, inputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def grid(self) -> Tensor:
        return self.weight.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.grid())


class Experts(nn.Module):
    """The FP4 matrices of all experts of one layer."""

    def __init__(self, count: int, inner: int, hidden: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(count, inner, hidden))
        self.w2 = nn.Parameter(torch.empty(count, hidden, inner))
        self.w3 = nn.Parameter(torch.empty(count, inner, hidden))

    def grids(self) -> tuple[Tensor, Tensor, Tensor]:
        return q4p(self.w1), q4p(self.w2), q4p(self.w3)


class Norm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps), everything in fp32, rounded to bf16 once."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (weight.to(torch.bfloat16).float() * (x * scale)).to(torch.bfloat16)
