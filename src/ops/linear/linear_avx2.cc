// The AVX2 + FMA kernel: fp32 multiply-adds, a vector lane is an output.
//
// Order of summation (that of linear_ref.cc, whose bits this returns): for every output one
// accumulator takes 32 consecutive columns in order by FMA with unscaled codes, starting from zero;
// then total = fma(accumulator, scale, total). One row and many rows differ in where the code
// values come from, never in this chain.
//
// One row is bound by memory, 0.53 (FP4), 1.0 (FP8) and 2 bytes (bf16) per weight: at 13 GB/s for
// each of two cores that is 7.9 FP4 weights per cycle of 3.2 GHz. Eight weights cost one FMA
// and 2.4 (FP4) to 4 (FP8) instructions of conversion on four vector pipes, so FP4 sits at the edge
// and decides the form of the loop. Several rows are bound by FMAs: 16 outputs x 6 rows of
// accumulators, codes converted once per call into a panel in L1 and L2.
//
// Measured on one Zen 3 core (EPYC 7003, 3.2 GHz, weights in L2; best of many while others used the
// machine): one row FP4 23.2, FP8 13.2, bf16 30 weights/ns, i.e. 12.3, 13.2 and 60 GB/s of codes
// where a core's half of DRAM bandwidth is 13.4; 64 rows 80-82 % of the FMA peak in every format.
//
// Tried and lost, FP4 in weights/ns: shifts instead of integer multiplications (20.2: shuffle and
// shift pipes saturate); eight accumulators, a whole column at a time (21.8: spills); int8 table,
// then conversion of dwords (17); byte merges by multiplication instead of half of the unpacks
// (20.1). Not tried on this CPU for their instruction counts: fp16 table and vcvtph2ps, vpermps.
// FP8 by multiplying the code as fp32 bits with 2^120: 8.5, because every vector with a subnormal
// code costs four extra cycles; through fp16: 13.2.
#include <immintrin.h>

#include "ops/linear/linear_kernels.h"

namespace deepinfer {
namespace {

constexpr int kVectors = 8;  // of 8 outputs: one tile

struct Fp4Tables {
  // E2M1 values as the two upper bytes of fp32.
  __m256i high;
  __m256i low;
  // Multipliers that stand in for shifts. Zen 3 has shifts and shuffles on two of its four vector
  // pipes, and multiply-adds on two that overlap with them; integer multiplications use another.
  // With shifts the loop over one row takes 10 cycles per 64 weights, with multiplications 8.7.
  __m256i word;        // 2^16 per dword: shift left by 16
  __m256i shift_four;  // 2^12 per word, for the upper half of the product: shift right by 4
};

inline Fp4Tables LoadFp4Tables() {
  // 0 0.5 1 1.5 2 3 4 6, then the same negated.
  const __m128i high =
      _mm_setr_epi8(0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, static_cast<char>(0x80),
                    static_cast<char>(0xbf), static_cast<char>(0xbf), static_cast<char>(0xbf),
                    static_cast<char>(0xc0), static_cast<char>(0xc0), static_cast<char>(0xc0),
                    static_cast<char>(0xc0));
  const __m128i low = _mm_setr_epi8(0x00, 0x00, static_cast<char>(0x80), static_cast<char>(0xc0),
                                    0x00, 0x40, static_cast<char>(0x80), static_cast<char>(0xc0),
                                    0x00, 0x00, static_cast<char>(0x80), static_cast<char>(0xc0),
                                    0x00, 0x40, static_cast<char>(0x80), static_cast<char>(0xc0));
  __m256i word = _mm256_set1_epi32(0x10000);
  __m256i shift_four = _mm256_set1_epi16(0x1000);
  // Hides the values, or the compiler turns the multiplications back into shifts.
  asm("" : "+x"(word), "+x"(shift_four));
  return {_mm256_broadcastsi128_si256(high), _mm256_broadcastsi128_si256(low), word, shift_four};
}

// The even and the odd words of bf16 as fp32.
inline __m256 EvenWords(__m256i words) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}

inline __m256 OddWords(__m256i words) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

// One column of FP4 codes, low nibbles (kHalf 0: outputs 0-31) or high ones (kHalf 1: outputs
// 32-63): calls use(v, values of outputs 8v ... 8v + 7) for v = 4 * kHalf ... 4 * kHalf + 3.
template <int kHalf, class Use>
inline void Fp4HalfColumn(const uint8_t* codes, const Fp4Tables& tables, Use use) {
  const __m256i bytes = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes));
  const __m256i index = _mm256_and_si256(
      kHalf == 0 ? bytes : _mm256_mulhi_epu16(bytes, tables.shift_four), _mm256_set1_epi8(15));
  const __m256i top = _mm256_shuffle_epi8(tables.high, index);
  const __m256i second = _mm256_shuffle_epi8(tables.low, index);
  const __m256i a = _mm256_unpacklo_epi8(second, top);
  const __m256i b = _mm256_unpackhi_epi8(second, top);
  use(4 * kHalf + 0, _mm256_castsi256_ps(_mm256_mullo_epi32(a, tables.word)));
  use(4 * kHalf + 1, OddWords(a));
  use(4 * kHalf + 2, _mm256_castsi256_ps(_mm256_mullo_epi32(b, tables.word)));
  use(4 * kHalf + 3, OddWords(b));
}

// One column of 64 E4M3 codes. As fp16 bits an E4M3 code is 2^-8 of its value, subnormals included;
// the conversion to fp32 is exact and, unlike a multiplication by 2^120 of the code as fp32 bits,
// has no penalty for subnormal codes on Zen 3.
template <class Use>
inline void Fp8Column(const uint8_t* codes, Use use) {
  const __m256i zero = _mm256_setzero_si256();
  const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0xbf80u));
#pragma GCC unroll 2
  for (int q = 0; q < 2; ++q) {
    const __m256i bytes = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + 32 * q));
    const __m256i words_a = _mm256_unpacklo_epi8(zero, bytes);
    const __m256i words_b = _mm256_unpackhi_epi8(zero, bytes);
    const __m256i a = _mm256_and_si256(_mm256_srai_epi16(words_a, 1), mask);
    const __m256i b = _mm256_and_si256(_mm256_srai_epi16(words_b, 1), mask);
    use(4 * q + 0, _mm256_cvtph_ps(_mm256_castsi256_si128(a)));
    use(4 * q + 1, _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
    use(4 * q + 2, _mm256_cvtph_ps(_mm256_castsi256_si128(b)));
    use(4 * q + 3, _mm256_cvtph_ps(_mm256_extracti128_si256(b, 1)));
  }
}

// Eight scales 2^(byte - 127); byte 0 is the subnormal 2^-127. NaN does not occur in a packed tile.
inline __m256 Scales(const uint8_t* bytes) {
  const __m256i wide =
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
  return _mm256_castsi256_ps(
      _mm256_max_epi32(_mm256_slli_epi32(wide, 23), _mm256_set1_epi32(0x00400000)));
}

inline __m256 Scale(uint8_t byte) {
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_set1_epi32(static_cast<int>(byte) << 23),
                                              _mm256_set1_epi32(0x00400000)));
}

constexpr int64_t kFp4BlockBytes = 64 + 32 * 32;
constexpr int64_t kFp8BlockBytes = 32 * 64;
constexpr int64_t kBf16BlockBytes = 32 * 128;

inline int64_t Fp8HeaderBytes(int64_t blocks) {
  return (2 * blocks + 63) / 64 * 64;
}

// Fp8Column yields 2^-8 of the values; the sums of a block are brought back before they are scaled,
// which is exact.
inline __m256 Fp8Unit() {
  return _mm256_set1_ps(0x1p8f);
}

// Far enough ahead for DRAM latency at one core's share of the bandwidth.
constexpr int64_t kPrefetchBytes = 2048;

inline void Prefetch(const uint8_t* address) {
  _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T0);
}

// ---- One row: codes are converted in registers and used once ------------------------------------

// Half a tile at a time: four accumulators, the tables and the temporaries fit in the registers,
// eight do not. Four chains of latency 4 are still shorter than the conversion of 32 weights.
template <int kHalf>
inline void RowFp4HalfBlock(const uint8_t* from, const float* x, const Fp4Tables& tables,
                            float* totals) {
  __m256 sum[4];
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) sum[v] = _mm256_setzero_ps();
#pragma GCC unroll 2
  for (int64_t k = 0; k < kLinearBlock; ++k) {
    const uint8_t* codes = from + 64 + 32 * k;
    if (kHalf == 0 && k % 2 == 0) Prefetch(codes + kPrefetchBytes);
    const __m256 xk = _mm256_broadcast_ss(x + k);
    Fp4HalfColumn<kHalf>(
        codes, tables, [&](int v, __m256 w) __attribute__((always_inline)) {
          sum[v - 4 * kHalf] = _mm256_fmadd_ps(xk, w, sum[v - 4 * kHalf]);
        });
  }
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    const int64_t at = 32 * kHalf + 8 * v;
    _mm256_store_ps(totals + at,
                    _mm256_fmadd_ps(sum[v], Scales(from + at), _mm256_load_ps(totals + at)));
  }
}

void RowFp4(const LinearTileJob& job) {
  const float* x = static_cast<const float*>(job.x);
  const Fp4Tables tables = LoadFp4Tables();
  const uint8_t* from = job.tile;
  for (int64_t block = 0; block < job.blocks; ++block, from += kFp4BlockBytes, x += kLinearBlock) {
    Prefetch(from + kPrefetchBytes);
    RowFp4HalfBlock<0>(from, x, tables, job.totals);
    RowFp4HalfBlock<1>(from, x, tables, job.totals);
  }
}

void RowFp8(const LinearTileJob& job) {
  const float* x = static_cast<const float*>(job.x);
  const uint8_t* codes = job.tile + Fp8HeaderBytes(job.blocks);
  for (int64_t block = 0; block < job.blocks; ++block, codes += kFp8BlockBytes, x += kLinearBlock) {
    __m256 sum[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[v] = _mm256_setzero_ps();
    for (int64_t k = 0; k < kLinearBlock; ++k) {
      Prefetch(codes + 64 * k + kPrefetchBytes);
      const __m256 xk = _mm256_broadcast_ss(x + k);
      Fp8Column(
          codes + 64 * k, [&](int v, __m256 w) __attribute__((always_inline)) {
            sum[v] = _mm256_fmadd_ps(xk, w, sum[v]);
          });
    }
#pragma GCC unroll 8
    for (int half = 0; half < 2; ++half) {
      const __m256 scale = Scale(job.tile[2 * block + half]);
#pragma GCC unroll 8
      for (int v = 4 * half; v < 4 * half + 4; ++v) {
        float* total = job.totals + 8 * v;
        _mm256_store_ps(
            total, _mm256_fmadd_ps(_mm256_mul_ps(sum[v], Fp8Unit()), scale, _mm256_load_ps(total)));
      }
    }
  }
}

void RowBf16(const LinearTileJob& job) {
  const float* x = static_cast<const float*>(job.x);
  const uint8_t* codes = job.tile;
  for (int64_t block = 0; block < job.blocks;
       ++block, codes += kBf16BlockBytes, x += kLinearBlock) {
    __m256 sum[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[v] = _mm256_setzero_ps();
    for (int64_t k = 0; k < kLinearBlock; k += 2) {
      const uint8_t* pair = codes + 128 * k;
#pragma GCC unroll 8
      for (int64_t line = 0; line < 4; ++line) Prefetch(pair + 64 * line + kPrefetchBytes);
      const __m256 x0 = _mm256_broadcast_ss(x + k);
      const __m256 x1 = _mm256_broadcast_ss(x + k + 1);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const __m256i words = _mm256_load_si256(reinterpret_cast<const __m256i*>(pair + 32 * v));
        sum[v] = _mm256_fmadd_ps(x0, EvenWords(words), sum[v]);
        sum[v] = _mm256_fmadd_ps(x1, OddWords(words), sum[v]);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* total = job.totals + 8 * v;
      _mm256_store_ps(total, _mm256_add_ps(_mm256_load_ps(total), sum[v]));
    }
  }
}

// ---- Several rows: codes are converted once into a panel, then reused --------------------------
//
// A panel covers up to kLinearPanelBlocks blocks. Code values lie as [4 strips of 16
// outputs][columns][16], so that what the inner loop reads for two vectors of outputs is contiguous
// and stays in L1; scales as [block][64].

struct Panel {
  float* values = nullptr;
  float* scales = nullptr;
  int64_t strip = 0;  // floats per strip
};

void FillPanel(const LinearTileJob& job, int64_t first_block, int64_t blocks, const Panel& panel) {
  const Fp4Tables tables = LoadFp4Tables();
  float* to = panel.values;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t block = first_block + b;
    float* scales = panel.scales + kLinearTileOutputs * b;
    const auto store = [&](int v, __m256 w) __attribute__((always_inline)) {
      _mm256_store_ps(to + (v / 2) * panel.strip + (v % 2) * 8, w);
    };
    switch (job.codes) {
      case LinearCodes::kFp4: {
        const uint8_t* from = job.tile + block * kFp4BlockBytes;
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) _mm256_store_ps(scales + 8 * v, Scales(from + 8 * v));
        for (int64_t k = 0; k < kLinearBlock; ++k, to += 16) {
          Prefetch(from + 64 + 32 * k + kPrefetchBytes);
          Fp4HalfColumn<0>(from + 64 + 32 * k, tables, store);
          Fp4HalfColumn<1>(from + 64 + 32 * k, tables, store);
        }
        break;
      }
      case LinearCodes::kFp8: {
        const uint8_t* from = job.tile + Fp8HeaderBytes(job.blocks) + block * kFp8BlockBytes;
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v)
          _mm256_store_ps(scales + 8 * v, Scale(job.tile[2 * block + v / 4]));
        for (int64_t k = 0; k < kLinearBlock; ++k, to += 16) {
          Prefetch(from + 64 * k + kPrefetchBytes);
          Fp8Column(from + 64 * k, store);
        }
        break;
      }
      case LinearCodes::kBf16: {
        const uint8_t* from = job.tile + block * kBf16BlockBytes;
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) _mm256_store_ps(scales + 8 * v, _mm256_set1_ps(1.0f));
        for (int64_t k = 0; k < kLinearBlock; k += 2, to += 32) {
#pragma GCC unroll 8
          for (int64_t line = 0; line < 4; ++line)
            Prefetch(from + 128 * k + 64 * line + kPrefetchBytes);
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) {
            const __m256i words =
                _mm256_load_si256(reinterpret_cast<const __m256i*>(from + 128 * k + 32 * v));
            float* at = to + (v / 2) * panel.strip + (v % 2) * 8;
            _mm256_store_ps(at, EvenWords(words));
            _mm256_store_ps(at + 16, OddWords(words));
          }
        }
        break;
      }
    }
  }
}

// kRows rows x (kStrips * 16) outputs.
template <int kRows, int kStrips>
void MultiplyStrips(bool fp8, const float* x, int64_t x_stride, const float* panel, int64_t strip,
                    const float* scales, int64_t blocks, float* totals) {
  constexpr int kCount = 2 * kStrips;
  for (int64_t b = 0; b < blocks; ++b) {
    __m256 sum[kRows][kCount];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kCount; ++v) sum[r][v] = _mm256_setzero_ps();
    }
#pragma GCC unroll 4
    for (int64_t k = 0; k < kLinearBlock; ++k) {
      if constexpr (kRows < kCount) {
        __m256 xk[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) xk[r] = _mm256_broadcast_ss(x + r * x_stride + k);
#pragma GCC unroll 8
        for (int v = 0; v < kCount; ++v) {
          const __m256 w = _mm256_load_ps(panel + (v / 2) * strip + 16 * k + 8 * (v % 2));
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) sum[r][v] = _mm256_fmadd_ps(xk[r], w, sum[r][v]);
        }
      } else {
        __m256 w[kCount];
#pragma GCC unroll 8
        for (int v = 0; v < kCount; ++v)
          w[v] = _mm256_load_ps(panel + (v / 2) * strip + 16 * k + 8 * (v % 2));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const __m256 xk = _mm256_broadcast_ss(x + r * x_stride + k);
#pragma GCC unroll 8
          for (int v = 0; v < kCount; ++v) sum[r][v] = _mm256_fmadd_ps(xk, w[v], sum[r][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kCount; ++v) {
      const __m256 scale = _mm256_load_ps(scales + 8 * v);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        float* total = totals + r * kLinearTileOutputs + 8 * v;
        // As for one row: sums of tiny x must be rounded in the same places.
        const __m256 of_block = fp8 ? _mm256_mul_ps(sum[r][v], Fp8Unit()) : sum[r][v];
        _mm256_store_ps(total, _mm256_fmadd_ps(of_block, scale, _mm256_load_ps(total)));
      }
    }
    x += kLinearBlock;
    panel += 16 * kLinearBlock;
    scales += kLinearTileOutputs;
  }
}

template <int kRows, int kStrips>
void MultiplyRows(const LinearTileJob& job, int64_t row, int64_t first_block, int64_t blocks,
                  const Panel& panel) {
  const float* x =
      static_cast<const float*>(job.x) + row * job.x_stride + first_block * kLinearBlock;
  for (int s = 0; s < 4; s += kStrips) {
    MultiplyStrips<kRows, kStrips>(
        job.codes == LinearCodes::kFp8, x, job.x_stride, panel.values + s * panel.strip,
        panel.strip, panel.scales + 16 * s, blocks, job.totals + row * kLinearTileOutputs + 16 * s);
  }
}

void ManyRows(const LinearTileJob& job) {
  // With few rows the panel is read few times: keep it small enough for L1.
  const int64_t panel_blocks = job.rows <= 6 ? 1 : kLinearPanelBlocks;
  Panel panel;
  panel.values = static_cast<float*>(job.scratch);
  for (int64_t first = 0; first < job.blocks; first += panel_blocks) {
    const int64_t blocks = job.blocks - first < panel_blocks ? job.blocks - first : panel_blocks;
    panel.strip = 16 * kLinearBlock * blocks;
    panel.scales = panel.values + 4 * panel.strip;
    FillPanel(job, first, blocks, panel);
    int64_t row = 0;
    // Twelve accumulators, two operands and one broadcast fill 15 of 16 registers.
    for (; row + 6 <= job.rows; row += 6) MultiplyRows<6, 1>(job, row, first, blocks, panel);
    switch (job.rows - row) {
      case 1:
        MultiplyRows<1, 4>(job, row, first, blocks, panel);
        break;
      case 2:
        MultiplyRows<2, 2>(job, row, first, blocks, panel);
        break;
      case 3:
        MultiplyRows<3, 2>(job, row, first, blocks, panel);
        break;
      case 4:
        MultiplyRows<4, 1>(job, row, first, blocks, panel);
        break;
      case 5:
        MultiplyRows<5, 1>(job, row, first, blocks, panel);
        break;
      default:
        break;
    }
  }
}

}  // namespace

void LinearTileAvx2(const LinearTileJob& job) {
  for (int64_t i = 0; i < job.rows * kLinearTileOutputs; i += 8)
    _mm256_store_ps(job.totals + i, _mm256_setzero_ps());
  if (job.rows > 1) {
    ManyRows(job);
    return;
  }
  switch (job.codes) {
    case LinearCodes::kFp4:
      RowFp4(job);
      break;
    case LinearCodes::kFp8:
      RowFp8(job);
      break;
    case LinearCodes::kBf16:
      RowBf16(job);
      break;
  }
}

void Bf16RowToF32Avx2(const uint16_t* from, int64_t k, float* to) {
  int64_t i = 0;
  for (; i + 8 <= k; i += 8) {
    const __m256i wide =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    _mm256_storeu_ps(to + i, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
  }
  for (; i < k; ++i) {
    const __m128i wide = _mm_cvtsi32_si128(static_cast<int>(static_cast<uint32_t>(from[i]) << 16));
    _mm_store_ss(to + i, _mm_castsi128_ps(wide));
  }
}

namespace {

inline __m256i RoundToBf16Words(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256 is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan));
}

}  // namespace

void F32RowToBf16Avx2(const float* from, int64_t count, uint16_t* to) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256i words = RoundToBf16Words(_mm256_loadu_ps(from + i));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_castsi256_si128(packed));
  }
  for (; i < count; ++i) {
    const __m256i words = RoundToBf16Words(_mm256_set1_ps(from[i]));
    to[i] = static_cast<uint16_t>(_mm256_extract_epi32(words, 0));
  }
}

}  // namespace deepinfer
