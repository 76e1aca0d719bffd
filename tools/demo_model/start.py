"""The first second of a training command. Free of torch."""

from __future__ import annotations

import argparse

from .workers import Shape, Workers


def start_workers(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, prompt_weight: float
) -> Workers | None:
    """None with --random-tokens. Without a tokenizer there is nothing to learn: refused."""
    if arguments.random_tokens:
        print("random tokens: this measures speed and learns nothing", flush=True)
        return None
    if arguments.tokenizer is None or not arguments.tokenizer.is_file():
        parser.error(
            f"--tokenizer is {arguments.tokenizer}: training needs the tokenizer.json of the demo "
            "model (or --random-tokens, to measure speed)"
        )
    shape = Shape(
        arguments.tokenizer,
        arguments.mixture,
        arguments.rows,
        arguments.positions,
        arguments.seed,
        prompt_weight,
    )
    workers = Workers(shape, arguments.workers, arguments.held_out_batches)
    print(f"{arguments.workers} workers started", flush=True)
    return workers
