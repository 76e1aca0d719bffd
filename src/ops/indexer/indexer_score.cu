// Scores of the lightning indexer on tensor cores: 32 heads of 128 channels, packed Q4P or bf16
// keys.
//
// Keys are the rows of the matrix product, the heads of up to eight queries of one sequence its
// columns: D[64 keys, 32 heads x queries]. Packed keys come as bulk copies of 64 records (4352
// bytes) into a ring in shared memory and become bf16 in registers, where the matrix instruction
// takes them. Every product is exact; sums over channels are fp32, in the tensor core's order over
// steps of 16 channels. The head sum is a chain of 8 heads per thread and then a tree over the four
// threads of a quad: the same for every (query, key) whatever the launch looks like.
//
// Channels are permuted so that each thread of a quad holds one group of 32 channels of its keys:
// its 16 bytes of codes have one scale, and no code needs to change threads. Keys are normalised to
// the largest of their four scales; that power of two multiplies the finished score.
//
// Work is the list of tiles of all row groups (rows of one sequence that share a pass over the
// keys), divided evenly among as many blocks as fit on the device. Every block computes the list
// from the positions by itself.
//
// Bound at one query per sequence by 68 bytes per key, at several by 8192 FLOP per query and key.
#include <algorithm>

#include "ops/indexer/indexer_cuda.cuh"
#include "warpgroup.cuh"

namespace deepinfer::cuda {
namespace {

constexpr int kHeads = 32;
constexpr int kChannels = 128;
constexpr int kThreads = 128;  // one warpgroup
constexpr int kTile = 64;      // keys
constexpr int kPackedRecord = 68;
constexpr int kBf16Record = 2 * kChannels;
constexpr int kTileBytes = kTile * kPackedRecord;
constexpr int kRunBytes = kScoreBlock * kPackedRecord;
constexpr int kStages = 5;
constexpr int kSteps = kChannels / 16;
constexpr int kPanelChannels = 64;  // 128 bytes: the width of a swizzled panel

// Bf16 pairs of the codes i and i + 4 (i = 0 ... 3) of a word of eight, times `multiplier`, which
// includes 2^126: E2M1 bits at bf16 bits 15, 8, 7, 6 are the code's value times 2^-126.
__device__ inline void DecodeCodes(uint32_t word, uint32_t multiplier, uint32_t (&pairs)[4]) {
  constexpr uint32_t kSigns = 0x80008000u;
  constexpr uint32_t kMagnitudes = 0x01c001c0u;
  pairs[0] = MulBf16x2(((word << 12) & kSigns) | ((word << 6) & kMagnitudes), multiplier);
  pairs[1] = MulBf16x2(((word << 8) & kSigns) | ((word << 2) & kMagnitudes), multiplier);
  pairs[2] = MulBf16x2(((word << 4) & kSigns) | ((word >> 2) & kMagnitudes), multiplier);
  pairs[3] = MulBf16x2((word & kSigns) | ((word >> 6) & kMagnitudes), multiplier);
}

__device__ inline uint32_t LargestByte(uint32_t word) {
  return max(max(word & 0xffu, (word >> 8) & 0xffu), max((word >> 16) & 0xffu, word >> 24));
}

// A thread's part of one packed key: its 32 channels as bf16 pairs in the order of use, relative to
// the key's largest scale. Returns that scale. Groups whose scale is more than 2^252 below it
// vanish.
__device__ inline float LoadPackedKey(const uint8_t* record, int quad_lane,
                                      uint32_t (&values)[16]) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(record);
  const uint32_t scales = words[kChannels / 8];
  const uint32_t largest = LargestByte(scales);
  const uint32_t own = (scales >> (8 * quad_lane)) & 0xffu;
  const int exponent = max(0, 253 + static_cast<int>(own) - static_cast<int>(largest));
  const uint32_t multiplier = (static_cast<uint32_t>(exponent) << 7) * 0x00010001u;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t pairs[4];
    DecodeCodes(words[4 * quad_lane + j], multiplier, pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[4 * j + i] = pairs[i];
  }
  return __uint_as_float(largest << 23);
}

// The same for a bf16 record in global memory.
__device__ inline void LoadBf16Key(const uint8_t* record, int quad_lane, uint32_t (&values)[16]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 v = LoadStreaming(record + 64 * i + 16 * quad_lane);
    values[4 * i + 0] = v.x;
    values[4 * i + 1] = v.y;
    values[4 * i + 2] = v.z;
    values[4 * i + 3] = v.w;
  }
}

// Byte offset of a pair of queries' channels in the panels of [columns, 64 channels], swizzled: `j`
// and `i` as in the key loaders (value 4 j + i of the quad's thread `quad_lane`).
__device__ inline int QueryOffset(int columns, int column, int quad_lane, int j, int i) {
  const int k = 16 * (2 * j + i / 2) + 2 * quad_lane + 8 * (i % 2);
  const int byte = 2 * (k % kPanelChannels);
  return (k / kPanelChannels) * columns * 128 + column * 128 + ((byte / 16) ^ (column % 8)) * 16 +
         byte % 16;
}

// Queries of `rows` rows as the B operand.
template <int kRows, bool kPacked>
__device__ void StageQueries(const IndexerProblem& problem, int row, int rows, uint8_t* panels,
                             float* weights) {
  constexpr int kColumns = kRows * kHeads;
  constexpr int kPieces = kChannels / 8;
  for (int e = static_cast<int>(threadIdx.x); e < rows * kHeads * kPieces; e += kThreads) {
    const int column = e / kPieces;
    const int piece = e % kPieces;
    const uint16_t* q = problem.q + (row + column / kHeads) * problem.q_stride +
                        column % kHeads * kChannels + 8 * piece;
    const uint4 v = *reinterpret_cast<const uint4*>(q);
    // Packed keys: piece is 4 t + j, pairs (c, c + 4). Bf16 keys: piece is 4 j + t, pairs (2c,
    // 2c+1).
    const int quad_lane = kPacked ? piece / 4 : piece % 4;
    const int j = kPacked ? piece % 4 : piece / 4;
    uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
    if (kPacked) {
      pairs[0] = (v.x & 0xffffu) | (v.z << 16);
      pairs[1] = (v.x >> 16) | (v.z & 0xffff0000u);
      pairs[2] = (v.y & 0xffffu) | (v.w << 16);
      pairs[3] = (v.y >> 16) | (v.w & 0xffff0000u);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<uint32_t*>(panels + QueryOffset(kColumns, column, quad_lane, j, i)) =
          pairs[i];
    }
  }
  for (int e = static_cast<int>(threadIdx.x); e < rows * kHeads; e += kThreads) {
    weights[e] =
        Bf16ToFloat(problem.weights[(row + e / kHeads) * problem.weights_stride + e % kHeads]);
  }
}

// products[64 x 32 kRows] = keys * queries.
template <int kRows, bool kWarpgroup>
__device__ inline void Multiply(const uint32_t (&a)[kSteps][4], const uint8_t* panels,
                                float (&products)[16 * kRows]) {
  constexpr int kColumns = kRows * kHeads;
  if constexpr (kWarpgroup) {
    WarpgroupFenceRegisters(products);
    WarpgroupFence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint64_t b =
          SharedDescriptor(panels + s / 4 * kColumns * 128, 16, 1024, Swizzle::k128Bytes);
      WarpgroupMmaRegisters<0>(products, a[s],
                               AdvanceDescriptor(b, static_cast<uint32_t>(s % 4 * 32)), s > 0);
    }
    WarpgroupCommit();
    WarpgroupWait<0>();
    WarpgroupFenceRegisters(products);
  } else {
    const int lane = LaneId();
#pragma unroll
    for (int i = 0; i < 16 * kRows; ++i) products[i] = 0.0f;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int j = 0; j < 4 * kRows; j += 2) {
        // Matrices: columns 8 j and 8 (j + 1), channels 16 s and 16 s + 8.
        const int column = 8 * (j + lane / 16) + lane % 8;
        const int piece = s % 4 * 2 + lane / 8 % 2;
        uint32_t b[4];
        LoadMatrix4(b,
                    panels + s / 4 * kColumns * 128 + column * 128 + (piece ^ (column % 8)) * 16);
        float(&left)[4] = *reinterpret_cast<float(*)[4]>(&products[4 * j]);
        float(&right)[4] = *reinterpret_cast<float(*)[4]>(&products[4 * j + 4]);
        MmaBf16(left, a[s], {b[0], b[1]});
        MmaBf16(right, a[s], {b[2], b[3]});
      }
    }
  }
}

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
  RowGroup group = {row, 0, problem.row_sequence[row], 0};
  const int first = max(problem.row_begin, problem.sequence_start[group.sequence]);
  if ((row - first) % kRows != 0) return group;  // inside a group
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
  int visible_positions[8];  // per row of the group: positions from here on are not visible
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

template <int kRows, bool kPacked, bool kWarpgroup>
__global__ void __launch_bounds__(kThreads, kRows == 1   ? 4
                                            : kRows <= 2 ? 3
                                                         : 2)
    TensorScoresKernel(const IndexerProblem problem) {
  constexpr int kColumns = kRows * kHeads;
  uint8_t* panels = DynamicShared<uint8_t>();
  uint8_t* ring = panels + kColumns * kBf16Record;
  float* weights = reinterpret_cast<float*>(ring + (kPacked ? kStages * kTileBytes : 0));
  int* prefix = reinterpret_cast<int*>(weights + kColumns);
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
  ListTiles<kRows>(problem, prefix, shared);  // ends with a barrier
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
      const int entry = run * kScoreBlock % problem.entries_per_block;
      return problem.blocks + max(block, 0) * problem.block_stride +
             static_cast<int64_t>(entry) * problem.record_bytes;
    };
    // Copies: one of a whole tile, or eight runs by eight lanes of the first warp.
    const int run_lane = problem.compact ? lane : 0;
    const bool copies = problem.compact ? lane < kTile / kScoreBlock : lane == 0;
    const auto tile_run = [&](int i) {
      return copies && i < tiles ? run_at((first_tile + i) * (kTile / kScoreBlock) + run_lane) : -1;
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
    StageQueries<kRows, kPacked>(problem, group.row, group.rows, panels, weights);
    if (thread < kRows) {
      const int n_vis = VisibleEntries(problem, group.row + min(thread, group.rows - 1));
      shared.visible_positions[thread] = problem.compact ? 0x7fffffff : n_vis;
    }
    __syncthreads();
    if (problem.compact && group.n_vis % kScoreBlock != 0) {
      // The newest block is not full: its place in the list, if it is there, ends what is visible.
      for (int i = thread; i < problem.num_candidates; i += kThreads) {
        if (candidates[i] == group.n_vis / kScoreBlock)
          shared.visible_positions[0] = i * kScoreBlock + group.n_vis % kScoreBlock;
      }
    }
    FenceAsyncProxy();
    __syncthreads();

    for (int i = 0; i < tiles; ++i) {
      const int position = (first_tile + i) * kTile + 16 * warp + key;
      uint32_t low[16];
      uint32_t high[16];
      float low_scale = 1.0f;
      float high_scale = 1.0f;
      if constexpr (kPacked) {
        BarrierWait(&shared.full[stage], parity);
        const uint8_t* records = ring + stage * kTileBytes + (16 * warp + key) * kPackedRecord;
        low_scale = LoadPackedKey(records, quad_lane, low);
        high_scale = LoadPackedKey(records + kRunBytes, quad_lane, high);
        __syncthreads();  // the stage is free
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
      } else {
        const int run = (first_tile + i) * (kTile / kScoreBlock) + 2 * warp;
        const int low_run = max(run_at(run), 0);
        const int high_run = max(run_at(run + 1), 0);
        LoadBf16Key(record_of(low_run, block_of(low_run)) + key * kBf16Record, quad_lane, low);
        LoadBf16Key(record_of(high_run, block_of(high_run)) + key * kBf16Record, quad_lane, high);
      }
      uint32_t a[kSteps][4];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        a[s][0] = low[2 * s];
        a[s][1] = high[2 * s];
        a[s][2] = low[2 * s + 1];
        a[s][3] = high[2 * s + 1];
      }
      float products[16 * kRows];
      Multiply<kRows, kWarpgroup>(a, panels, products);

      // Sums over heads. After the first exchange even lanes of a quad hold `key`, odd ones the
      // eighth after; after the second, lanes 0 and 1 hold a row and lanes 2 and 3 the next.
      float sums[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float low_sum = 0.0f;
        float high_sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 w =
              *reinterpret_cast<const float2*>(weights + r * kHeads + 8 * j + 2 * quad_lane);
          const float* d = products + 16 * r + 4 * j;
          low_sum = __fmaf_rn(fmaxf(d[0], 0.0f), w.x, low_sum);
          low_sum = __fmaf_rn(fmaxf(d[1], 0.0f), w.y, low_sum);
          high_sum = __fmaf_rn(fmaxf(d[2], 0.0f), w.x, high_sum);
          high_sum = __fmaf_rn(fmaxf(d[3], 0.0f), w.y, high_sum);
        }
        const float kept = odd != 0 ? high_sum : low_sum;
        const float sent = odd != 0 ? low_sum : high_sum;
        sums[r] = __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, sent, 1));
      }
      const float scale = odd != 0 ? high_scale : low_scale;
      const int my_position = position + odd * kScoreBlock;
#pragma unroll
      for (int r = 0; r < kRows; r += 2) {
        float score = 0.0f;
        int my_row = r;
        if constexpr (kRows == 1) {
          score = __fadd_rn(sums[0], __shfl_xor_sync(0xffffffffu, sums[0], 2));
        } else {
          const bool second = quad_lane >= 2;
          const float kept = second ? sums[r + 1] : sums[r];
          const float sent = second ? sums[r] : sums[r + 1];
          score = __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, sent, 2));
          my_row += second ? 1 : 0;
        }
        score = __fmul_rn(score, scale);
        const bool writes = my_row < group.rows && (kRows > 1 || quad_lane < 2);
        const int64_t score_row =
            int64_t{group.row - problem.row_begin + my_row} * problem.score_stride;
        if (writes) problem.scores[score_row + my_position] = score;
        float best = my_position < shared.visible_positions[my_row] ? score : -INFINITY;
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
          best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, distance));
        if (writes && key == 0) problem.maxima[(score_row + my_position) / kScoreBlock] = best;
      }
    }
  }
}

template <int kRows, bool kPacked, bool kWarpgroup>
Status LaunchKernel(const IndexerProblem& problem, Stream& stream) {
  constexpr int kBlocksPerSm = kRows == 1 ? 4 : kRows <= 2 ? 3 : 2;
  LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(stream.sm_count() * kBlocksPerSm);
  config.block = kThreads;
  config.shared_bytes = kRows * kHeads * kBf16Record + (kPacked ? kStages * kTileBytes : 0) +
                        static_cast<int>(sizeof(float)) * kRows * kHeads +
                        static_cast<int>(sizeof(int)) * (problem.row_end - problem.row_begin);
  return Launch("IndexerScores", TensorScoresKernel<kRows, kPacked, kWarpgroup>, config, stream,
                problem);
}

template <int kRows>
Status LaunchRows(const IndexerProblem& problem, Stream& stream) {
  const bool warpgroup = stream.compute_major() == 9;
  if (problem.packed) {
    return warpgroup ? LaunchKernel<kRows, true, true>(problem, stream)
                     : LaunchKernel<kRows, true, false>(problem, stream);
  }
  return warpgroup ? LaunchKernel<kRows, false, true>(problem, stream)
                   : LaunchKernel<kRows, false, false>(problem, stream);
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
  if (rows_per_sequence <= 6) return LaunchRows<6>(problem, stream);
  return LaunchRows<8>(problem, stream);
}

}  // namespace deepinfer::cuda
