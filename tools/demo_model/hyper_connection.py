"""The four residual streams: how a sub-layer reads them, and how its output is spread over them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .layers import rms_norm
from .quantization import q8
from .regions import Region
from .sinkhorn import sinkhorn


class HyperConnection(nn.Module):
    """One site. Its `pre` weights are consumed by the next site, `post` and `comb` by its own."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        streams = config.hc_mult
        self.streams = streams
        self.iterations = config.hc_sinkhorn_iters
        self.eps = config.hc_eps
        self.norm_eps = config.rms_norm_eps
        self.fn = nn.Parameter(torch.empty((2 + streams) * streams, streams * config.hidden_size))
        self.base = nn.Parameter(torch.empty((2 + streams) * streams))
        self.scale = nn.Parameter(torch.empty(3))

    def grid(self) -> Tensor:
        """fn rounded to bf16. It is stored in fp32; that it fits bf16 lets a tensor-core product
        with the bf16 streams be exact."""
        return self.fn.to(torch.bfloat16)

    def forward(self, h: Tensor, pre: Tensor, norm_weight: Tensor):
        """h: [tokens, 4, hidden] bf16, pre: [tokens, 4] fp32 of the site before.

        Returns the normalised input of the sub-layer, the same on the q8 grid, and this site's pre,
        post and comb.
        """
        x, x_grid, next_pre, post, comb = mix(
            h, pre, self.fn, self.base, self.scale, norm_weight, self.eps, self.norm_eps
        )
        return x, x_grid, next_pre, post, sinkhorn(comb, self.iterations, self.eps)


@Region
def mix(h, pre, fn, base, scale, norm_weight, eps: float, norm_eps: float):
    """What HyperConnection.forward returns, with the logits of comb: [tokens, 4, 4]."""
    n = h.shape[1]
    v = h.flatten(-2)
    r = torch.rsqrt(v.float().square().mean(-1, keepdim=True) + norm_eps)
    m = nn.functional.linear(v, fn.to(torch.bfloat16)).float() * r
    scales = torch.cat([scale[i : i + 1].expand(k) for i, k in enumerate((n, n, n * n))])
    next_pre, post, comb = (m * scales + base).split((n, n, n * n), -1)
    x = rms_norm((pre[..., None] * h.float()).sum(-2).to(torch.bfloat16), norm_weight, norm_eps)
    comb = comb.reshape(-1, n, n).contiguous()
    return x, q8(x), torch.sigmoid(next_pre) + eps, 2 * torch.sigmoid(post), comb


@Region
def expand(y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """h'[j] = post[j] * y + sum over i of comb[i, j] * h[i]; y: [tokens, hidden] bf16."""
    streams = h.float()
    parts = [post[:, :, None] * y.float()[:, None, :]]
    parts += [comb[:, i, :, None] * streams[:, i, None, :] for i in range(h.shape[1])]
    return sum(parts[1:], parts[0]).to(torch.bfloat16)


def collapse(h: Tensor, pre: Tensor) -> Tensor:
    return (pre[..., None] * h.float()).sum(-2).to(torch.bfloat16)
