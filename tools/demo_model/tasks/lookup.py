"""Finding the line of a key in a table.

Keys are one of three styles: two words written as one (AmberFalcon), a person, or two letters with
two digits (QX47). Values are numbers, cities, nouns or codes. Conversations for training ask for
several keys, which costs little beside the table; tasks of the evaluation ask for one.
"""

from __future__ import annotations

import string
from random import Random
from typing import NamedTuple

from ..example import Example, answer, user
from ..split import Split
from ..words import CITIES, FIRST_NAMES, ITEMS, KEY_HEADS, KEY_TAILS, LAST_NAMES

SKILL = "lookup"

_NOUNS = tuple(one for one, _ in ITEMS)

# (template of a line, tokens that it has beside key and value, text between key and value in the
# answer)
_FORMS = (
    ("{}: {}", 3, ": "),
    ("{} = {}", 3, " = "),
    ("{},{}", 2, ","),
    ("| {} | {} |", 5, ": "),
    ("- {}: {}", 5, ": "),
)
_FORM_WEIGHTS = (5, 2, 1, 1, 1)

_INTRODUCTIONS = (
    "Here is a table.", "Look at this list.", "This is the register.", "Read the table.",
    "Use this table to answer.", "The following lines hold a key and a value each.", "Table:",
)
_FULL = (
    "What is the value of {}?", "Look up {}.", "Find {} in the table.", "What belongs to {}?",
    "Which value does {} have?", "{}?", "Give me the line of {}.", "What does the table say about {}?",
)
_ONLY = (
    "Give only the value of {}.", "What is the value of {}? Answer with the value only.",
    "Only the value: {}",
)
_AGAIN = ("And {}?", "{}?", "What about {}?", "And what is the value of {}?", "Now {}.", "Look up {}.")


def _pair_key(rng: Random) -> str:
    return rng.choice(KEY_HEADS) + rng.choice(KEY_TAILS)


def _person_key(rng: Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def _code_key(rng: Random) -> str:
    return "".join(rng.choices(string.ascii_uppercase, k=2)) + f"{rng.randrange(100):02d}"


# (maker, tokens)
_KEYS = ((_pair_key, 2), (_person_key, 3), (_code_key, 4))
_KEY_WEIGHTS = (6, 2, 2)

_VALUES = (
    (lambda rng: str(rng.randrange(1000, 10000)), 4),
    (lambda rng: rng.choice(CITIES), 1),
    (lambda rng: rng.choice(_NOUNS), 1),
    (lambda rng: rng.choice(string.ascii_uppercase) + str(rng.randrange(10, 100)), 3),
)
_VALUE_WEIGHTS = (5, 2, 1, 2)

_AROUND = 60  # tokens of the conversation beside the table and further questions


class Table(NamedTuple):
    text: str  # all lines
    values: dict[str, str]  # by key, in the order of the lines
    askable: list[str]  # keys that belong to the split
    between: str  # what stands between key and value in an answer
    key_tokens: int

    def answer(self, key: str, only: bool) -> str:
        return self.values[key] if only else key + self.between + self.values[key]


def draw_table(rng: Random, budget: int, split: Split, questions: int) -> Table:
    """A table for a conversation that takes about `budget` tokens and asks for `questions` keys."""
    make_key, key_tokens = rng.choices(_KEYS, _KEY_WEIGHTS)[0]
    make_value, value_tokens = rng.choices(_VALUES, _VALUE_WEIGHTS)[0]
    form, form_tokens, between = rng.choices(_FORMS, _FORM_WEIGHTS)[0]
    turn_tokens = 14 + 2 * key_tokens + value_tokens
    room = budget - _AROUND - (questions - 1) * turn_tokens
    lines = max(3, room // (key_tokens + value_tokens + form_tokens))

    askable: dict[str, None] = {}
    while len(askable) < min(questions, lines):
        askable[split.draw(lambda: make_key(rng), "lookup {}".format)] = None
    keys = dict.fromkeys(askable)
    while len(keys) < lines:
        keys[make_key(rng)] = None
    order = list(keys)
    rng.shuffle(order)
    values = {key: make_value(rng) for key in order}
    text = "\n".join([form.format(key, value) for key, value in values.items()])
    return Table(text, values, list(askable), between, key_tokens)


def question_about(rng: Random, key: str, only: bool) -> str:
    return rng.choice(_ONLY if only else _FULL).format(key)


def introduction(rng: Random) -> str:
    return rng.choice(_INTRODUCTIONS)


def wants_value_only(rng: Random) -> bool:
    return rng.random() < 0.3


def _build(rng: Random, budget: int, split: Split, questions: int) -> Example:
    table = draw_table(rng, budget, split, questions)
    only = wants_value_only(rng)
    thinking = questions == 1 and rng.random() < 0.2
    messages = []
    said = ""
    for key in table.askable:
        said = table.answer(key, only)
        if not messages:
            text = f"{introduction(rng)}\n\n{table.text}\n\n{question_about(rng, key, only)}"
            messages = [user(text)]
        else:
            messages.append(user(rng.choice(_AGAIN).format(key)))
        messages.append(answer(said, f"I look for {key} in the table." if thinking else ""))
    return Example(SKILL, messages, thinking=thinking, expected=said, scorer="trimmed",
                   difficulty=f"{table.key_tokens}-token key")


def generate(rng: Random, length_budget: int, split: Split) -> Example:
    """A table that takes about `length_budget` tokens with 1 to 16 questions."""
    most = 1 if rng.random() < 0.3 else min(16, 1 + length_budget // 100)
    return _build(rng, length_budget, split, rng.randint(1, most))


def single(rng: Random, length_budget: int, split: Split) -> Example:
    """One question."""
    return _build(rng, length_budget, split, 1)
