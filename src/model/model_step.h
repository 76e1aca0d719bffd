// The tensors of a step on its way through the layers. Included by the files that implement Model.
#pragma once

#include <vector>

#include "base/check.h"
#include "model/model.h"

namespace deepinfer {

// Everything that lives for one step. Scratch of a sub-layer is taken and returned inside it.
struct Model::Step {
  const StepBatch* batch = nullptr;
  StepProbe* probe = nullptr;
  const CacheViews* caches = nullptr;
  const BatchLayout* layout = nullptr;  // of the rows that the current layer runs
  int64_t rows = 0;
  int64_t block_rows = 0;  // of a drafting pass: slots of a block

  TensorView streams;  // [rows, 4, hidden] bf16: the residual streams
  TensorView pre,
      next_pre;           // [rows, 4] f32: weights of the coming collapse, and of the one after it
  TensorView post, comb;  // [rows, 4], [rows, 16] f32 of the current site
  TensorView x, x_grid;   // [rows, hidden] bf16: normalised sub-layer input, and on the Q8 grid
  TensorView y;           // [rows, hidden] bf16: sub-layer output
  bool has_output = false;  // y is still to be added to the streams
  TensorView qr_grid;       // [rows, q_lora_rank] bf16: normalised low-rank query on the Q8 grid
  TensorView window_table;  // [rows, pairs, 2] f32: rotations of ratio-0 layers
  TensorView compressed_table;          // the same for layers with compressed keys
  std::vector<TensorView> entry_table;  // per element of batch->entries
  TensorView selected;                  // [rows, topk] i32: the latest published selection
  TensorView candidates;                // [rows, candidate blocks] i32
  TensorView experts;                   // [rows, k] i32: the current layer's routing
  TensorView targets;  // [rows, target layers * hidden] bf16, on the Q8 grid: mean streams at the
                       // entry of the layers that the draft layers read

  const CompressedEntries& entries(int64_t ratio, size_t* index) const {
    for (size_t i = 0; i < batch->entries.size(); ++i) {
      if (batch->entries[i].ratio == ratio) {
        *index = i;
        return batch->entries[i];
      }
    }
    CheckFailed(__FILE__, __LINE__, "a step describes the entries of every ratio of the model", "");
  }
};

}  // namespace deepinfer
