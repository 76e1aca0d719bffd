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
// rotated is written here, read by kReads (of 4) pieces at once.
template <int kReads>
__device__ inline void StartQueries(const AttentionParams& p, const Item& item, uint8_t* panels) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const uint16_t* q = p.q + item.row * p.q_stride + static_cast<int64_t>(item.first_head) * kDim;
  const int heads = min(kHeads, p.heads - item.first_head);
  // A thread keeps its piece of a panel; 16 heads go at a time.
  const int piece = thread % 8;
  const int num_copied = p.rotate_q ? 7 : 8;
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int head = thread / 8 + 16 * i;
    const bool valid = head < heads;
    const uint16_t* source = q + (valid ? head * kDim : 0) + piece * 8;
    uint8_t* target = panels + PanelOffset(head, piece);
#pragma unroll
    for (int panel = 0; panel < 8; ++panel) {
      if (panel < num_copied)
        CopyAsync16OrZero(target + panel * kPanelBytes, source + panel * 64, valid);
    }
  }
  CommitCopies();
  if (!p.rotate_q) return;
  const auto* table =
      reinterpret_cast<const float4*>(p.table + item.row * p.table_stride + piece * 8);
  const float4 angle[2] = {__ldg(table), __ldg(table + 1)};
  const auto rotate = [](uint32_t& pair, float cos, float sin) {
    float x0 = Bf16LowToFloat(pair);
    float x1 = Bf16HighToFloat(pair);
    RotatePair(x0, x1, cos, sin);
    pair = FloatsToBf16x2(x0, x1);
  };
#pragma unroll kReads
  for (int i = 0; i < 4; ++i) {
    const int head = thread / 8 + 16 * i;
    uint4 x = make_uint4(0u, 0u, 0u, 0u);
    if (head < heads)
      x = __ldg(reinterpret_cast<const uint4*>(q + head * kDim + kDim - kRotated + piece * 8));
    rotate(x.x, angle[0].x, angle[0].y);
    rotate(x.y, angle[0].z, angle[0].w);
    rotate(x.z, angle[1].x, angle[1].y);
    rotate(x.w, angle[1].z, angle[1].w);
    *reinterpret_cast<uint4*>(panels + 7 * kPanelBytes + PanelOffset(head, piece)) = x;
  }
}

// ---- Keys ------------------------------------------------------------------------------------

// What the 16 channels of a lane are: codes of window records, codes of compressed entries, or,
// with lanes of both, what bit 0 of a lane's reference says.
enum class KeyFormat { kQ8, kQ4E, kMixed };

// A key's reference is its record's address (records are 16-byte aligned), with bit 0 set for
// window keys.

// The references of keys first, first + stride, ... of a row's list, which has keys; the last key's
// for what lies beyond. In steps, so that the reads of all are under way at once.
template <int kCount>
__device__ inline void KeyReferences(const AttentionParams& p, const RowKeys& keys, int first,
                                     int stride, const uint8_t* (&references)[kCount]) {
  int place[kCount];  // position in the window, or entry
  bool entry[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int key = min(first + i * stride, keys.num_keys - 1);
    entry[i] = key >= keys.num_window;
    place[i] = keys.first_position + key;
    if (entry[i]) place[i] = __ldg(keys.selected + key - keys.num_window);
  }
  int unit[kCount];  // page or block
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int index = entry[i] ? p.entries_per_block.Quotient(place[i])
                               : p.page_rows.Quotient(place[i]) - keys.first_page;
    const bool in_step = !entry[i] && place[i] >= keys.step_start;
    unit[i] = 0;
    if (!in_step) unit[i] = __ldg((entry[i] ? keys.blocks : keys.pages) + index);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const Divisor& rows = entry[i] ? p.entries_per_block : p.page_rows;
    int row = place[i] - rows.Quotient(place[i]) * static_cast<int>(rows.value);
    int64_t unit_bytes = entry[i] ? p.kv_stride : p.page_stride;
    int64_t row_bytes = entry[i] ? p.kv_bytes : p.window_bytes;
    const uint8_t* base = entry[i] ? p.kv_blocks : p.window_pages + 1;
    if (!entry[i] && place[i] >= keys.step_start) {
      base = p.window_records + 1;
      row = keys.first_row + place[i] - keys.step_start;
      row_bytes = p.record_stride;
    }
    references[i] = base + unit[i] * unit_bytes + row * row_bytes;
  }
}

// 16 channels of one key. They are read without branches, so that many reads are under way: both
// formats read 16 bytes and a scale. Of an entry these are 32 codes, of which a lane uses half.
template <bool kBf16>
struct RawChannels {
  uint32_t words[kBf16 ? 8 : 4];
  uint32_t scale;  // byte of the group. Not with bf16.
};

// Where the channels of one half and one `part` (of 16 channels each) lie in records.
template <bool kBf16>
struct RawOffsets {
  int codes, scale;                // of entries
  int window_codes, window_scale;  // what window records add, less bit 0 of their references

  __device__ RawOffsets(int half, int part) {
    if constexpr (kBf16) {
      codes = half * (2 * kHalf) + part * 32;
      window_codes = -1;
      scale = 0;
      window_scale = 0;
    } else {
      codes = half * (kHalf / 2) + part / 2 * 16;
      scale = kDim / 2 + half * (kHalf / 16) + part;
      window_codes = half * kHalf + part * 16 - codes - 1;
      window_scale = kDim + half * (kHalf / 32) + part / 2 - scale - 1;
    }
  }
};

template <bool kBf16>
__device__ inline void LoadRaw(const uint8_t* reference, const RawOffsets<kBf16>& offsets,
                               RawChannels<kBf16>& raw) {
  const int window = static_cast<int>(reinterpret_cast<uintptr_t>(reference) & 1u);
  const auto* codes =
      reinterpret_cast<const uint4*>(reference + (offsets.codes + window * offsets.window_codes));
  const uint4 a = __ldg(codes);
  raw.words[0] = a.x;
  raw.words[1] = a.y;
  raw.words[2] = a.z;
  raw.words[3] = a.w;
  if constexpr (kBf16) {
    const uint4 b = __ldg(codes + 1);
    raw.words[4] = b.x;
    raw.words[5] = b.y;
    raw.words[6] = b.z;
    raw.words[7] = b.w;
  } else {
    raw.scale = __ldg(reference + (offsets.scale + window * offsets.window_scale));
  }
}

// `odd_part` and `window` are of the lane that loaded; the latter matters with kMixed.
template <bool kBf16, KeyFormat kFormat>
__device__ inline void DecodeRaw(const RawChannels<kBf16>& raw, bool odd_part, bool window,
                                 uint4& low, uint4& high) {
  if constexpr (kBf16) {
    low = DecodeBf16(make_uint4(raw.words[0], raw.words[1], raw.words[2], raw.words[3]));
    high = DecodeBf16(make_uint4(raw.words[4], raw.words[5], raw.words[6], raw.words[7]));
  } else if (kFormat == KeyFormat::kQ8 || (kFormat == KeyFormat::kMixed && window)) {
    const uint32_t factor = Q8Factor(raw.scale);
    low = DecodeE4M3(raw.words[0], raw.words[1], factor);
    high = DecodeE4M3(raw.words[2], raw.words[3], factor);
  } else {
    const uint32_t factor = Q4EFactor(raw.scale);
    low = DecodeE2M1(odd_part ? raw.words[2] : raw.words[0], factor);
    high = DecodeE2M1(odd_part ? raw.words[3] : raw.words[1], factor);
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
