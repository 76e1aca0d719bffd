#!/usr/bin/env python3
"""A sample of each skill of the demo model, through the program, reaches what the model card promises.

    python3 tests/demo_model/accuracy_test.py DEEPINFER MODEL [--limit N]

MODEL/eval/demo/minimum.json has the smallest share of right answers by skill, or by skill and
context length ("lookup 1024"). A sample may have fewer, but only as many as an accuracy of exactly
the minimum would give in one of a hundred samples. Exit status 77: MODEL has no weights.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import subprocess
import sys
import tempfile


def needed(minimum: float, tasks: int) -> int:
    """Right answers out of `tasks`: the 1 % quantile of the binomial distribution."""
    below = 0.0
    for right in range(tasks + 1):
        below += math.comb(tasks, right) * minimum**right * (1 - minimum) ** (tasks - right)
        if below > 0.01:
            return right
    return tasks


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--limit", type=int, default=6, help="tasks of each skill; 0: all")
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        print(f"skipped: {arguments.model} has no weights")
        return 77
    minimum = json.loads((arguments.model / "eval" / "demo" / "minimum.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        answers = pathlib.Path(folder) / "answers.jsonl"
        status = subprocess.run(
            [arguments.program, "eval", "--model", str(arguments.model), "--suite", "demo", "--limit",
             str(arguments.limit), "--json", str(report), "--output", str(answers)],
            check=False).returncode
        if status != 0:
            print(f"eval ended with {status}")
            return 1
        rows = json.loads(report.read_text())["rows"]
        wrong = [line for line in answers.read_text().splitlines() if not json.loads(line)["correct"]]
    failed = False
    seen = set()
    for row in rows:
        context = "" if row["context"] is None else f" {row['context']}"
        name = row["skill"] + context
        if name not in minimum:
            print(f"{name} is not in minimum.json")
            failed = True
            continue
        seen.add(name)
        least = needed(minimum[name], row["tasks"])
        if row["correct"] < least:
            print(f"{name}: {row['correct']} of {row['tasks']} are right, at least {least} are expected")
            failed = True
    for name in sorted(set(minimum) - seen):
        print(f"{name} is in minimum.json, but has no tasks")
        failed = True
    if failed:
        print("\n".join(wrong[:40]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
