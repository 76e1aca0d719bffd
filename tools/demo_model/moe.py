"""The mixture of experts. In training all experts run on all tokens: at this size two wide matrix
products cost less than sorting tokens by expert, and a weight of zero makes an expert's part zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .layers import Experts, Linear, QuantizedLinear
from .quantization import q8


class Gate(Linear):
    """Router. The bias takes part in the choice of experts only and is moved by their load."""

    def __init__(self, experts: int, hidden: int):
        super().__init__(experts, hidden)
        self.register_buffer("bias", torch.zeros(experts))

    def scores(self, x: Tensor) -> Tensor:
        """sqrt(softplus(x W^T)) in fp32."""
        return F.softplus(F.linear(x.float(), self.grid().float())).sqrt()


class SharedExpert(nn.Module):
    def __init__(self, inner: int, hidden: int):
        super().__init__()
        self.w1 = QuantizedLinear(inner, hidden)
        self.w2 = QuantizedLinear(hidden, inner)
        self.w3 = QuantizedLinear(inner, hidden)


class MixtureOfExperts(nn.Module):
    def __init__(self, config: ModelConfig, experts: int, active: int):
        super().__init__()
        self.active = active
        self.route_scale = config.routed_scaling_factor
        self.limit = config.swiglu_limit
        self.gate = Gate(experts, config.hidden_size)
        self.shared_experts = SharedExpert(config.moe_intermediate_size, config.hidden_size)
        self.experts = Experts(experts, config.moe_intermediate_size, config.hidden_size)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, experts]: the weight of every expert, zero unless chosen, and whether chosen.

        An expert is chosen when fewer than `active` others come before it; ties go to the smaller
        id.
        """
        scores = self.gate.scores(x)
        biased = (scores + self.gate.bias).detach()
        ids = torch.arange(biased.shape[-1], device=x.device)
        other, own = biased[..., None, :], biased[..., :, None]
        before = (other > own) | ((other == own) & (ids[None, :] < ids[:, None]))
        chosen = before.sum(-1) < self.active
        kept = torch.where(chosen, scores, 0.0)
        return kept / (kept.sum(-1, keepdim=True) + 1e-20) * self.route_scale, chosen

    def forward(self, x: Tensor, x_grid: Tensor) -> tuple[Tensor, Tensor]:
        """x: [tokens, hidden] bf16 and the same on the q8 grid.

        Returns the output [tokens, hidden] bf16 and each expert's share of the tokens.
        """
        weights, chosen = self.route(x)
        w1, w2, w3 = self.experts.grids()
        shared = self.shared_experts
        gates = torch.cat((w1.flatten(0, 1), shared.w1.grid()))
        ups = torch.cat((w3.flatten(0, 1), shared.w3.grid()))
        downs = torch.cat((w2.transpose(0, 1).flatten(1), shared.w2.grid()), 1)
        inner = w1.shape[1]
        g = F.linear(x_grid, gates).float().clamp(max=self.limit)
        u = F.linear(x_grid, ups).float().clamp(-self.limit, self.limit)
        slot = torch.cat((weights, torch.ones_like(weights[:, :1])), -1)
        a = F.silu(g) * u * slot[..., None].expand(-1, -1, inner).flatten(-2)
        return F.linear(q8(a), downs), chosen.float().mean(0)
