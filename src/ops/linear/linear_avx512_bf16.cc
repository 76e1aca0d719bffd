// The AVX512-BF16 kernel: vdpbf16ps, a vector lane is an output.
//
// Order of summation: for every output one accumulator takes the 16 pairs of columns of a block in
// order, one vdpbf16ps each, starting from zero, with unscaled codes; then total = fma(accumulator,
// scale, total) in fp32. One row and many rows differ in where the code values come from, never in
// this chain. The instruction adds the two products of a pair in a fixed way of its own and takes
// subnormal inputs and results as zero, so bits differ from the fp32 levels but not within this
// one.
#include <immintrin.h>

#include "ops/linear/linear_kernels.h"
#include "ops/linear/linear_pairs.h"

namespace deepinfer {
namespace {

template <LinearCodes kCodes>
inline __m512 BlockScale(const LinearTileJob& job, int64_t block, int strip) {
  if constexpr (kCodes == LinearCodes::kBf16) {
    return _mm512_set1_ps(1.0f);
  } else {
    // 2^(byte - 127); byte 0 is the subnormal 2^-127.
    return _mm512_castsi512_ps(
        _mm512_max_epi32(_mm512_slli_epi32(ScaleBytes<kCodes>(job, block, strip), 23),
                         _mm512_set1_epi32(0x00400000)));
  }
}

inline __m512 Dot(__m512 sum, __m512i w, __m512i x) {
  return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
}

// Columns 2 * pair and 2 * pair + 1 of a row, in every lane.
inline __m512i XPair(const uint16_t* x, int64_t pair) {
  int32_t bits = 0;
  __builtin_memcpy(&bits, x + 2 * pair, 4);
  return _mm512_set1_epi32(bits);
}

// One row: codes are converted in registers and used once.
template <LinearCodes kCodes>
void OneRow(const LinearTileJob& job) {
  const uint16_t* x = static_cast<const uint16_t*>(job.x);
  for (int64_t block = 0; block < job.blocks; ++block, x += kLinearBlock) {
    __m512 sum[kStrips];
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) sum[s] = _mm512_setzero_ps();
    DecodePairs<kCodes>(
        job, block, [&](int pair, int s, __m512i w) __attribute__((always_inline)) {
          sum[s] = Dot(sum[s], w, XPair(x, pair));
        });
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) {
      float* total = job.totals + 16 * s;
      _mm512_store_ps(
          total, _mm512_fmadd_ps(sum[s], BlockScale<kCodes>(job, block, s), _mm512_load_ps(total)));
    }
  }
}

// ---- Several rows: codes are converted once into a panel [pairs][64] with scales [block][64]
// ------

template <LinearCodes kCodes>
void FillPanel(const LinearTileJob& job, int64_t first_block, int64_t blocks, uint32_t* values,
               float* scales) {
  for (int64_t b = 0; b < blocks;
       ++b, values += kPairs * kLinearTileOutputs, scales += kLinearTileOutputs) {
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s)
      _mm512_store_ps(scales + 16 * s, BlockScale<kCodes>(job, first_block + b, s));
    DecodePairs<kCodes>(
        job, first_block + b, [&](int pair, int s, __m512i w) __attribute__((always_inline)) {
          _mm512_store_si512(values + pair * kLinearTileOutputs + 16 * s, w);
        });
  }
}

// 24 accumulators, four operands and one broadcast fill 29 of 32 registers at six rows.
template <int kRows>
void MultiplyRows(const LinearTileJob& job, int64_t row, int64_t first_block, int64_t blocks,
                  const uint32_t* values, const float* scales) {
  const uint16_t* x =
      static_cast<const uint16_t*>(job.x) + row * job.x_stride + first_block * kLinearBlock;
  float* totals = job.totals + row * kLinearTileOutputs;
  for (int64_t b = 0; b < blocks; ++b) {
    __m512 sum[kRows][kStrips];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) sum[r][s] = _mm512_setzero_ps();
    }
#pragma GCC unroll 2
    for (int64_t pair = 0; pair < kPairs; ++pair) {
      __m512i w[kStrips];
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s)
        w[s] = _mm512_load_si512(values + pair * kLinearTileOutputs + 16 * s);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m512i xk = XPair(x + r * job.x_stride, pair);
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) sum[r][s] = Dot(sum[r][s], w[s], xk);
      }
    }
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) {
      const __m512 scale = _mm512_load_ps(scales + 16 * s);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        float* total = totals + r * kLinearTileOutputs + 16 * s;
        _mm512_store_ps(total, _mm512_fmadd_ps(sum[r][s], scale, _mm512_load_ps(total)));
      }
    }
    x += kLinearBlock;
    values += kPairs * kLinearTileOutputs;
    scales += kLinearTileOutputs;
  }
}

template <LinearCodes kCodes>
void ManyRows(const LinearTileJob& job) {
  // With few rows the panel is read few times: keep it small enough for L1.
  const int64_t panel_blocks = job.rows <= 6 ? 4 : kLinearPanelBlocks;
  uint32_t* values = static_cast<uint32_t*>(job.scratch);
  float* scales = reinterpret_cast<float*>(values + panel_blocks * kPairs * kLinearTileOutputs);
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

void LinearTileAvx512Bf16(const LinearTileJob& job) {
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
