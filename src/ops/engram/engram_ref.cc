#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/engram/engram_impl.h"
#include "ops/row_access.h"

namespace deepinfer {

float EngramGate(float dot) {
  const float root = std::copysign(std::sqrt(std::max(std::fabs(dot), 1e-6f)), dot);
  return 1.0f / (1.0f + std::exp(-root));
}

namespace reference {

void EngramGather(const EngramGatherArgs& args, int64_t begin, int64_t end) {
  const int64_t lookups = args.table_rows.dim(1);
  const int64_t channels = args.weight.dim(1);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = args.table_rows.Row<int64_t>(i / lookups)[i % lookups];
    const uint8_t* codes = args.weight.Row<uint8_t>(row);
    const uint8_t* scales = args.scale.Row<uint8_t>(row);
    Bf16* out = args.out.Row<Bf16>(i / lookups) + (i % lookups) * channels;
    for (int64_t d = 0; d < channels; ++d)
      out[d] = F32ToBf16(E4M3ToF32(codes[d]) * E8M0ToF32(scales[d / 32]));
  }
}

void EngramApply(const EngramApplyArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t hidden = args.streams.dim(2);
  const auto n = static_cast<double>(hidden);
  for (int64_t t = row_begin; t < row_end; ++t) {
    const Bf16* key = args.kv.Row<Bf16>(t);
    const Bf16* value = key + 4 * hidden;
    for (int64_t s = 0; s < 4; ++s) {
      Bf16* h = args.streams.Row<Bf16>(t) + s * hidden;
      const Bf16* qw = args.q_weight.Row<Bf16>(s);
      const Bf16* kw = args.k_weight.Row<Bf16>(s);
      double dot = 0.0;
      double h_square = 0.0;
      double k_square = 0.0;
      for (int64_t d = 0; d < hidden; ++d) {
        const float hd = Bf16ToF32(h[d]);
        const float kd = Bf16ToF32(key[s * hidden + d]);
        const float w = Bf16ToF32(qw[d]) * Bf16ToF32(kw[d]);
        dot += static_cast<double>(hd * w) * kd;
        h_square += static_cast<double>(hd) * hd;
        k_square += static_cast<double>(kd) * kd;
      }
      const float h_scale = 1.0f / std::sqrt(static_cast<float>(h_square / n) + args.eps);
      const float k_scale = 1.0f / std::sqrt(static_cast<float>(k_square / n) + args.eps);
      const auto root_n = static_cast<float>(1.0 / std::sqrt(n));
      const float gate = EngramGate(static_cast<float>(dot) * h_scale * k_scale * root_n);
      for (int64_t d = 0; d < hidden; ++d)
        h[d] = F32ToBf16(Bf16ToF32(h[d]) + gate * Bf16ToF32(value[d]));
    }
  }
}

}  // namespace reference
}  // namespace deepinfer
