"""The published chat encoding, for what the tasks use: conversations that begin with a system or
user message and end with an answer, tools, a response format, thinking or not.

Text is given in segments that end where a special token begins or ends, so that each can be
tokenized by itself. `deepinfer render` makes the same prompts (chat_encoding_test.py).
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from .example import Example
from .special_tokens import ASSISTANT, BOS, DSML, END_THINK, EOS, SYSTEM, THINK, USER

_EFFORT = ("Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the "
           "reasoning)\n\n")

_TOOLS_BEGIN = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "<{DSML} calls>" block like the following:

<{DSML} calls>
<{DSML} invoke name="$TOOL_NAME">
<{DSML} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML} parameter>
...
</{DSML} invoke>
<{DSML} invoke name="$TOOL_NAME2">
...
</{DSML} invoke>
</{DSML} calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, \
booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside \
{THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_END = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_RESPONSE_FORMAT = """## Response Format:

You MUST strictly adhere to the following schema to reply:
"""


class Segment(NamedTuple):
    text: str
    # Whether the model learns to write it. Reasoning is told apart from the rest of the answer.
    reasoning: bool = False
    answer: bool = False


def dump(value: Any) -> str:
    """JSON as it stands in prompts."""
    return json.dumps(value, ensure_ascii=False)


def call_block(calls: list[dict[str, Any]]) -> str:
    """`arguments` are objects or the text of one."""
    lines = [f"\n\n<{DSML} calls>"]
    for call in calls:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        lines.append(f'<{DSML} invoke name="{function["name"]}">')
        for key, value in arguments.items():
            is_string = isinstance(value, str)
            shown = value if is_string else dump(value)
            flag = "true" if is_string else "false"
            lines.append(f'<{DSML} parameter name="{key}" string="{flag}">{shown}</{DSML} parameter>')
        if not arguments:
            lines.append("")
        lines.append(f"</{DSML} invoke>")
    lines.append(f"</{DSML} calls>")
    return "\n".join(lines)


def _tool_line(tool: dict[str, Any]) -> str:
    function = tool["function"]
    return dump({key: function[key] for key in ("name", "description", "parameters")})


def _system_turn(example: Example, text: str | None) -> str:
    """The first system turn, or "" if there is none. `text`: of the caller's system message."""
    parts = [_EFFORT.format(example.effort)] if example.thinking else []
    if text is not None:
        parts.append(text)
    if example.tools:
        parts += ["\n\n", _TOOLS_BEGIN, "\n".join(map(_tool_line, example.tools)), _TOOLS_END]
    if example.response_format is not None:
        schema = example.response_format
        if schema["type"] == "json_schema":
            schema = schema["json_schema"]["schema"]
        parts += ["\n\n", _RESPONSE_FORMAT, dump(schema)]
    return SYSTEM + "".join(parts) if parts or text is not None else ""


def segments(example: Example) -> list[Segment]:
    """The whole conversation, its last answer included."""
    if not example.messages:
        return [Segment(BOS), Segment(example.text + EOS, answer=True)]
    messages = example.messages
    text = None
    if messages[0]["role"] == "system":
        text = messages[0]["content"]
        messages = messages[1:]
    head = BOS + _system_turn(example, text)
    last = max(i for i, message in enumerate(messages) if message["role"] != "assistant")
    found: list[Segment] = []
    previous = ""
    for i, message in enumerate(messages):
        role = message["role"]
        if role == "assistant":
            # Without tools only the reasoning of the last answer is shown.
            thinks = example.thinking and (bool(example.tools) or i > last)
            found.append(Segment(head + ASSISTANT + (THINK if thinks else END_THINK)))
            if thinks:
                found.append(Segment(message.get("reasoning_content", "") + END_THINK,
                                     reasoning=True))
            calls = message.get("tool_calls")
            content = message["content"] + (call_block(calls) if calls else "")
            # Earlier answers that hide their reasoning are no model for a direct answer.
            found.append(Segment(content + EOS, answer=thinks or not example.thinking))
            head = ""
        else:
            content = message["content"]
            if role == "tool":
                content = f"<tool_result>{content}</tool_result>"
            if previous in ("user", "tool"):
                head += "\n\n" + content
            else:
                head += USER + content
        previous = role
    return found


def prompt_text(example: Example) -> str:
    """What the model is given before its last answer."""
    parts = segments(example)
    count = 2 if example.thinking else 1
    return "".join(segment.text for segment in parts[:-count])
