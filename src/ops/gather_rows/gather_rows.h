// out[i] = source[row_index[i]]: rows of any type, moved as bytes.
#pragma once

#include "base/error.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

struct GatherRowsArgs {
  TensorView source;     // [rows, ...]
  TensorView row_index;  // [n] i32, each in [0, rows): checked by the caller
  TensorView out;        // [n, ...], type and row shape of the source
};

Status GatherRows(const GatherRowsArgs& args, Stream& stream);

}  // namespace deepinfer
