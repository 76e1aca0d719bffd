"""What a query may see. Several documents share a training row; none sees another."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclasses.dataclass
class Masks:
    window: Tensor  # [sequences, positions, 2 * window] bool: the query's chunk and the one before
    compressed: dict[int, Tensor]  # per ratio: [sequences, positions, entries] bool


def window_mask(documents: Tensor, window: int) -> Tensor:
    """Keys of a query at position w of its chunk: 2 * window positions that end with the chunk."""
    sequences, positions = documents.shape
    chunks = documents.view(sequences, -1, window)
    before = F.pad(chunks[:, :-1], (0, 0, 1, 0), value=-1)
    keys = torch.cat((before, chunks), -1)
    same = chunks[..., :, None] == keys[..., None, :]
    query = torch.arange(window, device=documents.device)[:, None] + window
    key = torch.arange(2 * window, device=documents.device)[None, :]
    near = (key <= query) & (key > query - window)
    return (same & near).view(sequences, positions, 2 * window)


def compressed_mask(documents: Tensor, ratio: int) -> Tensor:
    """Entry j covers positions j * ratio ... j * ratio + ratio - 1, all before or at the query."""
    positions = documents.shape[1]
    first = documents[:, : positions // ratio * ratio : ratio]
    entry = torch.arange(first.shape[1], device=documents.device)
    query = torch.arange(positions, device=documents.device)
    complete = (entry + 1) * ratio <= query[:, None] + 1
    return (first[:, None, :] == documents[:, :, None]) & complete


@torch.no_grad()
def make_masks(documents: Tensor, window: int, ratios: tuple[int, ...]) -> Masks:
    return Masks(
        window_mask(documents, window),
        {ratio: compressed_mask(documents, ratio) for ratio in sorted(set(ratios)) if ratio > 0},
    )
