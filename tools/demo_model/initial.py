"""Initial values. Every mechanism starts alive: streams that differ, routers that choose, a sink
that matters little, hyper-connections near a plain residual connection."""

from __future__ import annotations

import torch
from torch import nn

from .config import ModelConfig
from .engram import Engram
from .hyper_connection import HyperConnection
from .layers import Experts, Linear, Norm, QuantizedLinear


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter: torch.Tensor, std: float, mean: float = 0.0) -> None:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std + mean)

    for name, module in model.named_modules():
        last = name.rsplit(".", 1)[-1]
        if isinstance(module, Norm):
            module.weight.fill_(1.0)
        elif isinstance(module, Experts):
            normal(module.w1, config.hidden_size**-0.5)
            normal(module.w3, config.hidden_size**-0.5)
            normal(module.w2, 0.5 * config.moe_intermediate_size**-0.5)
        elif isinstance(module, HyperConnection):
            normal(module.fn, (config.hc_mult * config.hidden_size) ** -0.5)
            module.scale.fill_(0.1)
            n = config.hc_mult
            normal(module.base[:n], 0.3, -1.1)  # reads about a quarter of every stream
            normal(module.base[n : 2 * n], 0.3)  # writes about once to every stream
            comb = module.base[2 * n :].view(n, n)
            normal(comb, 0.3)
            comb += 3 * torch.eye(n)  # keeps most of a stream where it is
        elif isinstance(module, Engram):
            normal(module.q_weight, 0.2, 1.0)
            normal(module.k_weight, 0.2, 1.0)
        elif isinstance(module, (Linear, QuantizedLinear)):
            inputs = module.weight.shape[1]
            if last == "embed":
                normal(module.weight, 0.5)
            elif last == "head":
                normal(module.weight, 0.3 * inputs**-0.5)
            elif last in ("wo_b", "w2"):
                normal(module.weight, 0.5 * inputs**-0.5)
            else:
                normal(module.weight, inputs**-0.5)
    for name, parameter in model.named_parameters():
        if name.endswith("attn_sink"):
            parameter.zero_()
