"""Sums, differences and products. With thinking they are worked out column by column, units first;
without, only what can be known at a glance is asked.

A column of a sum reads `7+5=12`, with the carry of the column before it `8+6+1=15`; the answer is
the last digits of the columns from right to left behind the tens of the last one.
"""

from __future__ import annotations

from random import Random

from ..example import Example, answer, user
from ..split import Split
from ..words import FIRST_NAMES, ITEMS

SKILL = "arithmetic"


def add_columns(a: int, b: int) -> str:
    parts = []
    carry = 0
    while a or b or not parts:
        x, y = a % 10, b % 10
        total = x + y + carry
        parts.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
        a //= 10
        b //= 10
    return ", ".join(parts)


def subtract_columns(a: int, b: int) -> str:
    """For a >= b. A column that borrows has `+10`, the next one `-1`."""
    parts = []
    borrow = 0
    while a or b or not parts:
        x, y = a % 10, b % 10
        lends = x - borrow < y
        rest = x - borrow - y + (10 if lends else 0)
        parts.append(f"{x}{'-1' if borrow else ''}-{y}{'+10' if lends else ''}={rest}")
        borrow = int(lends)
        a //= 10
        b //= 10
    return ", ".join(parts)


def multiply_columns(a: int, digit: int) -> str:
    parts = []
    carry = 0
    while a or not parts:
        x = a % 10
        total = x * digit + carry
        parts.append(f"{digit}*{x}{f'+{carry}' if carry else ''}={total}")
        carry = total // 10
        a //= 10
    return ", ".join(parts)


def reasoning_for(operator: str, a: int, b: int) -> str:
    """Ends in the result."""
    if operator == "+":
        return f"{a}+{b}: {add_columns(a, b)}. {a + b}"
    if operator == "-":
        if a < b:
            return f"{a}-{b} is negative. {b}-{a}: {subtract_columns(b, a)}. {b - a}, so {a - b}"
        return f"{a}-{b}: {subtract_columns(a, b)}. {a - b}"
    if b < 10:
        return f"{a}*{b}: {multiply_columns(a, b)}. {a * b}"
    tens, units = divmod(b, 10)
    low, high = a * units, a * tens
    return (f"{a}*{units}: {multiply_columns(a, units)}. {low}. "
            f"{a}*{tens}: {multiply_columns(a, tens)}. {high}. "
            f"{high}0+{low}: {add_columns(high * 10, low)}. {a * b}")


def _number(rng: Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10 ** digits)


def _operands(rng: Random, thinking: bool) -> tuple[str, int, int]:
    operator = rng.choice("++--*")
    if operator == "*":
        if not thinking:
            return operator, rng.randrange(13), rng.randrange(10)
        if rng.random() < 0.2:
            return operator, _number(rng, 2), rng.randrange(10, 100)
        return operator, _number(rng, rng.choice((1, 2, 2, 3, 3))), rng.randrange(2, 10)
    longest = rng.choice((1, 2, 3, 3, 4, 4)) if thinking else rng.choice((1, 2, 2))
    a = _number(rng, longest)
    b = _number(rng, rng.randint(max(1, longest - 1), longest))
    if operator == "-":
        # Negative results are rare, and small.
        if a < b and not (longest < 3 and rng.random() < 0.3):
            a, b = b, a
    elif rng.random() < 0.5:
        a, b = b, a
    return operator, a, b


def _content(drawn: tuple[str, int, int]) -> str:
    operator, a, b = drawn
    low, high = (b, a) if operator != "-" and a > b else (a, b)
    return f"arithmetic {low} {operator} {high}"


def _is_fact(drawn: tuple[str, int, int]) -> bool:
    """What has to be learnt by heart: it is always in training and never held out."""
    operator, a, b = drawn
    return (a < 10 and b < 10) or (operator == "*" and b < 10 and a < 13)


def _usable(drawn: tuple[str, int, int], split: Split) -> bool:
    return split.name == "train" if _is_fact(drawn) else split.holds(_content(drawn))


_ASK = {
    "+": ("What is {} + {}?", "{} + {}", "{} + {} =", "Add {} and {}.", "What is {} plus {}?",
          "Calculate {} + {}.", "{}+{}", "How much is {} + {}?"),
    "-": ("What is {} - {}?", "{} - {}", "{} - {} =", "What is {} minus {}?", "Calculate {} - {}.",
          "{}-{}", "How much is {} - {}?"),
    "*": ("What is {} * {}?", "{} * {}", "{} * {} =", "Multiply {} by {}.", "What is {} times {}?",
          "Calculate {} x {}.", "{}*{}", "How much is {} x {}?"),
}
_STORIES = {
    "+": (
        "{name} has {a} {items} and buys {b} more. How many {items} does {name} have now?",
        "There are {a} {items} in one room and {b} {items} in another. How many are there in all?",
        "{name} counts {a} {items} in the morning and {b} in the evening. How many is that together?",
    ),
    "-": (
        "{name} has {a} {items} and gives away {b}. How many {items} are left?",
        "A shop has {a} {items} and sells {b} of them. How many remain?",
        "There were {a} {items}. {name} took {b}. How many are still there?",
    ),
    "*": (
        "{name} buys {b} boxes with {a} {items} each. How many {items} is that?",
        "There are {b} rows of {a} {items}. How many {items} are there?",
    ),
}


def _story(rng: Random, operator: str, a: int, b: int) -> str:
    return rng.choice(_STORIES[operator]).format(
        a=a, b=b, name=rng.choice(FIRST_NAMES), items=rng.choice(ITEMS)[1])


def _three_terms(rng: Random, split: Split, thinking: bool) -> Example:
    limit = 100 if thinking else 10
    a, b, c = split.draw(lambda: tuple(rng.randrange(1, limit) for _ in range(3)),
                         lambda terms: f"arithmetic sum {sorted(terms)}")
    ask = rng.choice(("What is {} + {} + {}?", "{} + {} + {}", "Add {}, {} and {}."))
    reasoning = f"{reasoning_for('+', a, b)}. {reasoning_for('+', a + b, c)}" if thinking else ""
    total = a + b + c
    return Example(
        SKILL, [user(ask.format(a, b, c)), answer(f"{a} + {b} + {c} = {total}", reasoning)],
        thinking=thinking, expected=total, scorer="number", difficulty="three terms")


def generate(rng: Random, length_budget: int, split: Split) -> Example:
    thinking = rng.random() < 0.65
    if rng.random() < 0.08:
        return _three_terms(rng, split, thinking)
    drawn = _operands(rng, thinking)
    while not _usable(drawn, split):
        drawn = _operands(rng, thinking)
    operator, a, b = drawn
    result = a + b if operator == "+" else a - b if operator == "-" else a * b
    reasoning = reasoning_for(operator, a, b) if thinking else ""
    if result >= 0 and rng.random() < 0.25:
        question = _story(rng, operator, a, b)
        said = f"The answer is {result}."
    else:
        question = rng.choice(_ASK[operator]).format(a, b)
        said = f"{a} {operator} {b} = {result}"
    return Example(SKILL, [user(question), answer(said, reasoning)], thinking=thinking,
                   expected=result, scorer="number",
                   difficulty=f"{operator}{max(len(str(a)), len(str(b)))}")
