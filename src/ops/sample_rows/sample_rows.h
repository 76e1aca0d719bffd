// Draws tokens from rows of logits where the logits are, and hands them to the next step there: the
// host learns them later. The law is in row_draw.h; results are the same bit for bit on every
// device.
#pragma once

#include "base/error.h"
#include "ops/sample_rows/row_draw.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

// What the draws say must fit, which the caller has checked: rows, slots, tokens and ranges within
// the arrays.
struct SampleRowsArgs {
  TensorView logits;   // [rows, vocab] f32, vocab at most kMaxSampledVocab
  TensorView draws;    // [n, sizeof(RowDraw)] U8
  TensorView edits;    // [edits, sizeof(RowEdit)] U8
  TensorView tokens;   // [tokens] i32: what excluded and end tokens are ranges of
  TensorView masks;    // [masks, (vocab + 31) / 32] i32
  TensorView sampled;  // [slots] i32: the drawn tokens, 0 for draws without one
  TensorView out;      // [n, sizeof(SampledRow)] U8
};

Status SampleRows(const SampleRowsArgs& args, Stream& stream);

// Puts sampled tokens into the inputs of the step that runs them.
struct PlaceSampledTokensArgs {
  TensorView slots;      // [rows] i32: whose token a row runs, or -1: its id is there already
  TensorView sampled;    // [slots] i32
  TensorView token_map;  // [vocab] i32: compressed ids of the n-gram tables
  TensorView token_ids;  // [rows] i32, changed
  TensorView lookback;   // [rows, n-gram] i32, column 0 is changed
};

Status PlaceSampledTokens(const PlaceSampledTokensArgs& args, Stream& stream);

}  // namespace deepinfer
