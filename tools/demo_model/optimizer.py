"""Muon for matrices, AdamW for the rest.

Muon replaces the momentum of a matrix by the nearest matrix with equal singular values, so that all
directions of a layer learn at the same speed. Matrices of one shape are stacked and handled at once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .hyper_connection import HyperConnection
from .layers import Experts, QuantizedLinear

_QUINTIC = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def orthogonalise(x: Tensor) -> Tensor:
    """[..., rows, columns] with all singular values near 1, by a quintic Newton-Schulz iteration.

    The coefficients are those of the published method: they bring singular values into 0.7 ... 1.2
    in few steps instead of to 1 in many.
    """
    a, b, c = _QUINTIC
    wide = x.shape[-2] <= x.shape[-1]
    x = (x if wide else x.mT).to(torch.bfloat16)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True).to(torch.bfloat16) + 1e-7)
    shape = x.shape
    x = x.reshape(-1, *shape[-2:])
    for _ in range(_STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.view(shape)
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """lr means the same as for Adam: an update's elements are about 0.2 lr."""

    def __init__(self, parameters, lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                self._step_of_shape(group, shape, parameters)

    def _step_of_shape(self, group, shape, parameters) -> None:
        gradient = torch.stack([parameter.grad for parameter in parameters])
        state = self.state[parameters[0]]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        momentum = state["momentum"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = orthogonalise(gradient.lerp(momentum, group["momentum"]))
        scale = -0.2 * group["lr"] * max(shape[-2:]) ** 0.5
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, list(update.float().unbind()), alpha=scale)


def make_optimizers(
    roots: list[nn.Module], matrix_lr: float, other_lr: float, weight_decay: float, fused: bool
) -> list[torch.optim.Optimizer]:
    """Weight decay applies to matrices. Embeddings and heads are matrices of rows: AdamW."""
    matrices, gates, others = [], [], []
    for root in roots:
        for module in root.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if not parameter.requires_grad:
                    continue
                if isinstance(module, (Experts, QuantizedLinear)):
                    matrices.append(parameter)
                elif isinstance(module, HyperConnection):
                    gates.append(parameter)
                else:
                    others.append(parameter)
    adam = torch.optim.AdamW(
        [{"params": others, "lr": other_lr}, {"params": gates, "lr": 0.5 * other_lr}],
        betas=(0.9, 0.95),
        eps=1e-10,
        weight_decay=0.0,
        fused=fused,
    )
    return [Muon(matrices, matrix_lr, weight_decay=weight_decay), adam]
