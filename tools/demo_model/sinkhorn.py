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

    class _Sinkhorn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits: Tensor, iterations: int, eps: float) -> Tensor:
            tokens = logits.numel() // 16
            out = torch.empty_like(logits)
            sums = logits.new_empty(2 * iterations, tokens, 4)
            _forward_kernel[(triton.cdiv(tokens, _BLOCK),)](
                logits, out, sums, tokens, eps, ITERATIONS=iterations, BLOCK=_BLOCK
            )
            ctx.save_for_backward(out, sums)
            ctx.iterations, ctx.eps = iterations, eps
            return out

        @staticmethod
        def backward(ctx, gradient: Tensor):
            out, sums = ctx.saved_tensors
            tokens = out.numel() // 16
            result = torch.empty_like(out)
            _backward_kernel[(triton.cdiv(tokens, _BLOCK),)](
                out,
                sums,
                gradient.contiguous(),
                result,
                tokens,
                ctx.eps,
                ITERATIONS=ctx.iterations,
                BLOCK=_BLOCK,
            )
            return result, None, None


_use_kernel = True


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """[tokens, 4, 4] fp32, contiguous."""
    if triton is not None and _use_kernel and logits.is_cuda:
        return _Sinkhorn.apply(logits, iterations, eps)
    return sinkhorn_plain(logits, iterations, eps)


def check_kernel(device: torch.device | str) -> str:
    """Compares the kernel with the plain operations on a few matrices. From then on the kernel is
    used only if it agreed; says which."""
    global _use_kernel
    if triton is None or torch.device(device).type != "cuda":
        return "plain operations"
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(300, 4, 4, generator=generator)).to(device).requires_grad_()
    weights = torch.randn(300, 4, 4, generator=generator).to(device)
    results = []
    try:
        for function in (sinkhorn_plain, _Sinkhorn.apply):
            out = function(logits, 20, 1e-6)
            (gradient,) = torch.autograd.grad((out * weights).sum(), logits)
            results.append((out, gradient))
        error = max((a - b).abs().max().item() for a, b in zip(*results))
    except Exception as failure:  # the compiler's failures have no common type
        _use_kernel = False
        return f"plain operations: {type(failure).__name__}: {failure}"[:1000]
    _use_kernel = error < 1e-4
    return f"{'kernel' if _use_kernel else 'plain operations'} (they differ by {error:.1e})"
