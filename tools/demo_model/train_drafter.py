"""Trains the drafter of a trained target: `python -m demo_model.train_drafter --help`."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from .batches import Batch
from .checkpoint import load_masters, load_saved_config, save_masters
from .compiling import compile_layers, compile_model, compile_muon, configure
from .draft_training import expected_length, make_task, slot_losses, slot_weights
from .drafter import Drafter, block_attention
from .initial import initialise
from .model import DemoModel
from .optimizer import make_optimizers
from .sources import open_source


class DraftStage:
    def __init__(self, model: DemoModel, drafter: Drafter, arguments, skills: list[str]):
        self.model, self.drafter, self.arguments, self.skills = model, drafter, arguments, skills
        self.device = next(model.parameters()).device
        model.requires_grad_(False)
        self.slot_losses = slot_losses
        self.optimizers = make_optimizers(
            [drafter], arguments.matrix_lr, arguments.other_lr, 0.0, self.device.type != "cpu"
        )
        self.rates = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        if arguments.compile:
            configure()
            compile_model(model)
            compile_layers(drafter.stages)
            drafter.block_attention = torch.compile(block_attention, dynamic=False)
            compile_muon(self.optimizers[0])
            self.slot_losses = torch.compile(slot_losses, dynamic=False)

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
        loss, accepted, confidence = self.slot_losses(
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

    def run(self, batches, held_out: list[Batch], output: Path) -> None:
        a = self.arguments
        output.mkdir(parents=True, exist_ok=True)
        with open(output / "draft_log.jsonl", "a") as log:

            def write(**record) -> None:
                log.write(json.dumps(record) + "\n")
                log.flush()
                print(json.dumps(record), flush=True)

            start = time.monotonic()
            self.step(next(batches).to(self.device), 0.0)
            write(compiled_seconds=round(time.monotonic() - start, 1))
            start = time.monotonic()
            totals, steps, step = 0, 0, 0
            while True:
                elapsed = (time.monotonic() - start) / 60
                progress = max(
                    step / a.steps if a.steps else 0.0, elapsed / a.minutes if a.minutes else 0.0
                )
                if progress >= 1:
                    break
                factor = min(1.0, (step + 1) / 100, max(0.01, 1.2 * (1 - progress)))
                totals = totals + self.step(next(batches).to(self.device), factor)
                step, steps = step + 1, steps + 1
                if step % a.log_every == 0:
                    write(step=step, progress=round(progress, 4), **self.report(totals, steps))
                    totals, steps = 0, 0
            if held_out:
                totals = sum(self.step(batch.to(self.device), 0.0) for batch in held_out)
                write(step=step, held_out=self.report(totals, len(held_out)))
        save_masters(output, "drafter", self.drafter)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the drafter of a demo target.")
    parser.add_argument("--target", type=Path, required=True, help="directory of a trained target")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="directory of an earlier drafter")
    parser.add_argument("--tokenizer", type=Path, help="directory of tokenizer.json")
    parser.add_argument("--random-tokens", action="store_true", help="measure speed, learn nothing")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--anchors", type=int, default=128, help="blocks per row")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--matrix-lr", type=float, default=2e-3)
    parser.add_argument("--other-lr", type=float, default=1.5e-3)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    config = load_saved_config(arguments.target)
    source = open_source(arguments, config)
    model = DemoModel(config, source.token_map)
    load_masters(arguments.target, "target", model)
    drafter = Drafter(config)
    if arguments.resume:
        load_masters(arguments.resume, "drafter", drafter)
    else:
        initialise(drafter, config, arguments.seed)
    stage = DraftStage(model.to(device), drafter.to(device), arguments, source.skills)
    stage.run(source.batches, source.held_out, arguments.output)


if __name__ == "__main__":
    main()
