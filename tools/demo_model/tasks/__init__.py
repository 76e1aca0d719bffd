"""One module for each skill. A task is a function of a random generator, the tokens that an example
may take, and the split that decides which contents it may use."""

from __future__ import annotations

from random import Random
from typing import Callable

from ..example import Example
from ..split import Split
from . import (arithmetic, dialogue, free_text, identifiers, json_fields, lookup, records,
               small_talk, tool_call)

Task = Callable[[Random, int, Split], Example]

TASKS: dict[str, Task] = {
    "arithmetic": arithmetic.generate,
    "copy": identifiers.generate_copy,
    "reverse": identifiers.generate_reverse,
    "lookup": lookup.generate,
    "json": json_fields.generate,
    "tool_call": tool_call.generate,
    "small_talk": small_talk.generate,
    "free_text": free_text.generate,
    "records": records.generate,
    "dialogue": dialogue.generate,
}

# Numbers of Example.skill; "tool_result" are the answers of the task "tool_call" that are no call.
SKILLS: tuple[str, ...] = (*TASKS, "tool_result")

_SYSTEM = ("Be brief.", "You are a helpful assistant.", "Answer politely.", "Be friendly.",
           "You are a small model.", "Answer the question.")
_EFFORTS = (75, 75, 75, 50, 100)


def draw(name: str, rng: Random, length_budget: int, split: Split) -> Example:
    """An example of the task, sometimes behind a system message; efforts vary, as none of them
    changes the answer."""
    example = TASKS[name](rng, length_budget, split)
    if example.messages and example.messages[0]["role"] == "user" and rng.random() < 0.1:
        example.messages = [{"role": "system", "content": rng.choice(_SYSTEM)}, *example.messages]
    if example.thinking:
        example.effort = rng.choice(_EFFORTS) if rng.random() < 0.9 else rng.randint(1, 100)
    return example
