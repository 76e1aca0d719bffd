"""The files of the evaluation suite in the repository are what the generator writes."""

from __future__ import annotations

import json
import unittest

from program import SUITE, TOKENIZER
from tokenizers import Tokenizer

from tools.demo_model.chat_encoding import prompt_text
from tools.demo_model.example import Example, answer
from tools.demo_model.held_out import LOOKUPS, suite


class SuiteTest(unittest.TestCase):
    def test_files_are_those_of_the_generator(self) -> None:
        tokenizer = Tokenizer.from_file(str(TOKENIZER))
        files = suite(tokenizer)
        self.assertEqual({path.stem for path in SUITE.glob("*.jsonl")}, set(files))
        for name, lines in files.items():
            text = (SUITE / f"{name}.jsonl").read_text(encoding="utf-8")
            self.assertEqual([json.loads(line) for line in text.splitlines()], lines, name)

    def test_lookups_have_the_length_that_they_name(self) -> None:
        tokenizer = Tokenizer.from_file(str(TOKENIZER))
        documents: dict[str, str] = {}
        counts = dict.fromkeys((context for context, _, _ in LOOKUPS), 0)
        for line in map(json.loads, (SUITE / "lookup.jsonl").read_text().splitlines()):
            if "text" in line:
                documents[line["document"]] = line["text"]
                continue
            (message,) = line["messages"]
            content = message["content"].replace("{document}", documents[line["document"]])
            example = Example("lookup", [{"role": "user", "content": content}, answer("")])
            tokens = len(tokenizer.encode(prompt_text(example), add_special_tokens=False).ids)
            self.assertLessEqual(tokens, 0.99 * line["context"])
            self.assertGreaterEqual(tokens, 0.9 * line["context"])
            counts[line["context"]] += 1
            value = line["expected"].split(": ")[-1].split(" = ")[-1].split(",")[-1]
            self.assertIn(value, documents[line["document"]])
        self.assertEqual(counts, {c: tables * questions for c, tables, questions in LOOKUPS})


if __name__ == "__main__":
    unittest.main()
