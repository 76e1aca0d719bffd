// Index scores on vectors: exact integer dot products of FP4 codes.
//
// Bound by byte multiply-adds while several rows share a key, by reading 68-byte keys otherwise: 2
// * heads * channels = 8,192 operations per (row, key). Both sides are E2M1 codes times a power of
// two per 32 channels. Doubled codes are integers in [-12, 12], so the dot product of a group is an
// integer below 2^13: `vpmaddubsw` computes it exactly (keys shifted to [0, 24]; sums start at
// minus 12 times the query codes), and one fp32 multiplication per group by the product of both
// scales is exact as well. Only the additions of the four group results, of heads, and the weights
// round, in ascending order; all bits are independent of tiles, rows and threads.
//
// Per tile of 8 keys: nibbles become bytes by a table look-up, a 4x4 transposition puts the same
// four channels of 8 keys in one vector, then for every row and every 4 heads: 32 broadcasts of
// four query codes, multiply-add, 16-bit add; per group one widening add, conversion and scale.
// Eight keys in lanes need no horizontal sums. The same 256-bit code serves AVX-512 machines.
//
// Measured 2026-11-30, 2-core AMD EPYC (AVX2), one thread, processor time, on a machine busy with
// other work: 120 to 155 G operations/s (fp32 multiply-add peak 102), 32,768 entries 1.7 to 2.2 ms
// per row at 16 rows and 2.2 at one. Tried and lost: the codes of each head in one piece, 110 G/s
// for want of address registers; complete unrolling of the quad loop, which spills the sums.
#include <algorithm>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/indexer/indexer_cpu.cc"
// The order matters: targets first, then the header that includes this file once per instruction
// set.
// clang-format off
#include "ops/simd_targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "ops/indexer/indexer_impl.h"
#include "ops/quantize/group_quantize.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace deepinfer {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_AVX2

namespace {

constexpr int64_t kTile = cpu::kIndexTile;
constexpr int64_t kQuadsPerGroup = kQ4PGroup / 4;
constexpr int64_t kMaxGroups = 16;

// Keys of one tile: byte quad t of all 8 keys in quads[t], value 12 + doubled code; half of the
// scales per group.
struct KeyTile {
  __m256i quads[kMaxGroups * kQuadsPerGroup];
  __m256 scales[kMaxGroups];
};

HWY_INLINE __m256i Load2(const uint8_t* low, const uint8_t* high) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(high));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
}

// Transposes 4x4 quads inside both halves: x[i] = quads of key i | key i + 4 becomes out[t] = quad
// t of keys 0-3 | 4-7.
HWY_INLINE void Transpose(const __m256i* x, __m256i* out) {
  const __m256i a = _mm256_unpacklo_epi32(x[0], x[1]);
  const __m256i b = _mm256_unpackhi_epi32(x[0], x[1]);
  const __m256i c = _mm256_unpacklo_epi32(x[2], x[3]);
  const __m256i d = _mm256_unpackhi_epi32(x[2], x[3]);
  out[0] = _mm256_unpacklo_epi64(a, c);
  out[1] = _mm256_unpackhi_epi64(a, c);
  out[2] = _mm256_unpacklo_epi64(b, d);
  out[3] = _mm256_unpackhi_epi64(b, d);
}

// The doubled codes of a group of bf16 values on the Q4P grid, plus 12, even channels before odd
// ones, as the nibbles of packed keys are decoded. The scale found here may be half of the packed
// one with codes of twice the size: the products are the same.
HWY_INLINE float GroupCodes(const uint8_t* record, uint8_t* codes) {
  const auto* values = reinterpret_cast<const Bf16*>(record);
  float x[kQ4PGroup];
  for (int64_t i = 0; i < kQ4PGroup; ++i) x[i] = Bf16ToF32(values[i]);
  const float scale = E8M0ToF32(Q4PScaleByte(GroupAmax(x, kQ4PGroup)));
  const float factor = 2.0f / scale;  // a power of two
  int32_t doubled[kQ4PGroup];
  // Records beyond the visible ones may hold anything; the bounds keep their conversion defined.
  for (int64_t i = 0; i < kQ4PGroup; ++i) {
    const float code = x[i] * factor;
    doubled[i] = code >= -12.0f && code <= 12.0f ? static_cast<int32_t>(code) : 0;
  }
  for (int64_t i = 0; i < kQ4PGroup / 2; ++i) {
    codes[i] = static_cast<uint8_t>(12 + doubled[2 * i]);
    codes[kQ4PGroup / 2 + i] = static_cast<uint8_t>(12 + doubled[2 * i + 1]);
  }
  return scale;
}

void DecodeBf16Tile(const uint8_t* const* records, int64_t channels, KeyTile* tile) {
  for (int64_t g = 0; g < channels / kQ4PGroup; ++g) {
    alignas(32) uint8_t codes[kTile][kQ4PGroup];
    alignas(32) float scales[kTile];
    for (int64_t k = 0; k < kTile; ++k)
      scales[k] = 0.5f * GroupCodes(records[k] + g * Bf16RecordBytes(kQ4PGroup), codes[k]);
    __m256i low[4];
    __m256i high[4];
    for (int i = 0; i < 4; ++i) {
      low[i] = Load2(codes[i], codes[i + 4]);
      high[i] = Load2(codes[i] + kQ4PGroup / 2, codes[i + 4] + kQ4PGroup / 2);
    }
    Transpose(low, tile->quads + kQuadsPerGroup * g);
    Transpose(high, tile->quads + kQuadsPerGroup * g + 4);
    tile->scales[g] = _mm256_load_ps(scales);
  }
}

void DecodeTile(const uint8_t* const* records, int64_t channels, KeyTile* tile) {
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const __m256i nibble = _mm256_set1_epi8(15);
  for (int64_t g = 0; g < channels / kQ4PGroup; ++g) {
    __m256i low[4];
    __m256i high[4];
    for (int i = 0; i < 4; ++i) {
      const __m256i packed = Load2(records[i] + 16 * g, records[i + 4] + 16 * g);
      low[i] = _mm256_shuffle_epi8(table, _mm256_and_si256(packed, nibble));
      high[i] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble));
    }
    Transpose(low, tile->quads + kQuadsPerGroup * g);
    Transpose(high, tile->quads + kQuadsPerGroup * g + 4);
    alignas(32) float scales[kTile];
    for (int64_t k = 0; k < kTile; ++k) scales[k] = 0.5f * E8M0ToF32(records[k][channels / 2 + g]);
    tile->scales[g] = _mm256_load_ps(scales);
  }
}

// Adds kHeads heads from `head` on to the scores of 8 keys. Codes, scales and starts of these heads
// are interleaved.
template <int kHeads>
HWY_INLINE __m256 AddHeads(const KeyTile& tile, const cpu::IndexQuery& query, int64_t head,
                           int64_t groups, __m256 score) {
  const __m256i ones = _mm256_set1_epi16(1);
  const int8_t* codes = query.codes + head * groups * kQ4PGroup;
  const float* scales = query.scales + head * groups;
  const int32_t* starts = query.starts + head * groups;
  const __m256i* quads = tile.quads;
  __m256 dot[kHeads];
  for (int h = 0; h < kHeads; ++h) dot[h] = _mm256_setzero_ps();
  for (int64_t g = 0; g < groups; ++g, scales += kHeads, starts += kHeads) {
    __m256i sum[kHeads];
    for (int h = 0; h < kHeads; ++h) sum[h] = _mm256_set1_epi32(starts[h]);
      // Unrolled completely, the compiler keeps all broadcasts alive at once and spills the sums.
#pragma GCC unroll 4
    for (int64_t t = 0; t < kQuadsPerGroup; ++t, ++quads, codes += 4 * kHeads) {
      const __m256i keys = *quads;
      for (int h = 0; h < kHeads; ++h) {
        int32_t quad;
        std::memcpy(&quad, codes + 4 * h, 4);
        // At most 2 * 24 * 12 per 16-bit lane, 8 of them and the start: no saturation.
        sum[h] = _mm256_add_epi16(sum[h], _mm256_maddubs_epi16(keys, _mm256_set1_epi32(quad)));
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      const __m256 whole = _mm256_cvtepi32_ps(_mm256_madd_epi16(sum[h], ones));
      const __m256 scale = _mm256_mul_ps(tile.scales[g], _mm256_set1_ps(scales[h]));
      dot[h] = _mm256_fmadd_ps(whole, scale, dot[h]);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    const __m256 relu = _mm256_max_ps(dot[h], _mm256_setzero_ps());
    score = _mm256_add_ps(score, _mm256_mul_ps(relu, _mm256_set1_ps(query.weights[head + h])));
  }
  return score;
}

}  // namespace

void ScoreTiles(const IndexerArgs& args, int64_t sequence, std::span<const cpu::IndexQuery> queries,
                const int32_t* list, int64_t begin, int64_t end) {
  const int64_t heads = args.q.dim(1);
  const int64_t channels = args.q.dim(2);
  const int64_t groups = channels / kQ4PGroup;
  const int64_t entries_per_block = args.blocks.dim(1);
  const int64_t record_bytes = args.blocks.dim(2);
  const bool bf16 = record_bytes == Bf16RecordBytes(channels);
  const int32_t* block_table = args.layout.block_table.Row<int32_t>(sequence);
  const int64_t num_blocks = args.layout.block_table.dim(1);
  const uint8_t* any = args.blocks.Row<uint8_t>(0);
  KeyTile tile;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t number = list != nullptr ? list[i] : i;
    const uint8_t* records[kTile];
    for (int64_t k = 0; k < kTile; ++k) {
      const int64_t j = number * kTile + k;
      const int64_t block = j / entries_per_block;
      // A last tile reaches beyond the visible entries, possibly beyond the sequence's blocks: any
      // record will do there.
      const bool exists = block < num_blocks && block_table[block] >= 0;
      records[k] = exists ? args.blocks.Row<uint8_t>(block_table[block]) +
                                (j % entries_per_block) * record_bytes
                          : any;
    }
    if (bf16) {
      DecodeBf16Tile(records, channels, &tile);
    } else {
      DecodeTile(records, channels, &tile);
    }
    for (const cpu::IndexQuery& query : queries) {
      if (number >= query.tiles) continue;
      __m256 score = _mm256_setzero_ps();
      int64_t h = 0;
      for (; h + cpu::kIndexHeads <= heads; h += cpu::kIndexHeads)
        score = AddHeads<cpu::kIndexHeads>(tile, query, h, groups, score);
      for (; h < heads; ++h) score = AddHeads<1>(tile, query, h, groups, score);
      _mm256_storeu_ps(query.scores + number * kTile, score);
    }
  }
}

static_assert(kMaxGroups * kQ4PGroup == 512, "the dispatcher refuses wider index heads");

#endif  // HWY_TARGET == HWY_AVX2
}  // namespace HWY_NAMESPACE
}  // namespace deepinfer
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deepinfer::cpu {

void PrepareIndexQuery(const IndexerArgs& args, int64_t row, const IndexQuery& query) {
  const int64_t heads = args.q.dim(1);
  const int64_t channels = args.q.dim(2);
  const int64_t groups = channels / kQ4PGroup;
  const Bf16* q = args.q.Row<Bf16>(row);
  for (int64_t h = 0; h < heads; ++h) {
    // Whole tiles of heads are interleaved quad by quad; heads left over stand alone.
    const bool whole = h < heads / kIndexHeads * kIndexHeads;
    const int64_t tile = whole ? kIndexHeads : 1;
    const int64_t first = whole ? h / kIndexHeads * kIndexHeads : h;
    query.weights[h] = Bf16ToF32(args.weights.Row<Bf16>(row)[h]);
    for (int64_t g = 0; g < groups; ++g) {
      float x[kQ4PGroup];
      for (int64_t i = 0; i < kQ4PGroup; ++i) x[i] = Bf16ToF32(q[h * channels + g * kQ4PGroup + i]);
      // The values are on the grid already; quantising again finds their scale and codes.
      const float scale = E8M0ToF32(Q4PScaleByte(GroupAmax(x, kQ4PGroup)));
      int8_t* codes = query.codes + first * channels + g * kQ4PGroup * tile + 4 * (h - first);
      int32_t sum = 0;
      for (int64_t i = 0; i < kQ4PGroup; ++i) {
        const float value = E2M1ToF32(F32ToE2M1(std::clamp(x[i] / scale, -6.0f, 6.0f)));
        const auto doubled = static_cast<int8_t>(2.0f * value);
        const int64_t place =
            (i % 2) * (kQ4PGroup / 2) + i / 2;  // as the two nibbles of key bytes are decoded
        codes[place / 4 * 4 * tile + place % 4] = doubled;
        sum += doubled;
      }
      const int64_t slot = first * groups + g * tile + (h - first);
      query.scales[slot] = 0.5f * scale;
      query.starts[slot] = (-12 * sum) & 0xffff;  // in the lower 16-bit lane of each 32
    }
  }
}

void ScoreIndexTiles(const IndexerArgs& args, int64_t sequence, std::span<const IndexQuery> queries,
                     const int32_t* list, int64_t begin, int64_t end) {
  N_AVX2::ScoreTiles(args, sequence, queries, list, begin, end);
}

}  // namespace deepinfer::cpu
#endif  // HWY_ONCE
