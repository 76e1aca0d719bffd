// Random weights as stored, for tests and benchmarks of linears.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "ops/linear/linear.h"
#include "tensor/float_formats.h"

namespace deepinfer::testing {

// A weight as stored, and memory for it.
struct StoredWeight {
  std::vector<uint8_t> weight;
  std::vector<uint8_t> scale;
  LinearSource source;
};

// Codes are uniform over all that are finite; scales are bytes from min_scale to max_scale, both of
// which occur where there are two scales.
inline StoredWeight RandomWeight(WeightFormat format, int64_t n, int64_t k, uint32_t seed,
                                 int min_scale = 110, int max_scale = 130) {
  std::mt19937 random(seed);
  StoredWeight stored;
  stored.source.format = format;
  stored.source.n = n;
  stored.source.k = k;
  if (format == WeightFormat::kBf16) {
    stored.weight.resize(static_cast<size_t>(2 * n * k));
    std::normal_distribution<float> normal(0.0f, 0.05f);
    for (int64_t i = 0; i < n * k; ++i) {
      const Bf16 value = F32ToBf16(normal(random));
      std::memcpy(stored.weight.data() + 2 * i, &value, 2);
    }
    stored.source.weight = TensorView(stored.weight.data(), DType::kBf16, {n, k});
    return stored;
  }
  const bool fp8 = format == WeightFormat::kFp8Block;
  stored.weight.resize(static_cast<size_t>(fp8 ? n * k : n * k / 2));
  for (uint8_t& code : stored.weight) {
    do {
      code = static_cast<uint8_t>(random() & 255);
    } while (fp8 && (code & 0x7f) == 0x7f);
  }
  const int64_t scale_rows = fp8 ? (n + 31) / 32 : n;
  stored.scale.resize(static_cast<size_t>(scale_rows * (k / 32)));
  std::uniform_int_distribution<int> scale(min_scale, max_scale);
  for (uint8_t& s : stored.scale) s = static_cast<uint8_t>(scale(random));
  stored.scale.front() = static_cast<uint8_t>(min_scale);
  stored.scale.back() = static_cast<uint8_t>(max_scale);
  stored.source.weight = fp8 ? TensorView(stored.weight.data(), DType::kFp8E4M3, {n, k})
                             : TensorView(stored.weight.data(), DType::kFp4x2, {n, k / 2});
  stored.source.scale = TensorView(stored.scale.data(), DType::kE8M0, {scale_rows, k / 32});
  return stored;
}

}  // namespace deepinfer::testing
