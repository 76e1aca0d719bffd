#!/usr/bin/env python3
"""The Python xgrammar package over bench/grammar_schemas.jsonl, beside a run of `deepinfer bench grammar`.

    deepinfer bench grammar --tokenizer FILE --rounds 1 --json OURS.json
    python3 tools/bench_xgrammar.py FILE [--ours OURS.json] [--json OUT.json] [--whitespace N]

Needs the packages xgrammar (with what it asks for) and tokenizers. Run by hand; nothing depends on it. Both sides take the processor's
time: of the calling thread for a mask, of the process for a compilation. With --ours the rows of both stand beside each other; --json writes
what was measured, and with --ours what that run says too.
"""
import argparse
import datetime
import importlib.metadata
import json
import pathlib
import platform
import sys
import time

import tokenizers
import xgrammar

SCHEMAS = pathlib.Path(__file__).resolve().parent.parent / "bench" / "grammar_schemas.jsonl"


def percentile(values, share):
    values = sorted(values)
    return values[int(share * (len(values) - 1))] if values else 0.0


def summary(values):
    return {"count": len(values), "p50_us": percentile(values, 0.5), "p99_us": percentile(values, 0.99),
            "max_us": percentile(values, 1)}


def cpu_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def measure(compiler, tokenizer, end, mask, case, rounds, whitespace):
    begin = time.process_time_ns()
    try:
        grammar = compiler.compile_json_schema(json.dumps(case["schema"]), max_whitespace_cnt=whitespace)
    except Exception as error:  # whatever the package raises for a schema that it does not take
        return {"name": case["name"], "kind": case["kind"], "refused": str(error).splitlines()[0]}, []
    row = {"name": case["name"], "kind": case["kind"], "compile_us": (time.process_time_ns() - begin) / 1e3}
    masks, wrong = [], []
    for _ in range(rounds):
        for document in case["documents"]:
            matcher = xgrammar.GrammarMatcher(grammar)
            for token in tokenizer.encode(document, add_special_tokens=False).ids + [end]:
                begin = time.thread_time_ns()
                matcher.fill_next_token_bitmask(mask)
                masks.append((time.thread_time_ns() - begin) / 1e3)
                if not matcher.accept_token(token):
                    wrong.append(document[:80])
                    break
    row["mask"] = summary(masks)
    row["valid_documents_refused"] = len(wrong) // rounds
    return row, masks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("--ours")
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--whitespace", type=int, default=2)
    options = parser.parse_args()

    tokenizer = tokenizers.Tokenizer.from_file(options.tokenizer)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    vocabulary = ["" if i in special else tokenizer.id_to_token(i) or "" for i in range(size)]
    end = tokenizer.token_to_id("<｜end▁of▁sentence｜>")
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.BYTE_LEVEL, vocab_size=size, stop_token_ids=[end])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    mask = xgrammar.allocate_token_bitmask(1, size)
    ours = json.loads(pathlib.Path(options.ours).read_text(encoding="utf-8")) if options.ours else None
    our_rows = {row["name"]: row for row in ours["schemas"]} if ours else {}

    rows, masks, compiles, simple = [], [], [], []
    for line in SCHEMAS.read_text(encoding="utf-8").splitlines():
        row, own = measure(compiler, tokenizer, end, mask, json.loads(line), options.rounds, options.whitespace)
        rows.append(row)
        masks += own
        if "refused" in row:
            print(f"{row['name']:22} refused: {row['refused']}")
            continue
        compiles.append(row["compile_us"])
        if row["kind"] == "simple":
            simple.append(row["compile_us"])
        text = (f"{row['name']:22} compile {row['compile_us'] / 1e3:9.1f} ms; mask us p50 {row['mask']['p50_us']:6.1f} "
                f"p99 {row['mask']['p99_us']:8.1f} max {row['mask']['max_us']:8.1f}")
        if row["name"] in our_rows:
            other = our_rows[row["name"]]
            text += (f" | ours {other['compile_us'] / 1e3:9.1f} ms; p50 {other['mask']['p50_us']:6.1f} "
                     f"p99 {other['mask']['p99_us']:8.1f} max {other['mask']['max_us']:8.1f}")
        if row["valid_documents_refused"]:
            text += f" | {row['valid_documents_refused']} valid documents refused"
        print(text, flush=True)

    result = {"mask": summary(masks), "compile": summary(compiles), "simple_compile": summary(simple), "schemas": rows}
    for name, run in (("xgrammar package", result), ("deepinfer", ours)):
        if run is None:
            continue
        print(f"{name:17} masks p50 {run['mask']['p50_us']:.1f} us, p99 {run['mask']['p99_us']:.1f}, max {run['mask']['max_us']:.1f} "
              f"({run['mask']['count']}); compile p50 {run['compile']['p50_us'] / 1e3:.1f} ms, max "
              f"{run['compile']['max_us'] / 1e3:.1f}; simple p50 {run['simple_compile']['p50_us'] / 1e3:.1f} ms")
    if options.json:
        report = {
            "date": datetime.date.today().isoformat(),
            "cpu": cpu_name(),
            "options": (f"CPU time; masks over {options.rounds} round(s) of each document; at most {options.whitespace} white space characters between JSON tokens on both sides"),
            "xgrammar_package": {"version": importlib.metadata.version("xgrammar"), **result},
        }
        if ours:
            report["deepinfer"] = ours
        pathlib.Path(options.json).write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
