"""Compares the engine with the reference model of this package on one checkpoint, and records what
the reference computes as answers for the engine's own test.

    python -m demo_model.parity compare --model DIR --tokens FILE --engine build/.../deepinfer
    python -m demo_model.parity record --model DIR --tokens FILE --output FILE
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import reference
from .export import load_checkpoint
from .tensor_file import StoredTensor, read_tensors, write_tensors
from .token_map import token_map

BEST = 20  # logits that a recording keeps of every row


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def divergence(expected: Tensor, actual: Tensor) -> Tensor:
    """KL of every row, in double."""
    p = torch.log_softmax(expected.double(), -1)
    q = torch.log_softmax(actual.double(), -1)
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)


def run_engine(engine: Path, model: Path, tokens: Path, output: Path) -> dict[str, StoredTensor]:
    command = [engine, "logits", "--model", model, "--input", tokens, "--output", output]
    subprocess.run([*map(str, command), "--device", "cpu", "--dump-layers"], check=True)
    return read_tensors(output)


def compare(arguments: argparse.Namespace) -> None:
    model, _ = load_checkpoint(arguments.model, token_map(arguments.model / "tokenizer.json"))
    layers = model.config.num_hidden_layers
    kls, agreements = [], []
    stream_errors = [[] for _ in range(layers)]
    same_experts = [[] for _ in range(layers)]
    overlaps: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "logits.safetensors"
        engine = run_engine(arguments.engine, arguments.model, arguments.tokens, output)
    for line in read_lines(arguments.tokens):
        trace = reference.Trace()
        logits = reference.logits(model, torch.tensor(line["token_ids"]), trace)
        theirs = torch.from_numpy(engine[line["id"]].data.copy())
        kls.append(divergence(logits, theirs))
        agreements.append((logits.argmax(-1) == theirs.argmax(-1)).float())
        for layer in range(layers):
            streams = torch.from_numpy(engine[f"{line['id']}/streams.{layer}"].data.copy())
            error = (trace.streams[layer] - streams).norm(dim=(-1, -2))
            stream_errors[layer].append(error / streams.norm(dim=(-1, -2)))
            experts = torch.from_numpy(engine[f"{line['id']}/experts.{layer}"].data.copy())
            same = trace.experts[layer].sort(-1).values == experts.sort(-1).values
            same_experts[layer].append(same.all(-1).float())
        for layer, selected in trace.selected.items():
            chosen = engine[f"{line['id']}/selected.{layer}"].data
            for ours, row in zip(selected.tolist(), chosen.tolist()):
                a, b = set(ours) - {-1}, set(row) - {-1}
                overlaps.setdefault(layer, []).append(len(a & b) / max(len(a | b), 1) if a | b else 1)
    kl = torch.cat(kls)
    print(f"{len(kl)} rows: KL median {kl.median():.2e}, mean {kl.mean():.2e}, max {kl.max():.2e}; ", end="")
    print(f"arg-max agrees on {100 * torch.cat(agreements).mean():.2f} %")
    for layer in range(layers):
        error = torch.cat(stream_errors[layer])
        text = f"layer {layer}: streams differ by {error.median():.1e} median, {error.mean():.1e} mean"
        text += f"; experts agree on {100 * torch.cat(same_experts[layer]).mean():.2f} %"
        if layer in overlaps:
            text += f"; selections overlap by {100 * np.mean(overlaps[layer]):.2f} %"
        print(text)


def record(arguments: argparse.Namespace) -> None:
    """Per line the best logits of every row, their ids, and the log-sum-exp of all."""
    model, _ = load_checkpoint(arguments.model, token_map(arguments.model / "tokenizer.json"))
    tensors: dict[str, StoredTensor] = {}
    for line in read_lines(arguments.tokens):
        logits = reference.logits(model, torch.tensor(line["token_ids"]))
        best = logits.topk(BEST, -1)
        name = line["id"]
        tensors[f"{name}/logits"] = StoredTensor("F32", best.values.numpy())
        tensors[f"{name}/ids"] = StoredTensor("I32", best.indices.int().numpy())
        tensors[f"{name}/log_sum_exp"] = StoredTensor("F32", logits.logsumexp(-1).numpy())
    write_tensors(arguments.output, tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    for name, run in (("compare", compare), ("record", record)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("--model", type=Path, required=True, help="checkpoint directory")
        command.add_argument("--tokens", type=Path, required=True, help='lines {"id", "token_ids"}')
        if name == "compare":
            command.add_argument("--engine", type=Path, required=True, help="the deepinfer program")
        else:
            command.add_argument("--output", type=Path, required=True, help="a safetensors file")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
