// The lightning indexer: scores every visible compressed entry of a query's sequence and selects
// the best (model description, 9).
//
//   score[j] = sum_h relu(q_h . k_j) * w_h        for j < n_vis = (position + 1) div ratio
//
// Production numerics keep products and sums in fp32 (h ascending); the reference profile rounds
// q_h . k_j, its product with w_h and the sum to bf16. Ties at the selection boundary go to the
// lower entry index.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"
#include "ops/batch_layout.h"
#include "ops/numerics.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

struct IndexerArgs {
  TensorView q;        // [rows, heads, channels] bf16, rotated and on the Q4P grid
  TensorView weights;  // [rows, heads] bf16 (the constant factor 2^-6 of the description is left
                       // out: order only)
  TensorView blocks;   // [blocks, entries per block, record bytes] U8, index keys of the KV source:
                       // packed (Q4P) or bf16 records, as their size says
  BatchLayout layout;
  int64_t ratio = 1;
  // Restricts the choice to these blocks of candidate_block_size entries (ascending, then -1), or
  // empty: all visible entries.
  TensorView candidates_in;  // [rows, candidate blocks] i32
  // Published for later layers: the best blocks of this layer's own scores, or empty: not wanted.
  TensorView candidates_out;  // [rows, candidate blocks] i32
  int64_t candidate_block_size = 8;
  TensorView selected;  // [rows, topk] i32: chosen entries ascending, then -1
  Numerics numerics = Numerics::kProduction;
};

// A row depends on its own sequence only.
Status Indexer(const IndexerArgs& args, Stream& stream);

// The selection halves, host code on one row, also used by tests. `scores` has n_vis elements.
// Writes the min(k, n) best indices ascending to out[0...), the rest -1. Ties: lower index. NaN
// scores rank last.
void SelectTopK(std::span<const float> scores, std::span<int32_t> out);
// Block maxima over blocks of `block_size` entries (the last may be partial); the block with the
// newest entry is always kept; the min(out.size(), blocks) best, ascending, the rest -1.
void SelectCandidateBlocks(std::span<const float> scores, int64_t block_size,
                           std::span<int32_t> out);

}  // namespace deepinfer
