"""The program under comparison, and where the demo model is."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import unittest
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TOKENIZER = ROOT / "models" / "demo" / "tokenizer.json"
SUITE = ROOT / "models" / "demo" / "eval" / "demo"


def run_lines(command: str, lines: list[dict[str, Any]], *options: str) -> list[dict[str, Any]]:
    """`deepinfer COMMAND` with the demo model's tokenizer over JSON lines."""
    program = os.environ.get("DEEPINFER", "")
    if not program:
        raise unittest.SkipTest("no deepinfer to compare with")
    done = subprocess.run([program, command, "--tokenizer", str(TOKENIZER), *options],
                          input="".join(json.dumps(line) + "\n" for line in lines),
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{command} ended with {done.returncode}: {done.stderr[-500:]}"
                             f"{done.stdout[-500:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]
