"""Loss and share of solved documents per skill, summed on the device and read rarely."""

from __future__ import annotations

import torch
from torch import Tensor

from .batches import Batch


class SkillSums:
    """Sums over steps; reading them waits for the device."""

    def __init__(self, skills: list[str], device: torch.device | str):
        self.skills = skills
        self.loss = torch.zeros(len(skills), device=device)
        self.weight = torch.zeros(len(skills), device=device)
        self.solved = torch.zeros(len(skills), device=device)
        self.documents = torch.zeros(len(skills), device=device)

    def add(self, batch: Batch, losses: Tensor, right: Tensor) -> None:
        """losses, right: [rows, positions] of the targets.

        A document counts as solved when all its answer tokens are the best ones, given the right
        ones before.
        """
        weights = batch.target_weights
        skills = batch.skills[:, 1:].flatten()
        self.loss.index_add_(0, skills, (losses * weights).flatten())
        self.weight.index_add_(0, skills, weights.flatten())
        rows, positions = losses.shape
        same = batch.documents[:, 1:] == batch.documents[:, :-1]
        answers = batch.answers[:, 1:] & same
        slots = positions + 2
        first = torch.arange(rows, device=losses.device)[:, None] * slots
        key = (first + batch.documents[:, 1:]).flatten()
        count = losses.new_zeros(rows * slots)
        wrong = count.index_add(0, key, (answers & ~right).flatten().float())
        asked = count.index_add(0, key, answers.flatten().float())
        skill = torch.zeros_like(count, dtype=torch.long).index_put((key,), skills)
        self.documents.index_add_(0, skill, (asked > 0).float())
        self.solved.index_add_(0, skill, ((asked > 0) & (wrong == 0)).float())

    def read(self) -> dict[str, dict[str, float]]:
        columns = torch.stack((self.loss, self.weight, self.solved, self.documents)).tolist()
        result = {}
        for name, loss, weight, solved, documents in zip(self.skills, *columns):
            if documents or weight:
                result[name] = {
                    "loss": round(loss / max(weight, 1e-9), 4),
                    "solved": round(solved / max(documents, 1.0), 4),
                    "documents": int(documents),
                }
        return result
