"""Answers of the tasks are right, and what is held out is never trained on."""

from __future__ import annotations

import json
import re
import unittest
from random import Random

from tools.demo_model.example import SCORERS, Example
from tools.demo_model.split import SPLITS, Split
from tools.demo_model.tasks import SKILLS, TASKS, arithmetic, draw

EXAMPLES = 300


def _examples(task: str, split: str, count: int = EXAMPLES) -> list[Example]:
    chosen = Split(split)
    return [draw(task, Random(f"{task} {split} {i}"), 600, chosen) for i in range(count)]


def _question(example: Example) -> str:
    return example.messages[-2]["content"]


class TasksTest(unittest.TestCase):
    def test_a_seed_gives_the_same_examples(self) -> None:
        for task in TASKS:
            self.assertEqual(_examples(task, "train", 20), _examples(task, "train", 20), task)

    def test_every_example_ends_with_the_expected_answer(self) -> None:
        for task in TASKS:
            for split in SPLITS:
                for example in _examples(task, split, 100):
                    self.assertIn(example.skill, SKILLS)
                    self.assertIn(example.scorer, SCORERS)
                    if not example.messages:
                        self.assertTrue(example.text)
                        continue
                    last = example.messages[-1]
                    self.assertEqual(last["role"], "assistant")
                    self.assertEqual(bool(last.get("reasoning_content")), example.thinking)
                    said = last["content"]
                    if example.scorer == "trimmed":
                        self.assertEqual(said, example.expected)
                    elif example.scorer == "number":
                        self.assertEqual(int(re.findall(r"-?\d+", said)[-1]), example.expected, said)
                    elif example.scorer == "json":
                        self.assertEqual(json.loads(said), example.expected)
                    elif example.scorer == "tool_calls":
                        calls = [{"name": call["function"]["name"],
                                  "arguments": json.loads(call["function"]["arguments"])}
                                 for call in last["tool_calls"]]
                        self.assertEqual(calls, example.expected)
                    else:
                        self.assertIsNone(example.expected)

    def test_splits_share_no_content(self) -> None:
        self.assertNotEqual(Split("train").holds("x"), Split("held_out").holds("x"))
        held_out = sum(Split("held_out").holds(str(i)) for i in range(20000)) / 20000
        self.assertAlmostEqual(held_out, 13 / 256, delta=0.01)
        with self.assertRaises(ValueError):
            Split("test")
        for task in ("copy", "reverse"):
            seen = {example.expected for example in _examples(task, "train", 2000)}
            self.assertFalse(seen & {e.expected for e in _examples(task, "held_out", 100)}, task)
        # Three questions about the same operands in another wording are the same content.
        sums = [{tuple(sorted(re.findall(r"\d+", _question(example))))
                 for example in _examples("arithmetic", split, 2000)
                 if re.fullmatch(r"-?\d+ \+ -?\d+ = -?\d+", example.messages[-1]["content"])}
                for split in SPLITS]
        self.assertFalse(sums[0] & sums[1])

    def test_columns_of_arithmetic(self) -> None:
        self.assertEqual(arithmetic.reasoning_for("+", 487, 965),
                         "487+965: 7+5=12, 8+6+1=15, 4+9+1=14. 1452")
        self.assertEqual(arithmetic.reasoning_for("+", 5, 1), "5+1: 5+1=6. 6")
        self.assertEqual(arithmetic.reasoning_for("-", 905, 78),
                         "905-78: 5-8+10=7, 0-1-7+10=2, 9-1-0=8. 827")
        self.assertEqual(arithmetic.reasoning_for("-", 3, 12),
                         "3-12 is negative. 12-3: 2-3+10=9, 1-1-0=0. 9, so -9")
        self.assertEqual(arithmetic.reasoning_for("*", 37, 4), "37*4: 4*7=28, 4*3+2=14. 148")
        self.assertEqual(
            arithmetic.reasoning_for("*", 37, 24),
            "37*4: 4*7=28, 4*3+2=14. 148. 37*2: 2*7=14, 2*3+1=7. 74. "
            "740+148: 0+8=8, 4+4=8, 7+1=8. 888")

    def test_every_step_of_the_reasoning_is_true(self) -> None:
        steps = 0
        for example in _examples("arithmetic", "train", 1000):
            reasoning = example.messages[-1].get("reasoning_content", "")
            for left, right in re.findall(r"([-+*\d]+)=(\d+)", reasoning):
                self.assertEqual(eval(left), int(right), reasoning)
                steps += 1
            if reasoning:
                self.assertTrue(reasoning.endswith(str(example.expected)), reasoning)
        self.assertGreater(steps, 1000)

    def test_the_line_that_a_lookup_asks_for_is_in_the_table(self) -> None:
        for example in _examples("lookup", "held_out", 100):
            (table, *_) = [m["content"] for m in example.messages if m["role"] == "user"]
            for message in example.messages:
                if message["role"] == "assistant":
                    value = re.split(r": | = |,", message["content"])[-1]
                    self.assertRegex(table, rf"[:=,|] ?{re.escape(value)}( \|)?\n")

    def test_arguments_of_calls_are_those_that_the_schema_has(self) -> None:
        for example in _examples("tool_call", "train"):
            for call in example.expected if example.scorer == "tool_calls" else []:
                (tool,) = [tool["function"] for tool in example.tools
                           if tool["function"]["name"] == call["name"]]
                schema = tool["parameters"]
                self.assertLessEqual(set(schema["required"]), set(call["arguments"]))
                for name, value in call["arguments"].items():
                    described = schema["properties"][name]
                    kinds = {"string": str, "integer": int, "number": (int, float)}
                    self.assertIsInstance(value, kinds[described["type"]])
                    self.assertIn(value, described.get("enum", [value]))

    def test_json_answers_hold_what_was_asked_for(self) -> None:
        for example in _examples("json", "train"):
            if example.response_format is not None:
                schema = example.response_format["json_schema"]["schema"]
                self.assertEqual(list(schema["properties"]), list(example.expected))
            for name, value in example.expected.items():
                if isinstance(value, bool):
                    continue
                self.assertIn(str(value), _question(example))
                self.assertTrue(name in _question(example) or example.response_format is not None)


if __name__ == "__main__":
    unittest.main()
