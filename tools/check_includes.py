#!/usr/bin/env python3
"""Refuses includes against the dependency table of docs/architecture.md. Run by the tests; prints every violation."""

import pathlib
import re
import sys

ALLOWED = {
    "base": set(),
    "tensor": {"base"},
    "ops": {"tensor", "base"},
    "weights": {"tensor", "base"},
    "text": {"base"},
    "sample": {"ops", "base"},
    "grammar": {"sample", "text", "base"},
    "state": {"tensor", "base"},
    "sched": {"state", "base"},
    "model": {"ops", "weights", "tensor", "base"},
    "runtime": {"model", "state", "weights", "ops", "tensor", "base"},
    "engine": {"runtime", "sched", "state", "sample", "grammar", "text", "model", "ops", "tensor", "base"},
}
# Third-party headers and the modules that may include them; the public headers may use the error type only.
THIRD_PARTY = {
    "CLI/": {"apps"},
    "simdjson.h": {"base", "weights", "model", "text", "apps"},
    "nlohmann/": {"model", "engine", "apps"},
    "utf8proc.h": {"model"},
    "hwy/": {"ops"},
    "dnnl": {"ops"},
    "xgrammar/": {"grammar"},
    "dlpack/": {"grammar"},
}


def main() -> int:
    root = pathlib.Path(__file__).resolve().parent.parent
    problems = []
    for path in sorted((root / "src").rglob("*")) + sorted((root / "include").rglob("*.h")):
        if path.suffix not in {".h", ".cc"}:
            continue
        relative = path.relative_to(root)
        module = "public" if relative.parts[0] == "include" else relative.parts[1]
        is_test = path.stem.endswith(("_test", "_bench", "_test_data", "_test_util"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = re.match(r'#include\s+["<]([^">]+)[">]', line)
            if not match:
                continue
            target = match.group(1)
            first = target.split("/")[0]
            if first in ALLOWED or first == "apps":
                allowed = ALLOWED.get(module, set() if module == "public" else set(ALLOWED) | {"apps"})
                if first != module and first not in allowed:
                    problems.append(f"{relative}:{number}: {module} may not include {target}")
            for prefix, modules in THIRD_PARTY.items():
                if target.startswith(prefix) and module not in modules and not is_test:
                    problems.append(f"{relative}:{number}: {target} belongs to {', '.join(sorted(modules))}")
                if target.startswith(prefix) and path.suffix == ".h" and prefix != "hwy/" and not is_test:
                    problems.append(f"{relative}:{number}: {target} may be included by .cc files only")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
