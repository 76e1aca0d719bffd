"""One stage of training the target: steps, schedule, measures, saving."""

from __future__ import annotations

import json
import math
import signal
import time
from pathlib import Path
from typing import Iterator

import torch

from .artifacts import load_artifacts, save_artifacts
from .batches import Batch
from .checkpoint import load_masters, load_saved_config, save_config, save_masters
from .config import ModelConfig
from .initial import initialise
from .measures import SkillSums
from .model import DemoModel, Output, head_loss
from .optimizer import make_optimizers
from .options import Options
from .regions import compiler
from .precompile import Precompilation
from .sinkhorn import check_kernel
from .sources import Source, open_source, source_config
from .workers import Workers

_RESERVE = 12.0  # seconds before the end of the budget for the last evaluation and the files


class Stage:
    def __init__(
        self, model: DemoModel, options: Options, source: Source, output: Path, begin: float
    ):
        """begin: time.monotonic() of the command's start."""
        self.model = model
        self.options = options
        self.source = source
        self.output = output
        self.begin = begin
        self.device = next(model.parameters()).device
        self.optimizers = make_optimizers(
            [model],
            options.matrix_lr,
            options.other_lr,
            options.weight_decay,
            self.device.type != "cpu",
        )
        self.rates = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        self.stopping = False
        self.log = open(output / "log.jsonl", "a")

    def run(self, precompilation: Precompilation | None) -> None:
        o = self.options
        signal.signal(signal.SIGTERM, self._stop)
        batches = self.source.batches
        first = next(batches).to(self.device)
        say(self.begin, "first rows are here")
        if precompilation is not None:
            precompilation.wait(self.begin + o.precompile_seconds)
        held_out = [batch.to(self.device) for batch in self.source.held_out()]
        self._warm_up(first)
        self.first_step = saved = time.monotonic()
        sums = SkillSums(self.source.skills, self.device)
        totals = torch.zeros(2, device=self.device)
        last, step, last_step = self.first_step, 0, 0
        while not self.stopping:
            progress = self._progress(step)
            if progress >= 1:
                break
            self.source.set_easy(progress < o.easy_share)
            batch = next(batches).to(self.device)
            totals += self._step(batch, progress, step, sums)
            step += 1
            if step % o.log_every == 0:
                loss, index = (totals / (step - last_step)).tolist()
                now = time.monotonic()
                tokens = (step - last_step) * (batch.tokens.shape[0] * (batch.tokens.shape[1] - 1))
                whole = step % (10 * o.log_every) == 0
                self._write(
                    step=step,
                    seconds=round(now - self.begin, 1),
                    progress=round(progress, 4),
                    loss=round(loss, 4),
                    index_loss=round(index, 4),
                    tokens_per_second=round(tokens / (now - last)),
                    gigabytes=self._memory(),
                    waiting=self.source.waiting(),
                    **({"train": sums.read()} if whole else {}),
                )
                if whole:
                    sums = SkillSums(self.source.skills, self.device)
                totals.zero_()
                last, last_step = now, step
            if o.evaluate_every and step % o.evaluate_every == 0:
                self._write(step=step, held_out=self.evaluate(held_out, progress))
                last = time.monotonic()
            if o.save_minutes and time.monotonic() - saved > 60 * o.save_minutes:
                self._save()
                last = saved = time.monotonic()
            if o.profile and step == 60:
                self._profile(batch, progress)
                last = time.monotonic()
        self._save()
        self._write(step=step, held_out=self.evaluate(held_out, 1.0), final=True)
        say(self.begin, "done")

    @torch.no_grad()
    def _save(self) -> None:
        save_config(self.output, self.model.config)
        save_masters(self.output, "target", self.model)
        say(self.begin, "saved")

    def evaluate(self, held_out: list[Batch], progress: float) -> dict:
        """On held-out rows. With gradients enabled and unused: another mode would compile anew."""
        sums = SkillSums(self.source.skills, self.device)
        for batch in held_out:
            _, losses, right = self._forward(batch, self._selecting(progress))
            sums.add(batch, losses.detach(), right)
        return sums.read()

    def _selecting(self, progress: float) -> bool:
        return progress >= self.options.select_after

    def _progress(self, step: int) -> float:
        o = self.options
        shares = [0.0]
        if o.steps:
            shares.append(step / o.steps)
        if o.minutes:
            end = self.begin + 60 * o.minutes - _RESERVE
            passed = time.monotonic() - self.first_step
            shares.append(passed / max(end - self.first_step, 1e-3))
        return max(shares)

    def _forward(self, batch: Batch, selecting: bool) -> tuple[Output, torch.Tensor, torch.Tensor]:
        tokens = batch.tokens[:, :-1].contiguous()
        documents = batch.documents[:, :-1].contiguous()
        out = self.model(tokens, documents, selecting)
        targets = batch.tokens[:, 1:].flatten()
        losses, right = head_loss(out.hidden, self.model.head.grid(), targets)
        return out, losses.view(tokens.shape), right.view(tokens.shape)

    def _backward(self, batch: Batch, selecting: bool):
        out, losses, right = self._forward(batch, selecting)
        weights = batch.target_weights
        loss = (losses * weights).sum() / weights.sum().clamp(min=1)
        index = sum(loss.mean() for loss in out.index_losses)
        (loss + self.options.index_weight * index).backward()
        return out, losses, right, torch.stack((loss, index)).detach()

    def _warm_up(self, batch: Batch) -> None:
        """Compiles what there is time to compile, without a change of the weights."""
        o = self.options
        if o.compile:
            compiler.enable(self.begin + o.compile_seconds)
            if o.compiled is not None:
                load_artifacts(o.compiled)
                say(self.begin, f"compiled code taken from {o.compiled}")
        try:
            self._pass(batch)
        except Exception as error:  # a region that fails in its backward pass: no common type
            if not o.compile:
                raise
            say(self.begin, f"all runs as written: {type(error).__name__}: {error}"[:2000])
            compiler.disable()
            self._pass(batch)
        say(self.begin, f"{compiler.compiled} regions compiled, {compiler.plain} run as written")
        if compiler.deadline is not None:
            save_artifacts(self.output / "compiled.xz")

    def _pass(self, batch: Batch) -> None:
        self._backward(batch, False)
        self._wait()
        for optimizer in self.optimizers:
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

    def _stop(self, *_) -> None:
        self.stopping = True

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize()

    def _memory(self) -> float:
        cpu = self.device.type == "cpu"
        return 0.0 if cpu else round(torch.cuda.max_memory_allocated() / 2**30, 1)

    def _profile(self, batch: Batch, progress: float) -> None:
        from torch.profiler import ProfilerActivity, profile

        sums = SkillSums(self.source.skills, self.device)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            for _ in range(3):
                self._step(batch, progress, 10**6, sums)
            self._wait()
        averages = recorded.key_averages()
        table = averages.table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=70)
        (self.output / "profile.txt").write_text(table)
        say(self.begin, "profile written")


def say(begin: float, text: str) -> None:
    print(f"[{time.monotonic() - begin:6.1f} s] {text}", flush=True)


def train_target(
    arguments,
    options: Options,
    workers: Workers | None,
    precompilation: Precompilation | None,
    begin: float,
) -> None:
    """arguments: of demo_model.train."""
    say(begin, f"torch {torch.__version__} loaded")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.resume:
        config = load_saved_config(arguments.resume)
        if config != source_config(arguments, config):
            raise ValueError(f"{arguments.resume} was trained with another tokenizer.")
    else:
        config = source_config(arguments, ModelConfig())
    source = open_source(arguments, config, workers)
    model = DemoModel(config, source.token_map)
    if arguments.resume:
        load_masters(arguments.resume, "target", model)
    else:
        initialise(model, config, arguments.seed)
    model.to(device)
    count = sum(parameter.numel() for parameter in model.parameters())
    say(begin, f"model on {device}: {count} parameters")
    say(begin, f"Sinkhorn: {check_kernel(device)}")
    try:
        Stage(model, options, source, arguments.output, begin).run(precompilation)
    finally:
        if workers is not None:
            workers.stop()
