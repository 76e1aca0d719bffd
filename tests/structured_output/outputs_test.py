#!/usr/bin/env python3
"""Generates under constraints and checks every finished output with an independent validator.

usage: outputs_test.py DEEPINFER WORK_DIR [--schemas N]

Makes a tiny random checkpoint, so that what is not enforced shows, and runs `deepinfer generate` at temperature 1 over
schemas from schema_cases.py and from the public JSON Schema test suite, patterns, grammars and choices. Each finished
output must be valid for jsonschema (schemas), re (patterns) or the case's own check. Exit status 77 (skipped) without
the jsonschema package.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys

try:
    import jsonschema
except ImportError:
    print("skipped: this Python has no jsonschema package (Debian: python3-jsonschema)")
    sys.exit(77)

import schema_cases

SUITE = pathlib.Path("/usr/share/json-schema-test-suite/tests")
SUITE_DRAFTS = [("draft2020-12", jsonschema.Draft202012Validator), ("draft7", jsonschema.Draft7Validator)]
MAX_TOKENS = 400


def suite_schemas():
    for draft, validator in SUITE_DRAFTS:
        folder = SUITE / draft
        if not folder.is_dir():
            continue
        for path in sorted(folder.glob("*.json")):
            for number, group in enumerate(json.loads(path.read_text(encoding="utf-8"))):
                yield f"suite-{draft}-{path.stem}-{number}", group["schema"], validator
        return


def run(program, *arguments, ok=(0,)):
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode not in ok:
        sys.exit(f"{' '.join(map(str, arguments))}: exit status {done.returncode}\n{done.stderr}")
    return done


def token_bias(program, model, work):
    """A push towards the tokens that end strings, lists and objects: random text would seldom end by itself."""
    lines = [{"id": text, "text": text} for text in ['"', "}", "]", '"}', '"]', '",']]
    (work / "tokens.in").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    run(program, "tokenize", "--model", model, "--input", work / "tokens.in", "--output", work / "tokens.out")
    bias = {}
    for line in (work / "tokens.out").read_text(encoding="utf-8").splitlines():
        ids = json.loads(line)["ids"]
        if len(ids) == 1:
            bias[str(ids[0])] = 4.0
    return bias


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("work", type=pathlib.Path)
    parser.add_argument("--schemas", type=int, default=500)
    options = parser.parse_args()
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    model = work / "tiny"
    if not (model / "config.json").exists():
        run(options.program, "make-checkpoint", model, "--preset", "tiny", "--seed", 3)
    bias = token_bias(options.program, model, work)

    lines, checks = [], {}

    def add(name, constraint, check):
        lines.append({"id": name, "prompt": f"Case {name}:",
                      "sampling_params": {"temperature": 1.0, "max_tokens": MAX_TOKENS, "seq_seed": len(lines), "logprobs": None,
                                          "logit_bias": bias, "structured_outputs": constraint}})
        checks[name] = check

    def against(schema, validator):
        def check(text):
            validator(schema).validate(json.loads(text))
            return True
        return check

    from_suite = list(suite_schemas())
    own = schema_cases.generated(max(options.schemas - len(from_suite), 2 * options.schemas // 3))
    for name, schema in own:
        add(name, {"json": schema}, against(schema, jsonschema.Draft202012Validator))
    for name, schema, validator in from_suite:
        add(name, {"json": schema}, against(schema, validator))
    for i, pattern in enumerate(schema_cases.REGEXES):
        add(f"regex-{i}", {"regex": pattern}, lambda text, p=pattern: re.fullmatch(p, text, re.DOTALL) is not None)
    for i, (rules, matches) in enumerate(schema_cases.EBNFS):
        add(f"ebnf-{i}", {"grammar": rules}, matches)
    for i, choices in enumerate(schema_cases.CHOICES):
        add(f"choice-{i}", {"choice": choices}, lambda text, c=choices: text in c)
    add("json-object", {"json_object": True}, lambda text: isinstance(json.loads(text), dict))

    (work / "cases.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    run(options.program, "generate", "--model", model, "--input", work / "cases.jsonl", "--output", work / "outputs.jsonl",
        "--overwrite", "--seed", 1, "--no-progress", ok=(0, 3))

    failures, refused, unfinished, finished = [], [], [], []
    for line in (work / "outputs.jsonl").read_text(encoding="utf-8").splitlines():
        result = json.loads(line)
        name = result["id"]
        if "error" in result:
            refused.append((name, result["error"]))
            continue
        output = result["outputs"][0]
        if output["finish_reason"] == "error":
            failures.append(f"{name}: {output['error']}")
        elif output["finish_reason"] != "stop":
            unfinished.append(name)
        else:
            finished.append(name)
            try:
                if not checks[name](output["text"]):
                    failures.append(f"{name}: {output['text']!r} does not match")
            except (ValueError, jsonschema.ValidationError) as error:
                failures.append(f"{name}: {output['text']!r}: {str(error).splitlines()[0]}")
    for name, error in refused:
        if not name.startswith("suite-"):
            failures.append(f"{name} was refused: {error}")
        elif error["code"] not in ("unsupported", "invalid_argument") or len(error["message"]) < 20:
            failures.append(f"{name} was refused without a reason: {error}")
    print(f"{len(lines)} cases ({len(own)} generated schemas, {len(from_suite)} of the public suite): {len(finished)} finished, "
          f"{len(unfinished)} cut at {MAX_TOKENS} tokens, {len(refused)} refused")
    if len(finished) < len(lines) - len(refused) - len(unfinished) or len(finished) < 0.7 * (len(lines) - len(refused)):
        failures.append("too few outputs came to their end")
    for failure in failures[:40]:
        print("FAILED", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
