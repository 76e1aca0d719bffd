// The AMX kernel: tiles of 16 rows x 16 outputs, 32 columns per tdpbf16ps.
//
// Order of summation: for every output one tile element takes the blocks of 32 columns in order,
// one tdpbf16ps each, starting from zero; the instruction adds up the even and the odd columns of a
// block in two chains, then their sum to the element.
// Scales are multiplied into the bf16 weights (exact: powers of two; weights with scales beyond
// bf16's range are given to linear_avx512_bf16.cc instead), because a tile has no cheap way to
// scale its sums. Few rows take linear_amx_few_rows.cc, which returns the same bits without tiles.
// Where it cannot, the same instruction runs on a tile of as many rows. Accumulators that leave the
// tile between panels are stored as fp32, which changes nothing.
#include <immintrin.h>

#include "ops/linear/linear_kernels.h"
#include "ops/linear/linear_pairs.h"

namespace deepinfer {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;  // 16 pairs of columns x 16 outputs x 4 bytes

// Tiles 0-3: sums of one strip of 16 outputs each. Tile 4: rows of x. Tiles 5-7: weights.
void Configure(int64_t rows) {
  struct alignas(64) {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  } config;
  static_assert(sizeof(config) == 64);
  for (int tile = 0; tile < 5; ++tile) config.rows[tile] = static_cast<uint8_t>(rows);
  for (int tile = 5; tile < 8; ++tile) config.rows[tile] = kTileRows;
  // g++ 12 believes that the instruction reads 8 of the 64 bytes and would not write the rest.
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// Codes are decoded with the largest scale that comes here, and what a smaller scale lacks is
// subtracted from their exponents with saturation, which leaves zero at zero.
constexpr int kLargestScale = 240;

// For the bf16 pairs of 16 outputs.
template <LinearCodes kCodes>
inline __m512i ExponentsLacking(const LinearTileJob& job, int64_t block, int strip) {
  const __m512i lacking =
      _mm512_sub_epi32(_mm512_set1_epi32(kLargestScale), ScaleBytes<kCodes>(job, block, strip));
  return _mm512_or_si512(_mm512_slli_epi32(lacking, 7), _mm512_slli_epi32(lacking, 23));
}

// [block][strip][pair][16 outputs]: every strip of a block is one weight tile.
template <LinearCodes kCodes>
void FillPanel(const LinearTileJob& job, int64_t first_block, int64_t blocks, uint8_t* panel) {
  for (int64_t b = 0; b < blocks; ++b, panel += kStrips * kTileBytes) {
    const auto store = [&](int pair, int s, __m512i w) __attribute__((always_inline)) {
      _mm512_store_si512(panel + s * kTileBytes + 64 * pair, w);
    };
    if constexpr (kCodes == LinearCodes::kBf16) {
      DecodePairs<kCodes>(job, first_block + b, store);
    } else {
      __m512i lacking[kStrips];
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s)
        lacking[s] = ExponentsLacking<kCodes>(job, first_block + b, s);
      DecodePairs<kCodes, kLargestScale - 127>(
          job, first_block + b, store, [&](int s, __m512i w) __attribute__((always_inline)) {
            return _mm512_subs_epu16(w, lacking[s]);
          });
    }
  }
}

// Up to 16 rows x 64 outputs over one panel. The tile configuration has as many rows.
void MultiplyRows(const LinearTileJob& job, int64_t row, int64_t first_block, int64_t blocks,
                  const uint8_t* panel) {
  const uint16_t* x =
      static_cast<const uint16_t*>(job.x) + row * job.x_stride + first_block * kLinearBlock;
  float* totals = job.totals + row * kLinearTileOutputs;
  constexpr int64_t kTotalsStride = 4 * kLinearTileOutputs;
  if (first_block == 0) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, totals, kTotalsStride);
    _tile_loadd(1, totals + 16, kTotalsStride);
    _tile_loadd(2, totals + 32, kTotalsStride);
    _tile_loadd(3, totals + 48, kTotalsStride);
  }
  for (int64_t b = 0; b < blocks; ++b, x += kLinearBlock, panel += kStrips * kTileBytes) {
    _tile_loadd(4, x, 2 * job.x_stride);
    _tile_loadd(5, panel, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, panel + kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, panel + 2 * kTileBytes, 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, panel + 3 * kTileBytes, 64);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, totals, kTotalsStride);
  _tile_stored(1, totals + 16, kTotalsStride);
  _tile_stored(2, totals + 32, kTotalsStride);
  _tile_stored(3, totals + 48, kTotalsStride);
}

template <LinearCodes kCodes>
void Multiply(const LinearTileJob& job) {
  uint8_t* panel = static_cast<uint8_t*>(job.scratch);
  const int64_t full = job.rows / kTileRows * kTileRows;
  const int64_t rest = job.rows - full;
  if (full == 0 || rest == 0) Configure(full == 0 ? rest : kTileRows);
  for (int64_t first = 0; first < job.blocks; first += kLinearPanelBlocks) {
    const int64_t blocks =
        job.blocks - first < kLinearPanelBlocks ? job.blocks - first : kLinearPanelBlocks;
    FillPanel<kCodes>(job, first, blocks, panel);
    if (full > 0 && rest > 0) Configure(kTileRows);
    for (int64_t row = 0; row < full; row += kTileRows)
      MultiplyRows(job, row, first, blocks, panel);
    if (full > 0 && rest > 0) Configure(rest);
    if (rest > 0) MultiplyRows(job, full, first, blocks, panel);
  }
  _tile_release();
}

}  // namespace

void LinearTileAmx(const LinearTileJob& job) {
  if (LinearTileAmxFewRows(job)) return;
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
