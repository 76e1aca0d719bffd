// Sparse latent attention on wgmma, for 64 heads x 512 channels (fewer heads are padded, more are
// several launches).
//
// Bound by the tensor cores: 4 * 64 * 512 FLOPs per key and row (83.9 MFLOP for 640 keys) on 215 KB
// of records. A first kernel writes the record addresses of every row's key list. In the second, a
// block takes rows, 64 heads of each, one after the other and has four warpgroups:
//   scores        (0): S = q K^T of a block of 64 keys, softmax, P to shared memory, and the left
//                      half (channels 0 ... 255) of the numerator O += P V.
//   values        (1): the right half of O.
//   converters (2, 3): bring records a block ahead, codes to shared memory, and write their
//                      channels, decoded to bf16, into one of two K tiles. K and V are the same
//                      tile: S reads it K-major, O MN-major. They run ahead into the next row,
//                      whose q they bring, rotate and put into the order of tiles.
// S of block b + 1 is issued before O of block b, so that the softmax of b + 1 runs while the
// tensor cores work on O; S of a row's first block in the middle of the end of the row before. A
// tile is filled and released by channel halves: the right one first, which the values warpgroup
// releases while S still runs.
//
// Cycles per block of 64 keys, as planned: tensor cores 2050; shared memory 2450 (operands of wgmma
// 208 KB, decoded keys 64 KB, staged codes 32 KB, P 8 KB); of the 4 schedulers' issue slots each,
// converters 1150, softmax and rescaling 600, the end of a row 200 (2000 per row of 640 keys); the
// chain of the scores warpgroup 2400 (S with half of O in between 1500, softmax 650, messages and
// rescaling 250); that of a converter warp 1900, if it never waits for memory. Between the last use
// of a tile and the first use of its next content lies a conversion, hence two warpgroups for it.
// Tried and lost: loads inside a branch on the record's format, with arithmetic on the loaded
// scale: every load was waited for before the next one started (12 % of the ceiling); reading only
// half a block ahead, by lanes that decode half of what they read, and exchanging results between
// lanes before they are stored (33 %: converters waited for memory, and the end of a row took as
// long as three blocks); whole records in registers a block ahead (33 %: what was loaded was
// spilled at once, and each spill waited for its load, 70 % of the converters' time).
//
// Order of additions (the same in every kernel for these shapes): scores over channels 256 ... 511,
// then 0 ... 255, in steps of 16 in the order of tiles; of the denominator, each lane sums its four
// probabilities of a step of 16 keys, the steps of a block and the blocks, and the four lanes of a
// row are added at the end; numerators over keys in steps of 16, rescaled per block of 64.
#include "ops/sparse_attention/sparse_attention_sm90.cuh"
#include "warpgroup.cuh"

namespace deepinfer::cuda {
using namespace attention;
namespace {

constexpr int kThreads = 512;
constexpr int kConverterWarps = 8;
// Groups of 32 channels (of 8 of its half) that the scores warpgroup stores before it starts the
// scores of the next row.
constexpr int kGroupsBeforeScores = 4;

struct alignas(1024) SharedMemory {
  uint8_t q[8][kPanelBytes];
  uint8_t keys[2][2][kHalfBytes];         // [tile][half]
  uint8_t probabilities[2][kPanelBytes];  // heads x keys of a block
  uint4 staged_codes[kConverterWarps][2][2][32];
  float rescale[2][kHeads];     // of what was summed before this block
  float normaliser[2][kHeads];  // with the last block of a row
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

// Warpgroups 2 and 3. A warp has 8 keys of each block; a lane has one of them, and of each quarter
// of its channels a group of 32. The eight lanes that a 16-byte store writes at once have the same
// piece of eight rows: with the swizzle, all eight pieces of 128 bytes, no bank twice.
constexpr int kWarpKeys = kBlockKeys / kConverterWarps;
static_assert(kWarpKeys == 8);

// Half of the channels of a lane's key.
template <bool kBf16>
struct RawHalf {
  RawGroup<kBf16> groups[2];
};

// A lane's key is brought in three ways: the first 16 bytes of its groups' codes to shared memory,
// the groups' scales to registers, both a block ahead; the latter codes of window records to
// registers half a block ahead, because there are not enough for more. What is under way to
// registers is not to be touched before the next block begins, where all of it is waited for.

// A warp's part of shared memory: [half][group of the half][lane].
using StagedCodes = uint4[2][2][32];
using UpperCodes = uint32_t[2][4];  // of the groups of a half

__device__ inline void ReadScales(const uint8_t* reference, int lane_group, uint32_t (&scales)[4]) {
  const GroupReader reader(reference, lane_group);
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) scales[quarter] = reader.Scales(quarter);
}
__device__ inline void StageCodes(const uint8_t* reference, int lane_group, int half,
                                  StagedCodes& codes) {
  const GroupReader reader(reference, lane_group);
#pragma unroll
  for (int i = 0; i < 2; ++i) CopyAsync16(&codes[half][i][LaneId()], reader.Codes(2 * half + i));
  CommitCopies();
}
__device__ inline void ReadUpperCodes(const uint8_t* reference, int lane_group, int half,
                                      UpperCodes& upper) {
  const GroupReader reader(reference, lane_group);
#pragma unroll
  for (int i = 0; i < 2; ++i) reader.ReadUpperCodes(2 * half + i, upper[i]);
}

// A half whose copies have landed.
__device__ inline RawHalf<false> TakeHalf(const StagedCodes& codes, int half,
                                          const UpperCodes& upper, const uint32_t (&scales)[4]) {
  RawHalf<false> raw;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 x = codes[half][i][LaneId()];
    raw.groups[i].words[0] = x.x;
    raw.groups[i].words[1] = x.y;
    raw.groups[i].words[2] = x.z;
    raw.groups[i].words[3] = x.w;
#pragma unroll
    for (int t = 0; t < 4; ++t) raw.groups[i].words[4 + t] = upper[i][t];
    raw.groups[i].scales = scales[2 * half + i];
  }
  return raw;
}

// Writes it to a half of a tile, in which the first piece of the lane's first group is at `place`.
template <bool kBf16>
__device__ inline void WriteHalf(const RawHalf<kBf16>& raw, bool window, int lane_group,
                                 uint8_t* tile, uint32_t place) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint4 pieces[4];
    DecodeGroup<kBf16>(raw.groups[i], window, lane_group, pieces);
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j)
      *reinterpret_cast<uint4*>(tile + 2 * i * kPanelBytes + (place ^ (j << 4))) = pieces[j];
  }
}

template <bool kBf16>
__device__ void ConvertKeys(const AttentionParams& p, const KeyLists& lists, int first_head,
                            SharedMemory& s, int converter_warp) {
  const int key = converter_warp * kWarpKeys + LaneId() % 8;
  const int first_query_head = converter_warp * kQueryHeads;
  static_assert(kQueryHeads * kConverterWarps == kHeads);
  // The queries are there before the lists of keys: the kernel that makes the lists has waited for
  // the one before it when this one starts.
  int copied_row = static_cast<int>(blockIdx.x);
  CopyQueriesWarp(p, {copied_row, first_head}, first_query_head, s.q[0]);
  WaitForPreviousKernel();
  AllowNextKernel();
  const int lane_group = LaneId() / 8;
  const auto place =
      static_cast<uint32_t>(lane_group / 2 * kPanelBytes + PanelOffset(key, lane_group % 2 * 4));
  // A block of 64 keys and the lane's key in it.
  struct Stage {
    int row;
    bool begins_row;
    const uint8_t* reference;
  };
  BlockCursor cursor;
  cursor.Start(p, lists);
  if (!cursor.Valid(p)) {
    WaitCopies<0>();
    return;
  }
  int64_t latest = 0;  // block whose references were read last
  const auto fetch = [&] {
    // Behind the last block, those of some block once more: they are read, but not used.
    if (cursor.Valid(p))
      latest = cursor.row * (lists.stride / kBlockKeys) + cursor.begin / kBlockKeys;
    const Stage stage = {cursor.row, cursor.begin == 0, lists.records[latest * kBlockKeys + key]};
    if (cursor.Valid(p)) cursor.Advance(p, lists);
    return stage;
  };
  // The channels of a block are brought one block ahead, its references two.
  Stage current = fetch();
  Stage next = fetch();
  StagedCodes& codes = s.staged_codes[converter_warp];
  UpperCodes upper[2];
  uint32_t scales[4];
  if constexpr (!kBf16) {
    ReadScales(current.reference, lane_group, scales);
    StageCodes(current.reference, lane_group, kRight, codes);
    StageCodes(current.reference, lane_group, kLeft, codes);
    ReadUpperCodes(current.reference, lane_group, kRight, upper[kRight]);
  }
  Ring<2> tiles;
  uint32_t q_phase = 0;
  while (current.row < p.rows) {
    const Stage following = fetch();
    uint32_t next_scales[4];
    if constexpr (!kBf16) ReadScales(next.reference, lane_group, next_scales);
    // A row's queries are under way while the right half of its first block is decoded.
    const Item item = {current.row, first_head};
    const bool copies_queries = current.begins_row && current.row != copied_row;
    if (current.begins_row) {
      BarrierWait(&s.q_empty, q_phase ^ 1u);
      q_phase ^= 1u;
      if (copies_queries) {
        if (copied_row >= 0) WaitCopies<0>();  // of a row without keys
        CopyQueriesWarp(p, item, first_query_head, s.q[0]);
      }
      copied_row = -1;
      PrefetchQueriesWarp(p, {current.row + static_cast<int>(gridDim.x), first_head},
                          first_query_head);
    }
    const bool window = IsWindowKey(current.reference);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int half = step == 0 ? kRight : kLeft;
      uint8_t* tile = s.keys[tiles.slot][half];
      RawHalf<kBf16> raw;
      if constexpr (kBf16) {
        // Records of bf16 are too large to be brought a block ahead.
#pragma unroll
        for (int i = 0; i < 2; ++i)
          ReadBf16Group(current.reference, 4 * (2 * half + i) + lane_group, raw.groups[i]);
        BarrierWait(&s.keys_empty[tiles.slot][half], tiles.empty_phase());
      } else {
        const int next_half = step == 0 ? kLeft : kRight;
        ReadUpperCodes(step == 0 ? current.reference : next.reference, lane_group, next_half,
                       upper[next_half]);
        BarrierWait(&s.keys_empty[tiles.slot][half], tiles.empty_phase());
        // All but those of the next half and of queries; a lane reads only what it copied.
        if (step == 0 && copies_queries) {
          WaitCopies<2>();
        } else {
          WaitCopies<1>();
        }
        raw = TakeHalf(codes, half, upper[half], scales);
      }
      WriteHalf<kBf16>(raw, window, lane_group, tile, place);
      FenceAsyncProxy();
      ArriveWarp(&s.keys_full[tiles.slot][half]);
      if (step == 0 && current.begins_row) {
        FinishQueriesWarp(p, item, first_query_head, s.q[0]);
        FenceAsyncProxy();
        ArriveWarp(&s.q_full);
      }
      if constexpr (!kBf16) StageCodes(next.reference, lane_group, half, codes);
    }
    tiles.Advance();
    current = next;
    next = following;
    if constexpr (!kBf16) {
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) scales[quarter] = next_scales[quarter];
    }
  }
  WaitCopies<0>();
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
    // Scaling is monotonic: this is the maximum of the scaled scores.
    const float maximum = fmaxf(state.maximum[r], largest * scale);
    rescale[r] = Exp2(state.maximum[r] - maximum);
    state.maximum[r] = maximum;
    float sum[4];  // of steps of 16 keys
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float* x = scores + 8 * k + 2 * r;
      x[0] = Exp2(fmaf(x[0], scale, -maximum));
      x[1] = Exp2(fmaf(x[1], scale, -maximum));
      x[4] = Exp2(fmaf(x[4], scale, -maximum));
      x[5] = Exp2(fmaf(x[5], scale, -maximum));
      sum[k] = (x[0] + x[1]) + (x[4] + x[5]);
    }
    state.sum[r] = fmaf(state.sum[r], rescale[r], (sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
  return make_float2(rescale[0], rescale[1]);
}

// Finishes and stores groups [kFirst, kLast) of 8 of one half of the channels of 64 heads.
template <int kOutHalf, int kFirst, int kLast>
__device__ inline void StoreGroups(const AttentionParams& p, const Item& item, const Numerator& out,
                                   const float (&normaliser)[2]) {
  const int first_head = item.first_head + (WarpId() & 3) * 16 + LaneId() / 4;
  uint16_t* target = p.out + item.row * p.out_stride + static_cast<int64_t>(first_head) * kDim +
                     kOutHalf * kHalf + LaneId() % 4 * 8;
#pragma unroll
  for (int group = kFirst; group < kLast; ++group) {
    constexpr int kFirstRotated = (kHalf - kRotated) / 32;
    const bool rotated = kOutHalf == kRight && group >= kFirstRotated;
    Angles angles;
    if (rotated) angles = LoadAngles(p, item.row, group - kFirstRotated);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j)
        x[j] = out[group / 4][(group % 4 * 4 + j / 2) * 4 + 2 * r + j % 2];
      const uint4 values = FinishGroup(x, normaliser[r], rotated ? &angles : nullptr, p.production);
      if (first_head + 8 * r < p.heads) StoreVector(target + 8 * r * kDim + group * 32, values);
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

// The rows of a thread block that have keys; those without are set to zero on the way.
template <int kOutHalf>
struct RowCursor {
  int row;
  int num_keys = 0;

  __device__ void Start(const AttentionParams& p, const KeyLists& lists, int first_head) {
    row = static_cast<int>(blockIdx.x);
    Skip(p, lists, first_head);
  }
  __device__ void Advance(const AttentionParams& p, const KeyLists& lists, int first_head) {
    row += static_cast<int>(gridDim.x);
    Skip(p, lists, first_head);
  }

 private:
  __device__ void Skip(const AttentionParams& p, const KeyLists& lists, int first_head) {
    for (; row < p.rows; row += static_cast<int>(gridDim.x)) {
      num_keys = lists.num_keys[row];
      if (num_keys > 0) return;
      StoreZeros<kOutHalf>(p, {row, first_head});
    }
  }
};

// Warpgroup 0.
__device__ void AttendLeft(const AttentionParams& p, const KeyLists& lists, int first_head,
                           SharedMemory& s) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int lane = LaneId();
  const int warp = thread / 32;
  const int head = warp * 16 + lane / 4;
  // Lane i addresses row i % 16 of the warp's heads and the first or second of two pieces.
  const auto store_place = static_cast<uint32_t>(PanelOffset(warp * 16 + lane % 16, lane / 16));
  RowCursor<kLeft> next_row;
  next_row.Start(p, lists, first_head);
  if (next_row.row >= p.rows) return;
  Ring<2> tiles, slots;
  Ring<2> next;  // tile of the block whose scores come next
  uint32_t q_phase = 0;
  Numerator out;
  float scores[32];
  // Starts the scores of the first block of a row.
  const auto begin_row = [&] {
    BarrierWait(&s.q_full, q_phase);
    q_phase ^= 1u;
    IssueScores(s, next, scores);
    next.Advance();
  };
  const auto wait_for_scores = [&] {
    WarpgroupWait<0>();
    WarpgroupFenceRegisters(scores);
  };
  begin_row();
  wait_for_scores();
  while (true) {
    const Item item = {next_row.row, first_head};
    const int num_keys = next_row.num_keys;
    next_row.Advance(p, lists, first_head);
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
      uint8_t* target = s.probabilities[slots.slot];
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        const float* x = scores + 8 * j;
        StoreMatrix4(target + (store_place ^ (j << 5)),
                     {FloatsToBf16x2(x[0], x[1]), FloatsToBf16x2(x[2], x[3]),
                      FloatsToBf16x2(x[4], x[5]), FloatsToBf16x2(x[6], x[7])});
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
    // By the middle of what is stored the next row's q is there; its first scores are computed
    // behind the rest.
    StoreGroups<kLeft, 0, kGroupsBeforeScores>(p, item, out, normaliser);
    if (next_row.row >= p.rows) {
      StoreGroups<kLeft, kGroupsBeforeScores, 8>(p, item, out, normaliser);
      return;
    }
    begin_row();
    StoreGroups<kLeft, kGroupsBeforeScores, 8>(p, item, out, normaliser);
    wait_for_scores();
  }
}

// Warpgroup 1.
__device__ void AttendRight(const AttentionParams& p, const KeyLists& lists, int first_head,
                            SharedMemory& s) {
  const int head = (WarpId() & 3) * 16 + LaneId() / 4;
  Ring<2> tiles;
  Numerator out;
  RowCursor<kRight> rows;
  for (rows.Start(p, lists, first_head); rows.row < p.rows; rows.Advance(p, lists, first_head)) {
    const Item item = {rows.row, first_head};
    const int num_keys = rows.num_keys;
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
    StoreGroups<kRight, 0, 8>(p, item, out, normaliser);
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
    BarrierInit(&s.q_full, kConverterWarps);
    BarrierInit(&s.q_empty, 4);
    FenceBarrierInit();
  }
  __syncthreads();
  // 192 + 160 + 2 * 80 = 4 * 128, what the block was launched with: more would wait for ever. With
  // these numbers the compiler spills nothing that is under way from memory.
  if (warp < 4) {
    IncreaseRegisters<192>();
    WaitForPreviousKernel();
    AllowNextKernel();  // all blocks run at once
    AttendLeft(params, lists, first_head, s);
  } else if (warp < 8) {
    IncreaseRegisters<160>();
    WaitForPreviousKernel();
    AllowNextKernel();
    AttendRight(params, lists, first_head, s);
  } else {
    DecreaseRegisters<80>();
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
