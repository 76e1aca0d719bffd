"""The Engram's compression of the vocabulary: tokens whose text is the same up to case, accents and
compatibility forms share one id. The engine derives the same map from tokenizer.json."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import torch
from torch import Tensor


def normalised(text: str) -> str:
    stripped = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    stripped = "".join(c for c in stripped if not unicodedata.category(c).startswith("M"))
    stripped = re.sub(r"[ \t\r\n]+", " ", "".join(c.lower() for c in stripped))
    return " " if stripped == " " else stripped.strip()


def token_map(tokenizer_file: Path) -> Tensor:
    """[vocabulary] ids of the compressed vocabulary, consecutive in order of first appearance."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    keys: dict[str, int] = {}
    ids = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" in text:
            key = tokenizer.id_to_token(token)
        else:
            key = normalised(text) or text
        ids.append(keys.setdefault(key, len(keys)))
    return torch.tensor(ids)
