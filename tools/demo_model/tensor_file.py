"""Reading and writing safetensors files, with the element types of the checkpoint that NumPy lacks.

Tensors are NumPy arrays; bf16, FP8 and scale bytes travel as raw integers with a type name.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path

import numpy as np

_RAW = {
    "F64": np.float64,
    "F32": np.float32,
    "I64": np.int64,
    "I32": np.int32,
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.uint8,
}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    dtype: str
    data: np.ndarray  # of the raw type of `dtype`

    def __post_init__(self):
        if self.data.dtype != _RAW[self.dtype]:
            raise TypeError(f"{self.dtype} is stored as {_RAW[self.dtype]}, not {self.data.dtype}.")


def write_tensors(path: Path, tensors: dict[str, StoredTensor]) -> None:
    """In the order given. Wider types come first in a file only if the caller orders them so."""
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.data.nbytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.data.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.data).tobytes())


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    content = Path(path).read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        data = np.frombuffer(content[begin:end], _RAW[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = StoredTensor(entry["dtype"], data)
    return tensors
