"""Trains the drafter of a trained target: `python -m demo_model.train_drafter --help`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from .options import add_source_arguments
from .start import start_workers


def main() -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description="Train the drafter of a demo target.")
    parser.add_argument("--target", type=Path, required=True, help="directory of a trained target")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="directory of an earlier drafter")
    add_source_arguments(parser, rows=16)
    parser.add_argument("--anchors", type=int, default=128, help="blocks per row")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.0, help="of the whole command")
    parser.add_argument("--matrix-lr", type=float, default=2e-3)
    parser.add_argument("--other-lr", type=float, default=1.5e-3)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--save-minutes", type=float, default=2.0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile-seconds", type=float, default=100.0)
    parser.add_argument("--compiled", type=Path, help="compiled.xz of an earlier run")
    arguments = parser.parse_args()
    workers = start_workers(parser, arguments, prompt_weight=0.0)
    # From here on torch is loaded; the workers above must not inherit it.
    from .draft_stage import train_drafter

    train_drafter(arguments, workers, begin)


if __name__ == "__main__":
    main()
