// y = Q8(x): puts the input of a quantised linear on the FP8 grid (model description, section 5.1).
// q * s is exact in bf16.
#pragma once

#include "base/error.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

struct QuantizeFp8Args {
  TensorView x;  // [rows, channels] bf16 | f32, channels a multiple of 32
  TensorView y;  // [rows, channels] bf16; may alias a bf16 x
};

// A row depends on itself only.
Status QuantizeFp8(const QuantizeFp8Args& args, Stream& stream);

}  // namespace deepinfer
