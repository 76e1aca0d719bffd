"""Prompts and conversations of the tasks are those of the program, bytes and ids."""

from __future__ import annotations

import unittest
from random import Random

from program import TOKENIZER, run_lines
from tokenizers import Tokenizer

from tools.demo_model.chat_encoding import prompt_text, segments
from tools.demo_model.example import Example, answer, user
from tools.demo_model.held_out import task_line
from tools.demo_model.split import Split
from tools.demo_model.stream import Encoder
from tools.demo_model.tasks import TASKS, draw

EXAMPLES_PER_TASK = 60


def _examples() -> list[Example]:
    split = Split("train")
    return [draw(name, Random(f"{name} {i}"), 700, split)
            for name in TASKS for i in range(EXAMPLES_PER_TASK)]


def _request(id: int, example: Example) -> dict:
    """A line of `generate`, which `render` reads too."""
    line = task_line(str(id), example.skill, example)
    for field in ("skill", "expected", "scorer"):
        del line[field]
    line["thinking"] = {"type": "enabled" if example.thinking else "disabled"}
    return line


class ChatEncodingTest(unittest.TestCase):
    def test_prompts_are_those_of_the_program(self) -> None:
        examples = [example for example in _examples() if example.messages]
        lines = [_request(i, example) for i, example in enumerate(examples)]
        tokenizer = Tokenizer.from_file(str(TOKENIZER))
        for profile in ("recipe", "checkpoint"):
            rendered = run_lines("render", [{**line, "encoding_profile": profile} for line in lines])
            self.assertEqual(len(rendered), len(lines))
            for example, line in zip(examples, rendered):
                if profile == "checkpoint" and example.response_format is not None:
                    continue  # shown in another form there
                prompt = prompt_text(example)
                self.assertEqual(line["prompt"], prompt)
                self.assertEqual(line["ids"],
                                 tokenizer.encode(prompt, add_special_tokens=False).ids)

    def test_whole_conversations_are_those_of_the_program(self) -> None:
        examples = [example for example in _examples()
                    if example.messages and example.response_format is None]
        lines = []
        for i, example in enumerate(examples):
            line = {**_request(i, example), "messages": example.messages,
                    "encoding_profile": "checkpoint"}
            lines.append(line)
        encoder = Encoder(TOKENIZER)
        for example, line in zip(examples, run_lines("render", lines)):
            self.assertEqual(line["prompt"], "".join(s.text for s in segments(example)))
            self.assertEqual(line["ids"], encoder.encode([example])[0].ids.tolist())

    def test_the_published_example_of_a_call(self) -> None:
        function = {"name": "run_sh", "description": "Run a shell command",
                    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}},
                                   "required": ["cmd"]}}
        example = Example(
            "x", [{"role": "system", "content": ""}, user("go"),
                  answer("Running.", calls=[("run_sh", {"cmd": "pwd"})]),
                  {"role": "tool", "tool_call_id": "call_0", "content": "/data"},
                  user("and now?"), answer("", calls=[("f", {"n": -1.5, "l": [True, None]}),
                                                      ("g", {})])],
            tools=[{"type": "function", "function": function}])
        text = "".join(segment.text for segment in segments(example))
        self.assertIn(
            "<｜User｜>go<｜Assistant｜></think>Running.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke "
            "name=\"run_sh\">\n<｜DSML｜ parameter name=\"cmd\" string=\"true\">pwd</｜DSML｜ "
            "parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls><｜end▁of▁sentence｜><｜User｜>"
            "<tool_result>/data</tool_result>\n\nand now?<｜Assistant｜></think>", text)
        self.assertTrue(text.endswith(
            "<｜DSML｜ parameter name=\"n\" string=\"false\">-1.5</｜DSML｜ parameter>\n"
            "<｜DSML｜ parameter name=\"l\" string=\"false\">[true, null]</｜DSML｜ parameter>\n"
            "</｜DSML｜ invoke>\n<｜DSML｜ invoke name=\"g\">\n\n</｜DSML｜ invoke>\n"
            "</｜DSML｜ calls><｜end▁of▁sentence｜>"), text[-500:])

    def test_only_answers_are_learnt(self) -> None:
        example = Example("x", [user("q1"), answer("a1"), user("q2"), answer("a2", "why")],
                          thinking=True)
        shown = [(s.text, s.reasoning, s.answer) for s in segments(example)]
        # The first answer hides its reasoning, so it is no model for an answer without any.
        self.assertEqual(shown[1:], [
            ("a1<｜end▁of▁sentence｜>", False, False),
            ("<｜User｜>q2<｜Assistant｜><think>", False, False),
            ("why</think>", True, False),
            ("a2<｜end▁of▁sentence｜>", False, True)])
        example.thinking = False
        self.assertTrue(segments(example)[1].answer)


if __name__ == "__main__":
    unittest.main()
