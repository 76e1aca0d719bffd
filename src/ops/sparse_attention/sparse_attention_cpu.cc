// Latent attention on vectors.
//
// Bound by fp32 multiply-adds: 4 * heads * keys * head_dim FLOPs per row (84 MFLOP for 64 heads,
// 640 keys, 512 channels) on 215 KB of records. Per block of 64 keys, which is the contract's block
// of the running softmax:
//   1. decode the records once to fp32 (132 KB, second-level cache). FP8 and FP4 codes become half
//   floats by shifts or a byte look-up
//      and are widened by the F16C instruction: no subnormal fp32 arithmetic, no gathers.
//   2. scores: register tiles of 4 heads x 3 keys with the channels in lanes. Twelve sums hide the
//   latency of the multiply-add; a sum's
//      lanes are added at the end in Highway's fixed order. Groups of kKeyGroup keys stay in the
//      first-level cache over all heads.
//   3. maximum, exponentials, denominator per head.
//   4. numerators: register tiles of 4 heads x 3 vectors of channels, keys ascending. A bf16
//   probability times a decoded value is exact
//      in fp32, so the fused multiply-add gives the bits of the reference's separate operations.
// Every score and every numerator element is a chain of its own: tile shapes and remainders cannot
// change bits. Bits may differ between AVX2 and AVX-512, where a score has 8 or 16 partial sums.
//
// Measured 2026-11-30, 2-core AMD EPYC (AVX2), one thread, processor time: 16 rows of 640 keys 1.12
// ms per row = 75 GFLOP/s, 74 % of the fp32 multiply-add peak (102); decoding takes 7 % of it. Key
// groups of 3, 6, 9 and 21 gave 73, 74, 69 and 67 GFLOP/s. Without complete unrolling (-O2) the
// tiles live in memory: 15 GFLOP/s. AVX-512: compiled, not yet timed.
#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/sparse_attention/sparse_attention_cpu.cc"
// The order matters: targets first, then the header that includes this file once per instruction
// set.
// clang-format off
#include "ops/simd_targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "ops/simd-inl.h"
#include "ops/sparse_attention/sparse_attention_impl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace deepinfer {
namespace HWY_NAMESPACE {
#if DI_SIMD_PASS

namespace {

constexpr int64_t kHeadTile = 4;
constexpr int64_t kKeyTile = 3;
constexpr int64_t kKeyGroup = 12;
constexpr int64_t kVectorTile = 3;

HWY_INLINE void DecodeQ8(const uint8_t* record, int64_t channels, float* out) {
  const F32 d;
  for (int64_t i = 0; i < channels; i += kLanes) {
    const VecF32 scale = hn::Set(d, E8M0ToF32(record[channels + i / kQ8Group]));
    hn::StoreU(hn::Mul(LoadE4M3(record + i), scale), d, out + i);
  }
}

// Eight half floats, given as bits, times `scale`.
HWY_INLINE void StoreHalves(hn::Vec<hn::FixedTag<uint16_t, 8>> bits, float scale, float* out) {
  const hn::FixedTag<float, 8> d;
  const hn::FixedTag<hwy::float16_t, 8> dh;
  hn::StoreU(hn::Mul(hn::PromoteTo(d, hn::BitCast(dh, bits)), hn::Set(d, scale)), d, out);
}

HWY_INLINE void DecodeQ4E(const uint8_t* record, int64_t channels, float* out) {
  const hn::FixedTag<uint8_t, 16> d8;
  const hn::FixedTag<uint16_t, 8> d16;
  // High bytes of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives as half floats; the low bytes are
  // zero.
  alignas(16) static constexpr uint8_t kHighBytes[16] = {0x00, 0x38, 0x3c, 0x3e, 0x40, 0x42,
                                                         0x44, 0x46, 0x80, 0xb8, 0xbc, 0xbe,
                                                         0xc0, 0xc2, 0xc4, 0xc6};
  const auto table = hn::Load(d8, kHighBytes);
  const auto zero = hn::Zero(d8);
  for (int64_t i = 0; i < channels; i += kQ4EGroup) {
    const float scale = E4M3ToF32(record[channels / 2 + i / kQ4EGroup]);
    const auto bytes =
        hn::ZeroExtendVector(d8, hn::LoadU(hn::Half<decltype(d8)>(), record + i / 2));
    const auto low = hn::And(bytes, hn::Set(d8, 15));
    const auto high =
        hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(d16, hn::And(bytes, hn::Set(d8, 0xf0)))));
    const auto values = hn::TableLookupBytes(table, hn::InterleaveLower(d8, low, high));
    StoreHalves(hn::BitCast(d16, hn::InterleaveLower(d8, zero, values)), scale, out + i);
    StoreHalves(hn::BitCast(d16, hn::InterleaveUpper(d8, zero, values)), scale, out + i + 8);
  }
}

HWY_INLINE void DecodeBf16(const uint8_t* record, int64_t channels, float* out) {
  const F32 d;
  const auto* values = reinterpret_cast<const Bf16*>(record);
  for (int64_t i = 0; i < channels; i += kLanes) hn::StoreU(LoadBf16(values + i), d, out + i);
}

// Scores of kHeads heads x kKeys keys into p[head * kAttentionBlock + key].
template <int kHeads, int kKeys>
HWY_INLINE void ScoreTile(const float* q, const float* keys, int64_t dim, int64_t stride,
                          float scale, float* p) {
  const F32 d;
  VecF32 sum[kHeads][kKeys];
  for (int h = 0; h < kHeads; ++h) {
    for (int k = 0; k < kKeys; ++k) sum[h][k] = hn::Zero(d);
  }
  for (int64_t i = 0; i < dim; i += kLanes) {
    VecF32 key[kKeys];
    for (int k = 0; k < kKeys; ++k) key[k] = hn::LoadU(d, keys + k * stride + i);
    for (int h = 0; h < kHeads; ++h) {
      const VecF32 query = hn::LoadU(d, q + h * stride + i);
      for (int k = 0; k < kKeys; ++k) sum[h][k] = hn::MulAdd(query, key[k], sum[h][k]);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int k = 0; k < kKeys; ++k)
      p[h * kAttentionBlock + k] = hn::GetLane(hn::SumOfLanes(d, sum[h][k])) * scale;
  }
}

template <int kHeads>
HWY_INLINE void ScoreHeads(const float* q, const float* keys, int64_t count, int64_t dim,
                           int64_t stride, float scale, float* p) {
  int64_t k = 0;
  for (; k + kKeyTile <= count; k += kKeyTile)
    ScoreTile<kHeads, kKeyTile>(q, keys + k * stride, dim, stride, scale, p + k);
  for (; k < count; ++k) ScoreTile<kHeads, 1>(q, keys + k * stride, dim, stride, scale, p + k);
}

// out = out * rescale + sum over keys of p * value, for kHeads heads x kVectors vectors of
// channels.
template <int kHeads, int kVectors>
HWY_INLINE void ValueTile(const float* p, const float* values, int64_t count, int64_t stride,
                          const float* rescale, float* out) {
  const F32 d;
  VecF32 sum[kHeads][kVectors];
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < kVectors; ++v) {
      sum[h][v] = hn::Mul(hn::LoadU(d, out + h * stride + v * kLanes), hn::Set(d, rescale[h]));
    }
  }
  for (int64_t k = 0; k < count; ++k) {
    VecF32 value[kVectors];
    for (int v = 0; v < kVectors; ++v) value[v] = hn::LoadU(d, values + k * stride + v * kLanes);
    for (int h = 0; h < kHeads; ++h) {
      const VecF32 weight = hn::Set(d, p[h * kAttentionBlock + k]);
      for (int v = 0; v < kVectors; ++v) sum[h][v] = hn::MulAdd(weight, value[v], sum[h][v]);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[h][v], d, out + h * stride + v * kLanes);
  }
}

template <int kVectors>
HWY_INLINE void ValueHeads(const float* p, const float* values, int64_t heads, int64_t count,
                           int64_t stride, const float* rescale, float* out) {
  int64_t h = 0;
  for (; h + kHeadTile <= heads; h += kHeadTile) {
    ValueTile<kHeadTile, kVectors>(p + h * kAttentionBlock, values, count, stride, rescale + h,
                                   out + h * stride);
  }
  for (; h < heads; ++h) {
    ValueTile<1, kVectors>(p + h * kAttentionBlock, values, count, stride, rescale + h,
                           out + h * stride);
  }
}

// One head's scores become bf16 probabilities; `maximum` and `denominator` move on. Returns the
// factor for what was summed before.
HWY_INLINE float SoftmaxBlock(float* p, int64_t count, float* maximum, float* denominator) {
  const F32 d;
  const float previous = *maximum;
  for (int64_t k = 0; k < count; ++k) *maximum = std::max(*maximum, p[k]);
  // Lanes beyond `count` hold stale scores; they are computed and ignored.
  const VecF32 shift = hn::Set(d, *maximum);
  alignas(64) float exact[kAttentionBlock];
  for (int64_t k = 0; k < count; k += kLanes) {
    const VecF32 e = Exp(hn::Sub(hn::LoadU(d, p + k), shift));
    hn::Store(e, d, exact + k);
    hn::StoreU(RoundBf16(e), d, p + k);
  }
  const float rescale = hn::GetLane(Exp(hn::Set(d, previous - *maximum)));
  float sum = *denominator * rescale;
  for (int64_t k = 0; k < count; ++k) sum += exact[k];
  *denominator = sum;
  return rescale;
}

}  // namespace

void DecodeKeysVector(const KeyList& keys, int64_t begin, int64_t end, int64_t head_dim,
                      float* out) {
  const int64_t stride = cpu::AttentionStride(head_dim);
  for (int64_t i = begin; i < end; ++i) {
    const uint8_t* record = keys.records[static_cast<size_t>(i)];
    float* key = out + (i - begin) * stride;
    const bool window = i < keys.num_window;
    if (window ? keys.window_bf16 : keys.compressed_bf16) {
      DecodeBf16(record, head_dim, key);
    } else if (window) {
      DecodeQ8(record, head_dim, key);
    } else {
      DecodeQ4E(record, head_dim, key);
    }
  }
}

void AttendVector(const SparseAttentionArgs& args, int64_t row, const KeyList& keys,
                  const float* decoded, int64_t head_begin, int64_t head_end,
                  const cpu::AttentionScratch& scratch) {
  const F32 d;
  const int64_t dim = args.q.dim(2);
  const int64_t pairs = args.table.dim(1);
  const int64_t stride = cpu::AttentionStride(dim);
  const int64_t heads = head_end - head_begin;
  const auto count = static_cast<int64_t>(keys.records.size());
  float maximum[cpu::kMaxAttentionHeads];
  float denominator[cpu::kMaxAttentionHeads];
  const Bf16* source = args.q.Row<Bf16>(row) + head_begin * dim;
  for (int64_t h = 0; h < heads; ++h) {
    maximum[h] = -1e30f;
    denominator[h] = 0.0f;
    for (int64_t i = 0; i < dim; i += kLanes) {
      hn::StoreU(LoadBf16(source + h * dim + i), d, scratch.q + h * stride + i);
      hn::StoreU(hn::Zero(d), d, scratch.out + h * stride + i);
    }
  }
  for (int64_t begin = 0; begin < count; begin += kAttentionBlock) {
    const int64_t size = std::min(kAttentionBlock, count - begin);
    const float* block = decoded != nullptr ? decoded + begin * stride : scratch.keys;
    if (decoded == nullptr) DecodeKeysVector(keys, begin, begin + size, dim, scratch.keys);
    for (int64_t k = 0; k < size; k += kKeyGroup) {
      const int64_t group = std::min(kKeyGroup, size - k);
      int64_t h = 0;
      for (; h + kHeadTile <= heads; h += kHeadTile) {
        ScoreHeads<kHeadTile>(scratch.q + h * stride, block + k * stride, group, dim, stride,
                              args.scale, scratch.p + h * kAttentionBlock + k);
      }
      for (; h < heads; ++h) {
        ScoreHeads<1>(scratch.q + h * stride, block + k * stride, group, dim, stride, args.scale,
                      scratch.p + h * kAttentionBlock + k);
      }
    }
    for (int64_t h = 0; h < heads; ++h) {
      scratch.rescale[h] =
          SoftmaxBlock(scratch.p + h * kAttentionBlock, size, &maximum[h], &denominator[h]);
    }
    int64_t i = 0;
    for (; i + kVectorTile * kLanes <= dim; i += kVectorTile * kLanes) {
      ValueHeads<kVectorTile>(scratch.p, block + i, heads, size, stride, scratch.rescale,
                              scratch.out + i);
    }
    for (; i < dim; i += kLanes) {
      ValueHeads<1>(scratch.p, block + i, heads, size, stride, scratch.rescale, scratch.out + i);
    }
  }
  const float* table = args.table.Row<float>(row);
  const int64_t first_rotated = dim - 2 * pairs;
  const bool production = args.numerics == Numerics::kProduction;
  for (int64_t h = 0; h < heads; ++h) {
    float* out = scratch.out + h * stride;
    const VecF32 sink = Exp(hn::Set(d, args.sink.Row<float>(head_begin + h)[0] - maximum[h]));
    // Without any key the sum stays 0, whatever the sink.
    const VecF32 divisor =
        count == 0 ? hn::Set(d, 1.0f) : hn::Add(hn::Set(d, denominator[h]), sink);
    for (int64_t i = 0; i < dim; i += kLanes) {
      VecF32 value = hn::Div(hn::LoadU(d, out + i), divisor);
      if (!production) value = RoundBf16(value);
      if (i >= first_rotated) value = RotateBack(value, hn::LoadU(d, table + i - first_rotated));
      hn::StoreU(value, d, out + i);
    }
    Bf16* target = args.out.Row<Bf16>(row) + (head_begin + h) * dim;
    if (production) {
      Q8RowToBf16(out, dim, target);
    } else {
      for (int64_t i = 0; i < dim; i += kLanes) StoreBf16(hn::LoadU(d, out + i), target + i);
    }
  }
}

#endif  // DI_SIMD_PASS
}  // namespace HWY_NAMESPACE
}  // namespace deepinfer
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deepinfer::cpu {

void DecodeKeys(CpuLevel level, const KeyList& keys, int64_t begin, int64_t end, int64_t head_dim,
                float* out) {
  DI_SIMD_FUNCTION(level, DecodeKeysVector)
  (keys, begin, end, head_dim, out + begin * AttentionStride(head_dim));
}

void SparseAttention(CpuLevel level, const SparseAttentionArgs& args, int64_t row,
                     const KeyList& keys, const float* decoded, int64_t head_begin,
                     int64_t head_end, const AttentionScratch& scratch) {
  DI_SIMD_FUNCTION(level, AttendVector)(args, row, keys, decoded, head_begin, head_end, scratch);
}

}  // namespace deepinfer::cpu
#endif  // HWY_ONCE
