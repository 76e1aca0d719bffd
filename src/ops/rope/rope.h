// Rotary position embedding of the last channels of a vector: adjacent pairs (2i, 2i+1) are
// multiplied by cos + i sin of the angle fp32(position * frequency[i]) (model description,
// section 5.6).
#pragma once

#include "base/error.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

struct RopeTableArgs {
  TensorView positions;    // [rows] i32
  int64_t scale = 1;       // the angle is of position * scale (compressed entries: their ratio)
  TensorView frequencies;  // [pairs] f32
  TensorView table;        // [rows, pairs, 2] f32: cos, sin
};

// cos and sin of an fp32 angle, correctly rounded from double: the same on every machine and at
// every batch size.
Status RopeTable(const RopeTableArgs& args, Stream& stream);

struct RopeArgs {
  TensorView x;               // [rows, heads, channels] bf16, rotated in place and rounded to bf16
  TensorView table;           // [rows, pairs, 2] f32; 2 * pairs <= channels
  bool quantize_q4p = false;  // afterwards put every head on the Q4P grid (index queries); channels
                              // a multiple of 32
};

Status Rope(const RopeArgs& args, Stream& stream);

}  // namespace deepinfer
