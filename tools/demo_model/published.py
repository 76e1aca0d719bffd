"""Between modules and the tensors of the published format: names, packing, and back.

What a module computes with is on the stored grid already, so packing loses nothing.
"""

from __future__ import annotations

from typing import Callable

import numpy as np
import torch
from torch import Tensor, nn

from .attention import Attention
from .drafter import Drafter
from .engram import Engram
from .hyper_connection import HyperConnection
from .layers import Experts, Linear, Norm, QuantizedLinear
from .model import DemoModel
from .moe import Gate
from .quantization import GROUP, q4p_exponent, q8_blocks_exponent, q8_exponent
from .tensor_file import StoredTensor

Get = Callable[[str], Tensor]  # suffix of a stored tensor to its values in fp32

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _two_to(byte: Tensor) -> Tensor:
    return torch.exp2(byte.double() - 127).float()


def _bytes(x: Tensor) -> np.ndarray:
    return x.to(torch.uint8).numpy()


def store_bf16(x: Tensor) -> StoredTensor:
    data = x.detach().to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
    return StoredTensor("BF16", data)


def store_f32(x: Tensor) -> StoredTensor:
    return StoredTensor("F32", x.detach().float().contiguous().numpy())


def _store_e4m3(x: Tensor) -> StoredTensor:
    codes = x.to(torch.float8_e4m3fn).view(torch.uint8)
    return StoredTensor("F8_E4M3", codes.contiguous().numpy())


def store_fp8(weight: Tensor) -> tuple[StoredTensor, StoredTensor]:
    """Scale and codes of a matrix with 32 x 32 blocks."""
    byte = q8_blocks_exponent(weight.detach())
    scale = _two_to(byte).repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return StoredTensor("F8_E8M0", _bytes(byte)), _store_e4m3(weight.detach().float() / scale)


def store_fp8_rows(table: Tensor) -> tuple[StoredTensor, StoredTensor]:
    """Scale and codes of a table with a scale per row and 32 columns."""
    groups = table.detach().float().unflatten(-1, (-1, GROUP))
    byte = q8_exponent(groups.abs().amax(-1))
    codes = _store_e4m3((groups / _two_to(byte)[..., None]).flatten(1))
    return StoredTensor("F8_E8M0", _bytes(byte)), codes


def store_fp4(weight: Tensor, grid: Tensor) -> tuple[StoredTensor, StoredTensor]:
    """Scale and codes of one expert matrix, two codes a byte, the even column in the low half.

    grid: `weight` on the grid.
    """
    groups = weight.detach().float().unflatten(-1, (-1, GROUP))
    byte = q4p_exponent(groups.abs().amax(-1))
    scaled = grid.detach().float() / _two_to(byte).repeat_interleave(GROUP, -1)
    codes = torch.searchsorted(torch.tensor(_E2M1), scaled.abs())
    if not torch.equal(torch.tensor(_E2M1)[codes], scaled.abs()):
        raise ValueError("An expert matrix is not on the FP4 grid.")
    codes = codes + 8 * torch.signbit(scaled)
    packed = codes[:, 0::2] + 16 * codes[:, 1::2]
    return StoredTensor("F8_E8M0", _bytes(byte)), StoredTensor("I8", _bytes(packed).view(np.int8))


def _module_tensors(module: nn.Module, parent: nn.Module | None) -> dict[str, StoredTensor]:
    """Suffixes and tensors that belong to this module and not to a child."""
    if isinstance(module, Experts):
        tensors = {}
        grids = dict(zip(("w1", "w2", "w3"), module.grids()))
        for e in range(module.w1.shape[0]):
            packed = {
                name: store_fp4(getattr(module, name)[e], grid[e]) for name, grid in grids.items()
            }
            tensors |= {f".{e}.{name}.scale": scale for name, (scale, _) in packed.items()}
            tensors |= {f".{e}.{name}.weight": codes for name, (_, codes) in packed.items()}
        return tensors
    if isinstance(module, HyperConnection):
        return {
            "_fn": store_f32(module.grid()),
            "_base": store_f32(module.base),
            "_scale": store_f32(module.scale),
        }
    if isinstance(module, Attention):
        return {".attn_sink": store_f32(module.attn_sink)}
    if isinstance(module, Engram):
        return {".q_weight": store_bf16(module.q_weight), ".k_weight": store_bf16(module.k_weight)}
    if isinstance(module, Gate):
        # Nothing here is trained on images; their bias is the one for text.
        bias = store_f32(module.bias)
        return {".weight": store_bf16(module.weight), ".bias": bias, ".bias_vl": bias}
    if isinstance(module, QuantizedLinear):
        scale, codes = store_fp8(module.weight)
        return {".scale": scale, ".weight": codes}
    if isinstance(module, Linear) and isinstance(parent, Engram):
        scale, codes = store_fp8_rows(module.weight)
        return {".scale": scale, ".weight": codes}
    if isinstance(module, (Linear, Norm)):
        return {".weight": store_bf16(module.weight)}
    return {}


@torch.no_grad()
def _load_module(module: nn.Module, get: Get) -> None:
    if isinstance(module, Experts):
        for e in range(module.w1.shape[0]):
            for name in ("w1", "w2", "w3"):
                getattr(module, name)[e] = get(f".{e}.{name}.weight")
    elif isinstance(module, HyperConnection):
        for name in ("fn", "base", "scale"):
            getattr(module, name).copy_(get("_" + name))
    elif isinstance(module, Attention):
        module.attn_sink.copy_(get(".attn_sink"))
    elif isinstance(module, Engram):
        module.q_weight.copy_(get(".q_weight"))
        module.k_weight.copy_(get(".k_weight"))
    elif isinstance(module, (Linear, QuantizedLinear, Norm)):
        module.weight.copy_(get(".weight"))
        if isinstance(module, Gate):
            module.bias.copy_(get(".bias"))


def published_name(path: str, draft_stages: int | None) -> str:
    """Path of a module to the start of its tensors' names. draft_stages: None for the target."""
    path = path.replace(".index_keys.", ".indexer.").replace(".index_queries.", ".indexer.")
    if draft_stages is None:
        return path
    last = f"mtp.{draft_stages - 1}."
    special = {
        "main_proj": "mtp.0.main_proj",
        "main_norm": "mtp.0.main_norm",
        "norm": last + "norm",
        "markov_embed": last + "markov_head.embed",
        "markov_head": last + "markov_head.head",
        "confidence": last + "confidence_head.proj",
    }
    return special.get(path, path.replace("stages.", "mtp.", 1))


def _walk(root: nn.Module):
    modules = dict(root.named_modules())
    for path, module in modules.items():
        yield path, module, modules.get(path.rpartition(".")[0]) if path else None


def tensors_of(root: DemoModel | Drafter) -> dict[str, StoredTensor]:
    stages = len(root.stages) if isinstance(root, Drafter) else None
    tensors = {}
    for path, module, parent in _walk(root):
        start = published_name(path, stages)
        for suffix, tensor in _module_tensors(module, parent).items():
            tensors[start + suffix] = tensor
    return tensors


def load_tensors(root: DemoModel | Drafter, stored: dict[str, StoredTensor]) -> None:
    stages = len(root.stages) if isinstance(root, Drafter) else None
    for path, module, _ in _walk(root):
        start = published_name(path, stages)
        _load_module(module, lambda suffix: values(stored, start + suffix))


def values(stored: dict[str, StoredTensor], name: str) -> Tensor:
    """The numbers that a stored tensor stands for, fp32."""
    tensor = stored[name]
    raw = torch.from_numpy(tensor.data.copy())
    if tensor.dtype == "F32":
        return raw
    if tensor.dtype == "BF16":
        return raw.view(torch.bfloat16).float()
    scale = stored[name.removesuffix("weight") + "scale"]
    factor = _two_to(torch.from_numpy(scale.data.copy()).int()).repeat_interleave(GROUP, 1)
    if tensor.dtype == "F8_E4M3":
        decoded = raw.view(torch.float8_e4m3fn).float()
        if factor.shape[0] != decoded.shape[0]:
            factor = factor.repeat_interleave(GROUP, 0)
    else:
        byte = raw.view(torch.uint8).long()
        codes = torch.stack((byte & 15, byte >> 4), -1).flatten(1)
        decoded = torch.tensor(_E2M1)[codes & 7] * (1 - 2 * (codes >> 3))
    return decoded * factor[: decoded.shape[0], : decoded.shape[1]]
