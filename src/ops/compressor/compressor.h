// The gated pooling of the ratio-2 compressor (model description, section 8): per channel a softmax
// over the two gate values of a group weights its two key projections. Groups are (2j, 2j+1) by
// absolute position. When a step begins inside a group, the projections of the group's first token
// come from the sequence's remainder, where every step leaves those of its last rows: enough of
// them that a sequence can be set back by a few tokens. Ratio 1 needs no pooling.
#pragma once

#include "base/error.h"
#include "ops/batch_layout.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

struct CompressPairsArgs {
  TensorView key;   // [rows, head_dim] f32
  TensorView gate;  // [rows, head_dim] f32
  BatchLayout layout;
  CompressedEntries entries;  // ratio 2
  // [slots, remainder rows, 2 * head_dim] f32: key, then gate, of the token at a position p in row
  // p mod remainder rows; updated.
  TensorView remainders;
  TensorView pooled;  // [entries, head_dim] bf16
};

// An entry's bits do not depend on where steps cut the sequence.
Status CompressPairs(const CompressPairsArgs& args, Stream& stream);

}  // namespace deepinfer
