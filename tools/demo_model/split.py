"""Which contents are for training and which are held out.

Every task draws the content that decides the answer (the operands, the identifier, the key that is
looked up, the values of the fields) until the split it works for holds it. The decision is a keyed
hash of the content alone, so no content can be in both splits, whatever the seed.
"""

from __future__ import annotations

import hashlib
from typing import Callable, TypeVar

Content = TypeVar("Content")

SPLITS = ("train", "held_out")
_HELD_OUT_OF_256 = 13  # about 5 %
_KEY = b"deepinfer demo model"


class Split:
    """One of SPLITS."""

    def __init__(self, name: str) -> None:
        if name not in SPLITS:
            raise ValueError(f"split is {name!r}; it must be one of {', '.join(SPLITS)}")
        self.name = name
        self._held_out = name == "held_out"

    def holds(self, content: str) -> bool:
        """`content` begins with the name of its task, so that tasks do not share decisions."""
        digest = hashlib.blake2b(content.encode(), digest_size=1, key=_KEY).digest()
        return (digest[0] < _HELD_OUT_OF_256) == self._held_out

    def draw(self, make: Callable[[], Content], content_of: Callable[[Content], str]) -> Content:
        """The first result of `make` whose content this split holds."""
        for _ in range(10000):
            made = make()
            if self.holds(content_of(made)):
                return made
        raise RuntimeError(f"no content of the split {self.name} in 10000 draws")
