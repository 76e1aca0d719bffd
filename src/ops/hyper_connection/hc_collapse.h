// The residual streams as one vector, without the norm that follows where a sub-layer reads them
// (HcCollapseNorm): what the draft layers take from the target's streams, and what their own
// streams end in.
#pragma once

#include "base/error.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

// y = bf16( sum_i pre[i] * streams[i] ), ascending i with fused multiply-adds.
struct HcCollapseArgs {
  TensorView streams;     // [rows, 4, hidden] bf16
  TensorView pre;         // [rows, 4] f32, or empty: 1/4 each, the mean
  TensorView y;           // [rows, hidden] bf16, rows may be strided
  bool quantize = false;  // y on the Q8 grid (ops/quantize); hidden is a multiple of 32 then
};

// A row depends on itself only.
Status HcCollapse(const HcCollapseArgs& args, Stream& stream);

}  // namespace deepinfer
