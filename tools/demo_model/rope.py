"""Rotary positions: adjacent pairs of the last channels, angles rounded to fp32 before cos and sin."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import ModelConfig


def _base_frequencies(base: float, channels: int) -> Tensor:
    exponent = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    return 1.0 / torch.pow(torch.tensor(base, dtype=torch.float64), exponent.double()).float()


def window_frequencies(config: ModelConfig) -> Tensor:
    """[rope channels / 2] of layers without compressed keys."""
    return _base_frequencies(config.rope_theta, config.qk_rope_head_dim)


def compressed_frequencies(config: ModelConfig) -> Tensor:
    """[rope channels / 2] of layers with compressed keys: YaRN."""
    channels = config.qk_rope_head_dim

    def pair_of(rotations: float) -> float:
        turns = config.rope_original_positions / (rotations * 2 * math.pi)
        return channels * math.log(turns) / (2 * math.log(config.compress_rope_theta))

    low = max(math.floor(pair_of(config.rope_beta_fast)), 0)
    high = min(math.ceil(pair_of(config.rope_beta_slow)), channels - 1)
    frequencies = _base_frequencies(config.compress_rope_theta, channels)
    pairs = torch.arange(channels // 2, dtype=torch.float32)
    ramp = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    smooth = 1 - ramp
    return frequencies / config.rope_factor * (1 - smooth) + frequencies * smooth


def rope_table(positions: Tensor, frequencies: Tensor) -> Tensor:
    """[positions, pairs, 2] fp32: cosine and sine."""
    angles = positions.float()[:, None] * frequencies.to(positions.device)
    return torch.stack((angles.cos(), angles.sin()), -1)


def rotate(x: Tensor, table: Tensor, inverse: bool = False) -> Tensor:
    """The last channels of x turned by the table's angles; computed and returned in fp32.

    x: [..., channels]; table: broadcastable to [..., pairs, 2].
    """
    channels = 2 * table.shape[-2]
    still, turning = x.float().split((x.shape[-1] - channels, channels), -1)
    first, second = turning.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table.unbind(-1)
    if inverse:
        sin = -sin
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), -1)
    return torch.cat((still, turned.flatten(-2)), -1)
