// Runs drafting passes over a batch of sequences: checks what is asked for, builds the arrays,
// calls the model, and brings the drafts to the host. What an executor has beside its steps where
// the model drafts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"
#include "model/model.h"
#include "state/cache_memory.h"
#include "state/step_plan.h"
#include "tensor/buffer.h"
#include "tensor/stream.h"

namespace deepinfer {

// The drafts of all chunks of a plan, in host memory, valid until the next pass or step. Slot after
// slot: token k of chunk r is tokens.Row<int32_t>(k)[r].
struct Drafts {
  TensorView tokens;      // [K, chunks] i32, for positions length + 1 + k
  TensorView score;       // [K, chunks] f32: confidence before the sigmoid
  TensorView confidence;  // [K, chunks] f32: calibrated probability that token k is accepted if all
                          // before it are
  TensorView logits;  // [chunks * K, vocab] f32, rows r * K + k, if they were wanted; else empty
};

class Drafter {
 public:
  // For blocks of `block` slots of up to `max_sequences` sequences.
  static Result<Drafter> Create(const ModelConfig& config, int64_t block, int64_t max_sequences,
                                Stream& stream);

  int64_t block() const {
    return block_;
  }
  // Calibration of the confidences: one temperature for all slots or one for each. Errors:
  // kInvalidArgument with field "draft_temperatures".
  Status SetTemperatures(std::span<const float> temperatures, Stream& stream);

  // `logits` is memory for chunks * K rows, `chooser` as of Model::Draft. Errors: kInvalidArgument.
  // Nothing changes but the drafts.
  Result<Drafts> Run(const Model& model, const CacheViews& caches, const CacheMemory& memory,
                     std::span<const DraftChunk> chunks, const TensorView& logits, bool want_logits,
                     DraftChooser* chooser, Stream& stream);

 private:
  Drafter() = default;
  Status Validate(const ModelConfig& config, const CacheMemory& memory,
                  std::span<const DraftChunk> chunks) const;

  int64_t block_ = 0;
  int64_t max_sequences_ = 0;
  Buffer temperatures_;  // [K] f32
  Buffer drafts_;        // [3, K, max sequences] words: tokens, scores, confidences
  Buffer host_drafts_;   // the same on the host; unused when the device is the host
  Buffer host_logits_;
  Buffer staging_;  // page-locked: arrays on their way to a GPU
  std::vector<int32_t> anchors_, lengths_, window_table_, first_page_, window_begin_;
};

}  // namespace deepinfer
