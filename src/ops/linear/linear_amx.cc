// The AMX kernel: tiles of 16 rows x 16 outputs, 32 columns per tdpbf16ps.
//
// Order of summation: for every output one tile element takes the blocks of 32 columns in order,
// one tdpbf16ps each, starting from zero; the instruction adds up the even and the odd columns of a
// block in two chains, then their sum to the element.
// Scales are multiplied into the bf16 weights (exact: powers of two; weights with scales beyond
// bf16's range are given to linear_avx512_bf16.cc instead), because a tile has no cheap way to
// scale its sums. Accumulators that leave the tile between panels are stored as fp32, which changes
// nothing.
//
// Up to 16 rows are bound by memory, provided that decoding keeps up, and the sums of one block are
// few: there weights are decoded unscaled, block by block, and the sums are scaled, with the same
// bits (LinearScalesCommute; rows for which it says no take the first way). One to three rows of
// FP8 and bf16 are faster without tiles: linear_amx_few_rows.cc.
#include <immintrin.h>

#include "ops/linear/linear_kernels.h"
#include "ops/linear/linear_pairs.h"

namespace deepinfer {
namespace {

constexpr int64_t kTileRows = kLinearAmxTileRows;
constexpr int64_t kTileBytes = 1024;  // 16 pairs of columns x 16 outputs x 4 bytes
constexpr int64_t kBlockBytes = kStrips * kTileBytes;

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
  for (int64_t b = 0; b < blocks; ++b, panel += kBlockBytes) {
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

// Tiles 0-3 += rows of x times one block of weights.
inline void MultiplyBlock(const uint16_t* x, int64_t x_stride, const uint8_t* panel) {
  _tile_loadd(4, x, 2 * x_stride);
  _tile_loadd(5, panel, 64);
  _tile_dpbf16ps(0, 4, 5);
  _tile_loadd(6, panel + kTileBytes, 64);
  _tile_dpbf16ps(1, 4, 6);
  _tile_loadd(7, panel + 2 * kTileBytes, 64);
  _tile_dpbf16ps(2, 4, 7);
  _tile_loadd(5, panel + 3 * kTileBytes, 64);
  _tile_dpbf16ps(3, 4, 5);
}

inline void ZeroSums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

constexpr int64_t kSumsStride = 4 * kLinearTileOutputs;  // bytes

inline void StoreSums(float* sums) {
  _tile_stored(0, sums, kSumsStride);
  _tile_stored(1, sums + 16, kSumsStride);
  _tile_stored(2, sums + 32, kSumsStride);
  _tile_stored(3, sums + 48, kSumsStride);
}

// Up to 16 rows x 64 outputs over one panel. The tile configuration has as many rows.
void MultiplyRows(const LinearTileJob& job, int64_t row, int64_t first_block, int64_t blocks,
                  const uint8_t* panel) {
  const uint16_t* x =
      static_cast<const uint16_t*>(job.x) + row * job.x_stride + first_block * kLinearBlock;
  float* totals = job.totals + row * kLinearTileOutputs;
  if (first_block == 0) {
    ZeroSums();
  } else {
    _tile_loadd(0, totals, kSumsStride);
    _tile_loadd(1, totals + 16, kSumsStride);
    _tile_loadd(2, totals + 32, kSumsStride);
    _tile_loadd(3, totals + 48, kSumsStride);
  }
  for (int64_t b = 0; b < blocks; ++b)
    MultiplyBlock(x + b * kLinearBlock, job.x_stride, panel + b * kBlockBytes);
  StoreSums(totals);
}

// ---- Up to 16 rows of FP4 or FP8 codes ----------------------------------------------------------
//
// A block is decoded into a ring in L1, multiplied two blocks later, and its sums are scaled and
// added one block after that. A tile load does not wait for a store that way: two blocks of
// decoding are more instructions than the processor looks ahead, and more stores than it keeps
// back.
//
// Bound for one row of FP4, per block of 1088 bytes: 64 permutes of 16-bit words, which take a slot
// on either of the two 512-bit ports, 48 shifts, of which 16 are byte shuffles on the port that the
// other 32 leave free, and 12 to add the sums: 96 slots on the fuller port (Sapphire Rapids).
// Without tiles it is 166 cycles, because every weight is an fp32 multiply-add and a permute of its
// own. 64 stores, 64 tile rows loaded and 4 tile products of up to 16 cycles have units of their
// own.

constexpr int64_t kRingBlocks = 4;
constexpr int64_t kBlocksAhead = 2;  // decoded before they are multiplied
constexpr int64_t kSumsBytes = kTileRows * kSumsStride;
static_assert(kBlocksAhead < kRingBlocks && kRingBlocks % 2 == 0);
static_assert(kRingBlocks * kBlockBytes + 2 * kSumsBytes <= kLinearScratchBytes);

template <LinearCodes kCodes>
void AddScaledSums(const LinearTileJob& job, int64_t block, const float* sums) {
#pragma GCC unroll 4
  for (int s = 0; s < kStrips; ++s) {
    const __m512 scale =
        _mm512_castsi512_ps(_mm512_slli_epi32(ScaleBytes<kCodes>(job, block, s), 23));
    for (int64_t row = 0; row < job.rows; ++row) {
      const int64_t at = row * kLinearTileOutputs + 16 * s;
      float* total = job.totals + at;
      _mm512_store_ps(total,
                      _mm512_fmadd_ps(_mm512_load_ps(sums + at), scale, _mm512_load_ps(total)));
    }
  }
}

template <LinearCodes kCodes>
void MultiplyUnscaled(const LinearTileJob& job) {
  uint8_t* ring = static_cast<uint8_t*>(job.scratch);
  float* sums = reinterpret_cast<float*>(ring + kRingBlocks * kBlockBytes);
  const uint16_t* x = static_cast<const uint16_t*>(job.x);
  for (int64_t i = 0; i < job.rows * kLinearTileOutputs; i += 16)
    _mm512_store_ps(job.totals + i, _mm512_setzero_ps());
  Configure(job.rows);
  for (int64_t step = 0; step <= job.blocks + kBlocksAhead; ++step) {
    if (step < job.blocks) {
      uint8_t* panel = ring + step % kRingBlocks * kBlockBytes;
      DecodePairs<kCodes>(
          job, step, [panel](int pair, int s, __m512i w) __attribute__((always_inline)) {
            _mm512_store_si512(panel + s * kTileBytes + 64 * pair, w);
          });
    }
    const int64_t block = step - kBlocksAhead;
    if (block >= 0 && block < job.blocks) {
      ZeroSums();
      MultiplyBlock(x + block * kLinearBlock, job.x_stride,
                    ring + block % kRingBlocks * kBlockBytes);
      StoreSums(sums + block % 2 * (kSumsBytes / 4));
    }
    if (block > 0) AddScaledSums<kCodes>(job, block - 1, sums + (block - 1) % 2 * (kSumsBytes / 4));
  }
  _tile_release();
}

// ---- Any number of rows -------------------------------------------------------------------------

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
      job.scales_commute ? MultiplyUnscaled<LinearCodes::kFp4>(job)
                         : Multiply<LinearCodes::kFp4>(job);
      break;
    case LinearCodes::kFp8:
      job.scales_commute ? MultiplyUnscaled<LinearCodes::kFp8>(job)
                         : Multiply<LinearCodes::kFp8>(job);
      break;
    case LinearCodes::kBf16:
      Multiply<LinearCodes::kBf16>(job);
      break;
  }
}

}  // namespace deepinfer
