// Packed layouts of linear weights: how PackLinearWeight arranges the codes for the kernels of a
// level, and the way back. Internal to ops/linear.
//
// Every layout but the row-major one is a sequence of tiles of 64 outputs; a tile is one sequential
// stream of bytes, so that a thread that works through a range of tiles reads memory front to back.
// kLinearTileSlack bytes of no meaning follow the last tile.
// Outputs beyond n and columns beyond k are zero.
//
//   FP4   per block of 32 columns: 64 scale bytes (output order), then 1024 bytes of codes.
//   FP8   first the scale bytes of the whole tile, 2 per block (outputs 0-31, 32-63), padded to a
//         multiple of 64; then codes.
//   bf16  codes only.
//
// Codes within a tile, kPairs (AVX-512 and AMX; a dword lane is an output):
//
//   bf16  dword (k / 2, output) = columns k, k + 1.
//   FP8   word (k / 2, output) = columns k, k + 1.
//   FP4   dword (k / 8, output) = eight columns; low half columns 0 2 4 6, high half 1 3 5 7, so
//         that a shift and a 16-bit permute give bf16 pairs.
//
// kLanes (AVX2; a dword lane is an output or two; see linear_avx2.cc for how codes become fp32):
//
//   bf16  as kPairs.
//   FP8   dword (k / 4, output) = columns k ... k + 3.
//   FP4   32 bytes (k / 4, output / 16); dword i of these is outputs i (low half) and 8 + i of the
//         16. A word is four columns: exponent and mantissa in bits 6-8, 0-2, 11-13 and 3-5, sign
//         in bits 15, 9, 14 and 10. The first column is at the place that it has in bf16, the
//         second gets there by one shift, the others by a shift that puts the sign on top and one
//         back that repeats it.
//
// NaN never reaches a kernel: an output with a NaN code (FP8) or NaN scale is NaN for every x, so
// such outputs are listed and overwritten at the end, and their codes and scales are stored as zero
// and one.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ops/linear/linear.h"
#include "ops/linear/linear_kernels.h"
#include "tensor/buffer.h"

namespace deepinfer {

// kCuda: see ops/linear/cuda_pack.h.
enum class LinearLayout : uint8_t { kRowMajor, kLanes, kPairs, kCuda };

struct CudaLinearWeight;  // ops/linear/cuda_pack.h

struct LinearWeight::Packed {
  LinearLayout layout = LinearLayout::kRowMajor;
  CpuLevel level = CpuLevel::kScalar;
  int64_t blocks = 0;  // of 32 columns, the last one padded
  int64_t tiles = 0;   // of 64 outputs, the last one padded
  int64_t tile_bytes = 0;
  std::shared_ptr<const CudaLinearWeight> cuda;  // kCuda only; everything else is unused then
  Buffer data;  // tiles; for kRowMajor a copy of the source: weight rows, then scale rows
  std::vector<int32_t> nan_outputs;
  // Range of the scale bytes as the kernels see them, with one (127) always in it.
  int min_scale = 127;
  int max_scale = 127;
  // A block scale so small or large that code * scale leaves bf16's normal range: see
  // linear_amx.cc. E4M3 reaches from 2^-9 to 448, E2M1 from 2^-1 to 6.
  bool extreme_scales() const {
    return min_scale < 16 || max_scale > 240;
  }

  const uint8_t* tile(int64_t index) const {
    return static_cast<const uint8_t*>(data.data()) + index * tile_bytes;
  }
};

LinearLayout LinearLayoutOf(CpuLevel level);

// Unscaled code values of one output, codes[k], and its scale per block of 32 columns,
// scales[ceil(k / 32)]; NaN scales and codes as NaN.
void UnpackLinearOutput(const LinearSource& source, int64_t output, std::span<float> codes,
                        std::span<float> scales);
void UnpackLinearOutput(const LinearWeight& weight, int64_t output, std::span<float> codes,
                        std::span<float> scales);

// Rows [begin, end) of y = x * W^T in plain loops (linear_ref.cc), on the stream's threads. Row r
// takes x's row row_index[r], or r if row_index is null.
void LinearReferenceRows(const LinearWeight& weight, const TensorView& x, const int32_t* row_index,
                         int64_t begin, int64_t end, const TensorView& y, Stream& stream);

}  // namespace deepinfer
