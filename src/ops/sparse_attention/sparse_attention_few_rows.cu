// Sparse latent attention of few rows, for 64 heads x 512 channels: a cluster of eight blocks per
// row, so that one row runs on eight multiprocessors instead of one.
//
// Bound by latency: a chain of dependent reads (entries of the list, table of blocks, records),
// about 2.5 us when they come from memory, then scores, softmax and values at an eighth of the work
// each. The blocks share the row twice in different ways:
//   scores: a block has an eighth of the keys and all channels.
//   values: a block has an eighth of the channels, 64, and all keys.
// Splitting values by keys as well would need no second decoding, but another order of additions
// than for many rows. This one is the same, bit for bit: scores, probabilities and denominators
// have the same steps in the same order.
//
// Warpgroup 0 brings and finishes the queries and computes scores and probabilities. The other 16
// warps stage and decode: ten of them copy the records of the block's own keys, six the block's
// channels of all others; then all decode own keys, quarter by quarter of the channels, so that
// scores start behind the first quarter, and the values while the tensor cores work on scores.
// Records are staged where the decoded channels will be: 32 channels are 64 bytes, of which the
// codes take up to 32 and their scales 16. So nothing waits in registers and one loop decodes
// everything: code that runs once costs about a cycle per instruction to fetch (a fifth of the time
// of a version of 6,500 instructions), and a warp alone issues one in three cycles.
// Warpgroups 1 and 2 then sum values, 32 channels each, with probabilities as A from registers.
//
// What blocks tell each other is pushed to where it is needed and counted by barriers there: maxima
// of every (block of 64 keys, head), sums of probabilities (to the block that adds up the
// denominators of these heads), normalisers. Probabilities, 80 KB for every block, go through the
// second-level cache or are pushed as well. There is no barrier of the whole cluster but the first:
// such a barrier waits for all stores, 0.4 us each time. A block ends when all that is pushed to it
// has come.
//
// What the kernels before do not write (the layout of the batch) is read before they have ended.
#include "ops/sparse_attention/sparse_attention_sm90.cuh"
#include "warpgroup.cuh"

namespace deepinfer::cuda {
using namespace attention;
namespace {

constexpr int kCluster = 8;
constexpr int kThreads = 640;
constexpr int kDecoderWarps = 16;
constexpr int kStepKeys = 16;  // of a step of the matrix instructions
constexpr int kBlockSteps = kBlockKeys / kStepKeys;
constexpr int kOwnHeads = kHeads / kCluster;  // whose denominators a block adds up
constexpr int kGroups = kDim / 32;            // of 32 channels
constexpr int kSlotBytes = 64;                // a group of a key, in rows with the 64-byte swizzle

// Operand A of a step of 16 keys: warps of 16 heads, lane by lane.
struct ProbabilityStep {
  uint4 lanes[4][32];
};

// Shapes of lists of at most 128 kOwnSteps keys, of which a block has kOwnSteps steps.
template <int kOwnSteps>
struct Shape {
  static constexpr int kSteps = kCluster * kOwnSteps;
  static constexpr int kKeys = kSteps * kStepKeys;
  static constexpr int kOwnKeys = kOwnSteps * kStepKeys;
  static constexpr int kBlocks = kKeys / kBlockKeys;
  static constexpr int kPanelBytes = kOwnKeys * kSlotBytes;  // a group of the block's own keys
  // Warps that stage own keys, eight each; the others stage the values of all other keys.
  static constexpr int kKeyWarps = kOwnKeys / 8;
  static constexpr int kValueLanes = 32 * (kDecoderWarps - kKeyWarps);
  static constexpr int kOtherKeys = kKeys - kOwnKeys;
  static constexpr int kKeysOfLane = (kOtherKeys + kValueLanes - 1) / kValueLanes;
  // Units of a warp's work: a quarter of the channels of eight own keys, or 16 keys' values.
  static constexpr int kQuarterUnits = kOwnKeys / 8;
  static constexpr int kKeyUnits = 4 * kQuarterUnits;
  static constexpr int kUnits = kKeyUnits + kOtherKeys / 16;
};

template <int kOwnSteps>
struct alignas(1024) SharedMemory {
  using S = Shape<kOwnSteps>;
  struct Scores {
    uint8_t q[8][kPanelBytes];
    uint8_t keys[kGroups - 2][S::kPanelBytes];  // without the block's own channels
  };
  // What takes the place of q and K when all blocks have their scores.
  struct AfterScores {
    ProbabilityStep probabilities[S::kSteps];
    // Of probabilities, by source, own head, lane of the quad, and step of the source.
    float sums[kCluster][kOwnHeads][4][8];
    float rescale[S::kBlocks][kHeads];  // of what was summed before the block
    float maximum[kHeads];              // of all keys, in base 2
    float normaliser[kHeads];
  };
  union {
    Scores scores;
    AfterScores after;
  };
  // The block's 64 channels of every key. Rows of own keys are their last two groups for K as well.
  uint8_t values[2][S::kKeys][kSlotBytes];
  // Largest scores by source; of the source's keys in its first and second block of 64.
  float2 maxima[kCluster][kHeads];
  int num_keys;
  Barrier counted;
  Barrier keys_staged, values_staged;
  Barrier keys_full[4];  // by quarter of the channels
  Barrier values_full, rescale_full;
  Barrier maxima_full, sums_full, normalisers_full;
  Barrier probabilities_ready[kCluster];  // in the second-level cache, by source
  Barrier probabilities_full[kCluster];
};
static_assert(sizeof(SharedMemory<5>) <= 227 * 1024);
static_assert(sizeof(SharedMemory<5>::AfterScores) <= sizeof(SharedMemory<5>::Scores));
static_assert(sizeof(SharedMemory<1>::AfterScores) <= sizeof(SharedMemory<1>::Scores));

// ---- The list of keys --------------------------------------------------------------------------

// References of keys of the row's list (-1: none): those of window keys, which need the layout
// only, null for all others.
template <int kCount>
__device__ inline void WindowReferences(const AttentionParams& p, const RowKeys& keys,
                                        const int (&key)[kCount],
                                        const uint8_t* (&references)[kCount]) {
  int page[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int position = keys.first_position + key[i];
    const bool window = key[i] >= 0 && key[i] < keys.num_window;
    page[i] = 0;
    if (window && position < keys.step_start)
      page[i] = __ldg(keys.pages + p.page_rows.Quotient(position) - keys.first_page);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int position = keys.first_position + key[i];
    const bool window = key[i] >= 0 && key[i] < keys.num_window;
    const int row = position - p.page_rows.Quotient(position) * static_cast<int>(p.page_rows.value);
    const uint8_t* reference =
        p.window_pages + 1 + page[i] * p.page_stride + static_cast<int64_t>(row) * p.window_bytes;
    if (position >= keys.step_start) {
      reference =
          p.window_records + 1 + (keys.first_row + position - keys.step_start) * p.record_stride;
    }
    references[i] = window ? reference : nullptr;
  }
}

// Adds those of selected entries.
template <int kCount>
__device__ inline void EntryReferences(const AttentionParams& p, const RowKeys& keys,
                                       const int (&key)[kCount],
                                       const uint8_t* (&references)[kCount]) {
  int entry[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int index = key[i] - keys.num_window;
    entry[i] = -1;
    if (index >= 0 && index < p.topk) entry[i] = __ldg(keys.selected + index);
  }
  int block[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    block[i] = 0;
    if (entry[i] >= 0) block[i] = __ldg(keys.blocks + p.entries_per_block.Quotient(entry[i]));
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = entry[i] - p.entries_per_block.Quotient(entry[i]) *
                                   static_cast<int>(p.entries_per_block.value);
    if (entry[i] >= 0) {
      references[i] = p.kv_blocks + block[i] * p.kv_stride + static_cast<int64_t>(row) * p.kv_bytes;
    }
  }
}

// ---- Staging and decoding ----------------------------------------------------------------------

// Where the slot of row `row` begins in rows of 64 bytes; piece j of four is at ^ (j << 4).
__device__ inline uint32_t SlotOffset(int row) {
  return static_cast<uint32_t>(row * kSlotBytes + ((row >> 1 & 3) << 4));
}
__device__ inline uint4* SlotPiece(uint8_t* tile, uint32_t slot, uint32_t piece) {
  return reinterpret_cast<uint4*>(tile + (slot ^ (piece << 4)));
}

// Starts to copy a group of 32 channels of a key as it is to its slot; zeros for an absent key.
template <bool kBf16>
__device__ inline void StageGroup(const AttentionParams& p, const uint8_t* reference, int group,
                                  uint8_t* tile, uint32_t slot) {
  const bool valid = reference != nullptr;
  const bool window = IsWindowKey(reference);
  const uint8_t* record =
      valid ? reference - (window ? 1 : 0) : reinterpret_cast<const uint8_t*>(p.q);
  if constexpr (kBf16) {
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      CopyAsync16OrZero(SlotPiece(tile, slot, j), record + (valid ? group * 64 : 0) + 16 * j,
                        valid);
    }
  } else {
    int codes = 0;
    int scales = 0;
    if (valid) codes = window ? 32 * group : 16 * group;
    if (valid) scales = window ? kDim : kDim / 2 + (2 * group & 16);
    CopyAsync16OrZero(SlotPiece(tile, slot, 0), record + codes, valid);
    CopyAsync16OrZero(SlotPiece(tile, slot, 2), record + scales, valid);
    if (window) CopyAsync16(SlotPiece(tile, slot, 1), record + codes + 16);
  }
}

// Decodes it where it is.
template <bool kBf16>
__device__ inline void DecodeSlot(bool window, int group, uint8_t* tile, uint32_t slot) {
  RawGroup<kBf16> raw;
#pragma unroll
  for (uint32_t j = 0; j < (kBf16 ? 4 : 2); ++j) {
    const uint4 x = *SlotPiece(tile, slot, j);
    raw.words[4 * j] = x.x;
    raw.words[4 * j + 1] = x.y;
    raw.words[4 * j + 2] = x.z;
    raw.words[4 * j + 3] = x.w;
  }
  if constexpr (!kBf16) {
    const auto* scales = reinterpret_cast<const uint8_t*>(SlotPiece(tile, slot, 2));
    raw.scales =
        *reinterpret_cast<const uint16_t*>(scales + (window ? group & ~1 : 2 * group & 15));
  }
  uint4 pieces[4];
  DecodeGroup<kBf16>(raw, window, group, pieces);
#pragma unroll
  for (uint32_t j = 0; j < 4; ++j) *SlotPiece(tile, slot, j) = pieces[j];
}

// The block's own keys' rows of a group, for K.
template <int kOwnSteps>
__device__ inline uint8_t* KeyPanel(SharedMemory<kOwnSteps>& s, int rank, int group) {
  if (group / 2 == rank) return s.values[group % 2][rank * Shape<kOwnSteps>::kOwnKeys];
  return s.scores.keys[group - (group / 2 > rank ? 2 : 0)];
}

// ---- Warps -------------------------------------------------------------------------------------

// Keys that are not the block's own, in the order of the list.
template <int kOwnSteps>
__device__ inline int OtherKey(int index, int rank) {
  constexpr int kOwnKeys = Shape<kOwnSteps>::kOwnKeys;
  return index < rank * kOwnKeys ? index : index + kOwnKeys;
}

// Starts to copy the records that a warp of the decoders stages, and counts their keys. The first
// part, before the kernel in front has ended, reads the layout only.
template <bool kBf16, int kOwnSteps>
__device__ inline void StageKeys(const AttentionParams& p, const RowKeys& keys, int rank, int warp,
                                 SharedMemory<kOwnSteps>& s) {
  using S = Shape<kOwnSteps>;
  const int lane = LaneId();
  int count = 0;
  if (warp < S::kKeyWarps) {
    const int row = warp * 8 + lane % 8;
    const int key[1] = {rank * S::kOwnKeys + row};
    const uint8_t* reference[1];
    WindowReferences(p, keys, key, reference);
    WaitForPreviousKernel();
    AllowNextKernel();
    EntryReferences(p, keys, key, reference);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int group = (i ^ 2) * 4 + lane / 8;
      StageGroup<kBf16>(p, reference[0], group, KeyPanel(s, rank, group), SlotOffset(row));
    }
    BarrierArriveOnCopies(&s.keys_staged);
    count = __popc(__ballot_sync(0xffffffffu, reference[0] != nullptr && lane < 8));
  } else {
    int key[S::kKeysOfLane];
#pragma unroll
    for (int i = 0; i < S::kKeysOfLane; ++i) {
      const int index = (warp - S::kKeyWarps) * 32 + lane + i * S::kValueLanes;
      key[i] = index < S::kOtherKeys ? OtherKey<kOwnSteps>(index, rank) : -1;
    }
    const uint8_t* references[S::kKeysOfLane];
    WindowReferences(p, keys, key, references);
    WaitForPreviousKernel();
    AllowNextKernel();
    EntryReferences(p, keys, key, references);
#pragma unroll
    for (int i = 0; i < S::kKeysOfLane; ++i) {
      count += __popc(__ballot_sync(0xffffffffu, references[i] != nullptr));
      if (key[i] < 0) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        StageGroup<kBf16>(p, references[i], 2 * rank + half, s.values[half][0], SlotOffset(key[i]));
      }
    }
    BarrierArriveOnCopies(&s.values_staged);
  }
  if (lane == 0) atomicAdd(&s.num_keys, count);
  ArriveWarp(&s.counted);
}

// Decodes them, own keys first and of these the right half of the channels.
template <bool kBf16, int kOwnSteps>
__device__ inline void Decode(int num_window, int rank, int warp, SharedMemory<kOwnSteps>& s) {
  using S = Shape<kOwnSteps>;
  const int lane = LaneId();
  BarrierWait(&s.keys_staged, 0);
#pragma unroll 1
  for (int unit = warp; unit < S::kUnits; unit += kDecoderWarps) {
    const bool own = unit < S::kKeyUnits;
    const int quarter = unit / S::kQuarterUnits ^ 2;
    int group;
    int row;
    int key;
    uint8_t* tile;
    if (own) {
      group = quarter * 4 + lane / 8;
      row = unit % S::kQuarterUnits * 8 + lane % 8;
      key = rank * S::kOwnKeys + row;
      tile = KeyPanel(s, rank, group);
    } else {
      BarrierWait(&s.values_staged, 0);
      group = 2 * rank + lane / 16;
      row = OtherKey<kOwnSteps>((unit - S::kKeyUnits) * 16 + lane % 16, rank);
      key = row;
      tile = s.values[lane / 16][0];
    }
    DecodeSlot<kBf16>(key < num_window, group, tile, SlotOffset(row));
    FenceAsyncProxy();
    if (own) ArriveWarp(&s.keys_full[quarter]);
  }
  ArriveWarp(&s.values_full);
}

template <int kOwnSteps>
__device__ inline int CountedKeys(SharedMemory<kOwnSteps>& s) {
  BarrierWait(&s.counted, 0);
  return s.num_keys;
}

// Warpgroup 0.
template <int kOwnSteps>
__device__ inline void ComputeProbabilities(const AttentionParams& p, const Item& item, int rank,
                                            ProbabilityStep* exchange, bool push,
                                            SharedMemory<kOwnSteps>& s) {
  const int lane = LaneId();
  const int warp = WarpId();
  WaitForPreviousKernel();
  AllowNextKernel();
  constexpr int kCopies = kHeads / 4 / kQueryHeads;
#pragma unroll 1
  for (int i = 0; i < kCopies; ++i)
    CopyQueriesWarp(p, item, (warp * kCopies + i) * kQueryHeads, s.scores.q[0]);
  ClusterWait();
#pragma unroll 1
  for (int i = 0; i < kCopies; ++i)
    FinishQueriesWarp(p, item, (warp * kCopies + i) * kQueryHeads, s.scores.q[0]);
  FenceAsyncProxy();
  NamedBarrierSync(1, 128);
  const int num_keys = CountedKeys(s);

  float scores[8 * kOwnSteps];
  const uint64_t q = SharedDescriptor(s.scores.q, 16, 1024, Swizzle::k128Bytes);
  WarpgroupFenceRegisters(scores);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int quarter = i ^ 2;
    BarrierWait(&s.keys_full[quarter], 0);
    WarpgroupFence();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int group = quarter * 4 + j / 2;
      const auto inside = static_cast<uint32_t>(j % 2 * 32);
      const uint64_t k =
          SharedDescriptor(KeyPanel(s, rank, group), 16, 8 * kSlotBytes, Swizzle::k64Bytes);
      const auto place = static_cast<uint32_t>(group / 2 * kPanelBytes + group % 2 * 64);
      WarpgroupMmaShared<0>(scores, AdvanceDescriptor(q, place + inside),
                            AdvanceDescriptor(k, inside), i != 0 || j != 0);
    }
  }
  WarpgroupCommit();
  WarpgroupWait<0>();
  WarpgroupFenceRegisters(scores);

  // Own keys lie in one or two blocks of 64.
  const int head = warp * 16 + lane / 4;  // of this lane, and 8 more
  const int first_step = rank * kOwnSteps;
  const int first_block = first_step / kBlockSteps;
  const int steps_in_first = kBlockSteps - first_step % kBlockSteps;
  const int peer = lane % 4 * 2;  // this lane's, and the next one
  if (num_keys < (first_step + kOwnSteps) * kStepKeys) {
    const int limit = num_keys - first_step * kStepKeys - lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8 * kOwnSteps; ++i) {
      if (i / 4 * 8 + i % 2 >= limit) scores[i] = -INFINITY;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float2 largest = make_float2(-INFINITY, -INFINITY);
#pragma unroll
    for (int j = 0; j < kOwnSteps; ++j) {
      const float* x = scores + 8 * j + 2 * r;
      const float of_step = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[4], x[5]));
      if (j < steps_in_first) {
        largest.x = fmaxf(largest.x, of_step);
      } else {
        largest.y = fmaxf(largest.y, of_step);
      }
    }
#pragma unroll
    for (int offset = 1; offset <= 2; offset *= 2) {
      largest.x = fmaxf(largest.x, __shfl_xor_sync(0xffffffffu, largest.x, offset));
      largest.y = fmaxf(largest.y, __shfl_xor_sync(0xffffffffu, largest.y, offset));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      StoreClusterAsync(&s.maxima[rank][head + 8 * r], static_cast<uint32_t>(peer + i), largest,
                        &s.maxima_full);
    }
  }

  // Running maxima of the own blocks; the lanes of a quad look at two sources each.
  BarrierWait(&s.maxima_full, 0);
  float maximum[2][2];  // [head][block]
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int block = (peer + i) * kOwnSteps / kBlockSteps - first_block;
      const float2 x = s.maxima[peer + i][head + 8 * r];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (block <= j) largest[j] = fmaxf(largest[j], x.x);
        if (block + 1 <= j) largest[j] = fmaxf(largest[j], x.y);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      largest[j] = fmaxf(largest[j], __shfl_xor_sync(0xffffffffu, largest[j], 1));
      largest[j] = fmaxf(largest[j], __shfl_xor_sync(0xffffffffu, largest[j], 2));
      // Scaling is monotonic: this is the maximum of the scaled scores.
      maximum[r][j] = fmaxf(kFirstMaximum, largest[j] * p.scale);
    }
  }
  float sums[2][kOwnSteps];
  uint4 probabilities[kOwnSteps];
#pragma unroll
  for (int j = 0; j < kOwnSteps; ++j) {
    float* x = scores + 8 * j;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float largest = j < steps_in_first ? maximum[r][0] : maximum[r][1];
      float* y = x + 2 * r;
      y[0] = Exp2(fmaf(y[0], p.scale, -largest));
      y[1] = Exp2(fmaf(y[1], p.scale, -largest));
      y[4] = Exp2(fmaf(y[4], p.scale, -largest));
      y[5] = Exp2(fmaf(y[5], p.scale, -largest));
      sums[r][j] = (y[0] + y[1]) + (y[4] + y[5]);
    }
    probabilities[j] = make_uint4(FloatsToBf16x2(x[0], x[1]), FloatsToBf16x2(x[2], x[3]),
                                  FloatsToBf16x2(x[4], x[5]), FloatsToBf16x2(x[6], x[7]));
  }

  if (push) {
#pragma unroll 1
    for (int i = 0; i < kCluster; ++i) {
      const auto target = static_cast<uint32_t>(rank ^ i);
#pragma unroll
      for (int j = 0; j < kOwnSteps; ++j) {
        StoreClusterAsync(&s.after.probabilities[first_step + j].lanes[warp][lane], target,
                          probabilities[j], &s.probabilities_full[rank]);
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < kOwnSteps; ++j)
      StoreVector(&exchange[first_step + j].lanes[warp][lane], probabilities[j]);
    __syncwarp();
    if (lane < kCluster)
      ClusterBarrierArrive(&s.probabilities_ready[rank], static_cast<uint32_t>(lane));
  }
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // Heads 16 warp + 8 r ... are those of block 2 warp + r.
    const auto target = static_cast<uint32_t>(2 * warp + r);
    float* place = s.after.sums[rank][lane / 4][lane % 4];
#pragma unroll
    for (int j = 0; j < kOwnSteps; ++j)
      StoreClusterAsync(place + j, target, sums[r][j], &s.sums_full);
  }
  if (push) return;
#pragma unroll 1
  for (int source = 0; source < kCluster; ++source) {
    ClusterBarrierWait(&s.probabilities_ready[source], 0);
#pragma unroll
    for (int j = 0; j < kOwnSteps; ++j) {
      const int step = source * kOwnSteps + j;
      CopyAsync16(&s.after.probabilities[step].lanes[warp][lane],
                  &exchange[step].lanes[warp][lane]);
    }
    BarrierArriveOnCopies(&s.probabilities_full[source]);
  }
  CommitCopies();
  WaitCopies<0>();
}

// Two warps, `head` by lane: the factors by which sums are rescaled before each block of 64 keys.
template <int kOwnSteps>
__device__ inline void ComputeRescaling(const AttentionParams& p, int head,
                                        SharedMemory<kOwnSteps>& s) {
  BarrierWait(&s.maxima_full, 0);
  float largest[Shape<kOwnSteps>::kBlocks];
#pragma unroll
  for (float& x : largest) x = -INFINITY;
#pragma unroll
  for (int source = 0; source < kCluster; ++source) {
    const int block = source * kOwnSteps / kBlockSteps;
    const float2 x = s.maxima[source][head];
    largest[block] = fmaxf(largest[block], x.x);
    if constexpr (kOwnSteps > 1) largest[block + 1] = fmaxf(largest[block + 1], x.y);
  }
  float maximum = kFirstMaximum;
#pragma unroll
  for (int block = 0; block < Shape<kOwnSteps>::kBlocks; ++block) {
    const float next = fmaxf(maximum, largest[block] * p.scale);
    s.after.rescale[block][head] = Exp2(maximum - next);
    maximum = next;
  }
  s.after.maximum[head] = maximum;
  ArriveWarp(&s.rescale_full);
}

// One warp: the denominators of a block's own heads, to all blocks.
template <int kOwnSteps>
__device__ inline void ComputeNormalisers(const AttentionParams& p, const Item& item, int rank,
                                          SharedMemory<kOwnSteps>& s) {
  const int lane = LaneId();
  const int head = rank * kOwnHeads + lane / 4;
  const float sink = __ldg(p.sink + min(item.first_head + head, p.heads - 1));
  BarrierWait(&s.rescale_full, 0);
  BarrierWait(&s.sums_full, 0);
  float sum = 0.0f;
#pragma unroll
  for (int block = 0; block < Shape<kOwnSteps>::kBlocks; ++block) {
    float of_step[kBlockSteps];
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
      const int step = block * kBlockSteps + j;
      of_step[j] = s.after.sums[step / kOwnSteps][lane / 4][lane % 4][step % kOwnSteps];
    }
    sum = fmaf(sum, s.after.rescale[block][head],
               (of_step[0] + of_step[1]) + (of_step[2] + of_step[3]));
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  const float normaliser = Normaliser(sum, s.after.maximum[head], sink);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    StoreClusterAsync(&s.after.normaliser[head], static_cast<uint32_t>(lane % 4 * 2 + i),
                      normaliser, &s.normalisers_full);
  }
}

// Warpgroups 1 and 2, `half` of the block's channels each.
template <int kOwnSteps>
__device__ inline void ComputeValues(const AttentionParams& p, const Item& item, int rank, int half,
                                     SharedMemory<kOwnSteps>& s) {
  const int lane = LaneId();
  const int warp = WarpId() & 3;
  const int head = warp * 16 + lane / 4;  // of this lane, and 8 more
  const int group = 2 * rank + half;
  constexpr int kFirstRotated = kGroups - kRotated / 32;
  const bool rotated = group >= kFirstRotated;
  Angles angles;
  if (rotated) angles = LoadAngles(p, item.row, group - kFirstRotated);
  const int num_keys = CountedKeys(s);
  BarrierWait(&s.values_full, 0);
  BarrierWait(&s.rescale_full, 0);
  const uint64_t values =
      SharedDescriptor(s.values[half][0], 16, 8 * kSlotBytes, Swizzle::k64Bytes);
  int sources = 0;  // whose probabilities have come
  using Operands = uint32_t[kBlockSteps][4];
  const auto load = [&](int block, Operands& a) {
#pragma unroll 1
    for (; sources * kOwnSteps < (block + 1) * kBlockSteps; ++sources)
      BarrierWait(&s.probabilities_full[sources], 0);
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
      const uint4 x = s.after.probabilities[block * kBlockSteps + j].lanes[warp][lane];
      a[j][0] = x.x;
      a[j][1] = x.y;
      a[j][2] = x.z;
      a[j][3] = x.w;
    }
  };
  float out[16];
  Operands a = {};
  if (num_keys > 0) load(0, a);
#pragma unroll 1
  for (int block = 0; block * kBlockKeys < num_keys; ++block) {
    WarpgroupFenceRegisters(out);
    WarpgroupFence();
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
      const int step = block * kBlockSteps + j;
      WarpgroupMmaRegisters<1>(
          out, a[j],
          AdvanceDescriptor(values, static_cast<uint32_t>(step * kStepKeys * kSlotBytes)),
          step != 0);
    }
    WarpgroupCommit();
    Operands next = {};
    float rescale[2] = {1.0f, 1.0f};
    if ((block + 1) * kBlockKeys < num_keys) {
      load(block + 1, next);
      rescale[0] = s.after.rescale[block + 1][head];
      rescale[1] = s.after.rescale[block + 1][head + 8];
    }
    WarpgroupWait<0>();
    WarpgroupFenceRegisters(out);
#pragma unroll
    for (int i = 0; i < 16; ++i) out[i] *= rescale[i / 2 % 2];
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
      WarpgroupFenceRegisters(a[j]);  // read until now
#pragma unroll
      for (int i = 0; i < 4; ++i) a[j][i] = next[j][i];
    }
  }
  // Whatever is sent to a block comes before it ends.
#pragma unroll 1
  for (; sources < kCluster; ++sources) BarrierWait(&s.probabilities_full[sources], 0);
  BarrierWait(&s.normalisers_full, 0);
  const auto store = [&](const Angles* back) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int h = item.first_head + head + 8 * r;
      float x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = out[j / 2 * 4 + 2 * r + j % 2];
      uint4 result = FinishGroup(x, s.after.normaliser[head + 8 * r], back, p.production);
      if (num_keys == 0) result = make_uint4(0u, 0u, 0u, 0u);
      if (h < p.heads) {
        StoreVector(p.out + item.row * p.out_stride + static_cast<int64_t>(h) * kDim + group * 32 +
                        lane % 4 * 8,
                    result);
      }
    }
  };
  // Two copies: a pointer to one of two places would put the angles in local memory.
  if (rotated) {
    store(&angles);
  } else {
    store(nullptr);
  }
}

template <bool kBf16, int kOwnSteps>
__global__ void __launch_bounds__(kThreads, 1)
    FewRowsKernel(const AttentionParams p, ProbabilityStep* exchange, const bool push) {
  using S = Shape<kOwnSteps>;
  auto& s = *DynamicShared<SharedMemory<kOwnSteps>>();
  const int warp = UniformWarpId();
  const int rank = static_cast<int>(ClusterRank());
  const int item_index = static_cast<int>(blockIdx.x) / kCluster;
  const Item item = ItemOf(p, item_index);
  exchange += static_cast<int64_t>(item_index) * S::kSteps;
  if (threadIdx.x == 0) {
    for (Barrier& barrier : s.keys_full) BarrierInit(&barrier, S::kQuarterUnits);
    s.num_keys = 0;
    BarrierInit(&s.counted, kDecoderWarps);
    BarrierInit(&s.keys_staged, 32 * S::kKeyWarps);
    BarrierInit(&s.values_staged, S::kValueLanes);
    BarrierInit(&s.values_full, kDecoderWarps);
    BarrierInit(&s.rescale_full, 2);
    BarrierInit(&s.maxima_full, 1);
    BarrierInit(&s.sums_full, 1);
    BarrierInit(&s.normalisers_full, 1);
    for (int i = 0; i < kCluster; ++i) {
      BarrierInit(&s.probabilities_ready[i], 4);
      BarrierInit(&s.probabilities_full[i], push ? 1 : 128);
    }
    FenceBarrierInit();
    BarrierArriveExpect(&s.maxima_full, sizeof(s.maxima));
    BarrierArriveExpect(&s.sums_full, kCluster * kOwnHeads * 4 * kOwnSteps * sizeof(float));
    BarrierArriveExpect(&s.normalisers_full, sizeof(s.after.normaliser));
    if (push) {
      for (Barrier& barrier : s.probabilities_full)
        BarrierArriveExpect(&barrier, kOwnSteps * sizeof(ProbabilityStep));
    }
  }
  __syncthreads();
  ClusterArrive();
  if (warp < 4) {
    ComputeProbabilities(p, item, rank, exchange, push, s);
    return;
  }
  const RowKeys keys = WindowKeys(p, item.row);
  StageKeys<kBf16>(p, keys, rank, warp - 4, s);
  ClusterWait();
  Decode<kBf16>(keys.num_window, rank, warp - 4, s);
  if (warp < 12) {
    ComputeValues(p, item, rank, warp / 4 - 1, s);
  } else if (warp < 14) {
    ComputeRescaling(p, (warp - 12) * 32 + LaneId(), s);
  } else if (warp == 19) {
    ComputeNormalisers(p, item, rank, s);
  }
}

template <bool kBf16, int kOwnSteps>
Status LaunchFewRows(const AttentionParams& params, Stream& stream) {
  const int items = params.rows * ((params.heads + kHeads - 1) / kHeads);
  ScratchScope scope(stream);
  auto* exchange =
      scope.Allocate<ProbabilityStep>(static_cast<int64_t>(items) * Shape<kOwnSteps>::kSteps);
  LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(items * kCluster);
  config.block = kThreads;
  config.shared_bytes = static_cast<int>(sizeof(SharedMemory<kOwnSteps>));
  config.cluster = kCluster;
  config.overlap_previous = true;
  return Launch(kBf16 ? "sparse_attention_few_rows_bf16" : "sparse_attention_few_rows",
                FewRowsKernel<kBf16, kOwnSteps>, config, stream, params, exchange,
                sparse_attention_choices.push_probabilities);
}

}  // namespace

Status FewRowsAttention(const AttentionParams& params, Stream& stream) {
  constexpr int kOwnSteps = kFewRowsMaxKeys / (kCluster * kStepKeys);
  static_assert(kOwnSteps * kCluster * kStepKeys == kFewRowsMaxKeys);
  const bool window_only = params.window + params.topk <= Shape<1>::kKeys;
  if (params.window_bf16) {
    return window_only ? LaunchFewRows<true, 1>(params, stream)
                       : LaunchFewRows<true, kOwnSteps>(params, stream);
  }
  return window_only ? LaunchFewRows<false, 1>(params, stream)
                     : LaunchFewRows<false, kOwnSteps>(params, stream);
}

}  // namespace deepinfer::cuda
