#!/usr/bin/env python3
"""Tests of the demo model's data: tasks, chat encoding, tokenizer, stream, suite.

    python3 tests/demo_model/run_data_tests.py [DEEPINFER]

DEEPINFER is the program that prompts and ids are compared with; without it these comparisons are
skipped. Exit status 77: numpy or tokenizers is not installed.
"""

from __future__ import annotations

import os
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MODULES = ("chat_encoding_test", "tasks_test", "tokenizer_test", "stream_test", "suite_test")


def main() -> int:
    try:
        import numpy  # noqa: F401
        import tokenizers  # noqa: F401
    except ImportError as error:
        print(f"skipped: {error}; the demo model's data needs numpy and tokenizers")
        return 77
    sys.path[:0] = [str(ROOT), str(pathlib.Path(__file__).parent)]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["DEEPINFER"] = sys.argv[1] if len(sys.argv) > 1 else ""
    suite = unittest.defaultTestLoader.loadTestsFromNames(MODULES)
    return 0 if unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
