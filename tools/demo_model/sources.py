"""Where training rows come from, as the trainers see it."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Iterator

import torch
from torch import Tensor

from .batches import Batch, random_batches
from .config import ModelConfig


@dataclasses.dataclass
class Source:
    token_map: Tensor  # [vocab_size]: the Engram's compression of the vocabulary
    skills: list[str]  # what Batch.skills numbers
    batches: Iterator[Batch]
    held_out: list[Batch]


def open_source(arguments: argparse.Namespace, config: ModelConfig) -> Source:
    """arguments: rows, positions, seed, random_tokens."""
    shape = (arguments.rows, arguments.positions)
    batches = random_batches(config.vocab_size, *shape, arguments.seed)
    return Source(torch.arange(config.vocab_size), ["random"], batches, [])
