// The AVX-512 kernel without bf16 dot products: fp32 multiply-adds, a vector lane is an output.
//
// Order of summation: that of linear_ref.cc and linear_avx2.cc, whose bits this returns. For every
// output one accumulator takes 32 consecutive columns in order by FMA with unscaled codes, starting
// from zero; then total = fma(accumulator, scale, total).
#include <immintrin.h>

#include "ops/linear/linear_columns.h"
#include "ops/linear/linear_kernels.h"

namespace deepinfer {
namespace {

// One row: codes are converted in registers and used once.
template <LinearCodes kCodes>
void OneRow(const LinearTileJob& job) {
  const float* x = static_cast<const float*>(job.x);
  const __m512 unit = Unit(kCodes);
  for (int64_t block = 0; block < job.blocks; ++block, x += kLinearBlock) {
    __m512 sum[kStrips];
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) sum[s] = _mm512_setzero_ps();
    DecodeBlock<kCodes>(
        job, block, [&](int column, int s, __m512 w) __attribute__((always_inline)) {
          sum[s] = _mm512_fmadd_ps(_mm512_set1_ps(x[column]), w, sum[s]);
        });
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) {
      float* total = job.totals + 16 * s;
      _mm512_store_ps(total, AddBlock(sum[s], unit, BlockScale(job, block, s), total));
    }
  }
}

// ---- Several rows: codes are converted once into a panel [columns][64] with scales [block][64]
// ----

template <LinearCodes kCodes>
void FillPanel(const LinearTileJob& job, int64_t first_block, int64_t blocks, float* values,
               float* scales) {
  for (int64_t b = 0; b < blocks;
       ++b, values += kLinearBlock * kLinearTileOutputs, scales += kLinearTileOutputs) {
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s)
      _mm512_store_ps(scales + 16 * s, BlockScale(job, first_block + b, s));
    DecodeBlock<kCodes>(
        job, first_block + b, [&](int column, int s, __m512 w) __attribute__((always_inline)) {
          _mm512_store_ps(values + column * kLinearTileOutputs + 16 * s, w);
        });
  }
}

// 24 accumulators, four operands and one broadcast fill 29 of 32 registers at six rows.
template <int kRows>
void MultiplyRows(const LinearTileJob& job, int64_t row, int64_t first_block, int64_t blocks,
                  const float* values, const float* scales) {
  const float* x =
      static_cast<const float*>(job.x) + row * job.x_stride + first_block * kLinearBlock;
  float* totals = job.totals + row * kLinearTileOutputs;
  const __m512 unit = Unit(job.codes);
  for (int64_t b = 0; b < blocks; ++b) {
    __m512 sum[kRows][kStrips];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) sum[r][s] = _mm512_setzero_ps();
    }
#pragma GCC unroll 2
    for (int64_t k = 0; k < kLinearBlock; ++k) {
      __m512 w[kStrips];
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s)
        w[s] = _mm512_load_ps(values + k * kLinearTileOutputs + 16 * s);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m512 xk = _mm512_set1_ps(x[r * job.x_stride + k]);
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) sum[r][s] = _mm512_fmadd_ps(xk, w[s], sum[r][s]);
      }
    }
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) {
      const __m512 scale = _mm512_load_ps(scales + 16 * s);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        float* total = totals + r * kLinearTileOutputs + 16 * s;
        _mm512_store_ps(total, AddBlock(sum[r][s], unit, scale, total));
      }
    }
    x += kLinearBlock;
    values += kLinearBlock * kLinearTileOutputs;
    scales += kLinearTileOutputs;
  }
}

template <LinearCodes kCodes>
void ManyRows(const LinearTileJob& job) {
  // With few rows the panel is read few times: keep it small enough for L1.
  const int64_t panel_blocks = job.rows <= 6 ? 2 : kLinearPanelBlocks;
  float* values = static_cast<float*>(job.scratch);
  float* scales = values + panel_blocks * kLinearBlock * kLinearTileOutputs;
  for (int64_t first = 0; first < job.blocks; first += panel_blocks) {
    const int64_t blocks = job.blocks - first < panel_blocks ? job.blocks - first : panel_blocks;
    FillPanel<kCodes>(job, first, blocks, values, scales);
    int64_t row = 0;
    for (; row + 6 <= job.rows; row += 6) MultiplyRows<6>(job, row, first, blocks, values, scales);
    switch (job.rows - row) {
      case 1:
        MultiplyRows<1>(job, row, first, blocks, values, scales);
        break;
      case 2:
        MultiplyRows<2>(job, row, first, blocks, values, scales);
        break;
      case 3:
        MultiplyRows<3>(job, row, first, blocks, values, scales);
        break;
      case 4:
        MultiplyRows<4>(job, row, first, blocks, values, scales);
        break;
      case 5:
        MultiplyRows<5>(job, row, first, blocks, values, scales);
        break;
      default:
        break;
    }
  }
}

template <LinearCodes kCodes>
void Multiply(const LinearTileJob& job) {
  for (int64_t i = 0; i < job.rows * kLinearTileOutputs; i += 16)
    _mm512_store_ps(job.totals + i, _mm512_setzero_ps());
  if (job.rows == 1) {
    OneRow<kCodes>(job);
  } else {
    ManyRows<kCodes>(job);
  }
}

}  // namespace

void LinearTileAvx512(const LinearTileJob& job) {
  switch (job.codes) {
    case LinearCodes::kFp4:
      Multiply<LinearCodes::kFp4>(job);
      break;
    case LinearCodes::kFp8:
      Multiply<LinearCodes::kFp8>(job);
      break;
    case LinearCodes::kBf16:
      Multiply<LinearCodes::kBf16>(job);
      break;
  }
}

}  // namespace deepinfer
