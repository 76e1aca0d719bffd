"""What a stage of training can be told. Free of torch: processes that make rows start before it."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path


@dataclasses.dataclass
class Options:
    """steps and minutes: whichever is reached first ends the stage; 0 is no limit."""

    steps: int = 0
    minutes: float = 0.0  # of the whole command, from its start to the last file
    matrix_lr: float = 5e-3
    other_lr: float = 3e-3
    weight_decay: float = 0.02
    warmup_steps: int = 100
    decay: float = 0.45  # last share of the stage in which rates fall to a hundredth
    select_after: float = 0.6  # share of the stage without selection; the indexers learn all along
    easy_share: float = 0.15  # first share of the stage, on short rows of the plainest tasks
    prompt_weight: float = 0.05  # of the loss of tokens that are not an answer's
    index_weight: float = 0.3
    balance_rate: float = 1e-3
    log_every: int = 10
    evaluate_every: int = 400
    save_minutes: float = 2.0
    compile: bool = True
    compile_seconds: float = 100.0  # from the start of the command; then the rest runs as written
    precompile_seconds: float = 55.0  # likewise, for the processes that fill the compiler's cache
    compiled: Path | None = None  # compiled.xz of an earlier run of the same code and shapes
    profile: bool = False


def add_stage_arguments(parser: argparse.ArgumentParser) -> None:
    for field in dataclasses.fields(Options):
        name = "--" + field.name.replace("_", "-")
        if field.type == "bool":
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            kind = {"int": int, "float": float}.get(field.type, Path)
            parser.add_argument(name, type=kind, default=field.default)


def stage_options(arguments: argparse.Namespace) -> Options:
    names = [field.name for field in dataclasses.fields(Options)]
    return Options(**{name: getattr(arguments, name) for name in names})


def add_source_arguments(parser: argparse.ArgumentParser, rows: int) -> None:
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json")
    parser.add_argument("--mixture", default="short", help="of demo_model.stream")
    parser.add_argument("--workers", type=int, default=14, help="processes that make rows")
    parser.add_argument("--rows", type=int, default=rows, help="rows of a step")
    parser.add_argument("--positions", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--held-out-batches", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--random-tokens", action="store_true", help="measure speed, learn nothing")
