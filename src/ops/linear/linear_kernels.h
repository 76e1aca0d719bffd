// The seam between the driver of ops/linear (linear.cc) and the kernels of one instruction-set
// level each. Not for other modules. Kept free of inline functions: this header is compiled into
// files with different instruction sets, and the linker may keep any copy of an inline function.
#pragma once

#include <cstdint>

namespace deepinfer {

// Outputs (rows of W) per tile and columns per block: the units of every packed layout and of the
// summation order.
inline constexpr int64_t kLinearTileOutputs = 64;
inline constexpr int64_t kLinearBlock = 32;
// Bytes behind the last tile that kernels may load, but not use.
inline constexpr int64_t kLinearTileSlack = 64;
// Rows of x that one call of a kernel takes at most. 192 rows x 256 columns of fp32 are 192 KiB:
// with a panel of 64 KiB they stay in an L2 of 512 KiB.
inline constexpr int64_t kLinearMaxRows = 192;
// Dequantised panel of 64 outputs x 256 columns of fp32 and its block scales.
inline constexpr int64_t kLinearPanelBlocks = 8;
inline constexpr int64_t kLinearScratchBytes =
    kLinearTileOutputs * 4 * kLinearPanelBlocks * (kLinearBlock + 1);

// Up to this many rows the AMX level does without tiles.
inline constexpr int64_t kLinearAmxFewRows = 3;

// LinearTileJob::x_exponent of x as it is.
inline constexpr int kLinearUnscaledX = -1000;

enum class LinearCodes : uint8_t { kBf16, kFp8, kFp4 };

// totals[r, i] = sum over k of x[r, k] * W[tile outputs i, k], for one tile of 64 outputs.
struct LinearTileJob {
  const uint8_t* tile = nullptr;  // one packed tile, 64-byte aligned
  LinearCodes codes = LinearCodes::kBf16;
  int64_t blocks = 0;   // of 32 columns
  int min_scale = 127;  // range of the scale bytes of the whole weight
  int max_scale = 127;
  const void* x = nullptr;  // [rows, 32 * blocks] fp32 or bf16 as the level wants; zero beyond k
  int64_t x_stride = 0;     // elements
  int64_t rows = 0;         // 1 ... kLinearMaxRows
  // AVX2, one row, codes other than bf16: x has been multiplied with 2^x_exponent.
  int x_exponent = kLinearUnscaledX;
  float* totals = nullptr;  // [rows, 64], 64-byte aligned; written, not read
  void* scratch = nullptr;  // kLinearScratchBytes, 64-byte aligned
};

void LinearTileAvx2(const LinearTileJob& job);        // x fp32
void LinearTileAvx512(const LinearTileJob& job);      // x fp32
void LinearTileAvx512Bf16(const LinearTileJob& job);  // x bf16
void LinearTileAmx(const LinearTileJob& job);         // x bf16
// The same bits without tiles. False if the job has too many rows for that, or values for which
// the bits could differ; then nothing has been done.
bool LinearTileAmxFewRows(const LinearTileJob& job);

// Multiplies x[0, count) (values of bf16, count a multiple of 8, 32-byte aligned) with the power of
// two whose exponent it returns, such that LinearTileAvx2 can use codes times a tiny power of two
// for one row: sums of products become sums times a power of two, with every rounding in the same
// place, because none becomes infinite and those that are subnormal are exact. Returns
// kLinearUnscaledX and leaves x alone if x has no such factor.
int LinearScaleRowAvx2(LinearCodes codes, float* x, int64_t count);

// to[0, k) = from[0, k) as fp32.
void Bf16RowToF32Avx2(const uint16_t* from, int64_t k, float* to);
// to[0, count) = bf16(from), round to nearest even, NaN stays NaN; the bits of F32ToBf16.
void F32RowToBf16Avx2(const float* from, int64_t count, uint16_t* to);

}  // namespace deepinfer
