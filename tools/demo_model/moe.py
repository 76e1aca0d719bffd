"""The mixture of experts. In training all experts run on all tokens: at this size two wide matrix
products cost less than sorting tokens by expert, and a weight of zero makes an expert's part zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .layers import Experts, Linear, QuantizedLinear
from .quantization import q4p, q8, q8_blocks
from .regions import Region


class Gate(Linear):
    """Router. The bias takes part in the choice of experts only and is moved by their load."""

    def __init__(self, experts: int, hidden: int):
        super().__init__(experts, hidden)
        self.register_buffer("bias", torch.zeros(experts))


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

    def forward(self, x: Tensor, x_grid: Tensor) -> tuple[Tensor, Tensor]:
        """x: [tokens, hidden] bf16 and the same on the q8 grid.

        Returns the output [tokens, hidden] bf16 and each expert's share of the tokens.
        """
        experts, shared = self.experts, self.shared_experts
        return mixture(
            x,
            x_grid,
            self.gate.weight,
            self.gate.bias,
            experts.w1,
            experts.w2,
            experts.w3,
            shared.w1.weight,
            shared.w2.weight,
            shared.w3.weight,
            self.active,
            self.route_scale,
            self.limit,
        )


def route(x: Tensor, gate: Tensor, bias: Tensor, active: int, scale: float):
    """[tokens, experts]: the weight of every expert, zero unless chosen, and whether chosen.

    An expert is chosen when fewer than `active` others come before it; ties go to the smaller id.
    """
    logits = F.linear(x.float(), gate.to(torch.bfloat16).float())
    scores = F.softplus(logits).sqrt()
    biased = (scores + bias).detach()
    ids = torch.arange(biased.shape[-1], device=x.device)
    other, own = biased[..., None, :], biased[..., :, None]
    before = (other > own) | ((other == own) & (ids[None, :] < ids[:, None]))
    chosen = before.sum(-1) < active
    kept = torch.where(chosen, scores, 0.0)
    return kept / (kept.sum(-1, keepdim=True) + 1e-20) * scale, chosen


@Region
def mixture(x, x_grid, gate, bias, w1, w2, w3, s1, s2, s3, active, scale, limit):
    """gate, bias: of the router; w1, w2, w3: of the experts; s1, s2, s3: of the shared one."""
    weights, chosen = route(x, gate, bias, active, scale)
    gates = torch.cat((q4p(w1).flatten(0, 1), q8_blocks(s1)))
    ups = torch.cat((q4p(w3).flatten(0, 1), q8_blocks(s3)))
    downs = torch.cat((q4p(w2).transpose(0, 1).flatten(1), q8_blocks(s2)), 1)
    inner = w1.shape[1]
    g = F.linear(x_grid, gates).float().clamp(max=limit)
    u = F.linear(x_grid, ups).float().clamp(-limit, limit)
    slot = torch.cat((weights, torch.ones_like(weights[:, :1])), -1)
    a = F.silu(g) * u * slot[..., None].expand(-1, -1, inner).flatten(-2)
    return F.linear(q8(a), downs), chosen.float().mean(0)
