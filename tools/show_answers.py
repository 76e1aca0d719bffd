#!/usr/bin/env python3
"""Prints conversations and their answers for people.

    tools/show_answers.py PROMPTS.jsonl ANSWERS.jsonl

The files are the input and the output of 'deepinfer generate'.
"""

from __future__ import annotations

import json
import sys
from typing import Any

LONGEST = 240  # characters of a message that are shown


def read(path: str) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def shortened(text: str) -> str:
    text = text.replace("\n", "\n" + " " * 13)
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} [...] {text[-half:]}"


def show(who: str, text: str) -> None:
    print(f"{who:>11}: {shortened(text)}")


def show_answer(answer: dict[str, Any]) -> None:
    if "error" in answer:
        show("error", answer["error"]["message"])
        return
    for output in answer["outputs"]:
        message = output.get("message") or {"content": output["text"]}
        if message.get("reasoning_content"):
            show("reasoning", message["reasoning_content"])
        if message.get("content"):
            show("answer", message["content"])
        for call in message.get("tool_calls", []):
            show("tool call", f"{call['function']['name']}({call['function']['arguments']})")


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    answers = {answer.get("id"): answer for answer in read(sys.argv[2])}
    for prompt in read(sys.argv[1]):
        print(f"\n[{prompt['id']}]")
        for message in prompt.get("messages", []):
            show(message["role"], message["content"])
        if "prompt" in prompt:
            show("prompt", prompt["prompt"])
        show_answer(answers[prompt["id"]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
