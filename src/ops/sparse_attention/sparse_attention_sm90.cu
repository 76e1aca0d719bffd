// Sparse latent attention on wgmma, for 64 heads x 512 channels (fewer heads are padded, more are
// several work items).
//
// Bound by the tensor cores: 4 * 64 * 512 FLOPs per key and row (83.9 MFLOP for 640 keys) on 215 KB
// of records. A first kernel writes the record addresses of every row's key list. In the second, a
// block takes work items (row, 64 heads) one after the other and has three warpgroups:
//   scores    (0): S = q K^T of a block of 64 keys, softmax, P to registers and shared memory, and
//                  the left half (channels 0 ... 255) of the numerator O += P V.
//   values    (1): the right half of O.
//   converter (2): brings and rotates q, reads records to registers half a block ahead and writes
//                  their channels, decoded to bf16, into one of two K tiles. K and V are the same
//                  tile: S reads it K-major, O MN-major. It runs ahead into the next item.
// S of block b + 1 is issued before O of block b, so that the softmax of b + 1 runs while the
// tensor cores work on O. A tile is filled and released by channel halves: the right one first,
// which the values warpgroup releases while S still runs.
//
// Order of additions (the same in every kernel for these shapes): scores over channels 256 ... 511,
// then 0 ... 255, in steps of 16; each lane sums its probabilities of a block, the four lanes of a
// row are added at the end; numerators over keys in steps of 16, rescaled per block of 64.
#include "ops/sparse_attention/sparse_attention_cuda.cuh"
#include "warpgroup.cuh"

namespace deepinfer::cuda {
namespace {

constexpr int kHeads = 64;  // of a work item
constexpr int kDim = 512;
constexpr int kHalf = 256;  // channels
constexpr int kRotated = 64;
constexpr int kBlockKeys = static_cast<int>(kAttentionBlock);
constexpr int kThreads = 384;

// Panels are 64 rows (heads or keys) of 128 bytes (64 channels) with the 128-byte swizzle.
constexpr int kPanelBytes = 64 * 128;
constexpr int kHalfBytes = 4 * kPanelBytes;
constexpr int kRight = 1;  // half of the channels; 0 is the left one
constexpr int kLeft = 0;

struct alignas(1024) SharedMemory {
  uint8_t q[8][kPanelBytes];
  uint8_t keys[2][2][kHalfBytes];         // [tile][half]
  uint8_t probabilities[2][kPanelBytes];  // heads x keys of a block
  float rescale[2][kHeads];               // of what was summed before this block
  float normaliser[2][kHeads];            // with the last block of a row
  Barrier keys_full[2][2], keys_empty[2][2];
  Barrier probabilities_full[2], probabilities_empty[2];
  Barrier q_full, q_empty;
};
static_assert(sizeof(SharedMemory) <= 227 * 1024);

// Position in a ring of kStages slots, each with a full and an empty barrier.
template <int kStages>
struct Ring {
  int slot = 0;
  uint32_t phase = 0;
  __device__ void Advance() {
    if (++slot == kStages) {
      slot = 0;
      phase ^= 1u;
    }
  }
  // What the side that fills waits for: the first round finds every slot empty.
  __device__ uint32_t empty_phase() const {
    return phase ^ 1u;
  }
};

__device__ inline void ArriveWarp(Barrier* barrier) {
  __syncwarp();
  if (LaneId() == 0) BarrierArrive(barrier);
}

// Work items of a block: blockIdx.x, + gridDim.x, ...
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

// ---- Key lists
// -----------------------------------------------------------------------------------

// The key lists of all rows, padded to whole blocks of 64.
struct KeyLists {
  const uint8_t** records;  // [rows, stride]: addresses, bit 0 set for window keys; null: no key
  int* num_keys;            // [rows]
  int stride;
};

constexpr int kListThreads = 128;

__global__ void __launch_bounds__(kListThreads)
    KeyListKernel(const AttentionParams p, const KeyLists lists) {
  WaitForPreviousKernel();
  AllowNextKernel();
  const int row = static_cast<int>(blockIdx.x);
  RowKeys keys = WindowKeys(p, row);
  keys.num_keys += SelectedCountWarp(p, keys);
  const int padded = (keys.num_keys + kBlockKeys - 1) / kBlockKeys * kBlockKeys;
#pragma unroll 5
  for (int i = static_cast<int>(threadIdx.x); i < padded; i += kListThreads) {
    const uint8_t* record = nullptr;
    if (i < keys.num_keys) record = KeyRecord(p, keys, i) + (i < keys.num_window ? 1 : 0);
    lists.records[static_cast<int64_t>(row) * lists.stride + i] = record;
  }
  if (threadIdx.x == 0) lists.num_keys[row] = keys.num_keys;
}

// Where 16-byte piece `piece` (of 8) of row `row` lies in a panel.
__device__ inline int PanelOffset(int row, int piece) {
  return row * 128 + ((piece ^ (row & 7)) << 4);
}

// ---- Converter
// -----------------------------------------------------------------------------------

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

// Starts to bring q of an item; the 128 threads of the converter. What is rotated is written here.
__device__ inline void StartQueries(const AttentionParams& p, const Item& item, SharedMemory& s) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const uint16_t* q = p.q + item.row * p.q_stride + static_cast<int64_t>(item.first_head) * kDim;
  const int heads = min(kHeads, p.heads - item.first_head);
  // A thread keeps its piece of a panel; 16 heads go at a time.
  const int piece = thread % 8;
  const int panels = p.rotate_q ? 7 : 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int head = thread / 8 + 16 * i;
    const bool valid = head < heads;
    const uint16_t* source = q + (valid ? head * kDim : 0) + piece * 8;
    for (int panel = 0; panel < panels; ++panel)
      CopyAsync16OrZero(s.q[panel] + PanelOffset(head, piece), source + panel * 64, valid);
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
    *reinterpret_cast<uint4*>(s.q[7] + PanelOffset(thread / 8 + 16 * i, piece)) = x[i];
  }
}

// The blocks of 64 keys of a block's items, one after the other.
struct BlockCursor {
  int item;
  int begin = 0;     // of the block in the item's list
  int num_keys = 0;  // of the item

  // Goes to the first item at or behind `index` that has keys.
  __device__ void Seek(const AttentionParams& p, const KeyLists& lists, int index) {
    begin = 0;
    for (item = index; item < NumItems(p); item += static_cast<int>(gridDim.x)) {
      num_keys = lists.num_keys[ItemOf(p, item).row];
      if (num_keys > 0) return;
    }
  }
  __device__ void Advance(const AttentionParams& p, const KeyLists& lists) {
    begin += kBlockKeys;
    if (begin >= num_keys) Seek(p, lists, item + static_cast<int>(gridDim.x));
  }
  __device__ bool Valid(const AttentionParams& p) const {
    return item < NumItems(p);
  }
};

// Warpgroup 2. A warp has 16 keys of each block, two at a time: lanes with bit 2 clear the even
// one. So eight lanes of a 16-byte store write even pieces of an even row and of an odd one: with
// the swizzle, all eight pieces of 128 bytes, no bank twice.
template <bool kBf16>
__device__ void ConvertKeys(const AttentionParams& p, const KeyLists& lists, SharedMemory& s) {
  constexpr int kSteps = 8;
  const int lane = LaneId();
  const int part = (lane & 3) | ((lane >> 3) << 2);
  const int odd = (lane >> 2) & 1;
  const int first_key = (WarpId() & 3) * 16;
  // Of the first of the 16 channels.
  const int panel = part / 4 * kPanelBytes;
  const int piece = (part & 3) * 2;
  const auto reference = [&](const BlockCursor& cursor) -> const uint8_t* {
    if (!cursor.Valid(p)) return nullptr;
    return lists.records[static_cast<int64_t>(ItemOf(p, cursor.item).row) * lists.stride +
                         cursor.begin + first_key + lane % 16];
  };
  const uint8_t* records[kSteps];
  const auto spread = [&](const uint8_t* mine) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      records[i] = reinterpret_cast<const uint8_t*>(
          __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(mine), 2 * i + odd));
    }
  };

  BlockCursor cursor;
  cursor.Seek(p, lists, static_cast<int>(blockIdx.x));
  if (!cursor.Valid(p)) return;
  BlockCursor ahead = cursor;
  RawChannels<kBf16> raw[kSteps];
  spread(reference(ahead));
#pragma unroll
  for (int i = 0; i < kSteps; ++i) LoadRaw<kBf16>(records[i], kRight, part, raw[i]);
  ahead.Advance(p, lists);
  const uint8_t* next = reference(ahead);
  Ring<2> tiles;
  uint32_t q_phase = 0;
  // Decodes a half of the tile and reads another one; missing keys are zeros.
  const auto convert = [&](int half, int next_half) {
    BarrierWait(&s.keys_empty[tiles.slot][half], tiles.empty_phase());
    uint8_t* tile = s.keys[tiles.slot][half] + panel;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int key = first_key + 2 * i + odd;
      uint4 low, high;
      DecodeRaw<kBf16>(raw[i], low, high);
      LoadRaw<kBf16>(records[i], next_half, part, raw[i]);
      *reinterpret_cast<uint4*>(tile + PanelOffset(key, piece)) = low;
      *reinterpret_cast<uint4*>(tile + PanelOffset(key, piece + 1)) = high;
    }
    FenceAsyncProxy();
    ArriveWarp(&s.keys_full[tiles.slot][half]);
  };
  while (cursor.Valid(p)) {
    const bool first = cursor.begin == 0;
    if (first) {
      BarrierWait(&s.q_empty, q_phase ^ 1u);
      StartQueries(p, ItemOf(p, cursor.item), s);
    }
    convert(kRight, kLeft);
    if (first) {
      WaitCopies<0>();
      FenceAsyncProxy();
      ArriveWarp(&s.q_full);
      q_phase ^= 1u;
    }
    spread(next);
    cursor = ahead;
    ahead.Advance(p, lists);
    next = reference(ahead);
    convert(kLeft, kRight);
    tiles.Advance();
  }
}

// ---- Math
// ----------------------------------------------------------------------------------------

struct SoftmaxState {
  float maximum[2];  // of heads g and g + 8
  float sum[2];      // of this lane's keys
};

// Starts S of the block in `tile`: right half of the channels, then the left one.
__device__ inline void IssueScores(SharedMemory& s, const Ring<2>& tile, float (&scores)[32]) {
  const uint64_t q = SharedDescriptor(s.q, 16, 1024, Swizzle::k128Bytes);
  WarpgroupFenceRegisters(scores);
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const int half = step == 0 ? kRight : kLeft;
    BarrierWait(&s.keys_full[tile.slot][half], tile.phase);
    const uint64_t keys = SharedDescriptor(s.keys[tile.slot][half], 16, 1024, Swizzle::k128Bytes);
    WarpgroupFence();
#pragma unroll
    for (int k = 0; k < kHalf / 16; ++k) {
      const uint32_t offset = static_cast<uint32_t>(k / 4 * kPanelBytes + k % 4 * 32);
      WarpgroupMmaShared<0>(scores,
                            AdvanceDescriptor(q, static_cast<uint32_t>(half * kHalfBytes) + offset),
                            AdvanceDescriptor(keys, offset), step != 0 || k != 0);
    }
  }
  WarpgroupCommit();
}

// Starts O (+)= P V for one half of the channels.
__device__ inline void IssueValues(const uint8_t* tile, const uint8_t* probabilities,
                                   float (&out)[128], bool accumulate) {
  const uint64_t p = SharedDescriptor(probabilities, 16, 1024, Swizzle::k128Bytes);
  const uint64_t values = SharedDescriptor(tile, kPanelBytes, 1024, Swizzle::k128Bytes);
  WarpgroupFenceRegisters(out);
  WarpgroupFence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    WarpgroupMmaShared<1>(out, AdvanceDescriptor(p, static_cast<uint32_t>(k) * 32),
                          AdvanceDescriptor(values, static_cast<uint32_t>(k) * 2048),
                          accumulate || k != 0);
  }
  WarpgroupCommit();
}

__device__ inline void Rescale(float (&out)[128], float first, float second) {
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    out[4 * j] *= first;
    out[4 * j + 1] *= first;
    out[4 * j + 2] *= second;
    out[4 * j + 3] *= second;
  }
}

// Scores of a block of `size` keys become probabilities; the state moves on. Returns the factors
// for what was summed before.
__device__ inline float2 Softmax(float (&scores)[32], int size, float scale, SoftmaxState& state) {
  const int column = LaneId() % 4 * 2;
  if (size < kBlockKeys) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (i / 4 * 8 + column + i % 2 >= size) scores[i] = -INFINITY;
    }
  }
  float rescale[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = scores[2 * r];
#pragma unroll
    for (int i = 0; i < 16; ++i) largest = fmaxf(largest, scores[i / 2 * 4 + 2 * r + i % 2]);
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    // Scaling is monotonic: this is the maximum of the scaled scores, of which none exceeds it.
    const float maximum = fmaxf(state.maximum[r], largest * scale);
    rescale[r] = Exp2(state.maximum[r] - maximum);
    state.maximum[r] = maximum;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float& x = scores[i / 2 * 4 + 2 * r + i % 2];
      x = Exp2(x * scale - maximum);
      sum += x;
    }
    state.sum[r] = fmaf(state.sum[r], rescale[r], sum);
  }
  return make_float2(rescale[0], rescale[1]);
}

// Normalises, rotates back, rounds and stores one half of the channels of 64 heads.
template <int kOutHalf>
__device__ inline void StoreHalf(const AttentionParams& p, const Item& item, float (&out)[128],
                                 const float (&normaliser)[2]) {
  const int lane = LaneId();
  const int quad_lane = lane % 4;
  const int first_head = item.first_head + (WarpId() & 3) * 16 + lane / 4;
  const float* table = p.table + item.row * p.table_stride + 2 * quad_lane;
#pragma unroll
  for (int group = 0; group < 8; ++group) {
    float2 angle[4];
    if (kOutHalf == kRight && group >= 6) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        angle[j] = __ldg(reinterpret_cast<const float2*>(table + ((group - 6) * 4 + j) * 8));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        x[j] = out[(group * 4 + j / 2) * 4 + 2 * r + j % 2] * normaliser[r];
        if (!p.production) x[j] = Bf16ToFloat(FloatToBf16(x[j]));
      }
      if (kOutHalf == kRight && group >= 6) {
#pragma unroll
        for (int j = 0; j < 4; ++j) RotatePair(x[2 * j], x[2 * j + 1], angle[j].x, -angle[j].y);
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
      // Lane t of four has pair t of each of four 16-byte pieces; transposed, it has piece t.
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
      const int head = first_head + 8 * r;
      if (head < p.heads) {
        uint16_t* target = p.out + item.row * p.out_stride + static_cast<int64_t>(head) * kDim +
                           kOutHalf * kHalf + group * 32 + quad_lane * 8;
        *reinterpret_cast<uint4*>(target) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  }
}

template <int kOutHalf>
__device__ inline void StoreZeros(const AttentionParams& p, const Item& item) {
  const int heads = min(kHeads, p.heads - item.first_head);
  for (int i = static_cast<int>(threadIdx.x) % 128; i < heads * 32; i += 128) {
    uint16_t* target = p.out + item.row * p.out_stride +
                       static_cast<int64_t>(item.first_head + i / 32) * kDim + kOutHalf * kHalf +
                       i % 32 * 8;
    *reinterpret_cast<uint4*>(target) = make_uint4(0u, 0u, 0u, 0u);
  }
}

// Warpgroup 0.
__device__ void AttendLeft(const AttentionParams& p, const KeyLists& lists, SharedMemory& s) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int lane = LaneId();
  const int head = thread / 32 * 16 + lane / 4;
  Ring<2> tiles, slots;
  uint32_t q_phase = 0;
  float out[128];
  float scores[32];
  for (int i = static_cast<int>(blockIdx.x); i < NumItems(p); i += static_cast<int>(gridDim.x)) {
    const Item item = ItemOf(p, i);
    const int num_keys = lists.num_keys[item.row];
    if (num_keys == 0) {
      StoreZeros<kLeft>(p, item);
      continue;
    }
    SoftmaxState state = {{kFirstMaximum, kFirstMaximum}, {0.0f, 0.0f}};
    float normaliser[2] = {0.0f, 0.0f};
    // Softmax of the block whose scores are ready, and its message to the other warpgroup.
    const auto softmax = [&](int begin) {
      const float2 rescale = Softmax(scores, num_keys - begin, p.scale, state);
      const bool last = begin + kBlockKeys >= num_keys;
      if (last) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float sum = state.sum[r];
          sum += __shfl_xor_sync(0xffffffffu, sum, 1);
          sum += __shfl_xor_sync(0xffffffffu, sum, 2);
          const int h = min(item.first_head + head + 8 * r, p.heads - 1);
          normaliser[r] = Normaliser(sum, state.maximum[r], __ldg(p.sink + h));
        }
      }
      BarrierWait(&s.probabilities_empty[slots.slot], slots.empty_phase());
      // Eight rows of a store are in eight pieces of 16 bytes, four lanes in one: no bank twice.
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          *reinterpret_cast<uint32_t*>(s.probabilities[slots.slot] + PanelOffset(head + 8 * r, j) +
                                       lane % 4 * 4) =
              FloatsToBf16x2(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]);
        }
      }
      if (lane % 4 == 0) {
        s.rescale[slots.slot][head] = rescale.x;
        s.rescale[slots.slot][head + 8] = rescale.y;
        if (last) {
          s.normaliser[slots.slot][head] = normaliser[0];
          s.normaliser[slots.slot][head + 8] = normaliser[1];
        }
      }
      FenceAsyncProxy();
      ArriveWarp(&s.probabilities_full[slots.slot]);
      slots.Advance();
      return rescale;
    };

    BarrierWait(&s.q_full, q_phase);
    q_phase ^= 1u;
    Ring<2> next = tiles;  // of the block whose scores come next
    IssueScores(s, next, scores);
    next.Advance();
    WarpgroupWait<0>();
    WarpgroupFenceRegisters(scores);
    if (num_keys <= kBlockKeys) ArriveWarp(&s.q_empty);
    softmax(0);
    const auto release = [&] {
      ArriveWarp(&s.keys_empty[tiles.slot][kLeft]);
      ArriveWarp(&s.probabilities_empty[tiles.slot]);
      tiles.Advance();
    };
    int begin = kBlockKeys;
#pragma unroll 1
    for (; begin < num_keys; begin += kBlockKeys) {
      IssueScores(s, next, scores);
      BarrierWait(&s.probabilities_full[tiles.slot], tiles.phase);
      IssueValues(s.keys[tiles.slot][kLeft], s.probabilities[tiles.slot], out, begin > kBlockKeys);
      WarpgroupWait<1>();
      WarpgroupFenceRegisters(scores);
      if (begin + kBlockKeys >= num_keys) ArriveWarp(&s.q_empty);
      const float2 rescale = softmax(begin);
      next.Advance();
      WarpgroupWait<0>();
      WarpgroupFenceRegisters(out);
      release();
      Rescale(out, rescale.x, rescale.y);
    }
    BarrierWait(&s.probabilities_full[tiles.slot], tiles.phase);
    IssueValues(s.keys[tiles.slot][kLeft], s.probabilities[tiles.slot], out, begin > kBlockKeys);
    WarpgroupWait<0>();
    WarpgroupFenceRegisters(out);
    release();
    StoreHalf<kLeft>(p, item, out, normaliser);
  }
}

// Warpgroup 1.
__device__ void AttendRight(const AttentionParams& p, const KeyLists& lists, SharedMemory& s) {
  const int head = (WarpId() & 3) * 16 + LaneId() / 4;
  Ring<2> tiles;
  float out[128];
  for (int i = static_cast<int>(blockIdx.x); i < NumItems(p); i += static_cast<int>(gridDim.x)) {
    const Item item = ItemOf(p, i);
    const int num_keys = lists.num_keys[item.row];
    if (num_keys == 0) {
      StoreZeros<kRight>(p, item);
      continue;
    }
    float normaliser[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int begin = 0; begin < num_keys; begin += kBlockKeys) {
      BarrierWait(&s.probabilities_full[tiles.slot], tiles.phase);
      const float first = s.rescale[tiles.slot][head];
      const float second = s.rescale[tiles.slot][head + 8];
      if (begin + kBlockKeys >= num_keys) {
        normaliser[0] = s.normaliser[tiles.slot][head];
        normaliser[1] = s.normaliser[tiles.slot][head + 8];
      }
      if (begin > 0) Rescale(out, first, second);
      BarrierWait(&s.keys_full[tiles.slot][kRight], tiles.phase);
      IssueValues(s.keys[tiles.slot][kRight], s.probabilities[tiles.slot], out, begin > 0);
      WarpgroupWait<0>();
      WarpgroupFenceRegisters(out);
      ArriveWarp(&s.keys_empty[tiles.slot][kRight]);
      ArriveWarp(&s.probabilities_empty[tiles.slot]);
      tiles.Advance();
    }
    StoreHalf<kRight>(p, item, out, normaliser);
  }
}

template <bool kBf16>
__global__ void __launch_bounds__(kThreads, 1)
    WarpgroupAttentionKernel(const AttentionParams params, const KeyLists lists) {
  auto& s = *DynamicShared<SharedMemory>();
  const int warp = UniformWarpId();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      for (int half = 0; half < 2; ++half) {
        BarrierInit(&s.keys_full[i][half], 4);
        BarrierInit(&s.keys_empty[i][half], 4);
      }
      BarrierInit(&s.probabilities_full[i], 4);
      BarrierInit(&s.probabilities_empty[i], 8);
    }
    BarrierInit(&s.q_full, 4);
    BarrierInit(&s.q_empty, 4);
    FenceBarrierInit();
  }
  __syncthreads();
  WaitForPreviousKernel();
  // Together what the block was launched with: 3 * 168 registers per thread. More would wait for ever.
  if (warp < 4) {
    IncreaseRegisters<216>();
    AttendLeft(params, lists, s);
  } else if (warp < 8) {
    IncreaseRegisters<168>();
    AttendRight(params, lists, s);
  } else {
    DecreaseRegisters<120>();
    ConvertKeys<kBf16>(params, lists, s);
  }
}

}  // namespace

Status WarpgroupAttention(const AttentionParams& params, Stream& stream) {
  const int max_keys = params.window + params.topk;
  KeyLists lists = {};
  lists.stride = (max_keys + kBlockKeys - 1) / kBlockKeys * kBlockKeys;
  ScratchScope scope(stream);
  lists.records = scope.Allocate<const uint8_t*>(static_cast<int64_t>(params.rows) * lists.stride);
  lists.num_keys = scope.Allocate<int>(params.rows);
  LaunchConfig list_config;
  list_config.grid.x = static_cast<uint32_t>(params.rows);
  list_config.block = kListThreads;
  DI_RETURN_IF_ERROR(
      Launch("sparse_attention_key_lists", KeyListKernel, list_config, stream, params, lists));
  const int items = params.rows * ((params.heads + kHeads - 1) / kHeads);
  LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(items < stream.sm_count() ? items : stream.sm_count());
  config.block = kThreads;
  config.shared_bytes = static_cast<int>(sizeof(SharedMemory));
  config.overlap_previous = true;
  return params.window_bf16 ? Launch("sparse_attention_bf16", WarpgroupAttentionKernel<true>,
                                     config, stream, params, lists)
                            : Launch("sparse_attention", WarpgroupAttentionKernel<false>, config,
                                     stream, params, lists);
}

}  // namespace deepinfer::cuda
