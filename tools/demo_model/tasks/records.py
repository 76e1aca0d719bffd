"""Structured text: CSV, JSON lines and small programs, with values that are partly predictable. Ids
count up, sums add up, names repeat; the rest is drawn."""

from __future__ import annotations

from random import Random

from ..chat_encoding import dump
from ..example import Example, answer, user
from ..split import Split
from ..words import CITIES, COLORS, FIRST_NAMES, ITEMS, LAST_NAMES, MATERIALS, SIZES, WEEKDAYS

SKILL = "records"

_COLUMNS = {
    "name": lambda rng: rng.choice(FIRST_NAMES),
    "surname": lambda rng: rng.choice(LAST_NAMES),
    "city": lambda rng: rng.choice(CITIES),
    "day": lambda rng: rng.choice(WEEKDAYS),
    "color": lambda rng: rng.choice(COLORS),
    "size": lambda rng: rng.choice(SIZES),
    "material": lambda rng: rng.choice(MATERIALS),
    "age": lambda rng: rng.randint(18, 90),
    "quantity": lambda rng: rng.randint(1, 99),
    "item": lambda rng: rng.choice(ITEMS)[0],
    "active": lambda rng: rng.random() < 0.8,
}


def _rows(rng: Random, columns: list[str], count: int) -> list[dict]:
    first = rng.randrange(1, 500)
    rows = []
    for i in range(count):
        row: dict = {"id": first + i}
        for column in columns:
            row[column] = _COLUMNS[column](rng)
        rows.append(row)
    return rows


def _as_csv(rows: list[dict]) -> str:
    lines = [",".join(rows[0])]
    for row in rows:
        lines.append(",".join(str(value).lower() if isinstance(value, bool) else str(value)
                              for value in row.values()))
    return "\n".join(lines)


def _as_json_lines(rows: list[dict]) -> str:
    return "\n".join(map(dump, rows))


def _as_json(rows: list[dict]) -> str:
    return "[\n" + ",\n".join("  " + dump(row) for row in rows) + "\n]"


def _program(rng: Random, count: int) -> str:
    """Functions of one form each, whose bodies follow from their heads."""
    functions = []
    for _ in range(count):
        item = rng.choice(ITEMS)[0]
        other = rng.choice(ITEMS)[0]
        limit = rng.randrange(2, 100)
        kind = rng.randrange(4)
        if kind == 0:
            functions.append(f"def count_{item}s(values):\n    total = 0\n    for value in values:\n"
                             f"        if value == \"{item}\":\n            total += 1\n"
                             f"    return total")
        elif kind == 1:
            functions.append(f"def is_large_{item}({item}):\n    return {item} > {limit}")
        elif kind == 2:
            functions.append(f"def add_{item}({item}, {other}):\n    result = {item} + {other}\n"
                             f"    return result")
        else:
            functions.append(f"def first_{item}(values):\n    for {item} in values[:{limit}]:\n"
                             f"        return {item}\n    return None")
    return "\n\n\n".join(functions)


def _text(rng: Random, length_budget: int) -> tuple[str, str, list[str], int]:
    """The text, its form, the columns and the number of records."""
    form = rng.choice(("csv", "csv", "json lines", "json", "program"))
    if form == "program":
        count = rng.randint(1, max(1, min(6, length_budget // 50)))
        return _program(rng, count), form, [], count
    columns = rng.sample(list(_COLUMNS), rng.randint(2, 5))
    per_row = (4 if form == "csv" else 12) * len(columns)
    count = rng.randint(2, max(3, min(20, length_budget // (2 * per_row))))
    rows = _rows(rng, columns, count)
    made = {"csv": _as_csv, "json lines": _as_json_lines, "json": _as_json}[form](rows)
    return made, form, columns, count


def generate(rng: Random, length_budget: int, split: Split) -> Example:
    text, form, columns, count = split.draw(lambda: _text(rng, length_budget),
                                            "records {0[0]}".format)
    if rng.random() < 0.5:
        return Example(SKILL, text=text, difficulty=form)
    if form == "program":
        question = rng.choice(("Write {} functions.", "Write a program with {} functions.")).format(
            count)
    else:
        question = rng.choice((
            "Write {} records as {} with id, {}.", "Give me {} rows of {} with the columns id, {}.",
        )).format(count, form.upper(), ", ".join(columns))
    return Example(SKILL, [user(question), answer(text)], difficulty=form)
