"""One stage of training the target: steps, schedule, measures, saving."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Iterator

import torch

from .batches import Batch
from .checkpoint import save_config, save_masters
from .compiling import (
    compile_model,
    compile_muon,
    configure,
    load_compiled,
    save_compiled,
    try_once,
)
from .measures import SkillSums
from .model import DemoModel, Output, head_loss
from .optimizer import make_optimizers


@dataclasses.dataclass
class Options:
    """steps and minutes: whichever is reached first ends the stage; 0 is no limit."""

    steps: int = 0
    minutes: float = 0.0  # of stepping; compilation is not counted
    matrix_lr: float = 4e-3
    other_lr: float = 3e-3
    weight_decay: float = 0.02
    warmup_steps: int = 100
    decay: float = 0.4  # last share of the stage in which rates fall to a hundredth
    select_after: float = 0.5  # share of the stage without selection; the indexers learn all along
    index_weight: float = 0.3
    balance_rate: float = 1e-3
    log_every: int = 25
    evaluate_every: int = 400
    compile: bool = True
    compiled: Path | None = None  # compiled.xz of an earlier run of the same code and shapes
    profile: bool = False


class Stage:
    def __init__(
        self,
        model: DemoModel,
        options: Options,
        skills: list[str],
        output: Path,
        device: str,
        held_out: list[Batch],
    ):
        self.model = model
        self.options = options
        self.skills = skills
        self.output = output
        self.device = device
        self.held_out = [batch.to(device) for batch in held_out]
        self.head_loss = head_loss
        fused = device != "cpu"
        self.optimizers = make_optimizers(
            [model], options.matrix_lr, options.other_lr, options.weight_decay, fused
        )
        self.rates = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        if options.compile:
            configure()
            if options.compiled is not None:
                load_compiled(options.compiled)
            compile_model(model)
            compile_muon(self.optimizers[0])
            self.head_loss = torch.compile(head_loss, dynamic=False)
        output.mkdir(parents=True, exist_ok=True)
        self.log = open(output / "log.jsonl", "a")

    def run(self, batches: Iterator[Batch]) -> None:
        o = self.options
        start = time.monotonic()
        first = next(batches).to(self.device)
        warm = lambda: [self._warm_up(first, selecting) for selecting in self._modes()]
        try_once("The model", warm, warm)
        self._wait()
        print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
        if o.compile:
            save_compiled(self.output / "compiled.xz")
        sums = SkillSums(self.skills, self.device)
        totals = torch.zeros(2, device=self.device)
        start = last = time.monotonic()
        step = last_step = 0
        while True:
            progress = self._progress(step, time.monotonic() - start)
            if progress >= 1:
                break
            batch = next(batches).to(self.device)
            totals += self._step(batch, progress, step, sums)
            step += 1
            if step % o.log_every == 0:
                loss, index = (totals / o.log_every).tolist()
                now = time.monotonic()
                tokens = (step - last_step) * (batch.tokens.shape[0] * (batch.tokens.shape[1] - 1))
                self._write(
                    step=step,
                    seconds=round(now - start, 1),
                    progress=round(progress, 4),
                    loss=round(loss, 4),
                    index_loss=round(index, 4),
                    tokens_per_second=round(tokens / (now - last)),
                    gigabytes=self._memory(),
                    train=sums.read(),
                )
                sums = SkillSums(self.skills, self.device)
                totals.zero_()
                last, last_step = now, step
            if o.evaluate_every and step % o.evaluate_every == 0:
                self._write(step=step, held_out=self.evaluate(progress))
                last, last_step = time.monotonic(), step
            if o.profile and step == 3 * o.log_every:
                self._profile(batch, progress)
                last, last_step = time.monotonic(), step
        self._write(step=step, held_out=self.evaluate(1.0), final=True)
        save_config(self.output, self.model.config)
        save_masters(self.output, "target", self.model)

    def evaluate(self, progress: float) -> dict:
        """On held-out rows. With gradients enabled and unused: another mode would compile anew."""
        sums = SkillSums(self.skills, self.device)
        for batch in self.held_out:
            _, losses, right = self._forward(batch, self._selecting(progress))
            sums.add(batch, losses.detach(), right)
        return sums.read()

    def _modes(self) -> list[bool]:
        share = self.options.select_after
        return [False] if share >= 1 else [True] if share <= 0 else [False, True]

    def _selecting(self, progress: float) -> bool:
        return progress >= self.options.select_after

    def _progress(self, step: int, seconds: float) -> float:
        o = self.options
        shares = [0.0]
        if o.steps:
            shares.append(step / o.steps)
        if o.minutes:
            shares.append(seconds / (60 * o.minutes))
        return max(shares)

    def _forward(self, batch: Batch, selecting: bool) -> tuple[Output, torch.Tensor, torch.Tensor]:
        tokens = batch.tokens[:, :-1].contiguous()
        documents = batch.documents[:, :-1].contiguous()
        out = self.model(tokens, documents, selecting)
        targets = batch.tokens[:, 1:].flatten()
        losses, right = self.head_loss(out.hidden, self.model.head.grid(), targets)
        return out, losses.view(tokens.shape), right.view(tokens.shape)

    def _backward(self, batch: Batch, selecting: bool):
        out, losses, right = self._forward(batch, selecting)
        weights = batch.target_weights
        loss = (losses * weights).sum() / weights.sum().clamp(min=1)
        index = sum(loss.mean() for loss in out.index_losses)
        (loss + self.options.index_weight * index).backward()
        return out, losses, right, torch.stack((loss, index)).detach()

    def _warm_up(self, batch: Batch, selecting: bool) -> None:
        """Compiles everything, without a change of the weights."""
        self._backward(batch, selecting)
        for optimizer, rates in zip(self.optimizers, self.rates):
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            optimizer.step()
            optimizer.state.clear()
            optimizer.zero_grad(set_to_none=True)

    def _step(self, batch: Batch, progress: float, step: int, sums: SkillSums) -> torch.Tensor:
        o = self.options
        out, losses, right, totals = self._backward(batch, self._selecting(progress))
        factor = min(1.0, (step + 1) / o.warmup_steps)
        if o.decay > 0:
            factor *= min(1.0, max(0.01, (1 - progress) / o.decay))
        for optimizer, rates in zip(self.optimizers, self.rates):
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._balance(out.loads)
        with torch.no_grad():
            sums.add(batch, losses.detach(), right)
        return totals

    @torch.no_grad()
    def _balance(self, loads: torch.Tensor) -> None:
        """Experts with less than their share of the tokens become easier to choose."""
        moves = self.options.balance_rate * torch.sign(loads.mean(1, keepdim=True) - loads)
        biases = [layer.ffn.gate.bias for layer in self.model.layers]
        torch._foreach_add_(biases, list(moves.unbind()))

    def _write(self, **record) -> None:
        for value in record.values():
            if isinstance(value, float) and not math.isfinite(value):
                raise FloatingPointError(f"Training diverged: {record}")
        text = json.dumps(record)
        self.log.write(text + "\n")
        self.log.flush()
        print(text, flush=True)

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def _memory(self) -> float:
        return round(torch.cuda.max_memory_allocated() / 2**30, 1) if self.device != "cpu" else 0.0

    def _profile(self, batch: Batch, progress: float) -> None:
        from torch.profiler import ProfilerActivity, profile

        sums = SkillSums(self.skills, self.device)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            for _ in range(3):
                self._step(batch, progress, 10**6, sums)
            self._wait()
        averages = recorded.key_averages()
        print(averages.table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=80))
