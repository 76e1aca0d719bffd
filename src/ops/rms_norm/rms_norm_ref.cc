#include <cmath>
#include <vector>

#include "ops/quantize/group_quantize.h"
#include "ops/rms_norm/rms_norm_impl.h"
#include "ops/row_access.h"

namespace deepinfer::reference {

void RmsNormRow(const float* x, const Bf16* weight, int64_t channels, float eps, float* y) {
  double sum = 0.0;
  for (int64_t i = 0; i < channels; ++i) sum += static_cast<double>(x[i]) * x[i];
  const float mean = static_cast<float>(sum / static_cast<double>(channels));
  const float r = 1.0f / std::sqrt(mean + eps);
  for (int64_t i = 0; i < channels; ++i) y[i] = RoundToBf16(Bf16ToF32(weight[i]) * (x[i] * r));
}

void RmsNorm(const RmsNormArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t channels = args.x.row_size();
  std::vector<float> row(static_cast<size_t>(channels));
  for (int64_t t = row_begin; t < row_end; ++t) {
    LoadBf16(args.x.Row<Bf16>(t), channels, row.data());
    RmsNormRow(row.data(), args.weight.Row<Bf16>(0), channels, args.eps, row.data());
    if (!args.y.empty()) StoreRowBf16(row.data(), channels, args.y.Row<Bf16>(t));
    if (args.y_grid.empty()) continue;
    Q8InPlace(row.data(), channels);
    StoreRowBf16(row.data(), channels, args.y_grid.Row<Bf16>(t));
  }
}

}  // namespace deepinfer::reference
