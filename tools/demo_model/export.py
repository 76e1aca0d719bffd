"""Writes a checkpoint directory in the published format: one shard, its index, configuration,
generation configuration and tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from .config import VISION, load_config, published_config
from .drafter import Drafter
from .model import DemoModel
from .published import load_tensors, store_bf16, tensors_of
from .tensor_file import StoredTensor, read_tensors, write_tensors

SHARD = "model-00001-of-00001.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def _vision_tensors(hidden_size: int) -> dict[str, StoredTensor]:
    """An untrained tower of the smallest size: the format demands one."""
    v = VISION
    hidden, inner = v["hidden_size"], v["intermediate_size"]
    shapes = {
        "vision.patch_embed.proj.weight": (hidden, 3 * v["patch_size"] ** 2),
        "vision.patch_embed.proj.bias": (hidden,),
    }
    for block in range(v["num_hidden_layers"]):
        prefix = f"vision.blocks.{block}."
        shapes |= {
            prefix + "norm1.weight": (hidden,),
            prefix + "attn.wqkv.weight": (3 * hidden, hidden),
            prefix + "attn.wqkv.bias": (3 * hidden,),
            prefix + "attn.wo.weight": (hidden, hidden),
            prefix + "attn.wo.bias": (hidden,),
            prefix + "norm2.weight": (hidden,),
            prefix + "mlp.w1.weight": (2 * inner, hidden),
            prefix + "mlp.w2.weight": (hidden, inner),
        }
    shapes |= {
        "vision.norm.weight": (hidden,),
        "aligner.w1.weight": (hidden_size, hidden * v["downsample_ratio"] ** 2),
        "aligner.w1.bias": (hidden_size,),
        "aligner.w2.weight": (hidden_size, hidden_size),
        "aligner.w2.bias": (hidden_size,),
        "image_start": (hidden_size,),
        "image_end": (hidden_size,),
        "image_newline": (hidden_size,),
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        if "norm" in name:
            value = torch.ones(shape)
        elif name.endswith(".bias"):
            value = torch.zeros(shape)
        tensors[name] = store_bf16(value)
    return tensors


def write_checkpoint(
    directory: Path, model: DemoModel, drafter: Drafter, tokenizer_directory: Path
) -> int:
    """Returns the number of bytes of all files."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(model) | tensors_of(drafter)
    tensors |= _vision_tensors(model.config.hidden_size)
    # fp32 first, bytes last: every element then lies at a multiple of its size.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].data.itemsize))
    write_tensors(directory / SHARD, tensors)
    index = {
        "metadata": {"total_size": sum(tensor.data.nbytes for tensor in tensors.values())},
        "weight_map": {name: SHARD for name in sorted(tensors)},
    }
    config = model.config
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    documents = {
        "model.safetensors.index.json": index,
        "config.json": published_config(config),
        "generation_config.json": generation,
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, indent=1) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_directory / name, directory / name)
    return sum(path.stat().st_size for path in directory.iterdir())


def load_checkpoint(directory: Path, token_map: torch.Tensor) -> tuple[DemoModel, Drafter]:
    config = load_config(directory)
    stored: dict[str, StoredTensor] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        stored |= read_tensors(path)
    model, drafter = DemoModel(config, token_map), Drafter(config)
    load_tensors(model, stored)
    load_tensors(drafter, stored)
    return model, drafter
