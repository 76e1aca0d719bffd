// Writes checkpoints with random weights in exactly the published directory format: config.json,
// index, shards, tokenizer files. For tests (the tiny configuration) and benchmarks (a slice of the
// released model). Not for training: the values only keep every mechanism alive, so that logits
// vary and selections are decided by scores rather than by ties.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/error.h"

namespace deepinfer {

// The config.json of the tiny model: ten layers that contain every role, both compression ratios,
// candidates, two Engram layers and three draft layers. Model description, section 22.
Result<std::string> TinyConfigJson();

// A slice of the released model: all widths are the released ones, counts are chosen.
//
// The layer schedule is cut so that every mechanism of the released one remains. Of n layers the
// last max(2, n/2) form the decoder (ratio 1), the others the encoder. In an encoder of at least
// two layers the first max(1, encoder/10) see their window only; the rest have ratio 2 with a
// source of compressed keys at the first of them and every sixth after. The first decoder layer is
// the source of keys and candidates; every fourth after it selects anew, in a decoder of fewer than
// five layers the second one. Engram: the second layer (or the only encoder layer) and the last
// encoder source of keys, if that is another layer. Forty layers give the released schedule; four
// give ratios 0, 2, 1, 1 with roles window, full and Engram, full with candidates, reindex. The
// vision tower is reduced to one narrow layer.
struct SliceOptions {
  int64_t layers = 4;
  int64_t experts = 32;  // per layer; the released number is 384
  int64_t engram_rows =
      2400000;  // per Engram layer, rounded to a sum of primes; released: 384,006,168
  int64_t vocab = 129280;
  int64_t draft_layers = 0;    // released: 3
  int64_t draft_experts = 32;  // per draft layer; released: 128
};
Result<std::string> SliceConfigJson(const SliceOptions& options);

struct RandomCheckpointOptions {
  std::string dir;  // created if missing; must be empty but for an interrupted run's *.partial
  std::string config_json;  // any valid config.json whose vocabulary is the one below
  uint64_t seed = 0;
  int num_threads = 1;
  // Called after each written piece, from the calling thread; may be empty.
  std::function<void(int64_t bytes_done, int64_t bytes_total)> progress;
};

// The result is a function of config_json and seed alone. One shard per layer and draft layer,
// Engram layers apart, as the release. Errors: a directory with content, too little room on the
// disk, an invalid configuration.
Status WriteRandomCheckpoint(const RandomCheckpointOptions& options);

// A byte-level BPE tokenizer.json in the published form: three special tokens, the 256 bytes,
// merged pieces, and at the top twenty placeholders and the published chat markers, so that chat
// prompts can be rendered. At least 320 tokens.
Result<std::string> SmallTokenizerJson(int64_t vocab);

}  // namespace deepinfer
