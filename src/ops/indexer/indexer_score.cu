// Scores of the lightning indexer on tensor cores: 32 heads of 128 channels, packed Q4P or bf16
// keys.
//
// Keys are the rows of the matrix product, the heads of up to 16 queries of one sequence its
// columns: D[64 keys, 32 heads x queries]. Packed keys come as bulk copies of 64 records (4352
// bytes) into a ring in shared memory and become E4M3 in registers, where the matrix instruction
// takes them (indexer_operands.cuh). The head sum is a chain of 8 heads per thread and then a tree
// over the four threads of a quad: the same for every (query, key) whatever the launch looks like.
//
// Products of E4M3 codes are exact. The tensor core of Hopper is known to add those of a step, and
// the sum so far, aligned to the largest and cut at about 13 bits behind its leading one: sums are
// exact unless they need more than that, and else closer than bf16 by a factor of 32. The benchmark
// prints the distance from fp32 sums. All steps use the same arithmetic, whatever their number of
// rows.
//
// Wide keys and rows, whose scales do not fit E4M3, are scored a second time in bf16 with fp32
// sums, after the other tiles of their group. Which (query, key) pairs these are depends on the
// pair only.
//
// A block has an SM for itself. One warpgroup copies keys; two to four others take turns with the
// tiles, so that the tensor cores, the decoding of keys and the sums over heads of different tiles
// overlap. Nobody waits for another warpgroup, and a warp waits for nothing but keys and its own
// products. With more than four queries the products of every four are a batch of their own: one
// runs while the heads of another are added.
//
// Work is the list of tiles of all row groups (rows of one sequence that share a pass over the
// keys), divided evenly among the SMs. Every block computes the list from the positions by itself.
//
// Bound at one query per sequence by 68 bytes per key, which leaves 5 clocks per key and SM at
// three quarters of the bandwidth. Instructions take 3 of each of the four schedulers: 370 per warp
// and 32 keys, of which 110 decode, 64 add heads, 25 load codes, and about 190 in total use the
// unit of integer operations, which takes two clocks for each. (Four blocks of one warpgroup per
// SM, with the first warp copying and a block barrier per tile, needed 320 instructions per 16 keys
// and reached 33 % of the bandwidth.) At several queries bound by 8192 FLOP per query and key and
// by the instructions that add the heads, two for each of 32.
#include <algorithm>

#include "ops/indexer/indexer_operands.cuh"

namespace deepinfer::cuda {
namespace {

constexpr int kMmaKeys = 64;  // rows of a matrix instruction
constexpr int kPieceBytes = kMmaKeys * kPackedRecord;
constexpr int kRunBytes = kScoreBlock * kPackedRecord;
constexpr int kStages = 8;
constexpr int kWideBits = 1024;

// Warpgroups of a block that take turns with the tiles; one more copies keys.
template <int kRows>
inline constexpr int kGroups = kRows == 1   ? 4
                               : kRows <= 4 ? 3
                                            : 2;
template <int kRows>
inline constexpr int kConsumers = 128 * kGroups<kRows>;
inline constexpr int kCopyWarps = 4;
template <int kRows>
inline constexpr int kThreads = kConsumers<kRows> + 32 * kCopyWarps;
// Registers per thread when the warpgroups have parted. A kernel is launched with what the SM has
// for each thread, in steps of 8; consumers can have no more than copying threads give back.
template <int kRows>
inline constexpr int kLaunchRegisters = 65536 / kThreads<kRows> / 8 * 8;
template <int kRows>
inline constexpr int kCopyRegisters = kGroups<kRows> == 2 ? 24 : 32;
template <int kRows>
inline constexpr int kConsumerRegisters = kGroups<kRows> == 4   ? 112
                                          : kGroups<kRows> == 3 ? 160
                                                                : 240;

template <int kRows>
__device__ inline void SyncConsumers() {
  NamedBarrierSync(1, kConsumers<kRows>);
}

// Two halves of a tile where there is one query, so that the sums over threads, the block maxima
// and the stores are shared by all threads.
template <int kRows, KeyFormat kFormat>
inline constexpr int kHalves = kRows == 1 && kFormat == KeyFormat::kPackedE4M3 ? 2 : 1;
template <int kRows, KeyFormat kFormat>
inline constexpr int kTileKeys = kMmaKeys* kHalves<kRows, kFormat>;

// Every kStep-th tile of the block, beginning with the first-th, and the stages of the ring where
// they are.
template <int kStep>
struct Turns {
  int next;  // tile of the current segment
  int stage;
  uint32_t parity;

  __device__ explicit Turns(int first, uint32_t first_parity)
      : next(first), stage(first), parity(first_parity) {}
  __device__ void Advance() {
    next += kStep;
    stage += kStep;
    if (stage >= kStages) {
      stage -= kStages;
      parity ^= 1u;
    }
  }
};

// Where a row group's tiles lie.
struct RowGroup {
  int row;
  int rows;
  int sequence;
  int n_vis;  // of the last row
};

// Rows of a sequence form groups of kRows, counted from the sequence's first row or the wave's.
template <int kRows>
__device__ inline RowGroup GroupAt(const IndexerProblem& problem, int row) {
  RowGroup group = {row, 1, problem.row_sequence[row], 0};
  if constexpr (kRows == 1) {
    group.n_vis = VisibleEntries(problem, row);
    return group;
  }
  const int first = max(problem.row_begin, problem.sequence_start[group.sequence]);
  if ((row - first) % kRows != 0) {  // inside a group
    group.rows = 0;
    return group;
  }
  const int end = min(problem.row_end, problem.sequence_start[group.sequence + 1]);
  group.rows = max(1, min(kRows, end - row));
  group.n_vis = VisibleEntries(problem, row + group.rows - 1);
  return group;
}

template <int kTile>
__device__ inline int GroupTiles(const IndexerProblem& problem, const RowGroup& group) {
  if (group.rows == 0 || !ScoresMatter(problem, group.n_vis)) return 0;
  return CeilDiv(ScoredPositions(problem, group.n_vis), kTile);
}

struct SharedState {
  Barrier full[kStages];
  Barrier empty[kStages];
  int warp_sums[20];
  int visible_positions[16];  // per row of the group: positions from here on are not visible
  unsigned wide_rows;         // a bit per row of the group
  // A bit per tile, or per 2^n tiles where there are many, that has wide keys; whether one is set.
  unsigned wide_tiles[kWideBits / 32];
  unsigned any_wide;
};

// prefix[i] = tiles of rows up to and including row_begin + i.
template <int kRows, int kTile>
__device__ void ListTiles(const IndexerProblem& problem, int* prefix, SharedState& shared) {
  const int rows = problem.row_end - problem.row_begin;
  const int lane = LaneId();
  const int warp = WarpId();
  int before = 0;
  for (int first = 0; first < rows; first += kThreads<kRows>) {
    const int i = first + static_cast<int>(threadIdx.x);
    int sum = 0;
    if (i < rows) sum = GroupTiles<kTile>(problem, GroupAt<kRows>(problem, problem.row_begin + i));
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == 31) shared.warp_sums[warp] = sum;
    __syncthreads();
    int all = 0;
    for (int w = 0; w < kThreads<kRows> / 32; ++w) {
      if (w < warp) sum += shared.warp_sums[w];
      all += shared.warp_sums[w];
    }
    if (i < rows) prefix[i] = before + sum;
    before += all;
    __syncthreads();
  }
}

// Queries per batch of products; several batches alternate between two sets of accumulators.
template <int kRows>
inline constexpr int kPartRows = kRows > 4 ? 4 : kRows;
// Dynamic shared memory of a block, in this order.
template <int kRows, KeyFormat kFormat>
struct SharedLayout {
  static constexpr int kPanels = kRows * kHeads * kColumnBytes<kFormat>;
  // One row's queries in bf16, for wide pairs.
  static constexpr int kWidePanels =
      kFormat == KeyFormat::kPackedE4M3 ? kHeads * kColumnBytes<KeyFormat::kPackedBf16> : 0;
  static constexpr int kStageBytes = kHalves<kRows, kFormat> * kPieceBytes;
  static constexpr int kRing = kFormat == KeyFormat::kBf16 ? 0 : kStages * kStageBytes;
  static constexpr int kWeights = kRows * kHeads * 4;
  static constexpr int kWideWeights = kHeads * 4;
  static constexpr int kFixed = kPanels + kWidePanels + kRing + kWeights + kWideWeights;
};

// The tiles of one row group that a block works on.
struct Segment {
  RowGroup group;
  int first_tile;
  int tiles;
};

// The block's share of the work: all tiles of all groups, divided evenly.
template <int kRows>
class Share {
 public:
  __device__ Share(const IndexerProblem& problem, const int* prefix) : prefix_(prefix) {
    const int num_rows = problem.row_end - problem.row_begin;
    const int64_t total = prefix[num_rows - 1];
    cursor_ = static_cast<int>(total * blockIdx.x / gridDim.x);
    end_ = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
    for (int size = num_rows; size > 1;) {
      const int half = size / 2;
      if (prefix[index_ + half - 1] <= cursor_) index_ += half;
      size -= half;
    }
  }
  // False when there is no more.
  __device__ bool Next(const IndexerProblem& problem, Segment* segment) {
    if (cursor_ >= end_) return false;
    while (prefix_[index_] <= cursor_) ++index_;
    segment->group = GroupAt<kRows>(problem, problem.row_begin + index_);
    segment->first_tile = cursor_ - (index_ == 0 ? 0 : prefix_[index_ - 1]);
    segment->tiles = min(end_, prefix_[index_]) - cursor_;
    cursor_ += segment->tiles;
    return true;
  }

 private:
  const int* prefix_;
  int cursor_;
  int end_;
  int index_ = 0;  // of the first group that ends behind the cursor
};

// Where the keys of a segment are: runs of 8 entries, numbered in the sequence, negative: none.
struct KeySource {
  const int32_t* table;
  const int32_t* candidates;

  __device__ KeySource(const IndexerProblem& problem, const RowGroup& group)
      : table(problem.block_table + group.sequence * problem.table_stride),
        candidates(problem.candidates + group.row * problem.candidates_stride) {}
  // The run at which eight consecutive positions lie.
  __device__ int RunAt(const IndexerProblem& problem, int run) const {
    if (!problem.compact) return run;
    return run < problem.num_candidates ? candidates[run] : -1;
  }
  __device__ int BlockOf(const IndexerProblem& problem, int run) const {
    const int index = max(run, 0) * kScoreBlock / problem.entries_per_block;
    return table[min(index, problem.max_blocks - 1)];
  }
  __device__ const uint8_t* RecordOf(const IndexerProblem& problem, int run, int block) const {
    const int entry = max(run, 0) * kScoreBlock % problem.entries_per_block;
    return problem.blocks + max(block, 0) * problem.block_stride +
           static_cast<int64_t>(entry) * problem.record_bytes;
  }
};

// A warp that copies keys into the ring: a lane per 64 keys, or per run of candidates. Several take
// turns, because each tile costs a warp some hundred clocks of latency.
template <int kRows, KeyFormat kFormat>
__device__ void CopyKeys(const IndexerProblem& problem, Share<kRows> share, int copy_warp,
                         uint8_t* ring, SharedState& shared) {
  constexpr int kTileRuns = kTileKeys<kRows, kFormat> / kScoreBlock;
  constexpr int kStageBytes = SharedLayout<kRows, kFormat>::kStageBytes;
  const int lane = LaneId();
  const int runs_per_copy = problem.compact ? 1 : kMmaKeys / kScoreBlock;
  const uint32_t bytes = problem.compact ? kRunBytes : kPieceBytes;
  const bool copies = lane * runs_per_copy < kTileRuns;
  Turns<kCopyWarps> turns(copy_warp, 1);  // no wait for the first tiles
  Segment segment;
  while (share.Next(problem, &segment)) {
    const KeySource source(problem, segment.group);
    const auto tile_run = [&](int i) {
      if (!copies || i >= segment.tiles) return -1;
      return source.RunAt(problem, (segment.first_tile + i) * kTileRuns + lane * runs_per_copy);
    };
    // Looked up ahead: the run one tile earlier than its block.
    int run = tile_run(turns.next);
    int block = source.BlockOf(problem, run);
    int next_run = tile_run(turns.next + kCopyWarps);
    while (turns.next < segment.tiles) {
      const bool valid = run >= 0 && run * kScoreBlock < segment.group.n_vis;
      const uint8_t* records = source.RecordOf(problem, run, block);
      run = next_run;
      block = source.BlockOf(problem, run);
      next_run = tile_run(turns.next + 2 * kCopyWarps);
      const int count = __popc(__ballot_sync(0xffffffffu, valid));
      Barrier* full = &shared.full[turns.stage];
      BarrierWait(&shared.empty[turns.stage], turns.parity);
      if (lane == 0) BarrierArriveExpect(full, bytes * static_cast<uint32_t>(count));
      __syncwarp();
      if (valid) {
        BulkCopy(ring + turns.stage * kStageBytes + lane * static_cast<int>(bytes), records, bytes,
                 full);
      }
      turns.Advance();
    }
    turns.next -= segment.tiles;
  }
}

// A thread's head sums of one query's products for its two keys. `first` and `second` are
// the factors of its eight heads.
struct KeySums {
  float low;
  float high;
};
__device__ inline KeySums AddHeads(const float* d, const float4& first, const float4& second) {
  KeySums sums = {0.0f, 0.0f};
  const float w[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float low = d[j / 2 * 4 + j % 2];
    const float high = d[j / 2 * 4 + j % 2 + 2];
    sums.low = __fmaf_rn(__fadd_rn(low, fabsf(low)), w[j], sums.low);
    sums.high = __fmaf_rn(__fadd_rn(high, fabsf(high)), w[j], sums.high);
  }
  return sums;
}
// Adds pairs of threads of a quad: even ones keep the lower key, odd ones the eighth after it.
__device__ inline float AddPairs(const KeySums& sums, bool odd) {
  const float kept = odd ? sums.high : sums.low;
  const float sent = odd ? sums.low : sums.high;
  return __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, sent, 1));
}
// Adds the two pairs: threads 0 and 1 keep `first`, 2 and 3 `second`.
__device__ inline float AddQuads(float first, float second, bool upper) {
  const float kept = upper ? second : first;
  const float sent = upper ? first : second;
  return __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, sent, 2));
}

// Maxima over the eight lanes that are 4 apart, of kCount values of each lane. Afterwards values[0]
// has that of value `index` of the lane's quad; lanes with key % *duplicates != 0 have it twice.
template <int kCount>
__device__ inline float LargestOfKeys(float (&values)[kCount], int key, int* index) {
  *index = 0;
  int count = kCount;
#pragma unroll
  for (int bit = 1; bit < 8; bit *= 2) {
    if (count > 1) {
      const bool upper = (key & bit) != 0;
      count /= 2;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const float kept = upper ? values[i + count] : values[i];
        const float sent = upper ? values[i] : values[i + count];
        values[i] = fmaxf(kept, __shfl_xor_sync(0xffffffffu, sent, 4 * bit));
      }
      if (upper) *index += count;
    } else {
      values[0] = fmaxf(values[0], __shfl_xor_sync(0xffffffffu, values[0], 4 * bit));
    }
  }
  return values[0];
}

template <int kRows, KeyFormat kFormat, bool kWarpgroup>
__global__ void __launch_bounds__(kThreads<kRows>, 1)
    TensorScoresKernel(const IndexerProblem problem) {
  using Layout = SharedLayout<kRows, kFormat>;
  constexpr bool kPacked = kFormat != KeyFormat::kBf16;
  constexpr int kColumns = kRows * kHeads;
  constexpr int kPart = kPartRows<kRows>;
  constexpr int kSteps = kKSteps<kFormat>;
  constexpr int kParts = kRows / kPart;
  constexpr int kTile = kTileKeys<kRows, kFormat>;
  constexpr int kTileRuns = kTile / kScoreBlock;
  // Whether the upper half of a quad has scores of its own: of another row or half of the tile.
  constexpr bool kPairs = kRows * kHalves < kRows, kFormat >> 1;
  uint8_t* panels = DynamicShared<uint8_t>();
  uint8_t* wide_panels = panels + Layout::kPanels;
  uint8_t* ring = wide_panels + Layout::kWidePanels;
  float* weights = reinterpret_cast<float*>(ring + Layout::kRing);
  float* wide_weights = weights + kColumns;
  int* prefix = reinterpret_cast<int*>(wide_weights + kHeads);
  __shared__ SharedState shared;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp_of_block = UniformWarpId();

  if (thread == 0) {
    for (int s = 0; s < kStages; ++s) {
      BarrierInit(&shared.full[s], 1);
      BarrierInit(&shared.empty[s], 4);  // warps of a warpgroup
    }
    FenceBarrierInit();
  }
  WaitForPreviousKernel();
  ListTiles<kRows, kTile>(problem, prefix, shared);  // ends with a barrier
  AllowNextKernel();  // all blocks run at once, so the next kernel's take room that is left
  Share<kRows> share(problem, prefix);
  constexpr int kStep = kGroups<kRows>;
  if (warp_of_block >= 4 * kStep) {
    static_assert(kConsumers<kRows> * kConsumerRegisters<kRows> +
                      32 * kCopyWarps * kCopyRegisters<kRows> <=
                  kThreads<kRows> * kLaunchRegisters<kRows>);
    DecreaseRegisters<kCopyRegisters<kRows>>();
    if constexpr (kPacked)
      CopyKeys<kRows, kFormat>(problem, share, warp_of_block - 4 * kStep, ring, shared);
    return;
  }
  IncreaseRegisters<kConsumerRegisters<kRows>>();

  const int warpgroup = warp_of_block / 4;
  const int warp = warp_of_block % 4;
  const int lane = LaneId();
  const int key = lane / 4;  // of the warp's 16: this one and the eighth after
  const int quad_lane = lane % 4;
  const bool odd = quad_lane % 2 != 0;
  const bool upper = quad_lane >= 2;
  // The thread's scores are of one key, and of one row or of every second, as AddPairs and AddQuads
  // leave them.
  const int row_offset = kRows > 1 && upper ? 1 : 0;
  const int own_position =
      16 * warp + (odd ? kScoreBlock : 0) + (kRows == 1 && kPairs && upper ? kMmaKeys : 0);
  Turns<kStep> turns(warpgroup, 0);
  Segment segment;
  while (share.Next(problem, &segment)) {
    const RowGroup& group = segment.group;
    const int tiles = segment.tiles;
    const KeySource source(problem, group);
    // The records of the thread's two keys, of the 64 keys at a run, in global memory.
    const auto key_records = [&](int first_run, const uint8_t** low, const uint8_t** high) {
      const int low_run = source.RunAt(problem, first_run + 2 * warp);
      const int high_run = source.RunAt(problem, first_run + 2 * warp + 1);
      *low = source.RecordOf(problem, low_run, source.BlockOf(problem, low_run)) +
             key * problem.record_bytes;
      *high = source.RecordOf(problem, high_run, source.BlockOf(problem, high_run)) +
              key * problem.record_bytes;
    };

    SyncConsumers<kRows>();  // nobody reads the previous group's queries any more
    if (thread < kRows) {
      const int n_vis = VisibleEntries(problem, group.row + min(thread, group.rows - 1));
      shared.visible_positions[thread] = problem.compact ? 0x7fffffff : n_vis;
    }
    if (thread < kWideBits / 32) shared.wide_tiles[thread] = 0;
    if (thread == 0) {
      shared.wide_rows = 0;
      shared.any_wide = 0;
    }
    SyncConsumers<kRows>();
    if constexpr (kPacked) {
      StageQueriesE4M3<kConsumers<kRows>>(problem, group.row, group.rows, panels, weights,
                                          &shared.wide_rows);
    } else {
      StageQueriesBf16<kRows, false, kConsumers<kRows>>(problem, group.row, group.rows, panels,
                                                        weights);
    }
    if (problem.compact && group.n_vis % kScoreBlock != 0) {
      // The newest block is not full: its place in the list, if it is there, ends what is visible.
      for (int i = thread; i < problem.num_candidates; i += kConsumers<kRows>) {
        if (source.candidates[i] == group.n_vis / kScoreBlock)
          shared.visible_positions[0] = i * kScoreBlock + group.n_vis % kScoreBlock;
      }
    }
    FenceAsyncProxy();
    SyncConsumers<kRows>();

    int all_visible = shared.visible_positions[0];  // positions below are, for all rows
#pragma unroll
    for (int r = 1; r < kRows; ++r) all_visible = min(all_visible, shared.visible_positions[r]);
    const float4* factors = reinterpret_cast<const float4*>(weights + 8 * quad_lane);
    const float4 first_factors = factors[0];  // all that are needed for one row
    const float4 second_factors = factors[1];
    int wide_shift = 0;
    while ((tiles - 1) >> wide_shift >= kWideBits) ++wide_shift;
    const int maxima_stride = problem.score_stride / kScoreBlock;
    const int64_t own_row = group.row - problem.row_begin + row_offset;
    float* scores = problem.scores + own_row * problem.score_stride +
                    int64_t{segment.first_tile} * kTile + own_position + key;
    float* maxima = problem.maxima + own_row * maxima_stride +
                    int64_t{segment.first_tile} * kTileRuns + own_position / kScoreBlock;
    const int64_t pair_stride = int64_t{2} * problem.score_stride;
    // Rows of the thread's in the group, counted in its steps of two.
    const int own_rows = kPairs || !upper ? group.rows - row_offset : 0;

    // Records of 64 keys as they are in the ring.
    const auto load_pair = [&](int half) {
      return LoadPackedKeyPair(ring + turns.stage * Layout::kStageBytes + half * kPieceBytes +
                                   (16 * warp + key) * kPackedRecord,
                               quad_lane);
    };
    const auto note_wide = [&](int i, bool wide) {
      if (wide) {
        atomicOr(&shared.wide_tiles[(i >> wide_shift) / 32], 1u << ((i >> wide_shift) % 32));
        atomicOr(&shared.any_wide, 1u);
      }
    };
    const auto release_stage = [&] {
      __syncwarp();
      if (lane == 0) BarrierArrive(&shared.empty[turns.stage]);
      turns.Advance();
    };
    const auto decode = [](const PackedKeyPair& pair, uint32_t(&a)[4][4]) {
      uint32_t low[8];
      uint32_t high[8];
      DecodeE4M3(pair.low_codes, pair.gaps & 0xffffu, low);
      DecodeE4M3(pair.high_codes, pair.gaps >> 16, high);
      CombineE4M3(low, high, a);
    };
    const auto own_scale = [&](const PackedKeyPair& pair) {
      return (odd ? pair.largest >> 16 : pair.largest & 0xffffu) << 23;
    };
    // Position of the thread's score among the segment's; what is not visible counts as -inf.
    const auto masked = [&](int i, int row, float score) {
      const int position = (segment.first_tile + i) * kTile + own_position + key;
      return position < shared.visible_positions[row] ? score : -INFINITY;
    };

    // A tile's keys leave the ring and start their products. No products are under way from one
    // iteration to the next: the compiler would then wait after each instruction.
    if constexpr (kHalves<kRows, kFormat> == 2) {
      while (turns.next < tiles) {
        const int i = turns.next;
        BarrierWait(&shared.full[turns.stage], turns.parity);
        const PackedKeyPair first_pair = load_pair(0);
        const PackedKeyPair second_pair = load_pair(1);
        release_stage();
        note_wide(i, first_pair.wide || second_pair.wide);
        const float scale = __uint_as_float(upper ? own_scale(second_pair) : own_scale(first_pair));
        uint32_t first_a[kSteps][4];
        float first[16];
        decode(first_pair, first_a);
        StartProducts<kFormat, 1, kColumns, kWarpgroup>(first_a, panels, 0, first);
        uint32_t second_a[kSteps][4];
        float second[16];
        decode(second_pair, second_a);
        StartProducts<kFormat, 1, kColumns, kWarpgroup>(second_a, panels, 0, second);
        WaitProducts<kWarpgroup, 1>(first);
        const float first_sum = AddPairs(AddHeads(first, first_factors, second_factors), odd);
        WaitProducts<kWarpgroup, 0>(second);
        const float second_sum = AddPairs(AddHeads(second, first_factors, second_factors), odd);
        const float score = __fmul_rn(AddQuads(first_sum, second_sum, upper), scale);
        scores[int64_t{i} * kTile] = score;
        float best[1] = {score};
        if ((segment.first_tile + i + 1) * kTile > all_visible) best[0] = masked(i, 0, score);
        int index;
        const float largest = LargestOfKeys(best, key, &index);
        if (key == 0) maxima[int64_t{i} * kTileRuns] = largest;
      }
    } else {
      constexpr int kBest = kRows > 1 ? kRows / 2 : 1;
      PackedKeyPair pair = {};
      int i = turns.next;
      const auto load_next = [&] {
        if (turns.next >= tiles) return;
        if constexpr (!kPacked) {
          turns.Advance();
          return;
        }
        BarrierWait(&shared.full[turns.stage], turns.parity);
        pair = load_pair(0);
        note_wide(turns.next, pair.wide);
        release_stage();
      };
      load_next();
      for (; i < tiles; i += kStep) {
        float scale = 1.0f;
        uint32_t a[kSteps][4];
        if constexpr (kPacked) {
          scale = __uint_as_float(own_scale(pair));
          decode(pair, a);
        } else {
          const uint8_t* low_record;
          const uint8_t* high_record;
          key_records((segment.first_tile + i) * kTileRuns, &low_record, &high_record);
          uint32_t low[16];
          uint32_t high[16];
          LoadBf16Key(low_record, quad_lane, low);
          LoadBf16Key(high_record, quad_lane, high);
          CombineBf16(low, high, a);
        }
        const bool mask = (segment.first_tile + i + 1) * kTile > all_visible;
        float best[kBest];
        float* out = scores + int64_t{i} * kTile;
        const auto start = [&](int part, float(&products)[16 * kPart]) {
          StartProducts<kFormat, kPart, kColumns, kWarpgroup>(a, panels, part * kPart * kHeads,
                                                              products);
        };
        const auto finish = [&](int part, const float(&products)[16 * kPart]) {
          float sums[kPart];
#pragma unroll
          for (int r = 0; r < kPart; ++r) {
            const float4* w = factors + (part * kPart + r) * (kHeads / 4);
            sums[r] = AddPairs(AddHeads(products + 16 * r, kRows == 1 ? first_factors : w[0],
                                        kRows == 1 ? second_factors : w[1]),
                               odd);
          }
#pragma unroll
          for (int r = 0; r < kPart; r += 2) {
            const float score =
                __fmul_rn(AddQuads(sums[r], sums[kPart > 1 ? r + 1 : r], upper), scale);
            const int row = part * kPart + r;
            if (row < own_rows) *out = score;
            out += pair_stride;
            best[row / 2] = score;
          }
        };
        float first[16 * kPart];
        start(0, first);
        if constexpr (kParts == 1) {
          load_next();
          WaitProducts<kWarpgroup, 0>(first);
          finish(0, first);
        } else {
          float second[16 * kPart];
          start(1, second);
#pragma unroll
          for (int part = 0; part < kParts; part += 2) {
            WaitProducts<kWarpgroup, 1>(first);
            finish(part, first);
            if (part + 2 < kParts) {
              start(part + 2, first);
              WaitProducts<kWarpgroup, 1>(second);
            } else {
              load_next();
              WaitProducts<kWarpgroup, 0>(second);
            }
            finish(part + 1, second);
            if (part + 3 < kParts) start(part + 3, second);
          }
        }
        if (mask) {
#pragma unroll
          for (int r = 0; r < kBest; ++r) best[r] = masked(i, 2 * r + row_offset, best[r]);
        }
        int index;
        const float largest = LargestOfKeys(best, key, &index);
        // The lanes of a quad column that have the same maximum: the first writes.
        constexpr int kWriters = kBest > 8 ? 8 : kBest;
        if ((key & ~(kWriters - 1)) == 0 && 2 * index < own_rows) {
          maxima[int64_t{i} * kTileRuns + int64_t{2 * index} * maxima_stride] = largest;
        }
      }
    }
    turns.next -= tiles;
    if constexpr (!kPacked) continue;

    // Wide pairs are scored again, row by row. All have marked their tiles, and the scores are in
    // memory, after the barrier.
    SyncConsumers<kRows>();
    const unsigned wide_rows = shared.wide_rows;
    const bool any_wide = shared.any_wide != 0;
    for (int row = 0; row < group.rows; ++row) {
      const bool wide_row = ((wide_rows >> row) & 1u) != 0;
      if (!wide_row && !any_wide) continue;
      SyncConsumers<kRows>();  // nobody reads the queries before
      StageQueriesBf16<1, true, kConsumers<kRows>>(problem, group.row + row, 1, wide_panels,
                                                   wide_weights);
      FenceAsyncProxy();
      SyncConsumers<kRows>();
      for (int i = warpgroup; i < tiles * kHalves<kRows, kFormat>; i += kStep) {
        const int bit = i / kHalves<kRows, kFormat> >> wide_shift;
        if (!wide_row && ((shared.wide_tiles[bit / 32] >> (bit % 32)) & 1u) == 0) continue;
        const int first_position = segment.first_tile * kTile + i * kMmaKeys;
        const int position = first_position + 16 * warp + key + (odd ? kScoreBlock : 0);
        const uint8_t* low_record;
        const uint8_t* high_record;
        key_records(first_position / kScoreBlock, &low_record, &high_record);
        const PackedKey low_key = LoadPackedKey(low_record, quad_lane);
        const PackedKey high_key = LoadPackedKey(high_record, quad_lane);
        // A key is wide if one of its four groups is.
        unsigned wide_keys =
            (IsWide(low_key, quad_lane) ? 1u : 0u) | (IsWide(high_key, quad_lane) ? 2u : 0u);
        wide_keys |= __shfl_xor_sync(0xffffffffu, wide_keys, 1);
        wide_keys |= __shfl_xor_sync(0xffffffffu, wide_keys, 2);
        uint32_t low[16];
        uint32_t high[16];
        DecodePackedKeyBf16(low_key, quad_lane, low);
        DecodePackedKeyBf16(high_key, quad_lane, high);
        uint32_t a[8][4];
        CombineBf16(low, high, a);
        float products[16];
        StartProducts<KeyFormat::kPackedBf16, 1, kHeads, kWarpgroup>(a, wide_panels, 0, products);
        WaitProducts<kWarpgroup, 0>(products);
        const float4* w = reinterpret_cast<const float4*>(wide_weights + 8 * quad_lane);
        const float sum = AddPairs(AddHeads(products, w[0], w[1]), odd);
        float score =
            __fmul_rn(AddQuads(sum, sum, upper), KeyFactor(odd ? high_key.scales : low_key.scales));
        const int64_t at =
            int64_t{group.row - problem.row_begin + row} * problem.score_stride + position;
        if (!wide_row && ((wide_keys >> (odd ? 1 : 0)) & 1u) == 0) score = problem.scores[at];
        __syncwarp();
        if (!upper) problem.scores[at] = score;
        float best[1] = {position < shared.visible_positions[row] ? score : -INFINITY};
        int index;
        const float largest = LargestOfKeys(best, key, &index);
        if (!upper && key == 0) problem.maxima[at / kScoreBlock] = largest;
      }
    }
  }
}

template <int kRows, KeyFormat kFormat, bool kWarpgroup>
Status LaunchKernel(const IndexerProblem& problem, Stream& stream) {
  LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(stream.sm_count());
  config.block = kThreads<kRows>;
  config.overlap_previous = true;
  config.shared_bytes = SharedLayout<kRows, kFormat>::kFixed +
                        static_cast<int>(sizeof(int)) * (problem.row_end - problem.row_begin);
  return Launch("IndexerScores", TensorScoresKernel<kRows, kFormat, kWarpgroup>, config, stream,
                problem);
}

// Wide groups of rows pay where matrix instructions read B from shared memory themselves; bf16
// queries of 16 rows would leave room for one block only.
template <int kRows>
Status LaunchRows(const IndexerProblem& problem, Stream& stream) {
  constexpr int kBf16Rows = kRows > 8 ? 8 : kRows;
  constexpr int kWarpRows = kRows > 4 ? 4 : kRows;
  const bool warpgroup = stream.compute_major() == 9;
  if (problem.packed) {
    return warpgroup ? LaunchKernel<kRows, KeyFormat::kPackedE4M3, true>(problem, stream)
                     : LaunchKernel<kWarpRows, KeyFormat::kPackedE4M3, false>(problem, stream);
  }
  return warpgroup ? LaunchKernel<kBf16Rows, KeyFormat::kBf16, true>(problem, stream)
                   : LaunchKernel<kWarpRows, KeyFormat::kBf16, false>(problem, stream);
}

}  // namespace

bool TensorScoresSupported(const IndexerProblem& problem) {
  return problem.heads == kHeads && problem.channels == kChannels && !problem.rounded &&
         problem.entries_per_block % kMmaKeys == 0 && problem.q_stride % 8 == 0 &&
         problem.block_stride % 16 == 0 &&
         (!problem.compact || problem.candidate_block_size == kScoreBlock);
}

Status LaunchTensorScores(const IndexerProblem& problem, int64_t sequences, Stream& stream) {
  const int64_t rows = problem.row_end - problem.row_begin;
  const int64_t rows_per_sequence = (rows + sequences - 1) / std::max<int64_t>(sequences, 1);
  // Candidates differ from row to row.
  if (problem.compact || rows_per_sequence <= 1) return LaunchRows<1>(problem, stream);
  if (rows_per_sequence <= 2) return LaunchRows<2>(problem, stream);
  if (rows_per_sequence <= 4) return LaunchRows<4>(problem, stream);
  if (rows_per_sequence <= 8) return LaunchRows<8>(problem, stream);
  return LaunchRows<16>(problem, stream);
}

}  // namespace deepinfer::cuda
