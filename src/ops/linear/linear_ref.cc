// The specification of ops/linear in plain loops, and the implementation at CpuLevel::kScalar.
//
// Order of summation: the products of 32 consecutive columns are added in order, starting from
// zero, with unscaled codes; then the sum times the block's scale is added to the total. The fp32
// levels (AVX2, AVX-512) keep exactly this order. All products are exact (8 + 8 significant bits at
// most) and scales are powers of two, so a fused multiply-add rounds the same as the separate
// operations here, and those levels return the same bits unless a product or a scaled sum is
// subnormal or infinite.
#include <vector>

#include "base/check.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_pack.h"
#include "tensor/float_formats.h"

namespace deepinfer {
namespace {

void StoreOutput(const TensorView& y, int64_t row, int64_t output, float value) {
  if (y.dtype() == DType::kF32) {
    y.Row<float>(row)[output] = value;
  } else {
    y.Row<Bf16>(row)[output] = F32ToBf16(value);
  }
}

float Dot(const Bf16* x, const std::vector<float>& codes, const std::vector<float>& scales) {
  float total = 0.0f;
  for (size_t block = 0; block < scales.size(); ++block) {
    float sum = 0.0f;
    for (size_t k = 32 * block; k < 32 * (block + 1) && k < codes.size(); ++k) {
      sum += Bf16ToF32(x[k]) * codes[k];
    }
    total += sum * scales[block];
  }
  return total;
}

template <class Weight>
void Run(const Weight& weight, int64_t n, int64_t k, const TensorView& x, const int32_t* row_index,
         int64_t begin, int64_t end, const TensorView& y, int64_t first_output,
         int64_t last_output) {
  DI_CHECK_LE(last_output, n);
  std::vector<float> codes(static_cast<size_t>(k));
  std::vector<float> scales(static_cast<size_t>((k + 31) / 32));
  for (int64_t output = first_output; output < last_output; ++output) {
    UnpackLinearOutput(weight, output, codes, scales);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t x_row = row_index == nullptr ? row : row_index[row];
      StoreOutput(y, row, output, Dot(x.Row<Bf16>(x_row), codes, scales));
    }
  }
}

}  // namespace

void LinearReference(const LinearSource& source, const TensorView& x, const TensorView& y) {
  Run(source, source.n, source.k, x, nullptr, 0, x.rows(), y, 0, source.n);
}

void LinearReferenceRows(const LinearWeight& weight, const TensorView& x, const int32_t* row_index,
                         int64_t begin, int64_t end, const TensorView& y, Stream& stream) {
  stream.pool().ParallelFor(weight.n(), [&](int64_t first, int64_t last, int) {
    Run(weight, weight.n(), weight.k(), x, row_index, begin, end, y, first, last);
  });
}

}  // namespace deepinfer
