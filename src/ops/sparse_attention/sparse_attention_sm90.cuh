// What the kernels of sparse attention for Hopper share: shapes, the layout of operands in shared
// memory, the bringing of q, the decoding of keys and the storing of results.
//
// Channels are in an order of their own in shared memory. Of a group of 32, word t of 16-byte piece
// j holds channels 8 t + j and 8 t + j + 4. So the eight E2M1 codes of a word of a record become
// four words of keys by shifts and masks alone, and a lane of an accumulator, which has word t of
// every piece, has eight channels that follow each other: a group is stored without an exchange
// between lanes.
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

// ---- Queries -----------------------------------------------------------------------------------

// Eight channels in their own order (a word of two each) become words of four pieces, and a group's
// 16 words the group's pieces.
__device__ inline void PermuteWords(const uint4& x, uint32_t (&words)[4]) {
  words[0] = __byte_perm(x.x, x.z, 0x5410);
  words[1] = __byte_perm(x.x, x.z, 0x7632);
  words[2] = __byte_perm(x.y, x.w, 0x5410);
  words[3] = __byte_perm(x.y, x.w, 0x7632);
}

__device__ inline const uint16_t* QueriesOf(const AttentionParams& p, const Item& item) {
  return p.q + item.row * p.q_stride + static_cast<int64_t>(item.first_head) * kDim;
}

// Cosines and sines of a lane's two pieces of the rotated channels.
struct QueryAngles {
  float4 pairs[2][2];
};
__device__ inline QueryAngles LoadQueryAngles(const float* table) {
  QueryAngles angles;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto* source = reinterpret_cast<const float4*>(table + 8 * (LaneId() / 8 + 4 * i));
    angles.pairs[i][0] = __ldg(source);
    angles.pairs[i][1] = __ldg(source + 1);
  }
  return angles;
}

// Rotates the last 64 channels of 8 heads where they lie, in their own order. A lane has two pieces
// of one head.
__device__ inline void RotateQueries(const QueryAngles& angles, int first_head, uint8_t* panels) {
  const int head = first_head + LaneId() % 8;
  const auto rotate = [](uint32_t& pair, float cos, float sin) {
    float x0 = Bf16LowToFloat(pair);
    float x1 = Bf16HighToFloat(pair);
    RotatePair(x0, x1, cos, sin);
    pair = FloatsToBf16x2(x0, x1);
  };
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int piece = LaneId() / 8 + 4 * i;
    const float4& low = angles.pairs[i][0];
    const float4& high = angles.pairs[i][1];
    auto* place = reinterpret_cast<uint4*>(panels + 7 * kPanelBytes + PanelOffset(head, piece));
    uint4 x = *place;
    rotate(x.x, low.x, low.y);
    rotate(x.y, low.z, low.w);
    rotate(x.z, high.x, high.y);
    rotate(x.w, high.z, high.w);
    *place = x;
  }
}

// Heads of a warp that brings queries; all of them are copied as they are, then rotated and brought
// into the order of tiles where they lie.
inline constexpr int kQueryHeads = 8;

// Starts to copy heads of an item, from head `first_head` of the item on, to 8 panels.
__device__ inline void CopyQueriesWarp(const AttentionParams& p, const Item& item, int first_head,
                                       uint8_t* panels) {
  const int lane = LaneId();
  const uint16_t* q = QueriesOf(p, item);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int head = first_head + 4 * i + lane / 8;
    const bool valid = item.first_head + head < p.heads;
    const uint16_t* source = q + (valid ? head * kDim : 0) + lane % 8 * 8;
    uint8_t* target = panels + PanelOffset(head, lane % 8);
#pragma unroll
    for (int panel = 0; panel < 8; ++panel)
      CopyAsync16OrZero(target + panel * kPanelBytes, source + panel * 64, valid);
  }
  CommitCopies();
}
__device__ inline void PrefetchQueriesWarp(const AttentionParams& p, const Item& item,
                                           int first_head) {
  if (LaneId() == 0 && item.row < p.rows && item.first_head + first_head + kQueryHeads <= p.heads)
    PrefetchL2(QueriesOf(p, item) + first_head * kDim, kQueryHeads * kDim * 2);
}

// Waits for what CopyQueriesWarp started and finishes it.
__device__ inline void FinishQueriesWarp(const AttentionParams& p, const Item& item, int first_head,
                                         uint8_t* panels) {
  const int lane = LaneId();
  // Read while the copies are under way.
  QueryAngles angles = {};
  if (p.rotate_q) angles = LoadQueryAngles(p.table + item.row * p.table_stride);
  WaitCopies<0>();
  __syncwarp();
  if (p.rotate_q) {
    RotateQueries(angles, first_head, panels);
    __syncwarp();
  }
  const int head = first_head + lane % 8;
#pragma unroll 1
  for (int quarter = 0; quarter < 4; ++quarter) {
    // The lane's group of 32 channels of a quarter of 128: half of a panel's row.
    uint8_t* row = panels + (2 * quarter + lane / 16) * kPanelBytes;
    const int first_piece = lane / 8 % 2 * 4;
    uint32_t words[4][4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint4 x = *reinterpret_cast<const uint4*>(row + PanelOffset(head, first_piece + t));
      PermuteWords(x, words[t]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      *reinterpret_cast<uint4*>(row + PanelOffset(head, first_piece + j)) =
          make_uint4(words[0][j], words[1][j], words[2][j], words[3][j]);
    }
  }
}

// ---- Keys ------------------------------------------------------------------------------------

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

// ---- Decoding ----------------------------------------------------------------------------------

// Signs of `signs` and magnitudes of `magnitudes`, which are in place, times the factor.
template <uint32_t kMagnitudes>
__device__ inline uint32_t PlacedPair(uint32_t signs, uint32_t magnitudes, uint32_t factor) {
  return MulBf16x2((signs & 0x80008000u) | (magnitudes & kMagnitudes), factor);
}

// Eight channels, words for four pieces: of eight E2M1 codes or of eight E4M3 codes.
__device__ inline void DecodeE2M1Words(uint32_t codes, uint32_t factor, uint32_t (&words)[4]) {
  constexpr uint32_t kMagnitudes = 0x01c001c0u;
  const uint32_t high = codes >> 8;
  words[0] = PlacedPair<kMagnitudes>(codes << 12, codes << 6, factor);
  words[1] = PlacedPair<kMagnitudes>(codes << 8, codes << 2, factor);
  words[2] = PlacedPair<kMagnitudes>(codes << 4, high << 6, factor);
  words[3] = PlacedPair<kMagnitudes>(codes, high << 2, factor);
}
__device__ inline void DecodeE4M3Words(uint32_t low, uint32_t high, uint32_t factor,
                                       uint32_t (&words)[4]) {
  constexpr uint32_t kMagnitudes = 0x07f007f0u;
  const uint32_t first = __byte_perm(low, high, 0x5410);   // codes 0, 1, 4, 5
  const uint32_t second = __byte_perm(low, high, 0x7632);  // 2, 3, 6, 7
  words[0] = PlacedPair<kMagnitudes>(first << 8, first << 4, factor);
  words[1] = PlacedPair<kMagnitudes>(first, first >> 4, factor);
  words[2] = PlacedPair<kMagnitudes>(second << 8, second << 4, factor);
  words[3] = PlacedPair<kMagnitudes>(second, second >> 4, factor);
}

// A group of 32 channels of one key as it lies in memory: codes of an entry (the first four words)
// or of a window record, and two bytes with the group's scales; or bf16.
template <bool kBf16>
struct RawGroup {
  uint32_t words[kBf16 ? 16 : 8];
  uint32_t scales;  // not with bf16
};

__device__ inline void Load16Bytes(const uint8_t* source, uint32_t* words) {
  const uint4 x = __ldg(reinterpret_cast<const uint4*>(source));
  words[0] = x.x;
  words[1] = x.y;
  words[2] = x.z;
  words[3] = x.w;
}

__device__ inline bool IsWindowKey(const uint8_t* reference) {
  return (reinterpret_cast<uintptr_t>(reference) & 1u) != 0;
}

// Where a lane reads of a record: group `lane_group` of each of the four quarters of 128 channels.
struct GroupReader {
  const uint8_t* codes;
  const uint8_t* scales;
  uint32_t code_step;  // from quarter to quarter
  uint32_t scale_step;
  bool window;

  __device__ GroupReader(const uint8_t* reference, int lane_group) {
    const auto bit = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(reference) & 1u);
    const auto group = static_cast<uint32_t>(lane_group);
    window = bit != 0;
    codes = reference + (group * 16 << bit) - bit;
    code_step = 64u << bit;
    // Two bytes with the scale of 32 channels or the scales of two times 16.
    scales = reference + (window ? kDim + (group & 2u) - 1 : kDim / 2 + group * 2);
    scale_step = 8u >> bit;
  }
  // The group's codes of a quarter: 16 bytes, of window records 32.
  __device__ const uint8_t* Codes(int quarter) const {
    return codes + static_cast<uint64_t>(code_step) * static_cast<uint32_t>(quarter);
  }
  __device__ uint32_t Scales(int quarter) const {
    return __ldg(reinterpret_cast<const uint16_t*>(scales + static_cast<uint64_t>(scale_step) *
                                                                static_cast<uint32_t>(quarter)));
  }
  // What only window records have: the latter 16 bytes.
  __device__ void ReadUpperCodes(int quarter, uint32_t* words) const {
    if (window) Load16Bytes(Codes(quarter) + 16, words);
  }
  // Without branches on the format, so that one read does not wait for another; what only window
  // records have is read under a predicate.
  __device__ void Read(int quarter, RawGroup<false>& raw) const {
    Load16Bytes(Codes(quarter), raw.words);
    raw.scales = Scales(quarter);
    ReadUpperCodes(quarter, raw.words + 4);
  }
};
__device__ inline void ReadBf16Group(const uint8_t* reference, int group, RawGroup<true>& raw) {
  const auto bit = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(reference) & 1u);
#pragma unroll
  for (int i = 0; i < 4; ++i) Load16Bytes(reference - bit + group * 64 + 16 * i, raw.words + 4 * i);
}

// The four pieces of the group, pieces[j] for place j.
template <bool kBf16>
__device__ inline void DecodeGroup(const RawGroup<kBf16>& raw, bool window, int group,
                                   uint4 (&pieces)[4]) {
  uint32_t words[4][4];
  if constexpr (kBf16) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      PermuteWords(make_uint4(raw.words[4 * t], raw.words[4 * t + 1], raw.words[4 * t + 2],
                              raw.words[4 * t + 3]),
                   words[t]);
#pragma unroll
      for (uint32_t& word : words[t]) word = MulBf16x2(word, kTwoToMinus32);
    }
  } else if (window) {
    const uint32_t factor = Q8Factor((raw.scales >> (group % 2 * 8)) & 255u);
#pragma unroll
    for (int t = 0; t < 4; ++t)
      DecodeE4M3Words(raw.words[2 * t], raw.words[2 * t + 1], factor, words[t]);
  } else {
    const uint32_t factors[2] = {Q4EFactor(raw.scales & 255u), Q4EFactor(raw.scales >> 8)};
#pragma unroll
    for (int t = 0; t < 4; ++t) DecodeE2M1Words(raw.words[t], factors[t / 2], words[t]);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    pieces[j] = make_uint4(words[0][j], words[1][j], words[2][j], words[3][j]);
}

// ---- Results -----------------------------------------------------------------------------------

// What a lane of a quad has of a group of 32 channels of one head: channels 8 t ... 8 t + 7, of
// which x[2 j] is number j and x[2 j + 1] number j + 4.

// The values times the normaliser on the Q8 grid, as bf16.
__device__ inline uint4 QuantiseGroup(const float (&x)[8], float normaliser) {
  // Multiplication is monotonic: this is the largest magnitude of the products.
  float amax = fabsf(x[0]);
#pragma unroll
  for (int j = 1; j < 8; ++j) amax = fmaxf(amax, fabsf(x[j]));
  amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
  amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
  const uint32_t byte = Q8Byte(amax * normaliser);
  // A power of two more changes no rounding.
  const float multiplier = normaliser * __uint_as_float((254u - byte) << 23);
  const auto codes = [&](int first) {  // of numbers first, + 2, + 1, + 3
    const int i = first == 0 ? 0 : 1;
    const uint32_t even = FloatsToE4M3x2(x[i] * multiplier, x[i + 4] * multiplier);
    const uint32_t odd = FloatsToE4M3x2(x[i + 2] * multiplier, x[i + 6] * multiplier);
    return even | odd << 16;
  };
  const uint32_t low = codes(0);
  const uint32_t high = codes(4);
  constexpr uint32_t kMagnitudes = 0x07f007f0u;
  constexpr uint32_t kLargestByte = 134;  // whose factor 2^(byte - 7) is a bf16 number
  const uint32_t factor = ((byte + 120u) << 7) * 0x00010001u;
  uint4 pairs = make_uint4(PlacedPair<kMagnitudes>(low << 8, low << 4, factor),
                           PlacedPair<kMagnitudes>(low, low >> 4, factor),
                           PlacedPair<kMagnitudes>(high << 8, high << 4, factor),
                           PlacedPair<kMagnitudes>(high, high >> 4, factor));
  // Code 127 comes from NaN only.
  const uint32_t nan = ((low & 0x7f7f7f7fu) + 0x01010101u) | ((high & 0x7f7f7f7fu) + 0x01010101u);
  if ((nan & 0x80808080u) != 0 || byte > kLargestByte) {
    pairs = make_uint4(Q8Pair(x[0] * normaliser, x[2] * normaliser, byte),
                       Q8Pair(x[4] * normaliser, x[6] * normaliser, byte),
                       Q8Pair(x[1] * normaliser, x[3] * normaliser, byte),
                       Q8Pair(x[5] * normaliser, x[7] * normaliser, byte));
  }
  return pairs;
}

// Cosines and sines of the lane's channels of a group.
struct Angles {
  float4 pairs[2];
};
// Of rotated group 0 or 1.
__device__ inline Angles LoadAngles(const AttentionParams& p, int row, int rotated_group) {
  const auto* table = reinterpret_cast<const float4*>(p.table + row * p.table_stride +
                                                      rotated_group * 32 + LaneId() % 4 * 8);
  return {{__ldg(table), __ldg(table + 1)}};
}

// Numerators become values: normalised, rotated back by `angles` unless null, rounded.
__device__ inline uint4 FinishGroup(float (&x)[8], float normaliser, const Angles* angles,
                                    bool production) {
  if (production && angles == nullptr) return QuantiseGroup(x, normaliser);
#pragma unroll
  for (float& value : x) {
    value *= normaliser;
    if (!production) value = Bf16ToFloat(FloatToBf16(value));
  }
  if (angles != nullptr) {
    // Channels 2 i and 2 i + 1 are numbers 4 i and 4 i + 2, from the fourth channel on one more.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4& low = angles->pairs[0];
      const float4& high = angles->pairs[1];
      RotatePair(x[4 * i], x[4 * i + 2], i == 0 ? low.x : low.z, i == 0 ? -low.y : -low.w);
      RotatePair(x[4 * i + 1], x[4 * i + 3], i == 0 ? high.x : high.z, i == 0 ? -high.y : -high.w);
    }
  }
  if (production) return QuantiseGroup(x, 1.0f);
  return make_uint4(FloatsToBf16x2(x[0], x[2]), FloatsToBf16x2(x[4], x[6]),
                    FloatsToBf16x2(x[1], x[3]), FloatsToBf16x2(x[5], x[7]));
}

}  // namespace deepinfer::cuda::attention
