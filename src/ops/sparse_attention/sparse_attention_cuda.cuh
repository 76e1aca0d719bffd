// What the kernels of sparse attention share: their arguments as plain pointers, the key list of a
// row, the decoding of records to bf16 and the last steps of a row (normalise, rotate back, round).
//
// Decoded keys are stored times 2^-32. So one bf16 multiplication decodes a code and its scale: the
// code's bits are placed so that they read as the code times 2^-120 (E4M3) or 2^-126 (E2M1), and
// the factor up to the key is a finite bf16 number for every Q8 scale up to 2^39 and every Q4E
// scale. All factors are powers of two and far from the ends of the range, so scores and numerators
// are exactly 2^-32 of what they would be, and are scaled back where they are scaled anyway.
#pragma once

#include "device.cuh"
#include "ops/quantize/group_quantize.h"
#include "ops/sparse_attention/sparse_attention_impl.h"

namespace deepinfer::cuda {

inline constexpr float kKeyFactorInverse = 4294967296.0f;  // 2^32
inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kFirstMaximum = -1e30f;  // of the running maximum, finite on purpose

// Division of numbers below 2^31 by one that the host knows, in three instructions.
struct Divisor {
  uint32_t value = 1;
  uint32_t multiplier = 1;  // 2^32 (2^shift - value) / value, rounded down, plus 1
  uint32_t shift = 0;       // 2^shift is the first power of two that is not below value

  __host__ __device__ int Quotient(int x) const {
    const auto n = static_cast<uint32_t>(x);
    const auto high = static_cast<uint32_t>(static_cast<uint64_t>(n) * multiplier >> 32);
    return static_cast<int>((high + n) >> shift);
  }
};

inline Divisor MakeDivisor(int64_t value) {
  Divisor divisor;
  divisor.value = static_cast<uint32_t>(value);
  while ((int64_t{1} << divisor.shift) < value) ++divisor.shift;
  divisor.multiplier = static_cast<uint32_t>(
      (((uint64_t{1} << divisor.shift) - divisor.value) << 32) / divisor.value + 1);
  return divisor;
}

struct AttentionParams {
  const uint16_t* q;
  const uint8_t* window_records;
  const uint8_t* window_pages;
  const uint8_t* kv_blocks;  // null: window only
  const int32_t* selected;
  const int32_t* positions;
  const int32_t* row_sequence;
  const int32_t* sequence_start;
  const int32_t* block_table;
  const int32_t* window_table;
  const int32_t* window_first_page;
  const int32_t* window_begin;
  const float* sink;
  const float* table;
  uint16_t* out;
  // Between rows, pages, blocks: of q, selected, tables and out in elements, of records in bytes.
  int64_t q_stride;
  int64_t record_stride;
  int64_t page_stride;
  int64_t kv_stride;
  int64_t selected_stride;
  int64_t block_table_stride;
  int64_t window_table_stride;
  int64_t table_stride;
  int64_t out_stride;
  int rows;
  int heads;
  int dim;
  int pairs;
  int window;      // window keys of a row at most, a block's rows among them
  int block_rows;  // 0: rows see what is before them
  int topk;
  Divisor page_rows;
  Divisor entries_per_block;
  int window_bytes;  // of a record
  int kv_bytes;
  bool window_bf16;
  bool kv_bf16;
  bool rotate_q;
  bool production;
  float scale;  // of scores, in base 2, for keys that are stored times 2^-32
};

// Where the keys of a row are. `num_keys` counts window keys only until SelectedCount is added.
struct RowKeys {
  int first_position = 0;  // of the window
  int num_window = 0;
  int num_keys = 0;
  int step_start = 0;  // position of the sequence's first row in this step
  int first_row = 0;
  int first_page = 0;
  const int32_t* pages = nullptr;
  const int32_t* blocks = nullptr;
  const int32_t* selected = nullptr;
};

__device__ inline RowKeys WindowKeys(const AttentionParams& p, int row) {
  RowKeys keys;
  const int sequence = p.row_sequence[row];
  const int position = p.positions[row];
  keys.first_row = p.sequence_start[sequence];
  keys.step_start = position - (row - keys.first_row);  // rows of a sequence have all positions
  int first = position - p.window + 1;
  int last = position;
  if (p.block_rows > 0) {
    first = keys.step_start - (p.window - p.block_rows);
    last = p.positions[p.sequence_start[sequence + 1] - 1];
  }
  const int begin = max(max(0, first), p.window_begin[sequence]);
  keys.first_position = begin;
  keys.num_window = max(0, last - begin + 1);
  keys.num_keys = keys.num_window;
  keys.first_page = p.window_first_page[sequence];
  keys.pages = p.window_table + sequence * p.window_table_stride;
  keys.blocks = p.block_table + sequence * p.block_table_stride;
  keys.selected = p.selected + row * p.selected_stride;
  return keys;
}

// Entries in front of the first -1, for all lanes of the warp.
__device__ inline int SelectedCountWarp(const AttentionParams& p, int row) {
  if (p.kv_blocks == nullptr) return 0;
  const int32_t* selected = p.selected + row * p.selected_stride;
  constexpr int kReads = 16;  // under way at once
  int count = 0;
  for (int first = 0; first < p.topk; first += 32 * kReads) {
    int entries[kReads];
#pragma unroll
    for (int j = 0; j < kReads; ++j) {
      const int i = first + 32 * j + LaneId();
      entries[j] = -1;
      if (i < p.topk) entries[j] = __ldg(selected + i);
    }
#pragma unroll
    for (int j = 0; j < kReads; ++j) count += __popc(__ballot_sync(0xffffffffu, entries[j] >= 0));
  }
  return count;
}

// The record of key `i` of the row's list.
__device__ inline const uint8_t* KeyRecord(const AttentionParams& p, const RowKeys& keys, int i) {
  if (i < keys.num_window) {
    const int position = keys.first_position + i;
    if (position >= keys.step_start)
      return p.window_records + (keys.first_row + position - keys.step_start) * p.record_stride;
    const int page = p.page_rows.Quotient(position);
    const int row = position - page * static_cast<int>(p.page_rows.value);
    return p.window_pages + keys.pages[page - keys.first_page] * p.page_stride +
           row * p.window_bytes;
  }
  const int entry = keys.selected[i - keys.num_window];
  const int block = p.entries_per_block.Quotient(entry);
  const int row = entry - block * static_cast<int>(p.entries_per_block.value);
  return p.kv_blocks + keys.blocks[block] * p.kv_stride + row * p.kv_bytes;
}

// ---- Decoding ----------------------------------------------------------------------------------

inline constexpr uint32_t kTwoTo120 = 0x7b807b80u;  // bf16 pairs
inline constexpr uint32_t kTwoTo94 = 0x6e806e80u;   // 2^(126 - 32)
inline constexpr uint32_t kTwoToMinus32 = 0x2f802f80u;

// The factor of a Q8 group with this scale byte, twice: 2^(byte - 127 + 120 - 32).
__device__ inline uint32_t Q8Factor(uint32_t byte) {
  return (min(byte + 88u, 255u) << 7) * 0x00010001u;
}
// The factor of a Q4E group, twice: its scale * 2^(126 - 32).
__device__ inline uint32_t Q4EFactor(uint32_t byte) {
  return MulBf16x2(MulBf16x2(byte * 0x00100010u, kTwoTo120), kTwoTo94);
}
// Codes 2 kPair and 2 kPair + 1 of four E4M3 codes, times 2^-120.
template <int kPair>
__device__ inline uint32_t E4M3PairBits(uint32_t codes) {
  const uint32_t high = __byte_perm(codes, 0u, kPair == 0 ? 0x1404 : 0x3424);
  return (high & 0x80008000u) | ((high >> 4) & 0x07f007f0u);
}
// Codes 2 kPair and 2 kPair + 1 of eight E2M1 codes, times 2^-126. `shifted` is codes << 4.
template <int kPair>
__device__ inline uint32_t E2M1PairBits(uint32_t codes, uint32_t shifted) {
  constexpr uint32_t kSelector =
      static_cast<uint32_t>((4 + kPair) << 12 | (4 + kPair) << 8 | kPair << 4 | kPair);
  const uint32_t high = __byte_perm(shifted, codes, kSelector);
  return (high & 0x80008000u) | ((high >> 6) & 0x01c001c0u);
}
// ---- The end of a row --------------------------------------------------------------------------

// A rotated pair (back: by the conjugate), as ops/rope does.
__device__ inline void RotatePair(float& x0, float& x1, float cos, float sin) {
  const float y0 = fmaf(x0, cos, -(x1 * sin));
  x1 = fmaf(x0, sin, x1 * cos);
  x0 = y0;
}

// 2^32 / (denominator with the sink): what a numerator is multiplied with. `sum` and `maximum` are
// in base 2.
__device__ inline float Normaliser(float sum, float maximum, float sink) {
  return kKeyFactorInverse / (sum + Exp2(sink * kLog2E - maximum));
}

// The E8M0 byte of a Q8 group, from the maximum magnitude.
__device__ inline uint32_t Q8Byte(float amax) {
  const uint32_t bits = __float_as_uint(fmaxf(amax, 1e-4f));
  return min(((bits + 0x1fffffu) >> 23) - 8u, 254u);
}
// Two values of a group on its grid, as bf16. NaN stays NaN.
__device__ inline uint32_t Q8Pair(float x0, float x1, uint32_t byte) {
  const float inverse = __uint_as_float((254u - byte) << 23);
  const uint32_t codes = FloatsToE4M3x2(x0 * inverse, x1 * inverse);
  uint32_t pair =
      MulBf16x2(MulBf16x2(E4M3PairBits<0>(codes), kTwoTo120), (byte << 7) * 0x00010001u);
  if (x0 != x0) pair = (pair & 0xffff0000u) | 0x7fc0u;
  if (x1 != x1) pair = (pair & 0xffffu) | 0x7fc00000u;
  return pair;
}

// ---- Kernels of other files --------------------------------------------------------------------

// 64 heads (or multiples, or fewer) x 512 channels on Hopper; both give a row the same bits. A
// block of threads per row, one row after the other:
Status WarpgroupAttention(const AttentionParams& params, Stream& stream);
// A cluster of eight blocks per row, for lists of at most kFewRowsMaxKeys keys:
Status FewRowsAttention(const AttentionParams& params, Stream& stream);
inline constexpr int kFewRowsMaxKeys = 640;

}  // namespace deepinfer::cuda
