// One step's input to the model: rows of any mix of sequences, and the caches they use. All views
// are on the model's device and live until the step has run. Built by the runtime.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/batch_layout.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

struct StepBatch {
  BatchLayout layout;
  TensorView token_ids;  // [rows] i32
  TensorView
      engram_lookback;  // [rows, max ngram] i32 compressed ids at t, t-1, ...; pad beyond the start
  std::vector<CompressedEntries>
      entries;  // one per distinct ratio that occurs, positions of new entries
  // Which rows the layers from decoder_start() on run: those of `kept_rows`, in that order, or all
  // rows while it is empty and not all are dropped. `decoder_layout` describes them.
  BatchLayout decoder_layout;
  bool drops_rows = false;
  TensorView kept_rows;   // [kept] i32; with drops_rows
  TensorView logit_rows;  // [n] i32 rows whose logits are wanted, as numbers of decoder_layout
};

struct CacheViews {
  std::vector<TensorView> kv_blocks;  // per producer: [blocks, entries per block, record bytes] U8
  std::vector<TensorView> index_blocks;  // per producer
  // Per producer: [slots, remainder rows, 2 * head_dim] F32, empty for ratio 1.
  std::vector<TensorView> remainders;
  // Per layer: [pages, positions per page, record bytes] U8. Where the model drafts, those of the
  // draft stages follow: the keys that their blocks see are made by the model's own steps.
  std::vector<TensorView> window_pages;
};

}  // namespace deepinfer
