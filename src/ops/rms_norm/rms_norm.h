// y[t, :] = bf16( weight * (x[t, :] * rsqrt(mean(x[t, :]^2) + eps)) ), all in fp32.
#pragma once

#include "base/error.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

struct RmsNormArgs {
  TensorView x;       // [rows, channels] bf16
  TensorView weight;  // [channels] bf16
  TensorView y;       // [rows, channels] bf16; may alias x; may be empty when only y_grid is wanted
  TensorView y_grid;  // [rows, channels] bf16, Q8(y); may be empty
  float eps = 1e-20f;
};

// A row depends on itself only.
Status RmsNorm(const RmsNormArgs& args, Stream& stream);

}  // namespace deepinfer
