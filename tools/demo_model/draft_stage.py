"""One stage of training the drafter of a trained target."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from .artifacts import load_artifacts, save_artifacts
from .batches import Batch
from .checkpoint import load_masters, load_saved_config, save_config, save_masters
from .draft_training import expected_length, make_task, slot_losses, slot_weights
from .drafter import Drafter
from .initial import initialise
from .model import DemoModel
from .optimizer import make_optimizers
from .regions import compiler
from .sinkhorn import check_kernel
from .sources import Source, open_source
from .training import say
from .workers import Workers

_RESERVE = 10.0  # seconds before the end of the budget for the last evaluation and the files


class DraftStage:
    def __init__(self, model: DemoModel, drafter: Drafter, arguments, source: Source, begin: float):
        """begin: time.monotonic() of the command's start."""
        self.model, self.drafter, self.arguments = model, drafter, arguments
        self.source, self.skills, self.begin = source, source.skills, begin
        self.device = next(model.parameters()).device
        model.requires_grad_(False)
        self.optimizers = make_optimizers(
            [drafter], arguments.matrix_lr, arguments.other_lr, 0.0, self.device.type != "cpu"
        )
        self.rates = [[group["lr"] for group in o.param_groups] for o in self.optimizers]

    def losses(self, batch: Batch):
        c = self.model.config
        task = make_task(
            batch, self.arguments.anchors, c.dspark_block_size, c.sliding_window
        )
        with torch.no_grad():
            out = self.model(
                batch.tokens[:, :-1].contiguous(), batch.documents[:, :-1].contiguous(), True
            )
            embed, head = self.model.embed.grid(), self.model.head.grid()
        features = self.drafter.features(out.taps)
        h, loads = self.drafter(features, task.blocks, task.previous[:, 0], embed)
        loss, accepted, confidence = slot_losses(
            self.drafter, h, task.previous, task.labels, out.hidden[task.rows], head
        )
        return task, loss, accepted, confidence, loads

    def step(self, batch: Batch, factor: float) -> torch.Tensor:
        task, loss, accepted, confidence, loads = self.losses(batch)
        weights = slot_weights(task.valid)
        total = (loss * weights).sum() / (weights.sum() + 1e-6)
        total.backward()
        for optimizer, rates in zip(self.optimizers, self.rates):
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * factor
            if factor > 0:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            moves = 1e-3 * torch.sign(loads.mean(1, keepdim=True) - loads)
            for stage, move in zip(self.drafter.stages, moves):
                stage.ffn.gate.bias += move * (factor > 0)
            return torch.cat((total.detach()[None], self._measures(task, accepted, confidence)))

    def _measures(self, task, accepted, confidence) -> torch.Tensor:
        """Acceptance and error of the confidence per slot, then the expected length per skill."""
        count = task.valid.sum(0).clamp(min=1)
        share = (accepted * task.valid).sum(0) / count
        error = ((confidence - accepted) * task.valid).sum(0) / count
        length = expected_length(accepted, task.valid)
        whole = task.valid.all(-1).float()  # shorter blocks end with the document
        zero = length.new_zeros(len(self.skills))
        sums = zero.index_add(0, task.skills, length * whole)
        counts = zero.index_add(0, task.skills, whole)
        return torch.cat((share, error, sums, counts))

    def report(self, totals: torch.Tensor, steps: int) -> dict:
        size, skills = self.model.config.dspark_block_size, len(self.skills)
        loss, share, error, sums, counts = (totals / steps).split((1, size, size, skills, skills))
        lengths = {
            name: round(total / count, 3)
            for name, total, count in zip(self.skills, sums.tolist(), counts.tolist())
            if count > 0
        }
        return {
            "loss": round(loss.item(), 4),
            "accepted": [round(x, 4) for x in share.tolist()],
            "confidence_error": [round(x, 4) for x in error.tolist()],
            "expected_length": lengths,
        }

    def run(self, output: Path) -> None:
        a = self.arguments
        batches = self.source.batches
        first = next(batches).to(self.device)
        say(self.begin, "first rows are here")
        held_out = self.source.held_out()
        self._warm_up(first, output)
        start = saved = time.monotonic()
        end = self.begin + 60 * a.minutes - _RESERVE
        with open(output / "draft_log.jsonl", "a") as log:

            def write(**record) -> None:
                log.write(json.dumps(record) + "\n")
                log.flush()
                print(json.dumps(record), flush=True)

            self.source.set_easy(False)
            totals, steps, step = 0, 0, 0
            while True:
                now = time.monotonic()
                shares = [0.0]
                if a.steps:
                    shares.append(step / a.steps)
                if a.minutes:
                    shares.append((now - start) / max(end - start, 1e-3))
                progress = max(shares)
                if progress >= 1:
                    break
                factor = min(1.0, (step + 1) / 100, max(0.01, 1.2 * (1 - progress)))
                totals = totals + self.step(next(batches).to(self.device), factor)
                step, steps = step + 1, steps + 1
                if step % a.log_every == 0:
                    write(
                        step=step,
                        seconds=round(time.monotonic() - self.begin, 1),
                        progress=round(progress, 4),
                        **self.report(totals, steps),
                    )
                    totals, steps = 0, 0
                if time.monotonic() - saved > 60 * a.save_minutes:
                    save_masters(output, "drafter", self.drafter)
                    saved = time.monotonic()
            save_masters(output, "drafter", self.drafter)
            if held_out:
                totals = sum(self.step(batch.to(self.device), 0.0) for batch in held_out)
                write(step=step, held_out=self.report(totals, len(held_out)))
        say(self.begin, "done")

    def _warm_up(self, batch: Batch, output: Path) -> None:
        a = self.arguments
        if a.compile:
            compiler.enable(self.begin + a.compile_seconds)
            if a.compiled is not None:
                load_artifacts(a.compiled)
        try:
            self.step(batch, 0.0)
        except Exception as error:  # a region that fails in its backward pass: no common type
            if not a.compile:
                raise
            say(self.begin, f"all runs as written: {type(error).__name__}: {error}"[:2000])
            compiler.disable()
            self.step(batch, 0.0)
        say(self.begin, f"{compiler.compiled} regions compiled, {compiler.plain} run as written")
        if compiler.deadline is not None:
            save_artifacts(output / "compiled.xz")


def train_drafter(arguments, workers: Workers | None, begin: float) -> None:
    """arguments: of demo_model.train_drafter."""
    say(begin, f"torch {torch.__version__} loaded")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    arguments.output.mkdir(parents=True, exist_ok=True)
    config = load_saved_config(arguments.target)
    source = open_source(arguments, config, workers)
    model = DemoModel(config, source.token_map)
    load_masters(arguments.target, "target", model)
    drafter = Drafter(config)
    if arguments.resume:
        load_masters(arguments.resume, "drafter", drafter)
    else:
        initialise(drafter, config, arguments.seed)
    save_config(arguments.output, config)
    say(begin, f"Sinkhorn: {check_kernel(device)}")
    try:
        DraftStage(model.to(device), drafter.to(device), arguments, source, begin).run(
            arguments.output
        )
    finally:
        if workers is not None:
            workers.stop()
