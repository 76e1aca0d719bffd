"""Training rows: what the trainer needs of them, and random ones for measuring speed."""

from __future__ import annotations

import dataclasses
from typing import Iterator

import numpy as np
import torch
from torch import Tensor

_NUMBERS = ("tokens", "documents", "skills")


@dataclasses.dataclass
class Batch:
    """Rows of whole documents, padded behind the last one. One position more than is trained on:
    position t is the input whose target is t + 1."""

    tokens: Tensor  # [rows, positions + 1] int64
    documents: Tensor  # [rows, positions + 1] int64: ascending numbers; padding has one of its own
    weights: Tensor  # [rows, positions + 1] fp32: of the loss of predicting this token
    skills: Tensor  # [rows, positions + 1] int64: what this token's document trains
    answers: Tensor  # [rows, positions + 1] bool: must be right for the document to count as solved

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> "Batch":
        """Numbers may be narrower here; `to` widens them on the device."""
        return cls(**{name: torch.from_numpy(array) for name, array in arrays.items()})

    def to(self, device: torch.device | str) -> "Batch":
        moved = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if torch.device(device).type == "cuda" and not value.is_cuda:
                value = value.pin_memory()
            value = value.to(device, non_blocking=True)
            moved[field.name] = value.long() if field.name in _NUMBERS else value
        return Batch(**moved)

    @property
    def target_weights(self) -> Tensor:
        """[rows, positions]: zero where the target belongs to another document."""
        same = self.documents[:, 1:] == self.documents[:, :-1]
        return self.weights[:, 1:] * same


def random_batches(vocab_size: int, rows: int, positions: int, seed: int) -> Iterator[Batch]:
    """Nothing to learn: for measuring the speed of a step."""
    generator = np.random.default_rng(seed)
    shape = (rows, positions + 1)
    documents = np.repeat(np.arange(-(-shape[1] // 200)), 200)[: shape[1]]
    while True:
        yield Batch(
            tokens=torch.from_numpy(generator.integers(0, vocab_size, shape)),
            documents=torch.from_numpy(np.broadcast_to(documents, shape).copy()),
            weights=torch.ones(shape),
            skills=torch.zeros(shape, dtype=torch.int64),
            answers=torch.ones(shape, dtype=torch.bool),
        )
