"""Copying and reversing identifiers. The tokenizer merges neither digits nor two capital letters, so
an identifier of those is one token a character; others are for variety and only copied."""

from __future__ import annotations

import string
from random import Random

from ..example import Example, answer, user
from ..split import Split

_CAPITALS = string.ascii_uppercase + string.digits
_HEX = "0123456789abcdef"
_SMALL = string.ascii_lowercase + string.digits

_COPY = (
    "Copy this identifier:\n{}", "Repeat this exactly:\n{}", "Copy:\n{}", "Copy: {}",
    "Repeat: {}", "Write this string again:\n{}", "Repeat the following identifier exactly: {}",
    "Say it again, character by character:\n{}", "Echo {}", 'Copy the text "{}"',
)
_REVERSE = (
    "Reverse this identifier:\n{}", "Reverse:\n{}", "Reverse: {}",
    "Write this string backwards:\n{}", "Write it backwards: {}", 'Reverse the text "{}"',
    "Spell this from the last character to the first:\n{}",
)


def _drawn(rng: Random, alphabet: str, length: int) -> str:
    return "".join(rng.choices(alphabet, k=length))


def _grouped(text: str, group: int, separator: str) -> str:
    return separator.join(text[i:i + group] for i in range(0, len(text), group))


def plain(rng: Random, shortest: int, longest: int) -> str:
    return _drawn(rng, _CAPITALS, rng.randint(shortest, longest))


def varied(rng: Random) -> str:
    kind = rng.randrange(5)
    if kind == 0:
        return _drawn(rng, _HEX, rng.randint(6, 40))
    if kind == 1:
        return _grouped(_drawn(rng, _CAPITALS, rng.randint(6, 32)), rng.randint(3, 5),
                        rng.choice("-_.:"))
    if kind == 2:
        return _grouped(_drawn(rng, _HEX, rng.randint(8, 32)), 4, "-")
    if kind == 3:
        return _drawn(rng, _SMALL, rng.randint(5, 24))
    return _drawn(rng, string.digits, rng.randint(5, 36))


def _length(text: str) -> str:
    return "1-15" if len(text) < 16 else "16-31" if len(text) < 32 else "32+"


def generate_copy(rng: Random, length_budget: int, split: Split) -> Example:
    kind = rng.random()
    if kind < 0.75:
        text = split.draw(lambda: plain(rng, 4, 40), "copy {}".format)
        difficulty = _length(text)
    else:
        text = split.draw(lambda: varied(rng), "copy {}".format)
        difficulty = "mixed"
    return _copy(rng, text, difficulty)


def copy_of_length(rng: Random, length: int, split: Split) -> Example:
    """Of `length` capitals and digits."""
    return _copy(rng, split.draw(lambda: plain(rng, length, length), "copy {}".format),
                 str(length))


def _copy(rng: Random, text: str, difficulty: str) -> Example:
    thinking = rng.random() < 0.2
    return Example(
        "copy", [user(rng.choice(_COPY).format(text)),
                 answer(text, "I write the characters in their order." if thinking else "")],
        thinking=thinking, expected=text, scorer="trimmed", difficulty=difficulty)


def generate_reverse(rng: Random, length_budget: int, split: Split) -> Example:
    # Short ones are where the rule is learnt.
    longest = rng.choice((6, 12, 20, 32, 36))
    return reverse_of_length(rng, rng.randint(3, longest), split)


def reverse_of_length(rng: Random, length: int, split: Split) -> Example:
    text = split.draw(lambda: plain(rng, length, length), "reverse {}".format)
    thinking = rng.random() < 0.2
    return Example(
        "reverse", [user(rng.choice(_REVERSE).format(text)),
                    answer(text[::-1], "I write the characters from the last to the first."
                           if thinking else "")],
        thinking=thinking, expected=text[::-1], scorer="trimmed", difficulty=_length(text))
