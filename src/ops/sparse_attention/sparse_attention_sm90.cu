// Sparse latent attention on wgmma, for 64 heads x 512 channels (fewer heads are padded, more are
// several launches).
//
// Bound by the tensor cores: 4 * 64 * 512 FLOPs per key and row (83.9 MFLOP for 640 keys) on 215 KB
// of records. A first kernel writes the record addresses of every row's key list. In the second, a
// block takes rows, 64 heads of each, one after the other and has four warpgroups:
//   scores        (0): S = q K^T of a block of 64 keys, softmax, P to shared memory, and the left
//                      half (channels 0 ... 255) of the numerator O += P V.
//   values        (1): the right half of O.
//   converters (2, 3): read records to registers half a block ahead and write their channels,
//                      decoded to bf16, into one of two K tiles. K and V are the same tile: S reads
//                      it K-major, O MN-major. They run ahead into the next row. The first brings
//                      and rotates q, too.
// S of block b + 1 is issued before O of block b, so that the softmax of b + 1 runs while the
// tensor cores work on O. A tile is filled and released by channel halves: the right one first,
// which the values warpgroup releases while S still runs.
//
// A block of 64 keys keeps the tensor cores busy for about 2050 cycles and shared memory for 2200
// (operands of wgmma 208 KB, decoded keys 64 KB); decoding takes 1050 of the ALUs. Between the last
// use of a tile and the first use of its next content lies a conversion, hence two warpgroups for
// it. Tried and lost: loads inside a branch on the record's format, with arithmetic on the loaded
// scale: every load was waited for before the next one started (12 % of the ceiling).
//
// Order of additions (the same in every kernel for these shapes): scores over channels 256 ... 511,
// then 0 ... 255, in steps of 16; of the denominator, each lane sums its four probabilities of a
// step of 16 keys, the steps of a block and the blocks, and the four lanes of a row are added at
// the end; numerators over keys in steps of 16, rescaled per block of 64.
#include "ops/sparse_attention/sparse_attention_sm90.cuh"
#include "warpgroup.cuh"

namespace deepinfer::cuda {
using namespace attention;
namespace {

constexpr int kThreads = 512;
constexpr int kConverterWarps = 8;

struct alignas(1024) SharedMemory {
  uint8_t q[8][kPanelBytes];
  uint8_t keys[2][2][kHalfBytes];         // [tile][half]
  uint8_t probabilities[2][kPanelBytes];  // heads x keys of a block
  float rescale[2][kHeads];               // of what was summed before this block
  float normaliser[2][kHeads];            // with the last block of a row
  // Of this block's keys and the next one's, for each warp that converts keys.
  const uint8_t* references[kConverterWarps][2][kBlockKeys / kConverterWarps];
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

// ---- Key lists ---------------------------------------------------------------------------------

// The key lists of all rows, padded to whole blocks of 64.
struct KeyLists {
  const uint8_t** records;  // [rows, stride]: references; the last key's fill up its block
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
  keys.num_keys += SelectedCountWarp(p, row);
  const int padded = (keys.num_keys + kBlockKeys - 1) / kBlockKeys * kBlockKeys;
  constexpr int kChunk = 5;
  const uint8_t** list = lists.records + static_cast<int64_t>(row) * lists.stride;
  for (int i = static_cast<int>(threadIdx.x); i < padded; i += kChunk * kListThreads) {
    // Keys beyond the list have probability zero; they need to be finite if the others are.
    const uint8_t* references[kChunk];
    KeyReferences(p, keys, i, kListThreads, references);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      if (i + j * kListThreads < padded) list[i + j * kListThreads] = references[j];
    }
  }
  if (threadIdx.x == 0) lists.num_keys[row] = keys.num_keys;
}

// The blocks of 64 keys of a thread block's rows, one after the other.
struct BlockCursor {
  int row = 0;
  int begin = 0;           // of the block in the row's list
  int num_keys = 0;        // of the row
  int following_keys = 0;  // of the row after it, read ahead

  __device__ void Start(const AttentionParams& p, const KeyLists& lists) {
    row = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x);
    following_keys = KeysOf(p, lists, static_cast<int>(blockIdx.x));
    NextRow(p, lists);
  }
  __device__ void Advance(const AttentionParams& p, const KeyLists& lists) {
    begin += kBlockKeys;
    if (begin >= num_keys) NextRow(p, lists);
  }
  __device__ bool Valid(const AttentionParams& p) const {
    return row < p.rows;
  }

 private:
  // Goes to the next row that has keys.
  __device__ void NextRow(const AttentionParams& p, const KeyLists& lists) {
    begin = 0;
#pragma unroll 1
    do {
      row += static_cast<int>(gridDim.x);
      num_keys = following_keys;
      following_keys = KeysOf(p, lists, row + static_cast<int>(gridDim.x));
    } while (Valid(p) && num_keys == 0);
  }
  __device__ static int KeysOf(const AttentionParams& p, const KeyLists& lists, int row) {
    return row < p.rows ? lists.num_keys[row] : 0;
  }
};

// Warpgroups 2 and 3. A warp has 8 keys of each block, two at a time: lanes with bit 2 clear the
// even one. So eight lanes of a 16-byte store write even pieces of an even row and of an odd one:
// with the swizzle, all eight pieces of 128 bytes, no bank twice.
template <bool kBf16>
class KeyConverter {
 public:
  static constexpr int kKeys = kBlockKeys / kConverterWarps;

  __device__ KeyConverter(SharedMemory& s, int converter_warp)
      : references_(s.references[converter_warp]),
        part_((LaneId() & 3) | ((LaneId() >> 3) << 2)),
        odd_((LaneId() >> 2) & 1),
        first_key_(converter_warp * kKeys) {}

  // Starts to bring the references of the block of keys `first` of the lists to slot 0 or 1.
  __device__ void FetchReferences(const KeyLists& lists, int64_t first, int slot) {
    const int lane = LaneId();
    if (lane < kKeys / 2) {
      CopyAsync16(&references_[slot][2 * lane], lists.records + first + first_key_ + 2 * lane);
    }
    CommitCopies();
  }
  // Reads a half of the channels of the first block.
  __device__ void Start(int slot, int half) {
    const RawOffsets<kBf16> offsets(half, part_);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) LoadRaw<kBf16>(KeyOf(slot, i), offsets, raw_[i]);
  }
  // Decodes what was read, of the keys in `slot`, to a half of a tile, and reads a half of those in
  // `next_slot`.
  __device__ void Convert(uint8_t* tile, int slot, int next_slot, int next_half) {
    const RawOffsets<kBf16> offsets(next_half, part_);
    const uint8_t* reference = references_[slot][LaneId() % kKeys];
    const uint32_t window =
        __ballot_sync(0xffffffffu, (reinterpret_cast<uintptr_t>(reference) & 1u) != 0);
    if (kBf16 || window == 0) {
      Convert<KeyFormat::kQ4E>(tile, window, next_slot, offsets);
    } else if (window == 0xffffffffu) {
      Convert<KeyFormat::kQ8>(tile, window, next_slot, offsets);
    } else {
      Convert<KeyFormat::kMixed>(tile, window, next_slot, offsets);
    }
  }

 private:
  static constexpr int kSteps = kKeys / 2;

  __device__ const uint8_t* KeyOf(int slot, int step) const {
    return references_[slot][2 * step + odd_];
  }
  template <KeyFormat kFormat>
  __device__ void Convert(uint8_t* tile, uint32_t window, int next_slot,
                          const RawOffsets<kBf16>& offsets) {
    // Where the first of the 16 channels of step 0 goes.
    const auto first_target = static_cast<uint32_t>(
        part_ / 4 * kPanelBytes + PanelOffset(first_key_ + odd_, (part_ & 3) * 2));
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      uint4 low, high;
      DecodeRaw<kBf16, kFormat>(raw_[i], (part_ & 1) != 0, (window >> (2 * i + odd_) & 1u) != 0,
                                low, high);
      LoadRaw<kBf16>(KeyOf(next_slot, i), offsets, raw_[i]);
      // Two rows on: 256 bytes, and the swizzle's row by two.
      const uint32_t target =
          (first_target ^ static_cast<uint32_t>(2 * i << 4)) + static_cast<uint32_t>(256 * i);
      *reinterpret_cast<uint4*>(tile + target) = low;
      *reinterpret_cast<uint4*>(tile + (target ^ 16u)) = high;
    }
  }

  const uint8_t* (*const references_)[kKeys];
  const int part_;  // of 16 channels of a half
  const int odd_;
  const int first_key_;
  RawChannels<kBf16> raw_[kSteps];
};

template <bool kBf16>
__device__ void ConvertKeys(const AttentionParams& p, const KeyLists& lists, int first_head,
                            SharedMemory& s, int converter_warp) {
  BlockCursor ahead;
  ahead.Start(p, lists);
  if (!ahead.Valid(p)) return;
  KeyConverter<kBf16> converter(s, converter_warp);
  int row;  // of the current block
  bool begins_row;
  int fetched = 0;  // the latest block of 64 references
  const auto fetch = [&](int slot) {
    // Behind the last block, those of some block once more: they are read, but not used.
    if (ahead.Valid(p))
      fetched = ahead.row * (lists.stride / kBlockKeys) + ahead.begin / kBlockKeys;
    converter.FetchReferences(lists, static_cast<int64_t>(fetched) * kBlockKeys, slot);
  };
  // Goes on to a block and fetches the references of the one after it.
  const auto advance = [&](int next_slot) {
    row = ahead.row;
    begins_row = ahead.begin == 0;
    ahead.Advance(p, lists);
    fetch(next_slot);
  };
  fetch(0);
  WaitCopies<0>();
  __syncwarp();
  converter.Start(0, kRight);
  advance(1);
  const bool brings_queries = converter_warp < 4;
  Ring<2> tiles;  // and slots of references
  uint32_t q_phase = 0;
  while (row < p.rows) {
    const bool first = brings_queries && begins_row;
    if (first) {
      BarrierWait(&s.q_empty, q_phase ^ 1u);
      q_phase ^= 1u;
      StartQueries<2>(p, {row, first_head}, s.q[0]);
      WaitCopies<1>();
    } else {
      WaitCopies<0>();
    }
    __syncwarp();
#pragma unroll 1
    for (int next_half = kLeft; next_half <= kRight; ++next_half) {
      const int half = 1 - next_half;
      BarrierWait(&s.keys_empty[tiles.slot][half], tiles.empty_phase());
      converter.Convert(s.keys[tiles.slot][half], tiles.slot, tiles.slot ^ next_half, next_half);
      FenceAsyncProxy();
      ArriveWarp(&s.keys_full[tiles.slot][half]);
    }
    if (first) {
      WaitCopies<0>();
      FenceAsyncProxy();
      ArriveWarp(&s.q_full);
    }
    const int freed = tiles.slot;
    tiles.Advance();
    advance(freed);
  }
}

// ---- Math --------------------------------------------------------------------------------------

struct SoftmaxState {
  float maximum[2];  // of heads g and g + 8
  float sum[2];      // of this lane's keys
};

// The same descriptor, not known to the compiler to be the same in all iterations. It would keep
// each sum of it and a constant in two registers, and move them to uniform ones before every
// instruction.
__device__ inline uint64_t UniformDescriptor(uint64_t descriptor) {
  const uint32_t low = __shfl_sync(0xffffffffu, static_cast<uint32_t>(descriptor), 0);
  return descriptor >> 32 << 32 | low;
}

// Starts S of the block in `tile`: right half of the channels, then the left one.
__device__ inline void IssueScores(SharedMemory& s, const Ring<2>& tile, float (&scores)[32]) {
  const uint64_t q = UniformDescriptor(SharedDescriptor(s.q, 16, 1024, Swizzle::k128Bytes));
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

// Of one half of the channels. In two parts, because the compiler takes no instruction that needs
// more registers than a thread has at the launch.
using Numerator = float[2][64];

__device__ inline void FenceNumerator(Numerator& out) {
  WarpgroupFenceRegisters(out[0]);
  WarpgroupFenceRegisters(out[1]);
}

// Starts O (+)= P V for one half of the channels.
__device__ inline void IssueValues(const uint8_t* tile, const uint8_t* probabilities,
                                   Numerator& out, bool accumulate) {
  const uint64_t p = SharedDescriptor(probabilities, 16, 1024, Swizzle::k128Bytes);
  const uint64_t values = SharedDescriptor(tile, kPanelBytes, 1024, Swizzle::k128Bytes);
  FenceNumerator(out);
  WarpgroupFence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      WarpgroupMmaShared<1>(
          out[j], AdvanceDescriptor(p, static_cast<uint32_t>(k) * 32),
          AdvanceDescriptor(values, static_cast<uint32_t>(j * 2 * kPanelBytes + k * 2048)),
          accumulate || k != 0);
    }
  }
  WarpgroupCommit();
}

__device__ inline void Rescale(Numerator& out, float first, float second) {
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    float* x = out[j / 16] + j % 16 * 4;
    x[0] *= first;
    x[1] *= first;
    x[2] *= second;
    x[3] *= second;
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
    float sum[4];  // of steps of 16 keys
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float* x = scores + 8 * k + 2 * r;
      x[0] = Exp2(x[0] * scale - maximum);
      x[1] = Exp2(x[1] * scale - maximum);
      x[4] = Exp2(x[4] * scale - maximum);
      x[5] = Exp2(x[5] * scale - maximum);
      sum[k] = (x[0] + x[1]) + (x[4] + x[5]);
    }
    state.sum[r] = fmaf(state.sum[r], rescale[r], (sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
  return make_float2(rescale[0], rescale[1]);
}

// Normalises and stores one half of the channels of 64 heads.
template <int kOutHalf>
__device__ inline void StoreHalf(const AttentionParams& p, const Item& item, const Numerator& out,
                                 const float (&normaliser)[2]) {
  const int first_head = item.first_head + (WarpId() & 3) * 16 + LaneId() / 4;
#pragma unroll
  for (int group = 0; group < 8; ++group) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j)
        x[j] = out[group / 4][(group % 4 * 4 + j / 2) * 4 + 2 * r + j % 2] * normaliser[r];
      StoreGroup(p, item.row, first_head + 8 * r, kOutHalf * kHalf + group * 32, x);
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
__device__ void AttendLeft(const AttentionParams& p, const KeyLists& lists, int first_head,
                           SharedMemory& s) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int lane = LaneId();
  const int head = thread / 32 * 16 + lane / 4;
  Ring<2> tiles, slots;
  uint32_t q_phase = 0;
  Numerator out;
  float scores[32];
  for (int row = static_cast<int>(blockIdx.x); row < p.rows; row += static_cast<int>(gridDim.x)) {
    const Item item = {row, first_head};
    const int num_keys = lists.num_keys[row];
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
      uint8_t* target = s.probabilities[slots.slot];
      const uint32_t offset = static_cast<uint32_t>(PanelOffset(head, 0) + lane % 4 * 4);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t piece = offset ^ static_cast<uint32_t>(j << 4);
        *reinterpret_cast<uint32_t*>(target + piece) =
            FloatsToBf16x2(scores[4 * j], scores[4 * j + 1]);
        *reinterpret_cast<uint32_t*>(target + piece + 8 * 128) =
            FloatsToBf16x2(scores[4 * j + 2], scores[4 * j + 3]);
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
      FenceNumerator(out);
      release();
      Rescale(out, rescale.x, rescale.y);
    }
    BarrierWait(&s.probabilities_full[tiles.slot], tiles.phase);
    IssueValues(s.keys[tiles.slot][kLeft], s.probabilities[tiles.slot], out, begin > kBlockKeys);
    WarpgroupWait<0>();
    FenceNumerator(out);
    release();
    StoreHalf<kLeft>(p, item, out, normaliser);
  }
}

// Warpgroup 1.
__device__ void AttendRight(const AttentionParams& p, const KeyLists& lists, int first_head,
                            SharedMemory& s) {
  const int head = (WarpId() & 3) * 16 + LaneId() / 4;
  Ring<2> tiles;
  Numerator out;
  for (int row = static_cast<int>(blockIdx.x); row < p.rows; row += static_cast<int>(gridDim.x)) {
    const Item item = {row, first_head};
    const int num_keys = lists.num_keys[row];
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
      FenceNumerator(out);
      ArriveWarp(&s.keys_empty[tiles.slot][kRight]);
      ArriveWarp(&s.probabilities_empty[tiles.slot]);
      tiles.Advance();
    }
    StoreHalf<kRight>(p, item, out, normaliser);
  }
}

template <bool kBf16>
__global__ void __launch_bounds__(kThreads, 1)
    WarpgroupAttentionKernel(const AttentionParams params, const KeyLists lists,
                             const int first_head) {
  auto& s = *DynamicShared<SharedMemory>();
  const int warp = UniformWarpId();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      for (int half = 0; half < 2; ++half) {
        BarrierInit(&s.keys_full[i][half], kConverterWarps);
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
  AllowNextKernel();  // all blocks run at once
  // 200 + 160 + 2 * 72 = 504 of 4 * 128, what the block was launched with: more would wait for
  // ever. With these numbers the compiler spills nothing that is under way from memory.
  if (warp < 4) {
    IncreaseRegisters<200>();
    AttendLeft(params, lists, first_head, s);
  } else if (warp < 8) {
    IncreaseRegisters<160>();
    AttendRight(params, lists, first_head, s);
  } else {
    DecreaseRegisters<72>();
    ConvertKeys<kBf16>(params, lists, first_head, s, warp - 8);
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
  list_config.overlap_previous = true;
  list_config.grid.x = static_cast<uint32_t>(params.rows);
  list_config.block = kListThreads;
  DI_RETURN_IF_ERROR(
      Launch("sparse_attention_key_lists", KeyListKernel, list_config, stream, params, lists));
  LaunchConfig config;
  config.grid.x =
      static_cast<uint32_t>(params.rows < stream.sm_count() ? params.rows : stream.sm_count());
  config.block = kThreads;
  config.shared_bytes = static_cast<int>(sizeof(SharedMemory));
  config.overlap_previous = true;
  for (int head = 0; head < params.heads; head += kHeads) {
    DI_RETURN_IF_ERROR(params.window_bf16
                           ? Launch("sparse_attention_bf16", WarpgroupAttentionKernel<true>, config,
                                    stream, params, lists, head)
                           : Launch("sparse_attention", WarpgroupAttentionKernel<false>, config,
                                    stream, params, lists, head));
  }
  return {};
}

}  // namespace deepinfer::cuda
