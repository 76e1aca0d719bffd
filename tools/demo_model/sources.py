"""Where training rows come from, as the trainers see it."""

from __future__ import annotations

import argparse
import dataclasses
import queue
import threading
from pathlib import Path
from typing import Callable, Iterator

import torch
from torch import Tensor

from .batches import Batch, random_batches
from .config import ModelConfig
from .special_tokens import IMAGE, SYSTEM
from .token_map import token_map
from .workers import Workers


@dataclasses.dataclass
class Source:
    token_map: Tensor  # [vocab_size]: the Engram's compression of the vocabulary
    skills: list[str]  # what Batch.skills numbers
    batches: Iterator[Batch]
    held_out: Callable[[], list[Batch]]
    set_easy: Callable[[bool], None] = lambda easy: None
    waiting: Callable[[], int] = lambda: 0  # batches that are ready


def source_config(arguments: argparse.Namespace, config: ModelConfig) -> ModelConfig:
    return config if arguments.random_tokens else tokenizer_config(arguments.tokenizer, config)


def tokenizer_config(tokenizer_file: Path, config: ModelConfig) -> ModelConfig:
    """The configuration with what follows from the tokenizer."""
    from tokenizers import Tokenizer

    compressed = token_map(tokenizer_file)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    return dataclasses.replace(
        config,
        vocab_size=len(compressed),
        engram_compressed_vocab_size=int(compressed.max()) + 1,
        dspark_noise_token_id=tokenizer.token_to_id(SYSTEM),
        image_token_id=tokenizer.token_to_id(IMAGE),
    )


def open_source(
    arguments: argparse.Namespace, config: ModelConfig, workers: Workers | None
) -> Source:
    if workers is None:
        shape = (arguments.rows, arguments.positions)
        batches = random_batches(config.vocab_size, *shape, arguments.seed)
        return Source(torch.arange(config.vocab_size), ["random"], batches, lambda: [])
    return Source(
        token_map(arguments.tokenizer),
        workers.skills,
        _ahead(Batch.from_arrays(arrays) for arrays in workers.batches()),
        lambda: [Batch.from_arrays(arrays) for arrays in workers.held_out()],
        workers.set_easy,
        workers.waiting,
    )


def _ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """A thread unpacks the next batches meanwhile."""
    ready: queue.Queue = queue.Queue(4)

    def fill() -> None:
        try:
            for batch in batches:
                ready.put(batch)
        except Exception as error:  # for the thread that waits
            ready.put(error)

    threading.Thread(target=fill, daemon=True).start()
    while True:
        batch = ready.get()
        if isinstance(batch, Exception):
            raise batch
        yield batch
