// A few rows at the AMX level without tiles: AVX-512 multiply-adds that return the bits of
// linear_amx.cc. With one row, 15 of 16 tile rows would be empty and the time is that of writing
// weights to memory for the tile loads; here codes are converted in registers and used at once.
//
// Order of summation, that of tdpbf16ps: for every output and block of 32 columns one accumulator
// takes the even columns in order and one the odd columns, by FMA, starting from zero; then total =
// total + (even + odd). This is how the instruction is documented, and hardware agrees bit for bit.
// The instruction rounds to nearest even, takes subnormal operands as zero
// and returns zero for subnormal results, whatever MXCSR says, so MXCSR is set to do the same here.
//
// The tiles hold scaled weights, but scaling them here would cost as much as converting them.
// Multiplying every weight of a block by the same power of two multiplies every intermediate sum by
// it, as long as none of them becomes subnormal or infinite. All sums are multiples of the smallest
// possible product, so the exponents of x and of the scales tell in advance; rows for which they do
// not exclude it are left to the tiles.
#include <immintrin.h>

#include <type_traits>

#include "ops/linear/linear_columns.h"
#include "ops/linear/linear_kernels.h"

namespace deepinfer {
namespace {

constexpr int kMaxRows = static_cast<int>(kLinearAmxFewRows);
// x is converted to fp32 in pieces that stay in L1.
constexpr int64_t kPieceBlocks = 16;
constexpr int64_t kPieceColumns = kPieceBlocks * kLinearBlock;
constexpr int64_t kPieceBytes = kMaxRows * kPieceColumns * 4;
static_assert(kPieceBytes % 64 == 0 && kPieceBytes + 4 * kFp8BlockBytes <= kLinearScratchBytes);
static_assert(kMaxRows == 3);  // MultiplyRows is instantiated for as many
// Measured: nearer and farther are both slower here, where codes are read a block ahead.
constexpr int64_t kFp8PrefetchBytes = 3072;
// Round to nearest even, exceptions masked, subnormals to zero in operands and results.
constexpr unsigned kTileArithmetic = 0x9fc0;

// Stands in where nothing is read ahead.
struct Nothing {
  Nothing(const LinearTileJob&, int64_t, int64_t) {}
};

// Biased exponents of the bf16 values of x.
struct ExponentRange {
  int smallest_not_zero = 255;
  int largest = 0;
};

ExponentRange RangeOf(const LinearTileJob& job) {
  const __m512i magnitude_mask = _mm512_set1_epi16(0x7fff);
  __m512i smallest = magnitude_mask;
  __m512i largest = _mm512_setzero_si512();
  for (int64_t row = 0; row < job.rows; ++row) {
    const uint16_t* x = static_cast<const uint16_t*>(job.x) + row * job.x_stride;
    for (int64_t block = 0; block < job.blocks; ++block, x += kLinearBlock) {
      const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(x), magnitude_mask);
      largest = _mm512_max_epu16(largest, magnitude);
      smallest = _mm512_mask_min_epu16(smallest, _mm512_test_epi16_mask(magnitude, magnitude),
                                       smallest, magnitude);
    }
  }
  alignas(64) uint16_t low[32];
  alignas(64) uint16_t high[32];
  _mm512_store_si512(low, smallest);
  _mm512_store_si512(high, largest);
  ExponentRange range;
  for (int i = 0; i < 32; ++i) {
    if (low[i] >> 7 < range.smallest_not_zero) range.smallest_not_zero = low[i] >> 7;
    if (high[i] >> 7 > range.largest) range.largest = high[i] >> 7;
  }
  return range;
}

// Whether sums of unscaled codes, scaled afterwards, have the bits of sums of scaled codes.
bool ScalesCommute(const LinearTileJob& job) {
  const ExponentRange x = RangeOf(job);
  const bool fp8 = job.codes == LinearCodes::kFp8;
  // Codes are multiples of 2^-9 or 2^-1 and less than 2^9 or 2^3.
  const int code_quantum = fp8 ? -9 : -1;
  const int code_limit = fp8 ? 9 : 3;
  // FP8 codes are converted to 2^-8 of their value.
  const int unit = fp8 ? -8 : 0;
  const int min_scale = job.min_scale - 127 < unit ? job.min_scale - 127 : unit;
  const int max_scale = job.max_scale - 127 > 0 ? job.max_scale - 127 : 0;
  const int smallest_sum = x.smallest_not_zero - 127 - 7 + code_quantum + min_scale;
  // Fewer than 2^31 columns.
  const int sum_limit = x.largest - 126 + code_limit + max_scale + 31;
  return x.smallest_not_zero > 0 && smallest_sum >= -126 && sum_limit <= 127;
}

// Word i of a strip (0 or 1 of the 64 bytes that hold two columns of two strips) is code
// 32 * strip + 2 * (i % 16) + i / 16: first one column, then the other.
struct Fp8Order {
  constexpr Fp8Order() {
    for (int strip = 0; strip < 2; ++strip) {
      for (int i = 0; i < 32; ++i) {
        bytes[strip][2 * i] = bytes[strip][2 * i + 1] =
            static_cast<uint8_t>(32 * strip + i % 16 * 2 + i / 16);
      }
    }
  }
  alignas(64) uint8_t bytes[2][64] = {};
};
constexpr Fp8Order kFp8Order;

// Two columns of FP8 codes as fp16 of 2^-8 of their value, words[strips][2][16]: a byte permute
// puts the codes into the high bytes of words.
inline void Fp8ToFp16(const uint8_t* codes, uint16_t* words) {
  const __m512i mask = _mm512_set1_epi16(static_cast<int16_t>(0xbf80u));
#pragma GCC unroll 2
  for (int line = 0; line < 2; ++line) {
    Prefetch(codes + 64 * line + kFp8PrefetchBytes);
    const __m512i two_strips = _mm512_load_si512(codes + 64 * line);
#pragma GCC unroll 2
    for (int strip = 0; strip < 2; ++strip) {
      const __m512i high_bytes =
          _mm512_permutexvar_epi8(_mm512_load_si512(kFp8Order.bytes[strip]), two_strips);
      _mm512_store_si512(words + 64 * line + 32 * strip,
                         _mm512_and_si512(_mm512_srai_epi16(high_bytes, 1), mask));
    }
  }
}

inline __m512 Fp16ToF32(const uint16_t* words) {
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(words)));
}

// Codes of FP8 blocks go through memory, one block ahead of their use: the conversion from fp16
// needs no shuffle from there, and reading stays evenly spread over time.
struct Fp8Ahead {
  const uint8_t* next = nullptr;  // codes of the block after the one in use
  const uint8_t* end = nullptr;
  uint16_t* words = nullptr;  // two blocks
  int in_use = 0;

  Fp8Ahead(const LinearTileJob& job, int64_t first_block, int64_t blocks)
      : next(job.tile + Fp8HeaderBytes(job.blocks) + first_block * kFp8BlockBytes),
        end(next + blocks * kFp8BlockBytes),
        words(reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(job.scratch) + kPieceBytes)) {
    for (int column = 0; column < kLinearBlock; column += 2, next += 128)
      Fp8ToFp16(next, words + 64 * column);
  }

  // As DecodeBlock, block by block.
  template <class Use>
  void Block(Use use) {
    const uint16_t* from = words + in_use * kFp8BlockBytes;
    in_use ^= 1;
    uint16_t* to = words + in_use * kFp8BlockBytes;
    for (int column = 0; column < kLinearBlock; column += 2, from += 128) {
      if (next < end) {
        Fp8ToFp16(next, to + 64 * column);
        next += 128;
      }
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) use(column, s, Fp16ToF32(from + 32 * s));
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) use(column + 1, s, Fp16ToF32(from + 32 * s + 16));
    }
  }
};

// What the sum of a block is multiplied with. Scales beyond fp32's normal range do not come here.
template <LinearCodes kCodes>
inline __m512 ScaleOf(const LinearTileJob& job, int64_t block, int strip) {
  if constexpr (kCodes == LinearCodes::kFp4) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu8_epi32(_mm_load_si128(
            reinterpret_cast<const __m128i*>(job.tile + block * kFp4BlockBytes + 16 * strip))),
        23));
  } else {
    static_assert(kCodes == LinearCodes::kFp8);
    return _mm512_castsi512_ps(_mm512_set1_epi32((job.tile[2 * block + strip / 2] + 8) << 23));
  }
}

// `blocks` blocks for kRows rows of x, [kRows][kPieceColumns].
template <LinearCodes kCodes, int kRows>
inline void MultiplyPiece(const LinearTileJob& job, int64_t first_block, int64_t blocks,
                          const float* x) {
  [[maybe_unused]] std::conditional_t<kCodes == LinearCodes::kFp8, Fp8Ahead, Nothing> ahead(
      job, first_block, blocks);
  for (int64_t b = 0; b < blocks; ++b, x += kLinearBlock) {
    // 24 accumulators of 32 registers at three rows.
    __m512 even[kRows][kStrips];
    __m512 odd[kRows][kStrips];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) even[r][s] = odd[r][s] = _mm512_setzero_ps();
    }
    const auto use = [&](int column, int s, __m512 w) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m512 xk = _mm512_set1_ps(x[r * kPieceColumns + column]);
        if (column % 2 == 0) {
          even[r][s] = _mm512_fmadd_ps(xk, w, even[r][s]);
        } else {
          odd[r][s] = _mm512_fmadd_ps(xk, w, odd[r][s]);
        }
      }
    };
    if constexpr (kCodes == LinearCodes::kFp8) {
      ahead.Block(use);
    } else {
      DecodeBlock<kCodes>(job, first_block + b, use);
    }
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) {
      __m512 scale = _mm512_undefined_ps();
      if constexpr (kCodes != LinearCodes::kBf16) scale = ScaleOf<kCodes>(job, first_block + b, s);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        float* total = job.totals + r * kLinearTileOutputs + 16 * s;
        const __m512 sum = _mm512_add_ps(even[r][s], odd[r][s]);
        const __m512 before = _mm512_load_ps(total);
        _mm512_store_ps(total, kCodes == LinearCodes::kBf16 ? _mm512_add_ps(before, sum)
                                                            : _mm512_fmadd_ps(sum, scale, before));
      }
    }
  }
}

// sum += x * w, in place: the compiler likes to put the result elsewhere and move it back, which at
// this many accumulators costs an instruction in six.
inline void AddProduct(__m512& sum, __m512 x, __m512 w) {
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
}

// The same for one row of FP4 codes, where decoding is the bound: VPERMPS looks at the low four
// bits of a dword, so a line of codes loaded at each of its four byte offsets gives four columns as
// it is and four more after one shift.
//
// Bound: 512 weights (272 bytes with scales) are 32 FMAs, 32 permutes and 16 shifts for the two
// 512-bit ports, that is 40 cycles; the 16 loads, 12 of which cross a line, and 8 broadcasts have
// ports of their own. The 16-bit permute that would give every other column without a shift is two
// instructions in one here, one of them on the port of the shifts (46 cycles with aligned loads
// only).
inline void MultiplyRowOfFp4(const LinearTileJob& job, int64_t first_block, int64_t blocks,
                             const float* x) {
  constexpr int64_t kFp4PrefetchBytes = 3072;
  const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                       -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  // The columns in the low and in the high nibble of each byte of a dword.
  constexpr int kColumns[4][2] = {{0, 2}, {4, 6}, {1, 3}, {5, 7}};
  const uint8_t* codes = job.tile + first_block * kFp4BlockBytes;
  __m512 total[kStrips];
#pragma GCC unroll 4
  for (int s = 0; s < kStrips; ++s) total[s] = _mm512_load_ps(job.totals + 16 * s);
  for (int64_t b = 0; b < blocks; ++b) {
    __m512 even[kStrips];
    __m512 odd[kStrips];
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) even[s] = odd[s] = _mm512_setzero_ps();
    Prefetch(codes + kFp4PrefetchBytes);  // the scales
    codes += 64;
#pragma GCC unroll 1
    for (int column = 0; column < kLinearBlock; column += 8, codes += 256, x += 8) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const int byte = i / 2 + i % 2 * 2;  // 0 2 1 3: even and odd columns in turn
        Prefetch(codes + 64 * i + kFp4PrefetchBytes);
        const __m512 x_low = _mm512_set1_ps(x[kColumns[byte][0]]);
        const __m512 x_high = _mm512_set1_ps(x[kColumns[byte][1]]);
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) {
          __m512i dwords = _mm512_loadu_si512(codes + 64 * s + byte);
          asm("" : "+v"(dwords));  // or the compiler loads them again for the shift
          __m512& sum = byte < 2 ? even[s] : odd[s];
          AddProduct(sum, x_low, _mm512_permutexvar_ps(dwords, values));
          AddProduct(sum, x_high, _mm512_permutexvar_ps(_mm512_srli_epi32(dwords, 4), values));
        }
      }
    }
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) {
      total[s] = _mm512_fmadd_ps(_mm512_add_ps(even[s], odd[s]),
                                 ScaleOf<LinearCodes::kFp4>(job, first_block + b, s), total[s]);
    }
  }
#pragma GCC unroll 4
  for (int s = 0; s < kStrips; ++s) _mm512_store_ps(job.totals + 16 * s, total[s]);
}

// Not inlined, so that no arithmetic moves across the changes of MXCSR.
template <LinearCodes kCodes, int kRows>
[[gnu::noinline]] void MultiplyRows(const LinearTileJob& job) {
  float* piece = static_cast<float*>(job.scratch);
  for (int64_t i = 0; i < kRows * kLinearTileOutputs; i += 16)
    _mm512_store_ps(job.totals + i, _mm512_setzero_ps());
  for (int64_t first = 0; first < job.blocks; first += kPieceBlocks) {
    const int64_t blocks = job.blocks - first < kPieceBlocks ? job.blocks - first : kPieceBlocks;
    for (int r = 0; r < kRows; ++r) {
      const uint16_t* x =
          static_cast<const uint16_t*>(job.x) + r * job.x_stride + first * kLinearBlock;
      for (int64_t i = 0; i < blocks * kLinearBlock; i += 16) {
        const __m512i words =
            _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i)));
        _mm512_store_si512(piece + r * kPieceColumns + i, _mm512_slli_epi32(words, 16));
      }
    }
    if constexpr (kCodes == LinearCodes::kFp4 && kRows == 1) {
      MultiplyRowOfFp4(job, first, blocks, piece);
    } else {
      MultiplyPiece<kCodes, kRows>(job, first, blocks, piece);
    }
  }
}

template <LinearCodes kCodes>
void Multiply(const LinearTileJob& job) {
  const unsigned callers = _mm_getcsr();
  _mm_setcsr(kTileArithmetic);
  switch (job.rows) {
    case 1:
      MultiplyRows<kCodes, 1>(job);
      break;
    case 2:
      MultiplyRows<kCodes, 2>(job);
      break;
    case 3:
      MultiplyRows<kCodes, 3>(job);
      break;
    default:
      break;
  }
  _mm_setcsr(callers);
}

}  // namespace

bool LinearTileAmxFewRows(const LinearTileJob& job) {
  if (job.rows > kMaxRows) return false;
  switch (job.codes) {
    case LinearCodes::kFp4:
      if (!ScalesCommute(job)) return false;
      Multiply<LinearCodes::kFp4>(job);
      break;
    case LinearCodes::kFp8:
      if (!ScalesCommute(job)) return false;
      Multiply<LinearCodes::kFp8>(job);
      break;
    case LinearCodes::kBf16:
      Multiply<LinearCodes::kBf16>(job);
      break;
  }
  return true;
}

}  // namespace deepinfer
