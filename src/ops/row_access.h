// Converting rows between their storage type and fp32, for scalar code.
#pragma once

#include <cstdint>

#include "base/check.h"
#include "tensor/float_formats.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

inline void LoadBf16(const Bf16* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = Bf16ToF32(x[i]);
}

inline void StoreRowBf16(const float* x, int64_t count, Bf16* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = F32ToBf16(x[i]);
}

// Row `row` of a bf16 or f32 view as fp32.
inline void LoadRow(const TensorView& view, int64_t row, float* out) {
  const int64_t count = view.row_size();
  if (view.dtype() == DType::kBf16) {
    LoadBf16(view.Row<Bf16>(row), count, out);
  } else {
    DI_CHECK(view.dtype() == DType::kF32);
    const float* x = view.Row<float>(row);
    for (int64_t i = 0; i < count; ++i) out[i] = x[i];
  }
}

}  // namespace deepinfer
