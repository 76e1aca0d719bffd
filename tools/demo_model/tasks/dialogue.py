"""Conversations in which one question of any kind follows another, so that a skill does not depend
on being asked first."""

from __future__ import annotations

from random import Random
from typing import Callable

from ..example import Example
from ..split import Split
from . import arithmetic, identifiers, json_fields, lookup, small_talk

SKILL = "dialogue"

_PARTS: tuple[Callable[[Random, int, Split], Example], ...] = (
    arithmetic.generate, identifiers.generate_copy, identifiers.generate_reverse, lookup.single,
    json_fields.generate, small_talk.generate)


def _part(rng: Random, budget: int, split: Split, thinking: bool) -> Example:
    task = rng.choice(_PARTS)
    while True:
        example = task(rng, budget, split)
        plain = example.messages[0]["role"] == "user" and example.response_format is None
        if plain and example.thinking == thinking:
            return example


def generate(rng: Random, length_budget: int, split: Split) -> Example:
    turns = rng.choice((2, 2, 3, 4))
    budget = max(100, length_budget // turns)
    parts = [_part(rng, budget, split, thinking=False) for _ in range(turns - 1)]
    last = _part(rng, budget, split, thinking=rng.random() < 0.3)
    messages = [message for part in parts for message in part.messages] + last.messages
    return Example(SKILL, messages, thinking=last.thinking, expected=last.expected,
                   scorer=last.scorer, difficulty=f"{turns} questions")
