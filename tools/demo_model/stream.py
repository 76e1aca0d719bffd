"""Endless encoded examples for training, and rows of whole examples.

    stream = ExampleStream(seed=1, split="train", mixture="short", tokenizer_path=".../tokenizer.json")
    for example in stream: ...        # Encoded
    for rows in pack(stream, length=1024, rows=32): ...   # Rows

A stream is a function of its arguments; workers get different seeds. An example is a conversation
of its own: its positions begin at 0 and attention must not reach from one example of a row into
another, as the engine runs every conversation from position 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from random import Random
from typing import Iterator

import numpy as np
from tokenizers import Tokenizer

from .chat_encoding import Segment, segments
from .example import Example
from .special_tokens import PAD
from .split import Split
from .tasks import SKILLS, draw

_BATCH = 32  # examples that are tokenized together


@dataclasses.dataclass(frozen=True)
class Part:
    """One kind of example within a mixture."""

    task: str
    weight: float  # of the number of examples
    shortest: int  # the budget of an example is drawn between these, in tokens; evenly in its
    longest: int  # logarithm


# Weights are numbers of examples. An example of "long" has as many tokens as many short ones.
MIXTURES: dict[str, tuple[Part, ...]] = {
    "short": (
        Part("arithmetic", 5.0, 200, 200),
        Part("copy", 3.0, 200, 200),
        Part("reverse", 3.0, 200, 200),
        Part("lookup", 3.0, 120, 960),
        Part("json", 4.0, 300, 300),
        Part("tool_call", 3.0, 900, 900),
        Part("small_talk", 1.5, 200, 200),
        Part("free_text", 0.7, 64, 400),
        Part("records", 1.0, 100, 400),
        Part("dialogue", 1.5, 300, 900),
    ),
    "long": (
        Part("arithmetic", 5.0, 200, 200),
        Part("copy", 3.0, 200, 200),
        Part("reverse", 3.0, 200, 200),
        Part("lookup", 2.0, 120, 960),
        Part("lookup", 3.0, 1500, 7900),
        Part("json", 4.0, 300, 300),
        Part("tool_call", 3.0, 900, 900),
        Part("small_talk", 1.5, 200, 200),
        Part("free_text", 0.7, 64, 400),
        Part("records", 1.0, 100, 400),
        Part("dialogue", 1.5, 300, 900),
    ),
}


@dataclasses.dataclass(slots=True)
class Encoded:
    ids: np.ndarray  # [tokens] uint16
    trained: np.ndarray  # [tokens] bool: the model learns to predict this token
    answers: np.ndarray  # [tokens] bool: belongs to an answer beside its reasoning
    skill: int  # index into SKILLS


class Encoder:
    """Examples to ids."""

    def __init__(self, tokenizer_path: str | Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer_path))
        # Beginnings of conversations repeat.
        self._known: dict[str, np.ndarray] = {}

    def encode(self, examples: list[Example]) -> list[Encoded]:
        parts: list[list[Segment]] = [segments(example) for example in examples]
        texts = list({segment.text for one in parts for segment in one
                      if segment.text not in self._known})
        found = {text: np.array(encoding.ids, np.uint16)
                 for text, encoding in zip(texts, self.tokenizer.encode_batch_fast(
                     texts, add_special_tokens=False))}
        if len(self._known) < 4096:
            self._known.update((text, ids) for text, ids in found.items() if len(text) < 64)
        result = []
        for example, one in zip(examples, parts):
            pieces = [self._known[s.text] if s.text in self._known else found[s.text] for s in one]
            lengths = [len(piece) for piece in pieces]
            result.append(Encoded(
                np.concatenate(pieces),
                np.repeat([s.reasoning or s.answer for s in one], lengths),
                np.repeat([s.answer for s in one], lengths),
                SKILLS.index(example.skill)))
        return result


class ExampleStream:
    """`mixture`: a name in MIXTURES, or parts."""

    def __init__(self, seed: int, split: str, mixture: str | tuple[Part, ...],
                 tokenizer_path: str | Path) -> None:
        self._rng = Random(f"{split} {seed}")
        self._split = Split(split)
        self._parts = MIXTURES[mixture] if isinstance(mixture, str) else mixture
        self._weights = [part.weight for part in self._parts]
        self._encoder = Encoder(tokenizer_path)
        self.pad = self._encoder.tokenizer.token_to_id(PAD)

    def example(self) -> Example:
        """One that is not encoded."""
        rng = self._rng
        part = rng.choices(self._parts, self._weights)[0]
        budget = part.shortest
        if part.longest > part.shortest:
            budget = int(part.shortest * (part.longest / part.shortest) ** rng.random())
        return draw(part.task, rng, budget, self._split)

    def __iter__(self) -> Iterator[Encoded]:
        while True:
            yield from self._encoder.encode([self.example() for _ in range(_BATCH)])


@dataclasses.dataclass(slots=True)
class Rows:
    """Whole examples side by side, padding behind the last one."""

    ids: np.ndarray  # [rows, length] uint16
    trained: np.ndarray  # [rows, length] bool: this token is to be predicted from those before it
    answers: np.ndarray  # [rows, length] bool
    documents: np.ndarray  # [rows, length] int32: 0, 1, ... within a row; padding: the next number
    positions: np.ndarray  # [rows, length] int32: from 0 within each document, and in the padding
    skills: np.ndarray  # [rows, length] uint8: index into SKILLS; of padding 0


_OPEN = 64  # examples to choose from when a row is filled


def pack(stream: ExampleStream, length: int, rows: int) -> Iterator[Rows]:
    """Fills rows with the longest waiting examples that still fit. Longer examples than `length`
    are dropped. About 1 % of a row is padding when examples are short beside it."""
    source = iter(stream)
    waiting: list[Encoded] = []

    def refill() -> None:
        while len(waiting) < _OPEN:
            encoded = next(source)
            if len(encoded.ids) <= length:
                waiting.append(encoded)

    while True:
        batch = Rows(
            ids=np.full((rows, length), stream.pad, np.uint16),
            trained=np.zeros((rows, length), bool),
            answers=np.zeros((rows, length), bool),
            documents=np.zeros((rows, length), np.int32),
            positions=np.zeros((rows, length), np.int32),
            skills=np.zeros((rows, length), np.uint8))
        for row in range(rows):
            begin = document = 0
            while True:
                refill()
                room = length - begin
                # The first of a row is the one that has waited longest, so that none waits forever.
                best = 0 if document == 0 else max(
                    range(len(waiting)),
                    key=lambda i: len(waiting[i].ids) if len(waiting[i].ids) <= room else 0)
                encoded = waiting[best]
                n = len(encoded.ids)
                if n > room:
                    break
                waiting.pop(best)
                end = begin + n
                batch.ids[row, begin:end] = encoded.ids
                batch.trained[row, begin:end] = encoded.trained
                batch.answers[row, begin:end] = encoded.answers
                batch.documents[row, begin:end] = document
                batch.positions[row, begin:end] = np.arange(n)
                batch.skills[row, begin:end] = encoded.skill
                begin, document = end, document + 1
            batch.documents[row, begin:] = document
            batch.positions[row, begin:] = np.arange(length - begin)
        yield batch


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures how fast one process makes rows.")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json")
    parser.add_argument("--mixture", choices=sorted(MIXTURES), default="short")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=5)
    arguments = parser.parse_args()
    stream = ExampleStream(0, "train", arguments.mixture, arguments.tokenizer)
    batches = pack(stream, arguments.length, 16)
    next(batches)
    begin = time.process_time()
    tokens = used = trained = 0
    skills = np.zeros(len(SKILLS), np.int64)
    while time.process_time() - begin < arguments.seconds:
        rows = next(batches)
        filled = rows.ids != stream.pad
        tokens += rows.ids.size
        used += int(filled.sum())
        trained += int(rows.trained.sum())
        skills += np.bincount(rows.skills[filled], minlength=len(SKILLS))
    seconds = time.process_time() - begin
    print(f"{tokens / seconds:.0f} tokens/s in one process, {used / tokens:.1%} of a row filled, "
          f"{trained / used:.1%} of it trained")
    for name, n in zip(SKILLS, skills):
        print(f"  {name:12} {n / used:6.1%} of the tokens")


if __name__ == "__main__":
    main()
