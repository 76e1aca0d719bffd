// The AVX2 + FMA kernel: fp32 multiply-adds, a vector lane is an output.
//
// Order of summation (that of linear_ref.cc, whose bits this returns): for every output one
// accumulator takes 32 consecutive columns in order by FMA with unscaled codes, starting from zero;
// then total = fma(accumulator, scale, total). One row and many rows differ in where the code
// values come from, never in this chain.
//
// One row is bound by memory, 0.53 (FP4), 1.0 (FP8) and 2 bytes (bf16) per weight: at 13 GB/s for
// each of two cores that is 7.9 FP4 weights per cycle of 3.2 GHz. 64 weights cost 8 FMAs and 16
// instructions of conversion (FP4 and FP8) on four vector pipes: FP4 sits at the edge. Several rows
// are bound by FMAs: 16 outputs x 6 rows of accumulators, codes converted once per call into a
// panel in L1 and L2.
//
// Measured on one Zen 3 core (EPYC 7003, 3.2 GHz, weights in L2; best of many while others used the
// machine): one row FP4 26.0, FP8 23.4, bf16 30 weights/ns, i.e. 13.8, 23.4 and 60 GB/s of codes
// where a core's half of DRAM bandwidth is 13.4. That is 8 cycles per 64 FP4 weights; six would be
// enough for four pipes, but instructions that can only use some of them (a shift, then an AND,
// then an FMA) get through at 3.2 per cycle in any mixture tried, only additions in their place
// at 4.
//
// Tried and lost, FP4 in weights/ns: a table of the two upper bytes of fp32 by PSHUFB, unpacked
// (23.2 at half a tile, whose four chains of FMAs take eight cycles per 64 weights); int8 table,
// then conversion of dwords (17); all four columns of four vectors of codes in turn (24.4) and of
// one (25.1); shifts only (25.6); multiplications only (24.8).
// FP8 through fp16: 13.2, because VCVTPH2PS is two instructions.
//
// Several rows, on such a core's processor time beside busy neighbours: 64 rows took 60 to 73 % of
// the FMA peak over three shapes and two rounds (best calls 61 to 75 %). Tried in turns with it and
// no better: strips as the outer loop, so that one strip of the panel stays in L1 for all rows (60
// to 71 %, best calls 64 to 72 %).
#include <immintrin.h>

#include "ops/linear/linear_kernels.h"
#include "ops/linear/linear_tile_bytes.h"

namespace deepinfer {
namespace {

constexpr int kVectors = 8;  // of 8 outputs: one tile

// The even and the odd words of bf16 as fp32.
inline __m256 EvenWords(__m256i words) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}

inline __m256 OddWords(__m256i words) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

// Codes become fp32 by moving their bits: the sign to bit 31, exponent and mantissa to where fp32
// has the low bits of the one and the high bits of the other. That is the value times 2^-126 (FP4)
// or 2^-120 (FP8), with the subnormal codes as fp32 subnormals, which cost a multiply-add nothing
// as factors on Zen 3. The exponent's bias is made up for in x and in the sum of a block.
constexpr int kFp4CodeExponent = -126;
constexpr int kFp8CodeExponent = -120;

struct alignas(32) Words {
  int16_t even_and_odd[16];
};

constexpr Words AlternatingWords(int16_t even, int16_t odd) {
  Words words = {};
  for (int i = 0; i < 16; i += 2) {
    words.even_and_odd[i] = even;
    words.even_and_odd[i + 1] = odd;
  }
  return words;
}

// Factors that stand in for shifts: Zen 3 shifts on two of its four vector pipes and multiplies
// integers on another two. They stay in memory, because the registers are all in use, and the
// instructions are spelt out, because the compiler would make them shifts again.
constexpr Words kEvenBy10 = AlternatingWords(1 << 10, 0);
constexpr Words kEvenBy14 = AlternatingWords(1 << 14, 0);
constexpr Words kDwordsBy6 = AlternatingWords(1 << 6, 0);
constexpr Words kWordsBy5 = AlternatingWords(1 << 5, 1 << 5);

inline __m256i MultiplyEvenWords(__m256i words, const Words& factors) {  // sign-extended to dwords
  __m256i product;
  asm("vpmaddwd %2, %1, %0" : "=x"(product) : "x"(words), "m"(factors));
  return product;
}

inline __m256i MultiplyWords(__m256i words, const Words& factors) {
  __m256i product;
  asm("vpmullw %2, %1, %0" : "=x"(product) : "x"(words), "m"(factors));
  return product;
}

inline __m256i MultiplyDwords(__m256i dwords, const Words& factors) {
  __m256i product;
  asm("vpmulld %2, %1, %0" : "=x"(product) : "x"(dwords), "m"(factors));
  return product;
}

// Four columns of 64 FP4 codes in the order of linear_pack.h: calls use(c, v, values of outputs 8v
// ... 8v + 7 in column c), c ascending for every v. Two bytes before `codes` are loaded.
template <class Use>
inline void Fp4Columns(const uint8_t* codes, Use use) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0x81c00000u));
  const auto masked = [&](__m256i bits) __attribute__((always_inline)) {
    return _mm256_castsi256_ps(_mm256_and_si256(bits, mask));
  };
    // Two vectors of codes in turn: with one, the chains of multiply-adds are too few for the
    // schedulers to look past; with four, the registers do not suffice.
#pragma GCC unroll 2
  for (int first = 0; first < 4; first += 2) {
    __m256i words[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const uint8_t* from = codes + 32 * (first + i);
      words[i] = _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
      asm("" : "+x"(words[i]));  // or the compiler loads them again for every use
      const int v = 2 * (first + i);
      use(0, v + 1, masked(words[i]));
      use(0, v, masked(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from - 2))));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const int v = 2 * (first + i);
      use(1, v + 1, masked(MultiplyDwords(words[i], kDwordsBy6)));
      use(1, v, masked(_mm256_slli_epi32(words[i], 22)));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const int v = 2 * (first + i);
      __m256i twice;
      asm("vpaddw %1, %1, %0" : "=x"(twice) : "x"(words[i]));  // on any pipe
      use(2, v + 1, masked(_mm256_srai_epi32(twice, 6)));
      use(2, v, masked(MultiplyEvenWords(twice, kEvenBy10)));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const int v = 2 * (first + i);
      const __m256i shifted = MultiplyWords(words[i], kWordsBy5);
      use(3, v + 1, masked(_mm256_srai_epi32(shifted, 2)));
      use(3, v, masked(MultiplyEvenWords(shifted, kEvenBy14)));
    }
  }
}

// As Fp4Columns for E4M3 codes: loads that end at the code's byte leave it at the top of a dword.
// Three bytes before `codes` are loaded.
template <class Use>
inline void Fp8Columns(const uint8_t* codes, Use use) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0x87f00000u));
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const __m256i top =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * v + c - 3));
      use(c, v, _mm256_castsi256_ps(_mm256_and_si256(_mm256_srai_epi32(top, 4), mask)));
    }
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

// ---- One row: codes are converted in registers and used once ------------------------------------

// Makes up for the exponents of the codes and of x: exact, see LinearScaleRowAvx2.
inline __m256 RowUnit(const LinearTileJob& job, int code_exponent) {
  return _mm256_castsi256_ps(_mm256_set1_epi32((127 - code_exponent - job.x_exponent) << 23));
}

void RowFp4(const LinearTileJob& job) {
  const float* x = static_cast<const float*>(job.x);
  const __m256 unit = RowUnit(job, kFp4CodeExponent);
  const uint8_t* from = job.tile;
  for (int64_t block = 0; block < job.blocks; ++block, from += kFp4BlockBytes, x += kLinearBlock) {
    __m256 sum[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[v] = _mm256_setzero_ps();
    Prefetch(from + kPrefetchBytes);
    for (int64_t k = 0; k < kLinearBlock; k += 4) {
      const uint8_t* codes = from + 64 + 32 * k;
      Prefetch(codes + kPrefetchBytes);
      Prefetch(codes + 64 + kPrefetchBytes);
      __m256 xk[4];
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) xk[c] = _mm256_broadcast_ss(x + k + c);
      Fp4Columns(
          codes, [&](int c, int v, __m256 w) __attribute__((always_inline)) {
            sum[v] = _mm256_fmadd_ps(xk[c], w, sum[v]);
          });
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* total = job.totals + 8 * v;
      _mm256_store_ps(total, _mm256_fmadd_ps(_mm256_mul_ps(sum[v], unit), Scales(from + 8 * v),
                                             _mm256_load_ps(total)));
    }
  }
}

void RowFp8(const LinearTileJob& job) {
  const float* x = static_cast<const float*>(job.x);
  const __m256 unit = RowUnit(job, kFp8CodeExponent);
  const uint8_t* codes = job.tile + Fp8HeaderBytes(job.blocks);
  for (int64_t block = 0; block < job.blocks; ++block, x += kLinearBlock) {
    __m256 sum[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[v] = _mm256_setzero_ps();
    for (int64_t k = 0; k < kLinearBlock; k += 4, codes += 256) {
#pragma GCC unroll 4
      for (int64_t line = 0; line < 4; ++line) Prefetch(codes + 64 * line + kPrefetchBytes);
      __m256 xk[4];
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) xk[c] = _mm256_broadcast_ss(x + k + c);
      Fp8Columns(
          codes, [&](int c, int v, __m256 w) __attribute__((always_inline)) {
            sum[v] = _mm256_fmadd_ps(xk[c], w, sum[v]);
          });
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256 scale = Scale(job.tile[2 * block + half]);
#pragma GCC unroll 4
      for (int v = 4 * half; v < 4 * half + 4; ++v) {
        float* total = job.totals + 8 * v;
        _mm256_store_ps(total,
                        _mm256_fmadd_ps(_mm256_mul_ps(sum[v], unit), scale, _mm256_load_ps(total)));
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
  const __m256 fp4_unit = _mm256_set1_ps(0x1p126f);
  const __m256 fp8_unit = _mm256_set1_ps(0x1p120f);
  static_assert(kFp4CodeExponent == -126 && kFp8CodeExponent == -120);
  float* to = panel.values;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t block = first_block + b;
    float* scales = panel.scales + kLinearTileOutputs * b;
    const auto at = [&](int c, int v) __attribute__((always_inline)) {
      return to + (v / 2) * panel.strip + 16 * c + 8 * (v % 2);
    };
    switch (job.codes) {
      case LinearCodes::kFp4: {
        const uint8_t* from = job.tile + block * kFp4BlockBytes;
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) _mm256_store_ps(scales + 8 * v, Scales(from + 8 * v));
        for (int64_t k = 0; k < kLinearBlock; k += 4, to += 64) {
          const uint8_t* codes = from + 64 + 32 * k;
          Prefetch(codes + kPrefetchBytes);
          Prefetch(codes + 64 + kPrefetchBytes);
          Fp4Columns(
              codes, [&](int c, int v, __m256 w) __attribute__((always_inline)) {
                _mm256_store_ps(at(c, v), _mm256_mul_ps(w, fp4_unit));
              });
        }
        break;
      }
      case LinearCodes::kFp8: {
        const uint8_t* from = job.tile + Fp8HeaderBytes(job.blocks) + block * kFp8BlockBytes;
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v)
          _mm256_store_ps(scales + 8 * v, Scale(job.tile[2 * block + v / 4]));
        for (int64_t k = 0; k < kLinearBlock; k += 4, to += 64) {
          const uint8_t* codes = from + 64 * k;
#pragma GCC unroll 4
          for (int64_t line = 0; line < 4; ++line) Prefetch(codes + 64 * line + kPrefetchBytes);
          Fp8Columns(
              codes, [&](int c, int v, __m256 w) __attribute__((always_inline)) {
                _mm256_store_ps(at(c, v), _mm256_mul_ps(w, fp8_unit));
              });
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
            _mm256_store_ps(at(0, v), EvenWords(words));
            _mm256_store_ps(at(1, v), OddWords(words));
          }
        }
        break;
      }
    }
  }
}

// kRows rows x (kStrips * 16) outputs.
template <int kRows, int kStrips>
void MultiplyStrips(const float* x, int64_t x_stride, const float* panel, int64_t strip,
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
        _mm256_store_ps(total, _mm256_fmadd_ps(sum[r][v], scale, _mm256_load_ps(total)));
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
    MultiplyStrips<kRows, kStrips>(x, job.x_stride, panel.values + s * panel.strip, panel.strip,
                                   panel.scales + 16 * s, blocks,
                                   job.totals + row * kLinearTileOutputs + 16 * s);
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
  if (job.rows > 1 || (job.codes != LinearCodes::kBf16 && job.x_exponent == kLinearUnscaledX)) {
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

int LinearScaleRowAvx2(LinearCodes codes, float* x, int64_t count) {
  const int code_exponent = codes == LinearCodes::kFp4 ? kFp4CodeExponent : kFp8CodeExponent;
  // Codes are multiples of 2^-1 or 2^-9.
  const int code_quantum = codes == LinearCodes::kFp4 ? -1 : -9;
  const __m256i magnitude_mask = _mm256_set1_epi32(0x7fffffff);
  const __m256i one = _mm256_set1_epi32(1);
  __m256i largest = _mm256_setzero_si256();
  __m256i smallest_less_one = _mm256_set1_epi32(-1);  // unsigned, and what zero becomes
  for (int64_t i = 0; i < count; i += 8) {
    const __m256i magnitude = _mm256_and_si256(
        _mm256_load_si256(reinterpret_cast<const __m256i*>(x + i)), magnitude_mask);
    largest = _mm256_max_epu32(largest, magnitude);
    smallest_less_one = _mm256_min_epu32(smallest_less_one, _mm256_sub_epi32(magnitude, one));
  }
  alignas(32) uint32_t high[8];
  alignas(32) uint32_t low[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(high), largest);
  _mm256_store_si256(reinterpret_cast<__m256i*>(low), smallest_less_one);
  for (int i = 1; i < 8; ++i) {
    if (high[i] > high[0]) high[0] = high[i];
    if (low[i] < low[0]) low[0] = low[i];
  }
  // Powers of two: all |x| are less than 2^limit, and all x are multiples of 2^quantum.
  const int limit = static_cast<int>(high[0] >> 23) - 126;
  // Codes are less than 2^9, and a block has 2^5: beyond this, sums may become infinite.
  if (limit + 14 > 127) return kLinearUnscaledX;
  const int exponent = 127 - limit < -code_exponent ? 127 - limit : -code_exponent;
  if (high[0] != 0) {
    const int biased = static_cast<int>((low[0] + 1) >> 23);
    const int quantum = (biased < 1 ? 1 : biased) - 127 - 7;
    if (quantum + code_quantum + exponent + code_exponent < -149) return kLinearUnscaledX;
  }
  const __m256 factor = _mm256_castsi256_ps(_mm256_set1_epi32((127 + exponent) << 23));
  for (int64_t i = 0; i < count; i += 8)
    _mm256_store_ps(x + i, _mm256_mul_ps(_mm256_load_ps(x + i), factor));
  return exponent;
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
