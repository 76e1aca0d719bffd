// The AVX-512 kernel without bf16 dot products: fp32 multiply-adds, a vector lane is an output.
//
// Order of summation: that of linear_ref.cc and linear_avx2.cc, whose bits this returns. For every
// output one accumulator takes 32 consecutive columns in order by FMA with unscaled codes, starting
// from zero; then total = fma(accumulator, scale, total).
//
// Codes become fp32 by a permute of a 16-entry table (FP4: shift and permute, two instructions per
// 16 weights) or through fp16 (FP8: as fp16 bits a code is 2^-8 of its value, and the conversion
// takes subnormals without a microcode assist).
#include <immintrin.h>

#include "ops/linear/linear_kernels.h"

namespace deepinfer {
namespace {

constexpr int kStrips = 4;  // of 16 outputs: one tile
constexpr int64_t kFp4BlockBytes = 64 + 32 * 32;
constexpr int64_t kFp8BlockBytes = 32 * 64;
constexpr int64_t kBf16BlockBytes = 32 * 128;
// Far enough ahead for DRAM latency at one core's share of the bandwidth.
constexpr int64_t kPrefetchBytes = 2048;

inline void Prefetch(const uint8_t* address) {
  _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T0);
}

inline int64_t Fp8HeaderBytes(int64_t blocks) {
  return (2 * blocks + 63) / 64 * 64;
}

inline __m512 ScaleBits(__m512i bytes) {
  return _mm512_castsi512_ps(
      _mm512_max_epi32(_mm512_slli_epi32(bytes, 23), _mm512_set1_epi32(0x00400000)));
}

// The scales of 16 outputs in one block; byte 0 is the subnormal 2^-127.
inline __m512 BlockScale(const LinearTileJob& job, int64_t block, int strip) {
  switch (job.codes) {
    case LinearCodes::kFp4:
      return ScaleBits(_mm512_cvtepu8_epi32(_mm_load_si128(
          reinterpret_cast<const __m128i*>(job.tile + block * kFp4BlockBytes + 16 * strip))));
    case LinearCodes::kFp8:
      return ScaleBits(_mm512_set1_epi32(job.tile[2 * block + strip / 2]));
    case LinearCodes::kBf16:
      break;
  }
  return _mm512_set1_ps(1.0f);
}

// What a sum of code values of this format is multiplied with before the scale: see FP8 above.
inline __m512 Unit(LinearCodes codes) {
  return _mm512_set1_ps(codes == LinearCodes::kFp8 ? 0x1p8f : 1.0f);
}

inline __m512 EvenWords(__m512i words) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}

inline __m512 OddWords(__m512i words) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// Calls use(column, strip, values of 16 outputs) for the 32 columns of a block, ascending for every
// strip.
template <LinearCodes kCodes, class Use>
inline void DecodeBlock(const LinearTileJob& job, int64_t block, Use use) {
  if constexpr (kCodes == LinearCodes::kFp4) {
    const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f,
                                         -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    const uint8_t* codes = job.tile + block * kFp4BlockBytes + 64;
    for (int column = 0; column < 32; column += 8, codes += 256) {
      __m512i words[kStrips];
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) {
        Prefetch(codes + 64 * s + kPrefetchBytes);
        words[s] = _mm512_load_si512(codes + 64 * s);
      }
#pragma GCC unroll 8
      for (int c = 0; c < 8; ++c) {
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) {
          const __m512i index =
              _mm512_srli_epi32(words[s], static_cast<unsigned>(c % 2 * 16 + c / 2 * 4));
          use(column + c, s, _mm512_permutexvar_ps(index, values));
        }
      }
    }
  } else if constexpr (kCodes == LinearCodes::kFp8) {
    // The even words, then the odd words.
    const __m512i split =
        _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24,
                         22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i mask = _mm512_set1_epi16(static_cast<int16_t>(0xbf80u));
    const uint8_t* codes = job.tile + Fp8HeaderBytes(job.blocks) + block * kFp8BlockBytes;
    for (int column = 0; column < 32; column += 2, codes += 128) {
      Prefetch(codes + kPrefetchBytes);
      Prefetch(codes + 64 + kPrefetchBytes);
      __m512i half[kStrips];
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) {
        const __m512i words = _mm512_cvtepi8_epi16(
            _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + 32 * s)));
        half[s] =
            _mm512_permutexvar_epi16(split, _mm512_and_si512(_mm512_slli_epi16(words, 7), mask));
      }
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s)
        use(column, s, _mm512_cvtph_ps(_mm512_castsi512_si256(half[s])));
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s)
        use(column + 1, s, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half[s], 1)));
    }
  } else {
    const uint8_t* codes = job.tile + block * kBf16BlockBytes;
    for (int column = 0; column < 32; column += 2, codes += 256) {
      __m512i words[kStrips];
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) {
        Prefetch(codes + 64 * s + kPrefetchBytes);
        words[s] = _mm512_load_si512(codes + 64 * s);
      }
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) use(column, s, EvenWords(words[s]));
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) use(column + 1, s, OddWords(words[s]));
    }
  }
}

inline __m512 AddBlock(__m512 sum, __m512 unit, __m512 scale, const float* total) {
  return _mm512_fmadd_ps(_mm512_mul_ps(sum, unit), scale, _mm512_load_ps(total));
}

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
