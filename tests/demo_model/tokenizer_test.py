"""The tokenizer file of the demo model."""

from __future__ import annotations

import json
import unittest
from random import Random

from program import TOKENIZER, run_lines
from tokenizers import Tokenizer

from tools.demo_model import words
from tools.demo_model.bpe_training import train_merges
from tools.demo_model.chat_encoding import segments
from tools.demo_model.special_tokens import BOS, EOS, LAST, PAD
from tools.demo_model.split import Split
from tools.demo_model.tasks import TASKS, draw
from tools.demo_model.train_tokenizer import VOCAB_SIZE, mergeable

ALPHABET = " \"'!.,:;{}[]()<>|/\\-_=+*`~@#$%^&?\n\r\tabcABCxyzXYZ0123456789éß中文かアЖ😀\u0301\u00a0½"


class TokenizerTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.tokenizer = Tokenizer.from_file(str(TOKENIZER))

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def tokens(self, text: str) -> list[str]:
        return [self.tokenizer.decode([id], skip_special_tokens=False) for id in self.ids(text)]

    def test_layout_is_the_published_one(self) -> None:
        self.assertEqual(self.tokenizer.get_vocab_size(), VOCAB_SIZE)
        self.assertEqual([self.tokenizer.token_to_id(name) for name in (BOS, EOS, PAD)], [0, 1, 2])
        self.assertEqual(self.ids("!<"), [3, 30])
        self.assertEqual(self.ids("\n") + self.ids(" "), [201, 223])
        first = VOCAB_SIZE - len(LAST)
        self.assertEqual([self.tokenizer.token_to_id(name) for name, _ in LAST],
                         list(range(first, VOCAB_SIZE)))
        model = json.loads(TOKENIZER.read_text(encoding="utf-8"))["model"]
        for rank, merge in enumerate(model["merges"]):
            self.assertEqual(model["vocab"][merge.replace(" ", "")], 259 + rank)

    def test_numbers_and_identifiers_are_their_characters(self) -> None:
        for text in ("4821", "QX7RT2", "MUSTVALUE0123456789", "THEENDISNEAR"):
            self.assertEqual(self.tokens(text), list(text))
            self.assertEqual(self.tokens(" " + text), [" ", *text])
            self.assertEqual(self.tokens(f'"{text}"'), ['"', *text, '"'])

    def test_values_are_the_same_tokens_everywhere(self) -> None:
        for name in ("FIRST_NAMES", "LAST_NAMES", "CITIES", "KEY_HEADS", "KEY_TAILS", "COLORS",
                     "FOODS", "ANIMALS", "WEEKDAYS", "MONTHS", "COUNTRIES", "LANGUAGES"):
            for word in getattr(words, name):
                (id,) = self.ids(word)
                self.assertEqual(self.ids(f" {word}")[-1], id, word)
                self.assertEqual(self.ids(f'"{word}"')[1], id, word)
                self.assertEqual(self.ids(f"\n{word},")[1], id, word)
        self.assertEqual(self.tokens("AmberFalcon: 42"), ["Amber", "Falcon", ":", " ", "4", "2"])

    def test_ids_are_those_of_the_program(self) -> None:
        split = Split("held_out")
        texts = ["".join(segment.text for segment in segments(draw(name, Random(i), 500, split)))
                 for name in TASKS for i in range(30)]
        texts += ["".join(Random(i).choices(ALPHABET, k=80)) for i in range(1000)]
        found = run_lines("tokenize", [{"id": i, "text": text} for i, text in enumerate(texts)])
        for text, line in zip(texts, found, strict=True):
            self.assertEqual(line["ids"], self.ids(text), text)

    def test_text_comes_back(self) -> None:
        for i in range(200):
            text = "".join(Random(i).choices(ALPHABET, k=60))
            self.assertEqual(self.tokenizer.decode(self.ids(text), skip_special_tokens=False), text)

    def test_what_is_learnt_of_a_piece(self) -> None:
        self.assertEqual(mergeable("AmberFalcon"), ["Amber", "Falcon"])
        self.assertEqual(mergeable(" water"), ["water"])
        self.assertEqual(mergeable('"name'), ["name"])
        self.assertEqual(mergeable("_case"), ["case"])
        self.assertEqual(mergeable("123"), [])
        self.assertEqual(mergeable('": {"'), ['": {"'])

    def test_merges_are_the_most_frequent_pairs(self) -> None:
        words_ = {"abab": 3, "abc": 2, "xy": 7}
        # ab: 2 * 3 + 2 = 8, xy: 7; then (ab, ab): 3, (ab, c): 2.
        self.assertEqual(train_merges(words_, 4),
                         [("a", "b"), ("x", "y"), ("ab", "ab"), ("ab", "c")])
        self.assertEqual(train_merges({"aaaa": 1, "b": 9}, 2), [("a", "a"), ("aa", "aa")])
        self.assertEqual(train_merges({"ab": 1, "cd": 1}, 1), [("a", "b")])
        with self.assertRaises(ValueError):
            train_merges({"ab": 1}, 2)


if __name__ == "__main__":
    unittest.main()
