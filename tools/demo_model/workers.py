"""Processes that make training rows. They are forked before torch is loaded, so that they start at
once and share nothing with the device's driver; nothing here may import torch."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import queue
import signal
from pathlib import Path
from typing import Iterator

import numpy as np

from .stream import Encoded, ExampleStream, Part, Rows, pack
from .tasks import SKILLS

os.environ["TOKENIZERS_PARALLELISM"] = "false"

_HELD_OUT_SEED = 77
_QUEUED = 48  # batches that wait for the trainer

# The first rows of a run: many short conversations, in which an answer is a piece of the prompt.
EASY = (
    Part("copy", 5.0, 200, 200),
    Part("reverse", 3.0, 200, 200),
    Part("arithmetic", 5.0, 200, 200),
    Part("lookup", 6.0, 100, 250),
    Part("json", 3.0, 300, 300),
    Part("small_talk", 1.0, 200, 200),
    Part("dialogue", 0.5, 300, 400),
    Part("tool_call", 0.5, 900, 900),
)


class EvenStream:
    """Examples of even lengths, so that the pairs of a ratio-2 compressor begin where they do when
    a conversation runs alone: at its first token."""

    def __init__(self, stream: ExampleStream):
        self.stream = stream
        self.pad = stream.pad

    def __iter__(self) -> Iterator[Encoded]:
        for e in self.stream:
            if len(e.ids) % 2 == 0:
                yield e
            else:
                yield Encoded(
                    np.append(e.ids, np.uint16(self.pad)),
                    np.append(e.trained, False),
                    np.append(e.answers, False),
                    e.skill,
                )


@dataclasses.dataclass
class Shape:
    tokenizer: Path
    mixture: str
    rows: int
    positions: int
    seed: int
    prompt_weight: float


def _rows(shape: Shape, seed: int, split: str, mixture) -> Iterator[Rows]:
    stream = ExampleStream(seed, split, mixture, shape.tokenizer)
    return pack(EvenStream(stream), shape.positions + 1, shape.rows)


def _arrays(shape: Shape, rows: Rows, pad: int) -> dict[str, np.ndarray]:
    weights = np.where(rows.trained, np.float32(1), np.float32(shape.prompt_weight))
    weights[rows.ids == pad] = 0
    return {
        "tokens": rows.ids.astype(np.int32),
        "documents": rows.documents,
        "weights": weights,
        "skills": rows.skills,
        "answers": rows.answers,
    }


def _quietly(function):
    """The trainer decides when a worker ends, also when both get the same signal."""

    def run(*arguments):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        function(*arguments)

    return run


@_quietly
def _train(shape: Shape, number: int, easy, out) -> None:
    pad = ExampleStream(0, "train", EASY, shape.tokenizer).pad
    easy_rows = _rows(shape, 10_000 + 100 * shape.seed + number, "train", EASY)
    all_rows = _rows(shape, 100 * shape.seed + number, "train", shape.mixture)
    while True:
        out.put(_arrays(shape, next(easy_rows if easy.value else all_rows), pad))


@_quietly
def _held_out(shape: Shape, count: int, out) -> None:
    rows = _rows(shape, _HELD_OUT_SEED, "held_out", shape.mixture)
    pad = ExampleStream(0, "held_out", EASY, shape.tokenizer).pad
    for _ in range(count):
        out.put(_arrays(shape, next(rows), pad))


class Workers:
    skills = list(SKILLS)

    def __init__(self, shape: Shape, workers: int, held_out_batches: int):
        context = multiprocessing.get_context("fork")
        self._queue = context.Queue(_QUEUED)
        self._held_out_queue = context.Queue()
        self._held_out_count = held_out_batches
        self._easy = context.Value("i", 1, lock=False)
        targets = [(_train, (shape, i, self._easy, self._queue)) for i in range(workers)]
        targets.append((_held_out, (shape, held_out_batches, self._held_out_queue)))
        self._processes = [
            context.Process(target=target, args=arguments, daemon=True)
            for target, arguments in targets
        ]
        for process in self._processes:
            process.start()

    def set_easy(self, easy: bool) -> None:
        self._easy.value = int(easy)

    def batches(self) -> Iterator[dict[str, np.ndarray]]:
        while True:
            try:
                yield self._queue.get(timeout=30)
            except queue.Empty:
                alive = sum(process.is_alive() for process in self._processes)
                raise RuntimeError(f"No rows in 30 s; {alive} workers are alive.") from None

    def held_out(self) -> list[dict[str, np.ndarray]]:
        return [self._held_out_queue.get(timeout=60) for _ in range(self._held_out_count)]

    def waiting(self) -> int:
        return self._queue.qsize()

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
