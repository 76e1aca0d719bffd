"""Trains the target: `python -m demo_model.train --help`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from .options import add_source_arguments, add_stage_arguments, stage_options
from .precompile import Precompilation
from .start import start_workers


def main() -> None:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description="Train the demo target.")
    parser.add_argument("--output", type=Path, required=True, help="directory for masters and logs")
    parser.add_argument("--resume", type=Path, help="directory of an earlier stage")
    add_source_arguments(parser, rows=32)
    add_stage_arguments(parser)
    arguments = parser.parse_args()
    workers = start_workers(parser, arguments, arguments.prompt_weight)
    precompilation = None
    if arguments.compile and arguments.compiled is None and workers is not None:
        precompilation = Precompilation(
            arguments.tokenizer, arguments.rows, arguments.positions
        )
    # From here on torch is loaded; the workers above must not inherit it.
    from .training import train_target

    train_target(arguments, stage_options(arguments), workers, precompilation, start)


if __name__ == "__main__":
    main()
