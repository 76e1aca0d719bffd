"""Compiled pieces of the model.

Compiling whole layers takes minutes before the first step. A region is a plain function of tensors
that runs many times a step with the same shapes: a dozen small graphs, each compiled once for all
layers. A region whose turn comes after the deadline, or that does not compile, runs as written.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Callable

import torch
from torch import Tensor


class _TooLate(BaseException):
    """Raised by the alarm. No Exception: the compiler would take it for a failure of its own."""


def prepare() -> None:
    """Settings of the compiler; they are part of what its cache is looked up by."""
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.accumulated_recompile_limit = 1024
    torch._functorch.config.force_non_lazy_backward_lowering = True  # while the alarm is set
    torch.set_float32_matmul_precision("high")


class Compiler:
    """One per process. Off until `enable`; regions then run as written."""

    def __init__(self) -> None:
        self.deadline: float | None = None  # time.monotonic() after which nothing new is compiled
        self.recorder: Callable[[Callable, tuple], None] | None = None
        self.compiled = 0
        self.plain = 0

    def enable(self, deadline: float) -> None:
        """Before the first call of a region."""
        prepare()
        self.deadline = deadline

    def disable(self) -> None:
        """From now on every region runs as written, also one that is compiled."""
        self.deadline = None

    def first_call(self, name: str, function: Callable, arguments: tuple):
        """Runs the function, compiled if that succeeds in time: what to call later, the result."""
        start = time.monotonic()
        left = self.deadline - start
        if left <= 0:
            self._report(name, start, "runs as written: no time left")
            return function, function(*arguments)
        compiled = torch.compile(function, dynamic=False, fullgraph=True)
        try:
            with _alarm(left):
                result = compiled(*arguments)
            self._report(name, start, "compiled")
            return compiled, result
        except _TooLate:
            self._report(name, start, "runs as written: not compiled in time")
        except Exception as error:  # the compiler's failures have no common type
            self._report(name, start, f"runs as written: {type(error).__name__}: {error}"[:1000])
        return function, function(*arguments)

    def _report(self, name: str, start: float, what: str) -> None:
        if what == "compiled":
            self.compiled += 1
        else:
            self.plain += 1
        print(f"region {name} {what} ({time.monotonic() - start:.1f} s)", flush=True)


class _alarm:
    """Raises _TooLate in the main thread after some seconds; elsewhere there is no such alarm."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGALRM, self._ring)
            signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *_) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self.before)

    @staticmethod
    def _ring(*_) -> None:
        raise _TooLate


compiler = Compiler()


class Region:
    """Called like the function it wraps. Arguments are tensors and constants."""

    def __init__(self, function: Callable):
        self.function = function
        self.choices: dict[tuple, Callable] = {}
        self.__doc__ = function.__doc__

    def __call__(self, *arguments):
        if compiler.recorder is not None:
            compiler.recorder(self.function, arguments)
        if compiler.deadline is None:
            return self.function(*arguments)
        signature = (torch.is_grad_enabled(), *map(_describe, arguments))
        choice = self.choices.get(signature)
        if choice is not None:
            return choice(*arguments)
        choice, result = compiler.first_call(self.function.__name__, self.function, arguments)
        self.choices[signature] = choice
        return result


def _describe(argument):
    if isinstance(argument, Tensor):
        return argument.shape, argument.dtype, argument.requires_grad
    return argument
