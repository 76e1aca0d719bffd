"""Writes a checkpoint directory in the published format: one shard, its index, configuration,
generation configuration and tokenizer.

    python -m demo_model.export --target DIR [--drafter DIR] --tokenizer DIR --output DIR

Without a drafter the checkpoint has no draft layers: untrained ones would only slow it down.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from pathlib import Path

import torch

from .checkpoint import load_masters, load_saved_config
from .config import VISION, ModelConfig, load_config, published_config
from .drafter import Drafter
from .model import DemoModel
from .published import load_tensors, store_bf16, tensors_of
from .tensor_file import StoredTensor, read_tensors, write_tensors
from .token_map import token_map

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


def without_drafter(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(
        config,
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        compress_ratios=config.compress_ratios[: config.num_hidden_layers],
    )


def write_checkpoint(
    directory: Path, model: DemoModel, drafter: Drafter | None, tokenizer_directory: Path
) -> int:
    """Returns the number of bytes of the files it wrote."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(model)
    if drafter is not None:
        tensors |= tensors_of(drafter)
    tensors |= _vision_tensors(model.config.hidden_size)
    # fp32 first, bytes last: every element then lies at a multiple of its size.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].data.itemsize))
    write_tensors(directory / SHARD, tensors)
    index = {
        "metadata": {"total_size": sum(tensor.data.nbytes for tensor in tensors.values())},
        "weight_map": {name: SHARD for name in sorted(tensors)},
    }
    config = model.config if drafter is not None else without_drafter(model.config)
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
        if tokenizer_directory.resolve() != directory.resolve():
            shutil.copyfile(tokenizer_directory / name, directory / name)
    written = (SHARD, *documents, *TOKENIZER_FILES)
    return sum((directory / name).stat().st_size for name in written)


def load_checkpoint(directory: Path, token_map: torch.Tensor) -> tuple[DemoModel, Drafter | None]:
    config = load_config(directory)
    stored: dict[str, StoredTensor] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        stored |= read_tensors(path)
    model = DemoModel(config, token_map)
    load_tensors(model, stored)
    if config.num_nextn_predict_layers == 0:
        return model, None
    drafter = Drafter(config)
    load_tensors(drafter, stored)
    return model, drafter


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a trained model in the published format.")
    parser.add_argument("--target", type=Path, required=True, help="directory of a trained target")
    parser.add_argument("--drafter", type=Path, help="directory of a trained drafter")
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory of the tokenizer")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    config = load_saved_config(arguments.target)
    model = DemoModel(config, token_map(arguments.tokenizer / "tokenizer.json"))
    load_masters(arguments.target, "target", model)
    drafter = None
    if arguments.drafter:
        drafter = Drafter(config)
        load_masters(arguments.drafter, "drafter", drafter)
    written = write_checkpoint(arguments.output, model, drafter, arguments.tokenizer)
    print(f"{written} bytes in {arguments.output}")


if __name__ == "__main__":
    main()
