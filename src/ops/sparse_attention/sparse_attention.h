// Latent attention of one query token over its sliding window and its selected compressed entries
// (model description, section 7): one softmax over the union, K = V = the latent, a per-head sink
// in the denominator only, then the inverse rotation.
//
// Order of evaluation, part of the contract: the key list is the window in ascending position, then
// the selection in ascending entry index, cut into blocks of 64; a running maximum per head starts
// at -1e30; per block: fp32 scores, new maximum, rescaling of numerator and denominator, p =
// exp(score - maximum); the denominator adds fp32 p, the numerator adds bf16(p) * v in fp32. So the
// bits of a row depend on its own list only, not on chunking, batch or threads.
#pragma once

#include "base/error.h"
#include "ops/batch_layout.h"
#include "ops/numerics.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

struct SparseAttentionArgs {
  // [rows, heads, head_dim] bf16; rotated, or with rotate_q still to be rotated by `table` and
  // rounded to bf16 (ops/rope), which may overwrite it.
  TensorView q;
  bool rotate_q = false;
  // Records are packed (Q8 for the window, Q4E for compressed keys) or bf16, as their sizes say.
  TensorView window_records;  // [rows, record bytes] U8: the step's own rows
  TensorView window_pages;    // [pages, positions per page, record bytes] U8: rows before the step
  // A row at p sees positions max(0, p - window + 1, window_begin) ... p: none if p lies before
  // window_begin.
  int64_t window = 128;
  // Not 0: the step's rows of a sequence, at most so many, are a block. Each of them sees all of
  // them, and the same `window` positions in front of the first: those from max(0, first - window,
  // window_begin) to the block's last.
  int64_t block_rows = 0;
  TensorView kv_blocks;  // [blocks, entries per block, record bytes] U8, or empty: window only
  TensorView selected;   // [rows, topk] i32, entries ascending then -1; empty with kv_blocks
  // On a GPU not written by a kernel launched shortly before: it is read while that still runs.
  BatchLayout layout;
  TensorView sink;     // [heads] f32
  float scale = 1.0f;  // head_dim^-0.5
  TensorView table;    // [rows, pairs, 2] f32, rotation at the row's own position
  // [rows, heads * head_dim] bf16. Production: the normalised fp32 result is rotated back in fp32
  // and put on the Q8 grid. Reference: rounded to bf16, rotated back, rounded to bf16 again, not
  // quantised.
  TensorView out;
  Numerics numerics = Numerics::kProduction;
};

Status SparseAttention(const SparseAttentionArgs& args, Stream& stream);

}  // namespace deepinfer
