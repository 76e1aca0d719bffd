// Where the layout of ops/linear/cuda_pack.h puts each number, as functions that host and device
// code share: what the packing kernel writes, and what tests and the reference kernel read.
#pragma once

#include <bit>
#include <cstdint>

#include "ops/linear/linear.h"

namespace deepinfer {

inline constexpr int64_t kCudaStripOutputs = 16;
inline constexpr int64_t kCudaTileStrips = 4;
inline constexpr int64_t kCudaUnitBytes = 512;
// Units that are copied together, and the bytes of their scales that follow them.
inline constexpr int64_t kCudaChunkUnits = 4;

constexpr int64_t CudaUnitColumns(WeightFormat format) {
  return format == WeightFormat::kBf16 ? 16 : format == WeightFormat::kFp8Block ? 32 : 64;
}

constexpr int64_t CudaChunkScaleBytes(WeightFormat format) {
  return format == WeightFormat::kBf16 ? 0 : format == WeightFormat::kFp8Block ? 16 : 128;
}
constexpr int64_t CudaChunkBytes(WeightFormat format) {
  return kCudaChunkUnits * kCudaUnitBytes + CudaChunkScaleBytes(format);
}
constexpr int64_t CudaChunkColumns(WeightFormat format) {
  return kCudaChunkUnits * CudaUnitColumns(format);
}

// Byte offset of a unit in its strip.
constexpr int64_t CudaUnitOffset(WeightFormat format, int64_t unit) {
  return unit * kCudaUnitBytes + unit / kCudaChunkUnits * CudaChunkScaleBytes(format);
}

// Words of scales: of FP8 one for each unit, of FP4 one for each unit and row g of the first eight
// (the second eight rows are in the same words).
constexpr int64_t CudaScaleWordOffset(WeightFormat format, int64_t unit, int64_t g) {
  return CudaUnitOffset(format, unit / kCudaChunkUnits * kCudaChunkUnits) +
         kCudaChunkUnits * kCudaUnitBytes + (format == WeightFormat::kFp4Group ? 16 * g : 0) +
         unit % kCudaChunkUnits * 4;
}

// A pair of bf16 powers of two from exponent fields.
constexpr uint32_t CudaScalePair(uint32_t low, uint32_t high) {
  return (low << 7) | (high << 23);
}
// FP4: the fields of rows g and g + 8 in the unit's first and second 32 columns.
constexpr uint32_t CudaFp4ScaleWord(uint32_t low0, uint32_t high0, uint32_t low1, uint32_t high1) {
  return CudaScalePair(low0, high0) | std::rotr(CudaScalePair(low1, high1), 8);
}
constexpr uint32_t CudaFp4Scales(uint32_t word, int block) {
  return std::rotl(word, 8 * block) & 0x7f807f80u;
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

// A code as bf16 bits in place, which are its value times 2^-CudaScaleBias.
constexpr uint32_t CudaCodeBits(WeightFormat format, uint32_t code) {
  return format == WeightFormat::kFp8Block ? ((code & 0x80u) << 8) | ((code & 0x7fu) << 4)
                                           : ((code & 8u) << 12) | ((code & 7u) << 6);
}
constexpr uint32_t CudaCodeOfBits(WeightFormat format, uint32_t bits) {
  return format == WeightFormat::kFp8Block ? ((bits >> 8) & 0x80u) | ((bits >> 4) & 0x7fu)
                                           : ((bits >> 12) & 8u) | ((bits >> 6) & 7u);
}

// FP4: a pair of words has the eight fragment registers of two steps. Registers 0 to 2 of step i
// are in word i, which rotated left by CudaFp4Rotation has their bits in place (kCudaFp4Mask).
// What is left of both words, merged, has register 3 of both steps.
inline constexpr uint32_t kCudaFp4Mask = 0x81c081c0u;
constexpr int CudaFp4Rotation(int fragment) {
  return fragment == 0 ? 6 : fragment == 1 ? 0 : 26;
}
inline constexpr uint32_t kCudaFp4RestMask = 0x0c180c18u;  // of the first word
inline constexpr int kCudaFp4RestShift = 2;                // of the second word, to the left
// Of the merged word.
constexpr int CudaFp4RestRotation(int step) {
  return step == 0 ? 2 : 28;
}
constexpr uint32_t CudaFp4Rest(uint32_t first, uint32_t second) {
  return (first & kCudaFp4RestMask) | ((second << kCudaFp4RestShift) & ~kCudaFp4RestMask);
}
// Puts the register of a step (0 or 1) into words that have zeros there.
constexpr void CudaFp4Put(int step, int fragment, uint32_t bits, uint32_t (&words)[2]) {
  if (fragment < 3) {
    words[step] |= std::rotr(bits, CudaFp4Rotation(fragment));
    return;
  }
  const uint32_t rest = std::rotr(bits, CudaFp4RestRotation(step));
  words[0] |= rest & kCudaFp4RestMask;
  words[1] |= (rest & ~kCudaFp4RestMask) >> kCudaFp4RestShift;
}
constexpr uint32_t CudaFp4Get(int step, int fragment, uint32_t first, uint32_t second) {
  if (fragment == 3)
    return std::rotl(CudaFp4Rest(first, second), CudaFp4RestRotation(step)) & kCudaFp4Mask;
  return std::rotl(step == 0 ? first : second, CudaFp4Rotation(fragment)) & kCudaFp4Mask;
}

// FP8: a word has two registers, the even one (0 or 2) in place, the odd one in the bits between.
inline constexpr uint32_t kCudaFp8Mask = 0x87f087f0u;
inline constexpr uint32_t kCudaFp8HighMask = 0x87808780u;
inline constexpr uint32_t kCudaFp8LowMask = 0x00700070u;
constexpr uint32_t CudaFp8Put(int fragment, uint32_t bits) {
  if (fragment % 2 == 0) return bits;
  return std::rotl(bits & kCudaFp8HighMask, 4) | ((bits & kCudaFp8LowMask) >> 4);
}
constexpr uint32_t CudaFp8Get(int fragment, uint32_t word) {
  if (fragment % 2 == 0) return word & kCudaFp8Mask;
  return (std::rotr(word, 4) & kCudaFp8HighMask) | ((word << 4) & kCudaFp8LowMask);
}

constexpr uint32_t CudaWordAt(const uint8_t* bytes) {
  return static_cast<uint32_t>(bytes[0]) | (static_cast<uint32_t>(bytes[1]) << 8) |
         (static_cast<uint32_t>(bytes[2]) << 16) | (static_cast<uint32_t>(bytes[3]) << 24);
}

// The code (bf16 bits, E4M3 or E2M1) of an output of a strip and a column, from the packed strip.
constexpr uint32_t CudaCodeAt(WeightFormat format, const uint8_t* strip, int64_t output,
                              int64_t column) {
  const CudaCodePlace place = CudaPlaceOf(format, output, column);
  const uint8_t* lane = strip + CudaUnitOffset(format, place.unit) + 16 * place.lane;
  uint32_t pair = 0;
  switch (format) {
    case WeightFormat::kBf16:
      pair = CudaWordAt(lane + 4 * place.fragment);
      break;
    case WeightFormat::kFp8Block:
      pair = CudaFp8Get(place.fragment, CudaWordAt(lane + 8 * place.step + place.fragment / 2 * 4));
      break;
    case WeightFormat::kFp4Group: {
      const uint8_t* words = lane + place.step / 2 * 8;
      pair = CudaFp4Get(place.step % 2, place.fragment, CudaWordAt(words), CudaWordAt(words + 4));
      break;
    }
  }
  const uint32_t bits = (pair >> (16 * place.half)) & 0xffffu;
  return format == WeightFormat::kBf16 ? bits : CudaCodeOfBits(format, bits);
}

// The exponent field of the scale of an output of a strip and a block of 32 columns.
constexpr int CudaScaleFieldAt(WeightFormat format, const uint8_t* strip, int64_t output,
                               int64_t block) {
  const bool fp4 = format == WeightFormat::kFp4Group;
  const int64_t unit = fp4 ? block / 2 : block;
  const uint32_t word = CudaWordAt(strip + CudaScaleWordOffset(format, unit, output % 8));
  const uint32_t pair = fp4 ? CudaFp4Scales(word, static_cast<int>(block % 2)) : word;
  return static_cast<int>((pair >> (output < 8 ? 7 : 23)) & 0xffu);
}

// What a scale field means: the exponent field of a bf16 number that E2M1 bits in place (2^-126 of
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
          case WeightFormat::kFp8Block: {
            if (column >= columns) break;
            const uint32_t bits = CudaCodeBits(format, rows[row][column]) |
                                  (CudaCodeBits(format, rows[row][column + 1]) << 16);
            out[2 * step + pair] |= CudaFp8Put(fragment, bits);
            break;
          }
          case WeightFormat::kFp4Group: {
            if (column >= columns) break;
            const uint32_t codes = rows[row][column / 2];
            const uint32_t bits =
                CudaCodeBits(format, codes & 15u) | (CudaCodeBits(format, codes >> 4) << 16);
            uint32_t words[2] = {};
            CudaFp4Put(static_cast<int>(step % 2), fragment, bits, words);
            out[step / 2 * 2] |= words[0];
            out[step / 2 * 2 + 1] |= words[1];
            break;
          }
        }
      }
    }
  }
}

}  // namespace deepinfer
