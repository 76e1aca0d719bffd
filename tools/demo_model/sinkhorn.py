"""The Sinkhorn projection of the stream mixing matrices, as tensor operations and as one kernel.

The kernel keeps a token's 4 x 4 matrix in registers over all iterations. Written as tensor
operations the same takes two launches and a round trip to memory per iteration; that way it is the
plain reference and what runs on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch comes without it
    triton = None


def sinkhorn_plain(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """[..., 4, 4] fp32: softmax of the rows, then alternating normalisation that ends on columns."""
    c = torch.softmax(logits, -1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


if triton is not None:

    @triton.jit
    def _forward_kernel(logits, out, sums, tokens, eps, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr):
        # sums: [2 * ITERATIONS, tokens, 4] the divisors in order; slot 0 stays unused.
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        lane = tl.arange(0, 4)
        live = token < tokens
        at = token[:, None, None] * 16 + lane[None, :, None] * 4 + lane[None, None, :]
        sum_at = token[:, None] * 4 + lane[None, :]
        x = tl.load(logits + at, mask=live[:, None, None], other=0.0)
        x = tl.exp(x - tl.max(x, 2)[:, :, None])
        c = x / tl.sum(x, 2)[:, :, None] + eps
        columns = tl.sum(c, 1) + eps
        tl.store(sums + tokens * 4 + sum_at, columns, mask=live[:, None])
        c = c / columns[:, None, :]
        for i in range(1, ITERATIONS):
            rows = tl.sum(c, 2) + eps
            tl.store(sums + (2 * i) * tokens * 4 + sum_at, rows, mask=live[:, None])
            c = c / rows[:, :, None]
            columns = tl.sum(c, 1) + eps
            tl.store(sums + (2 * i + 1) * tokens * 4 + sum_at, columns, mask=live[:, None])
            c = c / columns[:, None, :]
        tl.store(out + at, c, mask=live[:, None, None])

    @triton.jit
    def _backward_kernel(
        out, sums, gradient, result, tokens, eps, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr
    ):
        # Walks the forward pass backwards; every division is undone by a multiplication, so only
        # its divisors are needed and not the matrices in between.
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        lane = tl.arange(0, 4)
        live = token < tokens
        at = token[:, None, None] * 16 + lane[None, :, None] * 4 + lane[None, None, :]
        sum_at = token[:, None] * 4 + lane[None, :]
        c = tl.load(out + at, mask=live[:, None, None], other=0.0)
        g = tl.load(gradient + at, mask=live[:, None, None], other=0.0)
        for step in range(1, ITERATIONS):
            i = ITERATIONS - step
            columns = tl.load(
                sums + (2 * i + 1) * tokens * 4 + sum_at, mask=live[:, None], other=1.0
            )
            g = (g - tl.sum(g * c, 1)[:, None, :]) / columns[:, None, :]
            c = c * columns[:, None, :]
            rows = tl.load(sums + (2 * i) * tokens * 4 + sum_at, mask=live[:, None], other=1.0)
            g = (g - tl.sum(g * c, 2)[:, :, None]) / rows[:, :, None]
            c = c * rows[:, :, None]
        columns = tl.load(sums + tokens * 4 + sum_at, mask=live[:, None], other=1.0)
        g = (g - tl.sum(g * c, 1)[:, None, :]) / columns[:, None, :]
        p = c * columns[:, None, :] - eps
        g = p * (g - tl.sum(g * p, 2)[:, :, None])
        tl.store(result + at, g, mask=live[:, None, None])

    _BLOCK = 64

    @torch.library.triton_op("deepinfer_demo::sinkhorn", mutates_args={})
    def _sinkhorn_op(logits: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
        tokens = logits.numel() // 16
        out = torch.empty_like(logits)
        sums = logits.new_empty(2 * iterations, tokens, 4)
        torch.library.wrap_triton(_forward_kernel)[(triton.cdiv(tokens, _BLOCK),)](
            logits, out, sums, tokens, eps, ITERATIONS=iterations, BLOCK=_BLOCK
        )
        return out, sums

    @torch.library.triton_op("deepinfer_demo::sinkhorn_backward", mutates_args={})
    def _sinkhorn_backward_op(out: Tensor, sums: Tensor, gradient: Tensor, eps: float) -> Tensor:
        tokens = out.numel() // 16
        result = torch.empty_like(out)
        torch.library.wrap_triton(_backward_kernel)[(triton.cdiv(tokens, _BLOCK),)](
            out, sums, gradient, result, tokens, eps, ITERATIONS=sums.shape[0] // 2, BLOCK=_BLOCK
        )
        return result

    def _setup_context(ctx, inputs, output):
        ctx.eps = inputs[2]
        ctx.save_for_backward(*output)

    def _backward(ctx, gradient, _):
        out, sums = ctx.saved_tensors
        return _sinkhorn_backward_op(out, sums, gradient.contiguous(), ctx.eps), None, None

    _sinkhorn_op.register_autograd(_backward, setup_context=_setup_context)


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """[tokens, 4, 4] fp32, contiguous."""
    if triton is not None and logits.is_cuda:
        return _sinkhorn_op(logits, iterations, eps)[0]
    return sinkhorn_plain(logits, iterations, eps)
