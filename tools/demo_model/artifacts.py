"""What the compiler produced, kept between commands that run the same code on the same device."""

from __future__ import annotations

import lzma
import threading
from pathlib import Path

import torch

_MOST_BYTES = 12 << 20


def load_artifacts(path: Path) -> None:
    torch.compiler.load_cache_artifacts(lzma.decompress(path.read_bytes()))


def save_artifacts(path: Path) -> None:
    """Returns at once: a thread compresses and writes."""
    artifacts = torch.compiler.save_cache_artifacts()
    if artifacts is not None:
        threading.Thread(target=_write, args=(path, artifacts[0]), daemon=True).start()


def _write(path: Path, data: bytes) -> None:
    packed = lzma.compress(data, preset=1)
    if len(packed) <= _MOST_BYTES:
        path.write_bytes(packed)
    print(f"compiled code: {len(data)} bytes, {len(packed)} packed", flush=True)
