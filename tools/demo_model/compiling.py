"""torch.compile over the pieces of the model that are worth it.

Whole sub-layers are compiled, not the whole model: layers of the same role share one compilation,
and the stacked passes between them cost little. A failure to compile is reported once and the piece
runs as written.
"""

from __future__ import annotations

import lzma
import sys
import traceback
from pathlib import Path

import torch

from .drafter import Drafter
from .model import DemoModel
from .optimizer import Muon


def _compiled(function):
    return torch.compile(function, dynamic=False, fullgraph=True)


def configure() -> None:
    """Before anything is compiled. Layers of one role differ in guards such as the id of a layer."""
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.accumulated_recompile_limit = 1024
    torch.set_float32_matmul_precision("high")


def compile_layers(layers) -> None:
    for layer in layers:
        layer.hc_attn.compile(dynamic=False, fullgraph=True)
        layer.hc_ffn.compile(dynamic=False, fullgraph=True)
        layer.ffn.compile(dynamic=False, fullgraph=True)
        if hasattr(layer, "engram"):
            layer.engram.compile(dynamic=False, fullgraph=True)
        for name in ("attend_window", "attend_full", "attend_reindex", "attend_reuse"):
            setattr(layer.attn, name, _compiled(getattr(layer.attn, name)))


def compile_model(model: DemoModel) -> None:
    compile_layers(model.layers)
    model.expand = _compiled(model.expand)
    model.index_loss = _compiled(model.index_loss)
    model.final = _compiled(model.final)


def compile_muon(muon: Muon) -> None:
    muon.orthogonalise = _compiled(muon.orthogonalise)


def try_once(what: str, compile_and_run, run_plain):
    """Runs the first pass compiled; if the compiler fails, says so and runs as written."""
    try:
        return compile_and_run()
    except Exception as error:  # the compiler's own failures have no common type
        traceback.print_exc()
        print(f"{what} does not compile and runs as written: {str(error)[:500]}", file=sys.stderr)
        torch._dynamo.reset()
        torch._dynamo.config.disable = True
        return run_plain()


def load_compiled(path: Path) -> None:
    """Takes over what save_compiled kept of an earlier run on such a machine, if there is any."""
    if path.exists():
        torch.compiler.load_cache_artifacts(lzma.decompress(path.read_bytes()))


def save_compiled(path: Path) -> None:
    artifacts = torch.compiler.save_cache_artifacts()
    if artifacts is not None:
        path.write_bytes(lzma.compress(artifacts[0], preset=1))
