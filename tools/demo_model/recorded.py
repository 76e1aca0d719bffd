"""The calls of regions that a step makes, found without running one."""

from __future__ import annotations

import dataclasses
from typing import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from .config import ModelConfig
from .model import DemoModel, head_loss
from .regions import compiler, prepare


@dataclasses.dataclass
class _Layout:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    parameter: bool  # the compiler tells them from other tensors

    def make(self, device: str) -> Tensor:
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        tensor = tensor.normal_() if self.dtype.is_floating_point else tensor.zero_()
        if self.parameter:
            return torch.nn.Parameter(tensor, self.requires_grad)
        return tensor.requires_grad_(self.requires_grad)


@dataclasses.dataclass
class Call:
    function: Callable
    arguments: list  # layouts of tensors, and constants


def record_calls(config: ModelConfig, rows: int, positions: int) -> list[Call]:
    """One of each kind, in order of the first use. Tensors are shapes without contents here."""
    calls: list[Call] = []

    def record(function: Callable, arguments: tuple) -> None:
        layouts = [
            _Layout(
                tuple(a.shape),
                a.stride(),
                a.dtype,
                a.requires_grad,
                isinstance(a, torch.nn.Parameter),
            )
            if isinstance(a, Tensor)
            else a
            for a in arguments
        ]
        call = Call(function, layouts)
        if call not in calls:
            calls.append(call)

    compiler.recorder = record
    with FakeTensorMode():
        model = DemoModel(config, torch.zeros(config.vocab_size))
        tokens = torch.zeros(rows, positions, dtype=torch.long)
        out = model(tokens, tokens, False)
        head_loss(out.hidden, model.head.grid(), tokens.flatten())
    compiler.recorder = None
    return calls


def compile_call(call: Call) -> None:
    """Forward and backward, into the cache on disk."""
    prepare()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = [a.make(device) if isinstance(a, _Layout) else a for a in call.arguments]
    outputs = torch.compile(call.function, dynamic=False, fullgraph=True)(*arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    outputs = [output for output in outputs if output.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
