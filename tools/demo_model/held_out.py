"""Writes the held-out tasks of the evaluation suite, in the format of `deepinfer eval`.

    python3 -m tools.demo_model.held_out --tokenizer models/demo/tokenizer.json --output models/demo/eval/demo

All contents are of the split "held_out". Tables of look-ups are documents that several questions
share; the longest prompt about a table of context length C has 95 to 99 % of C tokens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any, Callable, Iterator

from tokenizers import Tokenizer

from .chat_encoding import prompt_text
from .example import Example, answer, user
from .split import Split
from .tasks import draw, identifiers, lookup

_SEED = 2026
_SPLIT = Split("held_out")
_PLACEHOLDER = "{document}"

# (context length in tokens, tables, questions about each)
LOOKUPS = ((256, 40, 2), (512, 30, 2), (1024, 20, 4), (2048, 10, 6), (4096, 6, 10), (8192, 5, 12))

Line = dict[str, Any]


def task_line(id: str, skill: str, example: Example, **more: Any) -> Line:
    line: Line = {"id": id, "skill": skill, **more, "messages": example.prompt}
    if example.tools:
        line["tools"] = example.tools
    if example.response_format is not None:
        line["response_format"] = example.response_format
    line["thinking"] = example.thinking
    if example.thinking and example.effort != 75:
        line["reasoning_effort"] = example.effort
    line["expected"] = example.expected
    line["scorer"] = example.scorer
    return line


def _drawn(task: str, rng: Random, fits: Callable[[Example], bool]) -> Example:
    while True:
        example = draw(task, rng, 900, _SPLIT)
        if fits(example):
            return example


def _many(skill: str, count: int, make: Callable[[], Example]) -> list[Line]:
    """Tasks with different prompts."""
    lines: list[Line] = []
    seen: set[str] = set()
    while len(lines) < count:
        example = make()
        prompt = json.dumps([example.prompt, example.thinking])
        if prompt not in seen:
            seen.add(prompt)
            lines.append(task_line(f"{skill}-{len(lines) + 1}", skill, example))
    return lines


def _arithmetic(rng: Random) -> list[Line]:
    return [
        *_many("arithmetic", 120, lambda: _drawn("arithmetic", rng, lambda e: e.thinking)),
        *_many("arithmetic_direct", 60, lambda: _drawn("arithmetic", rng, lambda e: not e.thinking)),
    ]


def _copy(rng: Random) -> list[Line]:
    return [
        *_many("copy", 80, lambda: draw("copy", rng, 200, _SPLIT)),
        *_many("copy_32", 100, lambda: identifiers.copy_of_length(rng, 32, _SPLIT)),
    ]


def _tool_calls(rng: Random) -> list[Line]:
    return [
        *_many("tool_call", 100, lambda: _drawn("tool_call", rng, lambda e: e.skill == "tool_call")),
        *_many("tool_result", 40,
               lambda: _drawn("tool_call", rng, lambda e: e.skill == "tool_result")),
    ]


def _simple(task: str, count: int) -> Callable[[Random], list[Line]]:
    return lambda rng: _many(task, count, lambda: draw(task, rng, 600, _SPLIT))


def _questions(rng: Random, table: lookup.Table) -> list[Example]:
    """One for each key that can be asked for, with a placeholder for the table."""
    introduction = lookup.introduction(rng)
    examples = []
    for key in table.askable:
        only = lookup.wants_value_only(rng)
        content = f"{introduction}\n\n{_PLACEHOLDER}\n\n{lookup.question_about(rng, key, only)}"
        said = table.answer(key, only)
        examples.append(Example(lookup.SKILL, [user(content), answer(said)], expected=said,
                                scorer="trimmed"))
    return examples


def _fitting(rng: Random, context: int, count: int, tokenizer: Tokenizer
             ) -> tuple[lookup.Table, list[Example]]:
    """A table and `count` questions whose prompts nearly fill the context."""
    budget = context
    for _ in range(100):
        table = lookup.draw_table(rng, budget, _SPLIT, count)
        examples = _questions(rng, table)
        longest = max(
            len(tokenizer.encode(prompt_text(example).replace(_PLACEHOLDER, table.text),
                                 add_special_tokens=False).ids)
            for example in examples)
        if len(examples) == count and 0.95 * context <= longest <= 0.99 * context:
            return table, examples
        budget += round(0.97 * context) - longest
    raise RuntimeError(f"no table makes prompts of {context} tokens")


def _lookups(rng: Random, tokenizer: Tokenizer) -> Iterator[Line]:
    for context, tables, questions in LOOKUPS:
        for t in range(tables):
            table, examples = _fitting(rng, context, questions, tokenizer)
            name = f"table-{context}-{t + 1}"
            yield {"document": name, "text": table.text}
            for q, example in enumerate(examples):
                yield task_line(f"lookup-{context}-{t + 1}-{q + 1}", lookup.SKILL, example,
                                context=context, document=name)


_FILES: dict[str, Callable[[Random], list[Line]]] = {
    "arithmetic": _arithmetic,
    "copy": _copy,
    "reverse": _simple("reverse", 100),
    "json": _simple("json", 120),
    "tool_call": _tool_calls,
    "small_talk": _simple("small_talk", 80),
    "dialogue": _simple("dialogue", 60),
}


def suite(tokenizer: Tokenizer) -> dict[str, list[Line]]:
    """Lines by the name of their file."""
    files = {name: make(Random(f"{_SEED} {name}")) for name, make in _FILES.items()}
    files["lookup"] = list(_lookups(Random(f"{_SEED} lookup"), tokenizer))
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="directory of the suite")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    total = 0
    for name, lines in suite(Tokenizer.from_file(str(arguments.tokenizer))).items():
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (arguments.output / f"{name}.jsonl").write_text(text, encoding="utf-8")
        total += len(text.encode())
        print(f"{name}.jsonl: {sum('id' in line for line in lines)} tasks, {len(text.encode())} bytes")
    print(f"{total} bytes")


if __name__ == "__main__":
    main()
