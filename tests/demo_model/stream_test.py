"""Rows for training hold whole examples, and say of each token where it belongs."""

from __future__ import annotations

import itertools
import unittest

import numpy as np
from program import TOKENIZER

from tools.demo_model.special_tokens import BOS, EOS, PAD
from tools.demo_model.stream import MIXTURES, ExampleStream, Part, pack
from tools.demo_model.tasks import SKILLS


def _stream(mixture: str | tuple[Part, ...] = "short", seed: int = 1) -> ExampleStream:
    return ExampleStream(seed, "train", mixture, TOKENIZER)


class StreamTest(unittest.TestCase):
    def test_a_stream_is_a_function_of_its_seed(self) -> None:
        first, same, other = (list(itertools.islice(_stream(seed=s), 50)) for s in (1, 1, 2))
        for a, b in zip(first, same):
            np.testing.assert_array_equal(a.ids, b.ids)
            np.testing.assert_array_equal(a.trained, b.trained)
        self.assertTrue(any(len(a.ids) != len(b.ids) or (a.ids != b.ids).any()
                            for a, b in zip(first, other)))

    def test_trained_tokens_are_the_answers(self) -> None:
        stream = _stream()
        tokenizer = stream._encoder.tokenizer
        bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
        for encoded in itertools.islice(stream, 300):
            self.assertEqual(encoded.ids[0], bos)
            self.assertEqual(encoded.ids[-1], eos)
            self.assertTrue(encoded.trained[-1] and encoded.answers[-1])
            self.assertFalse(encoded.trained[0])
            self.assertTrue((encoded.trained >= encoded.answers).all())
            text = tokenizer.decode(encoded.ids[encoded.trained], skip_special_tokens=False)
            self.assertNotIn("<｜User｜>", text)
            self.assertNotIn("<｜Assistant｜>", text)

    def test_rows_hold_whole_examples(self) -> None:
        length = 1024
        stream = _stream()
        bos = stream._encoder.tokenizer.token_to_id(BOS)
        eos = stream._encoder.tokenizer.token_to_id(EOS)
        filled = 0
        for batch in itertools.islice(pack(stream, length, 4), 5):
            for row in range(4):
                ids, documents = batch.ids[row], batch.documents[row]
                changes = np.flatnonzero(np.diff(documents)) + 1
                starts = np.concatenate([[0], changes])
                self.assertTrue((np.diff(documents) >= 0).all() and (np.diff(documents) <= 1).all())
                for start, end in zip(starts, [*changes, length]):
                    np.testing.assert_array_equal(batch.positions[row, start:end],
                                                  np.arange(end - start))
                    self.assertEqual(len(set(batch.skills[row, start:end])), 1)
                    if ids[start] == stream.pad:
                        self.assertTrue((ids[start:end] == stream.pad).all())
                        self.assertFalse(batch.trained[row, start:end].any())
                        continue
                    self.assertEqual((ids[start], ids[end - 1]), (bos, eos))
                    filled += end - start
        self.assertGreater(filled / (5 * 4 * length), 0.97)

    def test_long_examples_are_as_long_as_asked_for(self) -> None:
        stream = _stream((Part("lookup", 1, 4000, 4000),))
        for encoded in itertools.islice(stream, 20):
            self.assertGreater(len(encoded.ids), 3500)
            self.assertLess(len(encoded.ids), 4200)

    def test_the_mixtures_have_every_skill(self) -> None:
        for mixture in MIXTURES:
            seen = {SKILLS[encoded.skill]
                    for encoded in itertools.islice(_stream(mixture), 1500)}
            self.assertEqual(seen, set(SKILLS), mixture)
        with self.assertRaises(KeyError):
            _stream("middle")

    def test_padding_is_the_pad_token(self) -> None:
        stream = _stream()
        self.assertEqual(stream.pad, stream._encoder.tokenizer.token_to_id(PAD))


if __name__ == "__main__":
    unittest.main()
