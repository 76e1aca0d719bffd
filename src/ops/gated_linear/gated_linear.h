// The gated half of a feed-forward network for groups of rows with one pair of weights each
// (experts), or for all rows with one pair (the shared expert):
//
//   gate = bf16(x[row_index[r], :] * gate_weights[g]^T),  up = bf16(x[row_index[r], :] *
//   up_weights[g]^T) out[r, :] = Q8(row_weight[r] * (silu(min(gate, limit)) * clamp(up, -limit,
//   limit)))
//
// that is GroupedLinear twice (ops/linear) and Swiglu (ops/moe), whose rounding points it has.
#pragma once

#include <span>

#include "base/error.h"
#include "ops/linear/linear.h"
#include "ops/numerics.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

struct GatedLinearArgs {
  TensorView x;              // [any, k] bf16
  TensorView row_index;      // [rows] i32 into x, or empty: r itself
  TensorView group_offsets;  // [groups + 1] i32, as of GroupedLinear; empty: one group of all rows
  std::span<const LinearWeight* const> gate_weights;  // groups, each [intermediate, k]
  std::span<const LinearWeight* const> up_weights;    // the same shape and format
  TensorView row_weight;                              // [rows] f32, or empty: 1
  float limit = 10.0f;
  TensorView out;  // [rows, intermediate] bf16, on the Q8 grid
  Numerics numerics = Numerics::kProduction;
};

// A row depends on itself and its group's weights only.
Status GatedLinear(const GatedLinearArgs& args, Stream& stream);

}  // namespace deepinfer
