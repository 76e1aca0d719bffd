// Shapes of linear layers for the tests: edges of the tiles (64 outputs), of the blocks (32
// columns) and of the register blocks, in every format.
#pragma once

#include <cstdint>

#include "ops/linear/linear.h"

namespace deepinfer {

struct LinearCase {
  WeightFormat format;
  int64_t n;
  int64_t k;
};

inline constexpr LinearCase kLinearCases[] = {
    // Eight segments on a GPU (cuda_pack.h), the last one shorter than the others.
    {WeightFormat::kBf16, 40, 1984},
    {WeightFormat::kFp8Block, 96, 1920},
    // k: one block, less than a block (bf16 only), a panel of 8 blocks, a panel and a bit.
    {WeightFormat::kBf16, 1, 1},
    {WeightFormat::kBf16, 64, 31},
    {WeightFormat::kBf16, 65, 33},
    {WeightFormat::kBf16, 130, 256},
    {WeightFormat::kBf16, 17, 391},
    {WeightFormat::kBf16, 200, 1024},
    {WeightFormat::kFp8Block, 1, 32},
    {WeightFormat::kFp8Block, 64, 64},
    {WeightFormat::kFp8Block, 33, 96},
    {WeightFormat::kFp8Block, 97, 256},
    {WeightFormat::kFp8Block, 130, 288},
    {WeightFormat::kFp8Block, 192, 1280},
    {WeightFormat::kFp4Group, 1, 32},
    {WeightFormat::kFp4Group, 64, 64},
    {WeightFormat::kFp4Group, 65, 96},
    {WeightFormat::kFp4Group, 127, 256},
    {WeightFormat::kFp4Group, 150, 544},
    {WeightFormat::kFp4Group, 256, 1280},
};

// Tolerance of one fp32 output against the exact sum. fp32 accumulation in blocks of 32 rounds at
// most 32 + k / 32 times, by 2^-24 of the sum of absolute products each; the AMX level halves the
// chain within a block, and vdpbf16ps may round twice per pair. All are bounded by
// (32 + k) * 2^-24.
inline double LinearTolerance(int64_t k, double sum_of_magnitudes) {
  return static_cast<double>(32 + k) * 0x1p-24 * sum_of_magnitudes + 1e-30;
}

}  // namespace deepinfer
