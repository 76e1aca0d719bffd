"""Compiles one region of the model into the compiler's cache on disk, for a trainer that starts
meanwhile: `python -m demo_model.precompile --help`.

A trainer starts one such process per region. Compiling is mostly the work of one thread, so a
dozen processes are done when the trainer would have finished the second region.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

REGIONS = 14  # of a target whose rows are longer than a selection


class Precompilation:
    """The processes, as the trainer sees them."""

    def __init__(self, tokenizer: Path, rows: int, positions: int):
        self.begin = time.monotonic()
        command = [sys.executable, "-m", "demo_model.precompile"]
        command += ["--tokenizer", str(tokenizer), "--rows", str(rows)]
        command += ["--positions", str(positions), "--region"]
        self.processes = [
            subprocess.Popen([*command, str(region)], env=_environment())
            for region in range(REGIONS)
        ]

    def wait(self, deadline: float) -> None:
        """Until all are done or time.monotonic() passes the deadline; late ones are ended."""
        for process in self.processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()
        done = sum(process.wait() == 0 for process in self.processes)
        seconds = time.monotonic() - self.begin
        print(f"{done} of {REGIONS} regions precompiled in {seconds:.1f} s", flush=True)


def _environment() -> dict[str, str]:
    package_root = str(Path(__file__).resolve().parent.parent)
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile one region of the target.")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--positions", type=int, required=True)
    parser.add_argument("--region", type=int, required=True, help="in order of the first use")
    arguments = parser.parse_args()

    from .config import ModelConfig
    from .recorded import compile_call, record_calls
    from .sources import tokenizer_config

    start = time.monotonic()
    config = tokenizer_config(arguments.tokenizer, ModelConfig())
    calls = record_calls(config, arguments.rows, arguments.positions)
    if arguments.region < len(calls):
        compile_call(calls[arguments.region])
        name = calls[arguments.region].function.__name__
        print(f"precompiled {name} in {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
