"""One module for each skill. A task is a function of a random generator, the tokens that an example
may take, and the split that decides which contents it may use."""

from __future__ import annotations

from random import Random
from typing import Callable

from ..example import Example
from ..split import Split
from . import (arithmetic, free_text, identifiers, json_fields, lookup, records, small_talk,
               tool_call)

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
}

# Numbers of Example.skill; "tool_result" are the answers of the task "tool_call" that are no call.
SKILLS: tuple[str, ...] = (*TASKS, "tool_result")
