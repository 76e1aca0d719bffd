// The parts of the mixture of experts around the expert linears (ops/linear): routing, grouping
// rows by expert, the gated activation, and the weighted sum (model description, section 10).
#pragma once

#include "base/error.h"
#include "ops/linear/linear.h"
#include "ops/numerics.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

// s = sqrt(softplus(logits / gate_temp)); the k best of s + bias, ties to the smaller id, in
// descending order; weight of a chosen expert = s / (sum of chosen s + 1e-20) * scale.
struct RouterSelectArgs {
  TensorView logits;  // [rows, experts] f32
  TensorView bias;    // [experts] f32
  float gate_temp = 1.0f;
  float scale = 1.0f;
  TensorView experts;  // [rows, k] i32
  TensorView weights;  // [rows, k] f32
};
Status RouterSelect(const RouterSelectArgs& args, Stream& stream);

// Sorts the (row, slot) pairs by expert, stable in row order: the layout of GroupedLinear.
struct GroupByExpertArgs {
  TensorView experts;  // [rows, k] i32
  TensorView weights;  // [rows, k] f32
  int64_t num_experts = 0;
  TensorView row_index;       // [rows * k] i32: source row of each grouped row
  TensorView grouped_weight;  // [rows * k] f32: its routing weight
  TensorView group_offsets;   // [num_experts + 1] i32
  TensorView slot_position;   // [rows, k] i32: grouped row of each (row, slot)
};
Status GroupByExpert(const GroupByExpertArgs& args, Stream& stream);

// Both of these as one: the experts and weights of `select` are those of `group`.
Status RouteExperts(const RouterSelectArgs& select, const GroupByExpertArgs& group, Stream& stream);

// The whole way from a row to its experts: logits = x * weight^T in fp32 (ops/linear), then both of
// these. `select` comes without logits. On a GPU two launches for up to 512 rows.
struct RouteArgs {
  TensorView x;                          // [rows, k] bf16
  const LinearWeight* weight = nullptr;  // [experts, k]
  RouterSelectArgs select;
  GroupByExpertArgs group;
};
Status Route(const RouteArgs& args, Stream& stream);

// a = row_weight * (silu(min(gate, limit)) * clamp(up, -limit, limit)) in fp32, then Q8(a)
// (reference: Q8(bf16(a))).
struct SwigluArgs {
  TensorView gate;        // [rows, intermediate] bf16
  TensorView up;          // [rows, intermediate] bf16
  TensorView row_weight;  // [rows] f32, or empty: 1
  float limit = 10.0f;
  TensorView out;  // [rows, intermediate] bf16, on the Q8 grid
  Numerics numerics = Numerics::kProduction;
};
Status Swiglu(const SwigluArgs& args, Stream& stream);

// y = bf16( shared + routed[slot 0] + routed[slot 1] + ... ) in fp32 in this order; reference
// profile: routed outputs in ascending expert id from zero, shared last.
struct MoeCombineArgs {
  TensorView routed;         // [rows * k, hidden] bf16, grouped rows
  TensorView slot_position;  // [rows, k] i32
  TensorView experts;        // [rows, k] i32
  TensorView shared;         // [rows, hidden] bf16
  TensorView y;              // [rows, hidden] bf16
  Numerics numerics = Numerics::kProduction;
};
Status MoeCombine(const MoeCombineArgs& args, Stream& stream);

}  // namespace deepinfer
