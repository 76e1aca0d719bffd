"""Masters between training commands: safetensors shards small enough to travel.

Matrices are kept in bf16, whose rounding is far below the steps of the grids they are trained for;
small tensors stay in fp32. Optimiser state is not kept: a resumed run warms up again.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from .config import ModelConfig, parse_published, published_config
from .published import store_bf16, store_f32
from .tensor_file import StoredTensor, read_tensors, write_tensors

SHARD_BYTES = 15 << 20
_SMALL = 4096  # elements below which a tensor stays in fp32


def save_masters(directory: Path, prefix: str, module: nn.Module) -> None:
    """Writes beside the files of an earlier call and then replaces them."""
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, StoredTensor]] = [{}]
    size = 0
    for name, tensor in module.state_dict().items():
        tensor = tensor.detach().float().cpu()
        stored = store_f32(tensor) if tensor.numel() < _SMALL else store_bf16(tensor)
        if size + stored.data.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = stored
        size += stored.data.nbytes
    names = [f"{prefix}-{number}.safetensors" for number in range(len(shards))]
    for name, tensors in zip(names, shards):
        write_tensors(directory / (name + ".part"), tensors)
    for name in names:
        (directory / (name + ".part")).replace(directory / name)
    for path in directory.glob(f"{prefix}-*.safetensors"):
        if path.name not in names:
            path.unlink()


def load_masters(directory: Path, prefix: str, module: nn.Module) -> None:
    state = {}
    for path in sorted(directory.glob(f"{prefix}-*.safetensors")):
        for name, stored in read_tensors(path).items():
            raw = torch.from_numpy(stored.data.copy())
            state[name] = raw.view(torch.bfloat16).float() if stored.dtype == "BF16" else raw
    if not state:
        raise FileNotFoundError(f"There are no files {prefix}-*.safetensors in {directory}.")
    module.load_state_dict(state)


def save_config(directory: Path, config: ModelConfig) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(published_config(config), indent=1)
    (directory / "config.json").write_text(text + "\n")


def load_saved_config(directory: Path) -> ModelConfig:
    return parse_published(json.loads((directory / "config.json").read_text()))
