// What the kernels of sparse attention for Hopper share: shapes, the layout of operands in shared
// memory, the bringing of q, the decoding of keys and the storing of results.
#pragma once

#include "ops/sparse_attention/sparse_attention_cuda.cuh"

namespace deepinfer::cuda::attention {

inline constexpr int kHeads = 64;  // of a work item
inline constexpr int kDim = 512;
inline constexpr int kHalf = 256;  // channels
inline constexpr int kRotated = 64;
inline constexpr int kBlockKeys = static_cast<int>(kAttentionBlock);
// Panels are 64 rows (heads or keys) of 128 bytes (64 channels) with the 128-byte swizzle.
inline constexpr int kPanelBytes = 64 * 128;
inline constexpr int kHalfBytes = 4 * kPanelBytes;
inline constexpr int kRight = 1;  // half of the channels; 0 is the left one
inline constexpr int kLeft = 0;

__device__ inline void ArriveWarp(Barrier* barrier) {
  __syncwarp();
  if (LaneId() == 0) BarrierArrive(barrier);
}

// A work item is a row and (up to) 64 of its heads.
struct Item {
  int row;
  int first_head;
};
__device__ inline int ItemsPerRow(const AttentionParams& p) {
  return (p.heads + kHeads - 1) / kHeads;
}
__device__ inline Item ItemOf(const AttentionParams& p, int index) {
  const int per_row = ItemsPerRow(p);
  return {index / per_row, index % per_row * kHeads};
}
__device__ inline int NumItems(const AttentionParams& p) {
  return p.rows * ItemsPerRow(p);
}

// Where 16-byte piece `piece` (of 8) of row `row` lies in a panel.
__device__ inline int PanelOffset(int row, int piece) {
  return row * 128 + ((piece ^ (row & 7)) << 4);
}

// Starts to bring q of an item to 8 panels; 128 threads, which must wait for their copies. What is
// rotated is written here.
__device__ inline void StartQueries(const AttentionParams& p, const Item& item, uint8_t* panels) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const uint16_t* q = p.q + item.row * p.q_stride + static_cast<int64_t>(item.first_head) * kDim;
  const int heads = min(kHeads, p.heads - item.first_head);
  // A thread keeps its piece of a panel; 16 heads go at a time.
  const int piece = thread % 8;
  const int num_copied = p.rotate_q ? 7 : 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int head = thread / 8 + 16 * i;
    const bool valid = head < heads;
    const uint16_t* source = q + (valid ? head * kDim : 0) + piece * 8;
    for (int panel = 0; panel < num_copied; ++panel)
      CopyAsync16OrZero(panels + panel * kPanelBytes + PanelOffset(head, piece),
                        source + panel * 64, valid);
  }
  CommitCopies();
  if (!p.rotate_q) return;
  const auto* table =
      reinterpret_cast<const float4*>(p.table + item.row * p.table_stride + piece * 8);
  const float4 angle[2] = {__ldg(table), __ldg(table + 1)};
  uint4 x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int head = thread / 8 + 16 * i;
    x[i] = make_uint4(0u, 0u, 0u, 0u);
    if (head < heads)
      x[i] = __ldg(reinterpret_cast<const uint4*>(q + head * kDim + kDim - kRotated + piece * 8));
  }
  const auto rotate = [](uint32_t& pair, float cos, float sin) {
    float x0 = Bf16LowToFloat(pair);
    float x1 = Bf16HighToFloat(pair);
    RotatePair(x0, x1, cos, sin);
    pair = FloatsToBf16x2(x0, x1);
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    rotate(x[i].x, angle[0].x, angle[0].y);
    rotate(x[i].y, angle[0].z, angle[0].w);
    rotate(x[i].z, angle[1].x, angle[1].y);
    rotate(x[i].w, angle[1].z, angle[1].w);
    *reinterpret_cast<uint4*>(panels + 7 * kPanelBytes + PanelOffset(thread / 8 + 16 * i, piece)) =
        x[i];
  }
}

// ---- Keys ------------------------------------------------------------------------------------

// 16 channels of one key as they lie in memory: 16 E4M3 codes, 8 bytes of E2M1 codes, or 16 bf16.
template <bool kBf16>
struct RawChannels {
  uint32_t words[kBf16 ? 8 : 4];
  uint32_t scale;  // byte of the group; bit 8: window key. Not with bf16.
};

// `part` counts 16 channels inside the half.
template <bool kBf16>
__device__ inline void LoadRaw(const uint8_t* reference, int half, int part,
                               RawChannels<kBf16>& raw) {
  const auto bits = reinterpret_cast<uintptr_t>(reference);
  const bool window = (bits & 1u) != 0;
  const auto* record = reinterpret_cast<const uint8_t*>(bits & ~static_cast<uintptr_t>(1));
#pragma unroll
  for (uint32_t& word : raw.words) word = 0;
  raw.scale = 0;
  if (record == nullptr) return;
  if constexpr (kBf16) {
    const auto* source = reinterpret_cast<const uint4*>(record + half * 512 + part * 32);
    const uint4 a = __ldg(source);
    const uint4 b = __ldg(source + 1);
    raw.words[0] = a.x;
    raw.words[1] = a.y;
    raw.words[2] = a.z;
    raw.words[3] = a.w;
    raw.words[4] = b.x;
    raw.words[5] = b.y;
    raw.words[6] = b.z;
    raw.words[7] = b.w;
  } else if (window) {
    const uint4 a = __ldg(reinterpret_cast<const uint4*>(record + half * kHalf + part * 16));
    raw.words[0] = a.x;
    raw.words[1] = a.y;
    raw.words[2] = a.z;
    raw.words[3] = a.w;
    raw.scale = 256u | __ldg(record + kDim + half * (kHalf / 32) + part / 2);
  } else {
    const uint2 a = __ldg(reinterpret_cast<const uint2*>(record + half * (kHalf / 2) + part * 8));
    raw.words[0] = a.x;
    raw.words[1] = a.y;
    raw.scale = __ldg(record + kDim / 2 + half * (kHalf / 16) + part);
  }
}

template <bool kBf16>
__device__ inline void DecodeRaw(const RawChannels<kBf16>& raw, uint4& low, uint4& high) {
  if constexpr (kBf16) {
    low = DecodeBf16(make_uint4(raw.words[0], raw.words[1], raw.words[2], raw.words[3]));
    high = DecodeBf16(make_uint4(raw.words[4], raw.words[5], raw.words[6], raw.words[7]));
  } else if ((raw.scale & 256u) != 0) {
    const uint32_t factor = Q8Factor(raw.scale & 255u);
    low = DecodeE4M3(raw.words[0], raw.words[1], factor);
    high = DecodeE4M3(raw.words[2], raw.words[3], factor);
  } else {
    const uint32_t factor = Q4EFactor(raw.scale);
    low = DecodeE2M1(raw.words[0], factor);
    high = DecodeE2M1(raw.words[1], factor);
  }
}

// ---- Results ---------------------------------------------------------------------------------

// Rounds and stores 32 channels of one head of a row; a quad of lanes, each with channels 2 t and
// 2 t + 1 of four groups of 8, normalised. Rotates back if the channels are among the last 64.
__device__ inline void StoreGroup(const AttentionParams& p, int row, int head, int first_channel,
                                  float (&x)[8]) {
  const int quad_lane = LaneId() % 4;
  if (!p.production) {
#pragma unroll
    for (float& value : x) value = Bf16ToFloat(FloatToBf16(value));
  }
  if (first_channel >= kDim - kRotated) {
    const float* table =
        p.table + row * p.table_stride + first_channel - (kDim - kRotated) + 2 * quad_lane;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 angle = __ldg(reinterpret_cast<const float2*>(table + 8 * j));
      RotatePair(x[2 * j], x[2 * j + 1], angle.x, -angle.y);
    }
  }
  uint32_t pairs[4];
  if (p.production) {
    float amax = fabsf(x[0]);
#pragma unroll
    for (int j = 1; j < 8; ++j) amax = fmaxf(amax, fabsf(x[j]));
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
    const uint32_t byte = Q8Byte(amax);
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = Q8Pair(x[2 * j], x[2 * j + 1], byte);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = FloatsToBf16x2(x[2 * j], x[2 * j + 1]);
  }
  // Lane t has pair t of each of four 16-byte pieces; transposed, it has piece t.
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const bool odd = (quad_lane & 1) != 0;
    const uint32_t received = __shfl_xor_sync(0xffffffffu, odd ? pairs[j] : pairs[j + 1], 1);
    (odd ? pairs[j] : pairs[j + 1]) = received;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const bool high = (quad_lane & 2) != 0;
    const uint32_t received = __shfl_xor_sync(0xffffffffu, high ? pairs[j] : pairs[j + 2], 2);
    (high ? pairs[j] : pairs[j + 2]) = received;
  }
  if (head < p.heads) {
    uint16_t* target = p.out + row * p.out_stride + static_cast<int64_t>(head) * kDim +
                       first_channel + quad_lane * 8;
    *reinterpret_cast<uint4*>(target) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

}  // namespace deepinfer::cuda::attention
