// Codes of the kPairs layout as pairs of bf16, one dword (columns k, k + 1) per output: what
// vdpbf16ps and the AMX tiles take. Included by linear_avx512_bf16.cc and linear_amx.cc only, which
// are compiled for AVX-512; everything has internal linkage.
#pragma once

#include <immintrin.h>

#include "ops/linear/linear_kernels.h"
#include "ops/linear/linear_tile_bytes.h"

namespace deepinfer {
namespace {

constexpr int kStrips = 4;  // of 16 outputs: one tile
constexpr int kPairs = 16;  // per block
// The scale bytes of 16 outputs in one block, as dwords.
template <LinearCodes kCodes>
inline __m512i ScaleBytes(const LinearTileJob& job, int64_t block, int strip) {
  static_assert(kCodes != LinearCodes::kBf16);
  if constexpr (kCodes == LinearCodes::kFp4) {
    return _mm512_cvtepu8_epi32(_mm_load_si128(
        reinterpret_cast<const __m128i*>(job.tile + block * kFp4BlockBytes + 16 * strip)));
  } else {
    return _mm512_set1_epi32(job.tile[2 * block + strip / 2]);
  }
}

// 16-bit words 0 ... 15 twice: permutes look at five index bits, and the fifth belongs to the
// neighbouring code.
inline __m512i RepeatWords(__m256i words) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(words), words, 1);
}

struct Unadjusted {
  __m512i operator()(int, __m512i words) const {
    return words;
  }
};

// Calls use(pair, strip, 16 dwords of bf16 pairs) for the 16 pairs of columns of a block, ascending
// for every strip. Values are unscaled by default. Otherwise the values of FP4 and FP8 codes are
// multiplied with 2^kExponent and replaced by adjust(strip, values); FP8 values have no sign at
// that point. There is no negative zero among FP4 values: its sign makes no difference to a sum
// that starts from positive zero.
template <LinearCodes kCodes, int kExponent = 0, class Use, class Adjust = Unadjusted>
inline void DecodePairs(const LinearTileJob& job, int64_t block, Use use, Adjust adjust = {}) {
  constexpr int kShift = kExponent * 128;
  if constexpr (kCodes == LinearCodes::kFp4) {
    // 0 0.5 1 1.5 2 3 4 6 and the same negated, as bf16.
    const auto value = [](int bits) { return static_cast<int16_t>(bits + kShift); };
    const __m512i values = RepeatWords(_mm256_setr_epi16(
        0, value(0x3f00), value(0x3f80), value(0x3fc0), value(0x4000), value(0x4040), value(0x4080),
        value(0x40c0), 0, value(0xbf00), value(0xbf80), value(0xbfc0), value(0xc000), value(0xc040),
        value(0xc080), value(0xc0c0)));
    const uint8_t* codes = job.tile + block * kFp4BlockBytes + 64;
    for (int pair = 0; pair < kPairs; pair += 4, codes += 256) {
      __m512i words[kStrips];
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) {
        Prefetch(codes + 64 * s + kPrefetchBytes);
        words[s] = _mm512_load_si512(codes + 64 * s);
      }
#pragma GCC unroll 4
      for (int p = 0; p < 4; ++p) {
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) {
          use(pair + p, s,
              adjust(s, _mm512_permutexvar_epi16(
                            _mm512_srli_epi16(words[s], static_cast<unsigned>(4 * p)), values)));
        }
      }
    }
  } else if constexpr (kCodes == LinearCodes::kFp8) {
    // Normal codes: exponent and mantissa move into place and the bias changes from 7 to 127.
    // Subnormal codes 1 ... 7 are multiples of 2^-9; dot products take subnormal operands as zero,
    // so they must become normal here.
    const __m512i subnormals = RepeatWords(_mm256_setr_epi16(
        0, 0x3b00 + kShift, 0x3b80 + kShift, 0x3bc0 + kShift, 0x3c00 + kShift, 0x3c20 + kShift,
        0x3c40 + kShift, 0x3c60 + kShift, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m512i magnitude_mask = _mm512_set1_epi16(0x7f);
    const __m512i bias = _mm512_set1_epi16(0x3c00 + kShift);  // (127 - 7) << 7
    const __m512i first_normal = _mm512_set1_epi16(8);
    const __m512i sign = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
    const uint8_t* codes = job.tile + Fp8HeaderBytes(job.blocks) + block * kFp8BlockBytes;
    for (int pair = 0; pair < kPairs; ++pair, codes += 128) {
      Prefetch(codes + kPrefetchBytes);
      Prefetch(codes + 64 + kPrefetchBytes);
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) {
        const __m512i words = _mm512_cvtepu8_epi16(
            _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + 32 * s)));
        const __m512i magnitude = _mm512_and_si512(words, magnitude_mask);
        const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), bias);
        const __mmask32 is_subnormal = _mm512_cmplt_epu16_mask(magnitude, first_normal);
        const __m512i value =
            _mm512_mask_permutexvar_epi16(normal, is_subnormal, magnitude, subnormals);
        use(pair, s,
            _mm512_or_si512(adjust(s, value), _mm512_and_si512(_mm512_slli_epi16(words, 8), sign)));
      }
    }
  } else {
    const uint8_t* codes = job.tile + block * kBf16BlockBytes;
    for (int pair = 0; pair < kPairs; ++pair, codes += 256) {
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) {
        Prefetch(codes + 64 * s + kPrefetchBytes);
        use(pair, s, _mm512_load_si512(codes + 64 * s));
      }
    }
  }
}

}  // namespace
}  // namespace deepinfer
