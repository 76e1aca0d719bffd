"""What a task makes: a conversation with its last answer, or a plain text."""

from __future__ import annotations

import dataclasses
from typing import Any

SCORERS = ("exact", "trimmed", "number", "json", "tool_calls", "prefix", "contains", "regex", "none")


@dataclasses.dataclass(slots=True)
class Example:
    skill: str
    # Chat Completions messages, the answers included; the last one is an answer. Empty: `text`.
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    text: str = ""  # of an example without messages: a document without a conversation
    tools: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    response_format: dict[str, Any] | None = None
    thinking: bool = False
    effort: int = 75
    expected: Any = None  # what the scorer compares the last answer with
    scorer: str = "none"  # one of SCORERS; "none": there is no right answer
    difficulty: str = ""

    @property
    def prompt(self) -> list[dict[str, Any]]:
        """The messages before the last answer."""
        return self.messages[:-1]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, reasoning: str = "", calls: list[tuple[str, dict[str, Any]]] | None = None
           ) -> dict[str, Any]:
    """`calls`: names and arguments."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return message
