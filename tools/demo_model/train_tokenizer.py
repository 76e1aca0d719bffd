"""Trains the tokenizer of the demo model on the tasks' own texts.

    python3 -m tools.demo_model.train_tokenizer --output models/demo

The format is the published one: byte-level BPE behind the published pre-tokenizer, byte symbols at
the ids 3 ... 258 in the order of their spelling, the result of merge r at 259 + r, then the special
tokens. Which merges there are is ours to choose, and a small model profits from tokens that are the
same wherever a word stands:

- no merge has a digit in it, so a number is its digits;
- a capital only begins a token, so an identifier of capitals is its characters, and `Paris` is the
  same token behind a space, a quotation mark or a line's end;
- a letter merges with what precedes it only if that is a letter;
- a space then merges with whole words that never stand without one: these are the words of
  questions and sentences, while a word that is also a value, or a name in JSON, has one token.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from random import Random

from tokenizers import Regex, pre_tokenizers

from .bpe_training import train_merges
from .chat_encoding import segments
from .special_tokens import FIRST, LAST
from .split import Split
from .tasks import TASKS, draw

VOCAB_SIZE = 3072
SPACED_WORDS = 256
EXAMPLES_PER_TASK = 4000
_SEED = 41
# Keys of tables must be few tokens; in prose it does not matter.
_WEIGHTS = {"lookup": 3.0, "free_text": 0.5}

# The published file has the line ends themselves in its patterns, not their escapes.
PRE_TOKENIZER_PATTERNS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^NL\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
     r""" ?[\p{P}\p{S}]+[NL]*|\s*[NL]+|\s+(?!\S)|\s+""").replace("NL", "\r\n"),
)

_LETTERS = re.compile(r"[A-Za-z]")
_WORD = re.compile(r"[a-z]+|[A-Z][a-z]*")
_SPACED_WORD = re.compile(r" [a-z]+")


def byte_alphabet() -> list[str]:
    """The spelling of each byte."""
    spelled: list[str] = []
    others = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            spelled.append(chr(byte))
        else:
            spelled.append(chr(0x100 + others))
            others += 1
    return spelled


def _split_pieces() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated", invert=False)
        for pattern in PRE_TOKENIZER_PATTERNS])


def mergeable(piece: str) -> list[str]:
    """The parts of a pre-tokenizer's piece within which merges are learnt."""
    if _LETTERS.search(piece):
        return _WORD.findall(piece)
    return [] if piece[0].isnumeric() else [piece]


def piece_counts(texts: Counter[str]) -> Counter[str]:
    """Of the pre-tokenizer's pieces."""
    split = _split_pieces()
    pieces: Counter[str] = Counter()
    for text, n in texts.items():
        for piece, _ in split.pre_tokenize_str(text):
            pieces[piece] += n
    return pieces


def corpus(task: str, seed: int, examples: int) -> Counter[str]:
    """Texts between special tokens."""
    special = re.compile("|".join(map(re.escape, (*FIRST, *(name for name, _ in LAST)))))
    texts: Counter[str] = Counter()
    split = Split("train")
    rng = Random(seed)
    for _ in range(examples):
        example = draw(task, rng, 768, split)
        # Random identifiers have no words.
        hidden = example.expected if example.skill in ("copy", "reverse") else None
        for segment in segments(example):
            text = segment.text
            if hidden is not None:
                text = text.replace(hidden, "").replace(hidden[::-1], "")
            texts.update(filter(None, special.split(text)))
    return texts


class Vocabulary:
    """What the merges are learnt from: words, and how often they stand behind a space."""

    def __init__(self) -> None:
        self.words: Counter[str] = Counter()
        self.spaced: Counter[str] = Counter()
        self.unspaced: Counter[str] = Counter()

    def add(self, pieces: Counter[str], weight: float) -> None:
        """Within a task a word counts with the root of its frequency: a list of many rare values
        needs its tokens as much as the words around it."""
        words: Counter[str] = Counter()
        for piece, n in pieces.items():
            spaced = _SPACED_WORD.fullmatch(piece) is not None
            for word in mergeable(piece):
                words[word] += n
                (self.spaced if spaced else self.unspaced)[word] += n
        total = sum(words.values())
        for word, n in words.items():
            self.words[word] += max(1, round(1000000 * weight * (n / total) ** 0.5))

    def spaced_words(self) -> list[str]:
        """Small words that never stand without a space, the most frequent first."""
        alone = [word for word in self.spaced if word not in self.unspaced]
        return sorted(alone, key=lambda word: (-self.spaced[word], word))


def merges_of(vocabulary: Vocabulary, count: int) -> list[tuple[str, str]]:
    alphabet = byte_alphabet()

    def spelled(word: str) -> str:
        return "".join(alphabet[byte] for byte in word.encode())

    words = {spelled(word): n for word, n in vocabulary.words.items()}
    merges = train_merges(words, count - SPACED_WORDS)
    tokens = {left + right for left, right in merges}
    spaced = [word for word in map(spelled, vocabulary.spaced_words())
              if word in tokens or len(word) == 1]
    return merges + [(alphabet[ord(" ")], word) for word in spaced[:SPACED_WORDS]]


def _added_token(id: int, content: str, special: bool) -> dict:
    return {"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": not special, "special": special}


def tokenizer_file(merges: list[tuple[str, str]]) -> dict:
    """The JSON object of tokenizer.json."""
    vocab: dict[str, int] = {name: i for i, name in enumerate(FIRST)}
    for spelled in sorted(byte_alphabet()):
        vocab[spelled] = len(vocab)
    for left, right in merges:
        vocab[left + right] = len(vocab)
    added = [_added_token(i, name, True) for i, name in enumerate(FIRST)]
    added += [_added_token(len(vocab) + i, name, special) for i, (name, special) in enumerate(LAST)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": False}
    splits = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
               "invert": False} for pattern in PRE_TOKENIZER_PATTERNS]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False,
                           "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                    "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "vocab": vocab,
                  "merges": [f"{left} {right}" for left, right in merges]},
    }


def tokenizer_config(context: int) -> dict:
    first = [_added_token(0, name, True) for name in FIRST]
    for token in first:
        del token["id"]
    bos, eos, pad = ({"__type": "AddedToken", **token} for token in first)
    return {"add_bos_token": False, "add_eos_token": False, "bos_token": bos, "eos_token": eos,
            "pad_token": pad, "clean_up_tokenization_spaces": False, "legacy": True,
            "model_max_length": context, "unk_token": None,
            "tokenizer_class": "PreTrainedTokenizerFast"}


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory for the two files")
    parser.add_argument("--seed", type=int, default=_SEED)
    parser.add_argument("--examples-per-task", type=int, default=EXAMPLES_PER_TASK)
    parser.add_argument("--context", type=int, default=16384, help="the model's longest context")
    arguments = parser.parse_args()
    vocabulary = Vocabulary()
    for i, name in enumerate(TASKS):
        texts = corpus(name, arguments.seed * 1000 + i, arguments.examples_per_task)
        vocabulary.add(piece_counts(texts), _WEIGHTS.get(name, 1.0))
    merges = merges_of(vocabulary, VOCAB_SIZE - len(FIRST) - 256 - len(LAST))
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_json(arguments.output / "tokenizer.json", tokenizer_file(merges))
    write_json(arguments.output / "tokenizer_config.json", tokenizer_config(arguments.context))
    print(f"{arguments.output}/tokenizer.json: {VOCAB_SIZE} entries, {len(merges)} merges")


if __name__ == "__main__":
    main()
