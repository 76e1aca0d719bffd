"""The number formats of the checkpoint and of the running model, with straight-through gradients.

Every quantiser returns the values that the format can hold; its gradient is the identity. So a
model trained with these is exported without loss: packing a value that is on the grid is exact.

| name | grid | scale | used for |
| --- | --- | --- | --- |
| q8 | E4M3, 32 channels | power of two | inputs of quantised linears, window keys, Engram rows |
| q4p | E2M1, 32 channels | power of two | expert weights, index keys and queries |
| q4e | E2M1, 16 channels | E4M3 | compressed keys |
| q8_blocks | E4M3, 32 x 32 block | power of two | dense weights |
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # channels of one power-of-two scale
E4_GROUP = 16  # channels of one E4M3 scale
_SIXTH = 0.16666667163372040  # 1/6 in fp32


def _power_of_two(byte: Tensor) -> Tensor:
    """2^(byte - 127) from a biased exponent of 1 ... 254."""
    return (byte << 23).view(torch.float32)


def q8_exponent(amax: Tensor) -> Tensor:
    """Biased exponent of the scale 2^ceil(log2(max(amax, 1e-4) / 448)), from the bits of amax.

    448 = 1.75 * 2^8: the exponent rises exactly when the significand of amax exceeds 1.75.
    """
    amax = amax.clamp(min=1e-4)
    return ((amax.view(torch.int32) + 0x1FFFFF) >> 23) - 8


def q4p_exponent(amax: Tensor) -> Tensor:
    """Biased exponent of the scale 2^ceil(log2(amax / 6))."""
    share = amax.clamp(min=6 * 2.0**-126) * _SIXTH
    return ((share.view(torch.int32) + 0x7FFFFF) >> 23).clamp(min=1)


def e2m1_round(x: Tensor) -> Tensor:
    """|x| <= 6 to 0, 0.5, 1, 1.5, 2, 3, 4, 6 with ties to the even code."""
    magnitude = x.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.round(x / step) * step


def e4m3_round(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(torch.float32)


def q8_grid(x: Tensor) -> Tensor:
    """Groups of 32 channels of the last axis; fp32 values."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    byte = q8_exponent(groups.abs().amax(-1, keepdim=True))
    return (e4m3_round(groups * _power_of_two(254 - byte)) * _power_of_two(byte)).flatten(-2)


def q4p_grid(x: Tensor) -> Tensor:
    groups = x.float().unflatten(-1, (-1, GROUP))
    scale = _power_of_two(q4p_exponent(groups.abs().amax(-1, keepdim=True)))
    return (e2m1_round((groups / scale).clamp(-6, 6)) * scale).flatten(-2)


def q4e_grid(x: Tensor) -> Tensor:
    groups = x.float().unflatten(-1, (-1, E4_GROUP))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-9)
    scale = e4m3_round((amax * _SIXTH).clamp(max=448))
    return (e2m1_round((groups * (1.0 / scale)).clamp(-6, 6)) * scale).flatten(-2)


def q8_blocks_exponent(weight: Tensor) -> Tensor:
    """[..., rows / 32, columns / 32] biased exponents of the scales of 32 x 32 blocks."""
    blocks = weight.float().unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))
    return q8_exponent(blocks.abs().amax((-3, -1)))


def q8_blocks_grid(weight: Tensor) -> Tensor:
    byte = q8_blocks_exponent(weight)[..., :, None, :, None]
    blocks = weight.float().unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))
    grid = e4m3_round(blocks * _power_of_two(254 - byte)) * _power_of_two(byte)
    return grid.flatten(-2).flatten(-3, -2)


class _Q8(torch.autograd.Function):
    """Values of a grid in bf16, which holds them exactly; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return q8_grid(x).to(torch.bfloat16)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.dtype)


class _Q4p(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return q4p_grid(x).to(torch.bfloat16)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.dtype)


class _Q4e(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return q4e_grid(x).to(torch.bfloat16)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.dtype)


class _Q8Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return q8_blocks_grid(x).to(torch.bfloat16)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.dtype)


def q8(x: Tensor) -> Tensor:
    """x on the FP8 grid, bf16; so are the three below."""
    return _Q8.apply(x)


def q4p(x: Tensor) -> Tensor:
    return _Q4p.apply(x)


def q4e(x: Tensor) -> Tensor:
    return _Q4e.apply(x)


def q8_blocks(weight: Tensor) -> Tensor:
    return _Q8Blocks.apply(weight)
