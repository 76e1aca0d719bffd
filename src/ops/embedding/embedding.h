// streams[t, s, :] = table[ids[t], :] for each of the residual streams s. No scaling.
#pragma once

#include "base/error.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

struct EmbeddingArgs {
  TensorView ids;      // [rows] i32, each in [0, vocab): checked by the caller
  TensorView table;    // [vocab, hidden] bf16
  TensorView streams;  // [rows, streams, hidden] bf16
  // [rows, streams] f32, set to (1, 0, ...): the weights of the first collapse (model description,
  // 6.1), which takes the first stream; or empty.
  TensorView first_pre;
};

Status Embedding(const EmbeddingArgs& args, Stream& stream);

}  // namespace deepinfer
