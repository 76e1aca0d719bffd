// Codes of the kPairs layout as fp32, one column of 16 outputs per vector. Included by
// linear_avx512.cc and linear_amx_few_rows.cc only, which are compiled for AVX-512; everything has
// internal linkage.
//
// Codes become fp32 by a permute of a 16-entry table (FP4: a permute and for every other column a
// shift) or through fp16 (FP8: as fp16 bits a code is 2^-8 of its value, and the conversion
// takes subnormals without a microcode assist).
#pragma once

#include <immintrin.h>

#include "ops/linear/linear_kernels.h"
#include "ops/linear/linear_tile_bytes.h"

namespace deepinfer {
namespace {

constexpr int kStrips = 4;  // of 16 outputs: one tile
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
    Prefetch(codes - 64 + kPrefetchBytes);  // scales
    for (int column = 0; column < 32; column += 8, codes += 256) {
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) Prefetch(codes + 64 * s + kPrefetchBytes);
#pragma GCC unroll 8
      for (int c = 0; c < 8; ++c) {
        // The bit at which the code of a column starts in its dword. Loads that start at the byte
        // of the code leave only every other shift to the vector units, which are the bottleneck
        // here.
        const int bit = c % 2 * 16 + c / 2 * 4;
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) {
          const __m512i words = _mm512_loadu_si512(codes + 64 * s + bit / 8);
          const __m512i index =
              bit % 8 == 0 ? words : _mm512_srli_epi32(words, static_cast<unsigned>(bit % 8));
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

}  // namespace
}  // namespace deepinfer
