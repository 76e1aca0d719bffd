"""Trains the target: `python -m demo_model.train --help`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch

from .checkpoint import load_masters, load_saved_config
from .config import ModelConfig
from .initial import initialise
from .model import DemoModel
from .sources import open_source
from .training import Options, Stage


def add_stage_arguments(parser: argparse.ArgumentParser) -> None:
    for field in dataclasses.fields(Options):
        name = "--" + field.name.replace("_", "-")
        if field.type == "bool":
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            kind = {"int": int, "float": float}.get(field.type, Path)
            parser.add_argument(name, type=kind, default=field.default)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo target.")
    parser.add_argument("--output", type=Path, required=True, help="directory for masters and logs")
    parser.add_argument("--resume", type=Path, help="directory of an earlier stage")
    parser.add_argument("--rows", type=int, default=32, help="rows of a step")
    parser.add_argument("--positions", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--random-tokens", action="store_true", help="measure speed, learn nothing")
    add_stage_arguments(parser)
    arguments = parser.parse_args()
    names = [field.name for field in dataclasses.fields(Options)]
    options = Options(**{name: getattr(arguments, name) for name in names})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)

    config = load_saved_config(arguments.resume) if arguments.resume else ModelConfig()
    source = open_source(arguments, config)
    model = DemoModel(config, source.token_map)
    if arguments.resume:
        load_masters(arguments.resume, "target", model)
    else:
        initialise(model, config, arguments.seed)
    model.to(device)
    stage = Stage(model, options, source.skills, arguments.output, device, source.held_out)
    stage.run(source.batches)


if __name__ == "__main__":
    main()
