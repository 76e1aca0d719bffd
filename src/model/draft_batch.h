// What a drafting pass takes and gives. All views are on the model's device. Anchors and lengths
// are read there, so that the host need not know what the step before has drawn or accepted.
#pragma once

#include <cstdint>

#include "base/error.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

struct DraftBatch {
  int64_t block = 0;   // K: slots of a block, and tokens that are drafted
  TensorView anchors;  // [sequences] i32: the token that was sampled last and has no state yet
  TensorView lengths;  // [sequences] i32: tokens with state, which is the anchor's position
  // As of BatchLayout. A block sees the window in front of it as far as window_begin allows.
  TensorView window_table;       // [sequences, max pages] i32
  TensorView window_first_page;  // [sequences] i32
  TensorView window_begin;       // [sequences] i32
  TensorView temperatures;       // [K] f32, positive: calibration of the confidence; 1 is none
};

struct DraftOutput {
  TensorView tokens;  // [K, sequences] i32: token k of every sequence, for position length + 1 + k
  TensorView score;   // [K, sequences] f32: confidence before the sigmoid
  TensorView confidence;  // [K, sequences] f32: that token k is accepted if all before it are
  // [sequences * K, vocab] f32: what token k of sequence r was chosen from, in row r * K + k,
  // before a chooser has changed it.
  TensorView logits;
};

// Chooses the tokens of a slot. Confidences are computed from the tokens of the slots before, never
// from the one that they are about.
class DraftChooser {
 public:
  virtual ~DraftChooser() = default;
  // Writes the token of slot `slot` of every sequence to `tokens` [sequences] i32, in the stream's
  // order. Row r of `logits`, [sequences, vocab] f32 with strided rows (row r * K + slot of
  // DraftOutput::logits), may be changed.
  virtual Status Choose(int64_t slot, const TensorView& logits, const TensorView& tokens,
                        Stream& stream) = 0;
};

}  // namespace deepinfer
