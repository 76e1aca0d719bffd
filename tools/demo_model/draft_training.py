"""The drafter's loss: what the target would say, how likely a slot survives, and how sure it is."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from .batches import Batch
from .drafter import Blocks, Drafter, make_blocks

FALL = 4.0  # slots over which the weight of a slot falls by a factor of e


@dataclasses.dataclass
class DraftTask:
    """Blocks with what their slots should predict."""

    blocks: Blocks
    previous: Tensor  # [blocks, K] token before the one that a slot predicts; slot 0: the anchor
    labels: Tensor  # [blocks, K] the token that follows
    valid: Tensor  # [blocks, K] bool: the label exists, and so do all before it
    rows: Tensor  # [blocks, K] flattened row whose target logits predict the label
    skills: Tensor  # [blocks]


@torch.no_grad()
def make_task(batch: Batch, anchors_per_row: int, block_size: int, window: int) -> DraftTask:
    """Anchors are drawn among tokens that, like their successors, the target was trained on."""
    count, width = batch.tokens.shape[0], batch.tokens.shape[1] - 1
    device = batch.tokens.device
    trained = (batch.weights > 0) & (batch.documents >= 0)
    follows = batch.documents[:, 1:] == batch.documents[:, :-1]
    eligible = trained[:, :-1] & trained[:, 1:] & follows
    order = torch.rand(count, width, device=device).masked_fill(~eligible, -1)
    best = order.topk(anchors_per_row, -1)
    at = best.indices
    row = torch.arange(count, device=device)[:, None]
    anchors = (row * width + at).flatten()
    used = (best.values >= 0).flatten()

    slots = torch.arange(block_size, device=device)
    label_at = at[..., None] + 1 + slots
    inside = label_at <= width
    label_at = label_at.clamp(max=width)
    wide_row = row[..., None]
    labels = batch.tokens[wide_row, label_at]
    same = batch.documents[wide_row, label_at] == batch.documents[row, at][..., None]
    good = inside & same & trained[wide_row, label_at]
    valid = good.long().cumprod(-1).bool().flatten(0, 1) & used[:, None]
    return DraftTask(
        blocks=make_blocks(anchors, batch.documents[:, :-1], window),
        previous=batch.tokens[wide_row, label_at - 1].flatten(0, 1),
        labels=labels.flatten(0, 1),
        valid=valid,
        rows=(wide_row * width + (label_at - 1).clamp(max=width - 1)).flatten(0, 1),
        skills=batch.skills[row, at].flatten(),
    )


def slot_losses(
    drafter: Drafter, h: Tensor, task_previous: Tensor, labels: Tensor, target: Tensor, head: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """h: [blocks, K, hidden]; target: the target's normalised hidden state for each slot's label.

    Returns per slot the loss, the share of the target's distribution that the draft meets (the
    chance of acceptance), and the estimate of that chance.
    """
    drafted = torch.log_softmax(drafter.logits(h, task_previous, head), -1)
    wanted = torch.softmax(F.linear(target, head).float(), -1)
    distance = (drafted.exp() - wanted).abs().sum(-1)
    accepted = (1 - 0.5 * distance).detach()
    surprise = -drafted.gather(-1, labels[..., None])[..., 0]
    confidence = drafter.confidences(h, task_previous)
    unsure = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
    loss = 0.1 * surprise + 0.9 * distance + unsure
    return loss, accepted, torch.sigmoid(confidence.detach())


def slot_weights(valid: Tensor) -> Tensor:
    slots = torch.arange(valid.shape[1], device=valid.device)
    return valid * torch.exp(-slots / FALL)


def expected_length(accepted: Tensor, valid: Tensor) -> Tensor:
    """[blocks]: tokens that a round yields, the target's own included."""
    return 1 + (accepted * valid).cumprod(-1).sum(-1)
