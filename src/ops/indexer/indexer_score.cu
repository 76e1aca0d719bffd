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
// sums. Which (query, key) pairs these are depends on the pair only.
//
// The next tile's keys leave shared memory while the tensor cores run. With more than four queries
// the products of every four are a batch of their own: one runs while the heads of another are
// added.
//
// Work is the list of tiles of all row groups (rows of one sequence that share a pass over the
// keys), divided evenly among as many blocks as fit on the device. Every block computes the list
// from the positions by itself.
//
// Bound at one query per sequence by 68 bytes per key, at several by 8192 FLOP per query and key
// and by the instructions that add the heads, two for each of 32.
#include <algorithm>

#include "ops/indexer/indexer_operands.cuh"

namespace deepinfer::cuda {
namespace {

constexpr int kThreads = kScoreThreads;
constexpr int kTile = 64;  // keys
constexpr int kTileRuns = kTile / kScoreBlock;
constexpr int kTileBytes = kTile * kPackedRecord;
constexpr int kRunBytes = kScoreBlock * kPackedRecord;
constexpr int kStages = 5;

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

__device__ inline int GroupTiles(const IndexerProblem& problem, const RowGroup& group) {
  if (group.rows == 0 || !ScoresMatter(problem, group.n_vis)) return 0;
  return CeilDiv(ScoredPositions(problem, group.n_vis), kTile);
}

struct SharedState {
  Barrier full[kStages];
  int warp_sums[kThreads / 32];
  int visible_positions[16];  // per row of the group: positions from here on are not visible
  unsigned wide_rows;         // a bit per row of the group
};

// prefix[i] = tiles of rows up to and including row_begin + i.
template <int kRows>
__device__ void ListTiles(const IndexerProblem& problem, int* prefix, SharedState& shared) {
  const int rows = problem.row_end - problem.row_begin;
  const int lane = LaneId();
  const int warp = WarpId();
  int before = 0;
  for (int first = 0; first < rows; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    int sum = i < rows ? GroupTiles(problem, GroupAt<kRows>(problem, problem.row_begin + i)) : 0;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == 31) shared.warp_sums[warp] = sum;
    __syncthreads();
    int all = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
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
template <int kRows>
inline constexpr int kBlocksPerSm = kRows == 1   ? 4
                                    : kRows <= 4 ? 3
                                                 : 2;

// Dynamic shared memory of a block, in this order.
template <int kRows, KeyFormat kFormat>
struct SharedLayout {
  static constexpr int kPanels = kRows * kHeads * kColumnBytes<kFormat>;
  // One row's queries in bf16, for wide pairs.
  static constexpr int kWidePanels =
      kFormat == KeyFormat::kPackedE4M3 ? kHeads * kColumnBytes<KeyFormat::kPackedBf16> : 0;
  static constexpr int kRing = kFormat == KeyFormat::kBf16 ? 0 : kStages * kTileBytes;
  static constexpr int kWeights = kRows * kHeads * 4;
  static constexpr int kWideWeights = kHeads * 4;
  static constexpr int kFixed = kPanels + kWidePanels + kRing + kWeights + kWideWeights;
};

// Head sums of one batch of products. Even threads of a quad end up with the lower key, odd ones
// with the eighth after it; of two rows at a time, threads 0 and 1 take the first and 2 and 3 the
// second. Calls use(first of the two rows, score) in all threads alike; with one row threads 2 and
// 3 repeat what 0 and 1 have.
template <int kRows, class Use>
__device__ inline void AddHeads(const float (&products)[16 * kRows], const float* weights,
                                float scale, const Use& use) {
  const int quad_lane = LaneId() % 4;
  const bool odd = quad_lane % 2 != 0;
  float sums[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float low_sum = 0.0f;
    float high_sum = 0.0f;
    const float4* factors = reinterpret_cast<const float4*>(weights + r * kHeads + 8 * quad_lane);
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const float4 w = factors[j / 2];
      const float* d = products + 16 * r + 4 * j;
      low_sum = __fmaf_rn(fmaxf(d[0], 0.0f), w.x, low_sum);
      high_sum = __fmaf_rn(fmaxf(d[2], 0.0f), w.x, high_sum);
      low_sum = __fmaf_rn(__fadd_rn(d[1], fabsf(d[1])), w.y, low_sum);
      high_sum = __fmaf_rn(__fadd_rn(d[3], fabsf(d[3])), w.y, high_sum);
      low_sum = __fmaf_rn(fmaxf(d[4], 0.0f), w.z, low_sum);
      high_sum = __fmaf_rn(fmaxf(d[6], 0.0f), w.z, high_sum);
      low_sum = __fmaf_rn(__fadd_rn(d[5], fabsf(d[5])), w.w, low_sum);
      high_sum = __fmaf_rn(__fadd_rn(d[7], fabsf(d[7])), w.w, high_sum);
    }
    const float kept = odd ? high_sum : low_sum;
    const float sent = odd ? low_sum : high_sum;
    sums[r] = __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, sent, 1));
  }
#pragma unroll
  for (int r = 0; r < kRows; r += 2) {
    float score = 0.0f;
    if constexpr (kRows == 1) {
      score = __fadd_rn(sums[0], __shfl_xor_sync(0xffffffffu, sums[0], 2));
    } else {
      const bool second = quad_lane >= 2;
      const float kept = second ? sums[r + 1] : sums[r];
      const float sent = second ? sums[r] : sums[r + 1];
      score = __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, sent, 2));
    }
    use(r, __fmul_rn(score, scale));
  }
}

// The largest of the scores of eight consecutive keys, one of them in every fourth lane.
__device__ inline float LargestOfKeys(float score) {
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2)
    score = fmaxf(score, __shfl_xor_sync(0xffffffffu, score, distance));
  return score;
}

template <int kRows, KeyFormat kFormat, bool kWarpgroup>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kRows>)
    TensorScoresKernel(const IndexerProblem problem) {
  using Layout = SharedLayout<kRows, kFormat>;
  constexpr bool kPacked = kFormat != KeyFormat::kBf16;
  constexpr int kColumns = kRows * kHeads;
  constexpr int kPart = kPartRows<kRows>;
  constexpr int kSteps = kKSteps<kFormat>;
  constexpr int kParts = kRows / kPart;
  uint8_t* panels = DynamicShared<uint8_t>();
  uint8_t* wide_panels = panels + Layout::kPanels;
  uint8_t* ring = wide_panels + Layout::kWidePanels;
  float* weights = reinterpret_cast<float*>(ring + Layout::kRing);
  float* wide_weights = weights + kColumns;
  int* prefix = reinterpret_cast<int*>(wide_weights + kHeads);
  __shared__ SharedState shared;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = LaneId();
  const int warp = WarpId();
  const int key = lane / 4;  // of the warp's 16: this one and the eighth after
  const int quad_lane = lane % 4;
  const int odd = quad_lane % 2;

  if (thread == 0) {
    for (int s = 0; s < kStages; ++s) BarrierInit(&shared.full[s], 1);
    FenceBarrierInit();
  }
  WaitForPreviousKernel();
  ListTiles<kRows>(problem, prefix, shared);  // ends with a barrier
  AllowNextKernel();  // all blocks run at once, so the next kernel's take room that is left
  const int num_rows = problem.row_end - problem.row_begin;
  const int64_t total = prefix[num_rows - 1];
  int cursor = static_cast<int>(total * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
  if (cursor >= end) return;
  int index = 0;  // of the first group that ends behind the cursor
  for (int size = num_rows; size > 1;) {
    const int half = size / 2;
    if (prefix[index + half - 1] <= cursor) index += half;
    size -= half;
  }

  int stage = 0;
  uint32_t parity = 0;
  while (cursor < end) {
    while (prefix[index] <= cursor) ++index;
    const RowGroup group = GroupAt<kRows>(problem, problem.row_begin + index);
    const int first_tile = cursor - (index == 0 ? 0 : prefix[index - 1]);
    const int tiles = min(end, prefix[index]) - cursor;
    cursor += tiles;
    const int32_t* table = problem.block_table + group.sequence * problem.table_stride;
    const int32_t* candidates = problem.candidates + group.row * problem.candidates_stride;

    // The run of 8 entries (numbered) at which eight consecutive positions lie; negative: none.
    const auto run_at = [&](int run) {
      if (!problem.compact) return run;
      return run < problem.num_candidates ? candidates[run] : -1;
    };
    const auto block_of = [&](int run) {
      const int index_in_table = max(run, 0) * kScoreBlock / problem.entries_per_block;
      return table[min(index_in_table, problem.max_blocks - 1)];
    };
    const auto record_of = [&](int run, int block) {
      const int entry = max(run, 0) * kScoreBlock % problem.entries_per_block;
      return problem.blocks + max(block, 0) * problem.block_stride +
             static_cast<int64_t>(entry) * problem.record_bytes;
    };
    // The records of the thread's two keys in global memory.
    const auto key_records = [&](int i, const uint8_t** low, const uint8_t** high) {
      const int run = (first_tile + i) * kTileRuns + 2 * warp;
      const int low_run = run_at(run);
      const int high_run = run_at(run + 1);
      *low = record_of(low_run, block_of(low_run)) + key * problem.record_bytes;
      *high = record_of(high_run, block_of(high_run)) + key * problem.record_bytes;
    };
    // Copies: one of a whole tile, or eight runs by eight lanes of the first warp.
    const int run_lane = problem.compact ? lane : 0;
    const bool copies = problem.compact ? lane < kTileRuns : lane == 0;
    const auto tile_run = [&](int i) {
      return copies && i < tiles ? run_at((first_tile + i) * kTileRuns + run_lane) : -1;
    };
    const auto start_copy = [&](int into, int run, int block) {
      const bool valid = copies && run >= 0 && run * kScoreBlock < group.n_vis;
      const uint32_t bytes = problem.compact ? kRunBytes : kTileBytes;
      const int count = __popc(__ballot_sync(0xffffffffu, valid));
      if (lane == 0) BarrierArriveExpect(&shared.full[into], bytes * static_cast<uint32_t>(count));
      __syncwarp();
      if (valid) {
        BulkCopy(ring + into * kTileBytes + run_lane * kRunBytes, record_of(run, block), bytes,
                 &shared.full[into]);
      }
    };
    // What is copied next is looked up ahead: the run one tile earlier than its block.
    int next_run = -1;
    int next_block = 0;
    int after_run = -1;
    if (kPacked && warp == 0) {
      int fill = stage;
      for (int i = 0; i < min(kStages, tiles); ++i) {
        const int run = tile_run(i);
        start_copy(fill, run, block_of(run));
        fill = fill + 1 == kStages ? 0 : fill + 1;
      }
      next_run = tile_run(kStages);
      next_block = block_of(next_run);
      after_run = tile_run(kStages + 1);
    }

    __syncthreads();  // nobody reads the previous group's queries any more
    if (thread < kRows) {
      const int n_vis = VisibleEntries(problem, group.row + min(thread, group.rows - 1));
      shared.visible_positions[thread] = problem.compact ? 0x7fffffff : n_vis;
    }
    if (thread == 0) shared.wide_rows = 0;
    __syncthreads();
    if constexpr (kPacked) {
      StageQueriesE4M3(problem, group.row, group.rows, panels, weights, &shared.wide_rows);
    } else {
      StageQueriesBf16<kRows, false>(problem, group.row, group.rows, panels, weights);
    }
    if (problem.compact && group.n_vis % kScoreBlock != 0) {
      // The newest block is not full: its place in the list, if it is there, ends what is visible.
      for (int i = thread; i < problem.num_candidates; i += kThreads) {
        if (candidates[i] == group.n_vis / kScoreBlock)
          shared.visible_positions[0] = i * kScoreBlock + group.n_vis % kScoreBlock;
      }
    }
    FenceAsyncProxy();
    __syncthreads();

    // Takes tile i out of the ring. Returns whether it has wide keys.
    const auto load_packed = [&](int i, PackedKeyPair* pair) {
      BarrierWait(&shared.full[stage], parity);
      *pair = LoadPackedKeyPair(ring + stage * kTileBytes + (16 * warp + key) * kPackedRecord,
                                quad_lane);
      // The stage is free when all have read it.
      const bool any_wide = __syncthreads_or(pair->wide) != 0;
      if (warp == 0 && i + kStages < tiles) {
        start_copy(stage, next_run, next_block);
        next_run = after_run;
        next_block = block_of(next_run);
        after_run = tile_run(i + kStages + 2);
      }
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1u;
      }
      return any_wide;
    };
    // The operand A of tile i.
    const auto make_operand = [&](int i, const PackedKeyPair& pair, uint32_t(&a)[kSteps][4]) {
      if constexpr (kPacked) {
        uint32_t low[8];
        uint32_t high[8];
        DecodeE4M3(pair.low_codes, pair.gaps & 0xffffu, low);
        DecodeE4M3(pair.high_codes, pair.gaps >> 16, high);
        CombineE4M3(low, high, a);
      } else {
        const uint8_t* low_record;
        const uint8_t* high_record;
        key_records(i, &low_record, &high_record);
        uint32_t low[16];
        uint32_t high[16];
        LoadBf16Key(low_record, quad_lane, low);
        LoadBf16Key(high_record, quad_lane, high);
        CombineBf16(low, high, a);
      }
    };
    // Scores and block maxima of rows first_row ... of the group, of which the thread has every
    // second.
    const int row_of_pair = kPart > 1 ? quad_lane / 2 : 0;
    const int64_t own_row = group.row - problem.row_begin + row_of_pair;
    const int own_position = 16 * warp + odd * kScoreBlock;  // in a tile, of the eight keys
    const int maxima_stride = problem.score_stride / kScoreBlock;
    float* own_scores = problem.scores + own_row * problem.score_stride + own_position + key;
    float* own_maxima = problem.maxima + own_row * maxima_stride + own_position / kScoreBlock;
    const auto finish = [&](int i, float scale, int first_row, const float(&products)[16 * kPart]) {
      const int tile = first_tile + i;
      const int position = tile * kTile + own_position + key;
      AddHeads<kPart>(products, weights + first_row * kHeads, scale, [&](int r, float score) {
        const int row = first_row + r + row_of_pair;
        const bool writes = row < group.rows && (kPart > 1 || quad_lane < 2);
        const int64_t rows_on = first_row + r;
        if (writes) own_scores[rows_on * problem.score_stride + tile * kTile] = score;
        const float best =
            LargestOfKeys(position < shared.visible_positions[row] ? score : -INFINITY);
        if (writes && key == 0) own_maxima[rows_on * maxima_stride + tile * kTileRuns] = best;
      });
    };
    // Scores wide pairs of the tile again, row by row.
    const auto finish_wide = [&](int i, bool tile_wide) {
      const uint8_t* low_record;
      const uint8_t* high_record;
      key_records(i, &low_record, &high_record);
      const int position = (first_tile + i) * kTile + 16 * warp + key + odd * kScoreBlock;
      const PackedKey low_key = LoadPackedKey(low_record, quad_lane);
      const PackedKey high_key = LoadPackedKey(high_record, quad_lane);
      // A key is wide if one of its four groups is.
      unsigned wide_keys =
          (IsWide(low_key, quad_lane) ? 1u : 0u) | (IsWide(high_key, quad_lane) ? 2u : 0u);
      wide_keys |= __shfl_xor_sync(0xffffffffu, wide_keys, 1);
      wide_keys |= __shfl_xor_sync(0xffffffffu, wide_keys, 2);
      for (int row = 0; row < group.rows; ++row) {
        const bool wide_row = ((shared.wide_rows >> row) & 1u) != 0;
        if (!wide_row && !tile_wide) continue;
        __syncthreads();  // the scores of this tile are in memory
        StageQueriesBf16<1, true>(problem, group.row + row, 1, wide_panels, wide_weights);
        FenceAsyncProxy();
        __syncthreads();
        uint32_t low[16];
        uint32_t high[16];
        DecodePackedKeyBf16(low_key, quad_lane, low);
        DecodePackedKeyBf16(high_key, quad_lane, high);
        uint32_t a[8][4];
        CombineBf16(low, high, a);
        float products[16];
        StartProducts<KeyFormat::kPackedBf16, 1, kHeads, kWarpgroup>(a, wide_panels, 0, products);
        WaitProducts<kWarpgroup, 0>(products);
        const float scale = KeyFactor(odd != 0 ? high_key.scales : low_key.scales);
        AddHeads<1>(products, wide_weights, scale, [&](int, float score) {
          const int64_t at =
              int64_t{group.row - problem.row_begin + row} * problem.score_stride + position;
          if (!wide_row && ((wide_keys >> odd) & 1u) == 0) score = problem.scores[at];
          __syncwarp();
          if (quad_lane < 2) problem.scores[at] = score;
          const float best =
              LargestOfKeys(position < shared.visible_positions[row] ? score : -INFINITY);
          if (quad_lane < 2 && key == 0) problem.maxima[at / kScoreBlock] = best;
        });
      }
    };

    // The next tile leaves the ring while products are under way, and is decoded when they are
    // done: the operand's registers are in use until then. No products are under way from one
    // iteration to the next: the compiler would then wait after each instruction.
    PackedKeyPair pair = {};
    bool any_wide = false;
    if constexpr (kPacked) any_wide = load_packed(0, &pair);
    for (int i = 0; i < tiles; ++i) {
      const bool tile_wide = any_wide;
      float scale = 1.0f;
      if constexpr (kPacked)
        scale = __uint_as_float((odd != 0 ? pair.largest >> 16 : pair.largest & 0xffffu) << 23);
      uint32_t a[kSteps][4];
      make_operand(i, pair, a);
      const auto load_next = [&] {
        if (kPacked && i + 1 < tiles) any_wide = load_packed(i + 1, &pair);
      };
      const auto start = [&](int part, float(&products)[16 * kPart]) {
        StartProducts<kFormat, kPart, kColumns, kWarpgroup>(a, panels, part * kPart * kHeads,
                                                            products);
      };
      float first[16 * kPart];
      start(0, first);
      if constexpr (kParts == 1) {
        load_next();
        WaitProducts<kWarpgroup, 0>(first);
        finish(i, scale, 0, first);
      } else {
        float second[16 * kPart];
        start(1, second);
#pragma unroll
        for (int part = 0; part < kParts; part += 2) {
          WaitProducts<kWarpgroup, 1>(first);
          finish(i, scale, part * kPart, first);
          if (part + 2 < kParts) {
            start(part + 2, first);
            WaitProducts<kWarpgroup, 1>(second);
          } else {
            load_next();
            WaitProducts<kWarpgroup, 0>(second);
          }
          finish(i, scale, (part + 1) * kPart, second);
          if (part + 3 < kParts) start(part + 3, second);
        }
      }
      if constexpr (kPacked) {
        if (tile_wide || shared.wide_rows != 0) finish_wide(i, tile_wide);
      }
    }
  }
}

template <int kRows, KeyFormat kFormat, bool kWarpgroup>
Status LaunchKernel(const IndexerProblem& problem, Stream& stream) {
  LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(stream.sm_count() * kBlocksPerSm<kRows>);
  config.block = kThreads;
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
         problem.entries_per_block % kTile == 0 && problem.q_stride % 8 == 0 &&
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
