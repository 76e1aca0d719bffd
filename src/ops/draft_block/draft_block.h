// What only the drafting of a block of tokens needs (model description, section 13): the rows of
// the blocks, the step of the chain that turns a slot's logits into a token, and the confidence
// head. Everything that has a value per slot and sequence is slot after slot, [slots, sequences]:
// a step of the chain works on one slot of all sequences.
#pragma once

#include "base/error.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

// The rows of a block of K slots for each of n sequences, where anchors and lengths are: row
// r * K + s is slot s of sequence r, at position lengths[r] + s. Slot 0 holds the anchor, the
// others `filler`.
struct BlockRowsArgs {
  TensorView anchors;  // [n] i32: the token that was sampled last and has no state yet
  TensorView lengths;  // [n] i32: its position
  int32_t filler = 0;
  TensorView token_ids;       // [n * K] i32
  TensorView positions;       // [n * K] i32
  TensorView row_sequence;    // [n * K] i32
  TensorView sequence_start;  // [n + 1] i32
};
Status BlockRows(const BlockRowsArgs& args, Stream& stream);

// logits[r] += bias[r] in fp32, then tokens[r] = the first of the largest. NaN is no candidate; a
// row of nothing else gives 0.
struct BiasedArgmaxArgs {
  TensorView logits;  // [rows, vocab] f32, rows may be strided; changed
  TensorView bias;    // [rows, vocab] f32
  TensorView tokens;  // [rows] i32, or empty: the sum alone
};
Status BiasedArgmax(const BiasedArgmaxArgs& args, Stream& stream);

// score[k, r] = weight . x[r * K + k] with fp32 accumulation, and
// probability = sigmoid(clamp(score / temperature[k], -60, 60)).
struct BlockConfidenceArgs {
  TensorView x;             // [n * K, width] bf16
  TensorView weight;        // [1, width] bf16
  TensorView temperatures;  // [K] f32, positive
  TensorView score;         // [K, n] f32
  TensorView probability;   // [K, n] f32
};
Status BlockConfidence(const BlockConfidenceArgs& args, Stream& stream);

}  // namespace deepinfer
