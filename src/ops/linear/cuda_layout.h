// Where the layout of ops/linear/cuda_pack.h puts each number, as functions that host and device
// code share: what the packing kernel writes, and what tests and the reference kernel read.
#pragma once

#include <cstdint>

#include "ops/linear/linear.h"

namespace deepinfer {

inline constexpr int64_t kCudaStripOutputs = 16;
inline constexpr int64_t kCudaTileStrips = 4;
inline constexpr int64_t kCudaUnitBytes = 512;
// FP4: four units and their scales.
inline constexpr int64_t kCudaFp4BlockUnits = 4;
inline constexpr int64_t kCudaFp4ScaleBytes = 128;
inline constexpr int64_t kCudaFp4BlockBytes =
    kCudaFp4BlockUnits * kCudaUnitBytes + kCudaFp4ScaleBytes;

constexpr int64_t CudaUnitColumns(WeightFormat format) {
  return format == WeightFormat::kBf16 ? 16 : format == WeightFormat::kFp8Block ? 32 : 64;
}

// Byte offset of a unit in its strip.
constexpr int64_t CudaUnitOffset(WeightFormat format, int64_t unit) {
  return unit * kCudaUnitBytes +
         (format == WeightFormat::kFp4Group ? unit / kCudaFp4BlockUnits * kCudaFp4ScaleBytes : 0);
}

// Byte offset in its strip of the scale of an output of the strip and a block of 32 columns.
constexpr int64_t CudaScaleOffset(WeightFormat format, int64_t padded_k, int64_t output,
                                  int64_t block) {
  if (format == WeightFormat::kFp8Block) return padded_k / 32 * kCudaUnitBytes + block;
  const int64_t unit = block / 2;
  return CudaUnitOffset(format, unit / kCudaFp4BlockUnits * kCudaFp4BlockUnits) +
         kCudaFp4BlockUnits * kCudaUnitBytes + output % 8 * 16 + unit % kCudaFp4BlockUnits * 4 +
         block % 2 * 2 + output / 8;
}

// The place of a code among a lane's 16 bytes of a unit: which lane, which of the unit's k16 steps,
// which fragment register (0 to 3), which half of it.
struct CudaCodePlace {
  int64_t unit;
  int lane;
  int step;
  int fragment;
  int half;
};
constexpr CudaCodePlace CudaPlaceOf(WeightFormat format, int64_t output, int64_t column) {
  const int64_t columns = CudaUnitColumns(format);
  const int in_step = static_cast<int>(column % 16);
  const int row = static_cast<int>(output);
  return {column / columns, row % 8 * 4 + in_step % 8 / 2, static_cast<int>(column % columns / 16),
          row / 8 + in_step / 8 * 2, in_step % 2};
}

// FP4: bits of a code in its half word: the low three (exponent and mantissa) and the sign.
constexpr uint32_t CudaFp4Bits(int fragment, uint32_t code) {
  const uint32_t sign = code >> 3;
  const uint32_t low = code & 7u;
  switch (fragment) {
    case 0:
      return (sign << 15) | (low << 6);
    case 1:
      return (sign << 12) | (low << 3);
    case 2:
      return (sign << 9) | low;
    default:
      return (sign << 14) | ((low & 4u) << 11) | ((low & 3u) << 10);
  }
}
constexpr uint32_t CudaFp4Code(int fragment, uint32_t half) {
  switch (fragment) {
    case 0:
      return ((half >> 15) & 1u) << 3 | ((half >> 6) & 7u);
    case 1:
      return ((half >> 12) & 1u) << 3 | ((half >> 3) & 7u);
    case 2:
      return ((half >> 9) & 1u) << 3 | (half & 7u);
    default:
      return ((half >> 14) & 1u) << 3 | ((half >> 13) & 1u) << 2 | ((half >> 10) & 3u);
  }
}

// The code (bf16 bits, E4M3 or E2M1) of an output of a strip and a column, from the packed strip.
constexpr uint32_t CudaCodeAt(WeightFormat format, const uint8_t* strip, int64_t output,
                              int64_t column) {
  const CudaCodePlace place = CudaPlaceOf(format, output, column);
  const uint8_t* lane = strip + CudaUnitOffset(format, place.unit) + 16 * place.lane;
  switch (format) {
    case WeightFormat::kBf16: {
      const uint8_t* at = lane + 4 * place.fragment + 2 * place.half;
      return static_cast<uint32_t>(at[0] | (at[1] << 8));
    }
    case WeightFormat::kFp8Block:
      // Registers 0 and 2 have the high bytes, 1 and 3 the low ones.
      return lane[8 * place.step + 4 * (place.fragment / 2) + 2 * place.half + 1 -
                  place.fragment % 2];
    case WeightFormat::kFp4Group: {
      const uint8_t* at = lane + 4 * place.step + 2 * place.half;
      return CudaFp4Code(place.fragment, static_cast<uint32_t>(at[0] | (at[1] << 8)));
    }
  }
  return 0;
}

// What a scale byte means: the exponent field of a bf16 number that E2M1 bits in place (2^-126 of
// their value) or E4M3 bits in place (2^-120) are multiplied by.
constexpr int CudaScaleBias(WeightFormat format) {
  return format == WeightFormat::kFp4Group ? 126 : 120;
}

// The sixteen bytes of one lane of one unit from the rows as stored: `low` and `high` are the rows
// g and g + 8 of the strip from the unit's first column on, null for rows beyond n; `columns` of
// the unit's columns exist. The last byte of a row is read by nobody else.
constexpr void CudaPackLane(WeightFormat format, int lane, const uint8_t* low, const uint8_t* high,
                            int64_t columns, uint32_t (&out)[4]) {
  const int t = lane % 4;
  const uint8_t* rows[2] = {low, high};
  for (uint32_t& word : out) word = 0;
  for (int row = 0; row < 2; ++row) {
    if (rows[row] == nullptr) continue;
    for (int64_t step = 0; step < CudaUnitColumns(format) / 16; ++step) {
      for (int pair = 0; pair < 2; ++pair) {
        const int fragment = 2 * pair + row;
        const int64_t column = 16 * step + 8 * pair + 2 * t;
        switch (format) {
          case WeightFormat::kBf16:
            for (int half = 0; half < 2; ++half) {
              if (column + half >= columns) continue;
              const uint8_t* at = rows[row] + 2 * (column + half);
              out[fragment] |= static_cast<uint32_t>(at[0] | (at[1] << 8)) << (16 * half);
            }
            break;
          case WeightFormat::kFp8Block:
            if (column >= columns) break;
            for (int half = 0; half < 2; ++half) {
              out[2 * step + pair] |= static_cast<uint32_t>(rows[row][column + half])
                                      << (16 * half + 8 * (1 - row));
            }
            break;
          case WeightFormat::kFp4Group: {
            if (column >= columns) break;
            const uint32_t codes = rows[row][column / 2];
            out[step] |=
                CudaFp4Bits(fragment, codes & 15u) | (CudaFp4Bits(fragment, codes >> 4) << 16);
            break;
          }
        }
      }
    }
  }
}

}  // namespace deepinfer
