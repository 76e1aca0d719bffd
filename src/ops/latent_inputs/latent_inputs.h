// What lies between the two low-rank projections of attention and what uses them (model
// description, section 7): the norm of the latent query, and norm, rotation and quantisation of the
// latent key.
//
//   q_grid  = Q8(RmsNorm(q, q_weight))                               (ops/rms_norm)
//   records = WindowRecords(RmsNorm(kv, kv_weight), table)           (ops/cache_records)
//   and WriteWindowPages(records, layout, pages)
//
// as one operation. Without `q` the key alone; without `pages` nothing is kept for later steps.
// Attention of the same step may follow: it reads a step's own rows from
// `records`, and pages hold no row's position twice.
#pragma once

#include "base/error.h"
#include "ops/batch_layout.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

struct LatentInputsArgs {
  TensorView q;          // [rows, q_lora_rank] bf16, or empty
  TensorView q_weight;   // [q_lora_rank] bf16; empty with q
  TensorView q_grid;     // [rows, q_lora_rank] bf16; empty with q
  TensorView kv;         // [rows, head_dim] bf16; may be overwritten
  TensorView kv_weight;  // [head_dim] bf16
  TensorView table;      // [rows, pairs, 2] f32
  TensorView records;    // [rows, record bytes] U8
  BatchLayout layout;
  TensorView pages;  // [pages, positions per page, record bytes] U8, or empty
  float eps = 1e-20f;
};

// A row depends on itself only.
Status LatentInputs(const LatentInputsArgs& args, Stream& stream);

}  // namespace deepinfer
