// Sparse latent attention of few rows, for 64 heads x 512 channels: a cluster of eight blocks per
// row, so that one row runs on eight multiprocessors instead of one.
//
// Bound by latency: a chain of dependent reads (row, list, table, record), 3 to 4 us when they come
// from memory, then scores, softmax and values at an eighth of the work each. So what a step reads
// is under way at once: no branches around reads, no arithmetic on what one brought before the next
// has started (which took 23 us for 640 keys). The blocks share the row twice in
// different ways:
//   scores: a block has an eighth of the keys and all channels (wgmma, as for many rows).
//   values: a block has an eighth of the channels, 64, and all keys (mma.sync), decoded while the
//           scores are computed.
// Between the two, the maxima of every 16 keys go to all blocks through the cluster's shared
// memory, then the probabilities through the second-level cache (80 KB to every block), already as
// operands of mma.sync. Splitting values by keys would need half as many bytes, but another order
// of additions than for many rows. This one is the same, bit for bit: scores, probabilities and
// denominators have the same steps in the same order, and mma.sync adds as wgmma does.
#include "ops/sparse_attention/sparse_attention_sm90.cuh"
#include "warpgroup.cuh"

namespace deepinfer::cuda {
using namespace attention;
namespace {

constexpr int kCluster = 8;
constexpr int kThreads = 256;
constexpr int kStepKeys = 16;  // of a step of the matrix instructions
constexpr int kMaxSteps = kFewRowsMaxKeys / kStepKeys;
constexpr int kOwnSteps = kMaxSteps / kCluster;
constexpr int kOwnKeys = kOwnSteps * kStepKeys;
constexpr int kSliceDim = kDim / kCluster;  // channels of values
constexpr int kMaxBlocks = kFewRowsMaxKeys / kBlockKeys;
constexpr int kKeyPanelBytes = kOwnKeys * 128;  // K: 8 panels of 64 channels
// Scores are computed for 96 keys, of which the last 16 are whatever follows in shared memory.
constexpr int kScoreColumns = 96;
static_assert(kOwnKeys <= kScoreColumns && kKeyPanelBytes % 1024 == 0);

// Operand A of mma.sync for a step of 16 keys: a warp of 16 heads, lane by lane.
struct ProbabilityStep {
  uint4 lanes[4][32];
};

// What takes the place of q and K when the scores are done.
struct AfterScores {
  ProbabilityStep probabilities[kMaxSteps];
  // Maxima of the scores of a step, and sums of the probabilities per head and lane of its quad: of
  // this block's steps, and of all.
  float own_maximum[kOwnSteps][kHeads];
  float own_sum[kOwnSteps][kHeads][4];
  float maximum[kMaxSteps][kHeads];
  float sum[kMaxSteps][kHeads / kCluster][4];  // of the heads whose denominators this block adds up
  float block_maximum[kMaxBlocks][kHeads];     // running
  float rescale[kMaxBlocks][kHeads];           // of what was summed before the block
};
struct Scores {
  uint8_t q[8][kPanelBytes];
  uint8_t keys[8][kKeyPanelBytes];
};
static_assert(sizeof(AfterScores) <= sizeof(Scores));

struct alignas(1024) SharedMemory {
  union {
    Scores scores;
    AfterScores after;
  };
  uint8_t values[kFewRowsMaxKeys][128];  // 64 channels of every key, swizzled
  const uint8_t* records[kOwnKeys];
  float normaliser[kHeads / kCluster];
};
static_assert(sizeof(SharedMemory) <= 227 * 1024);

// 64 channels of one key as they lie in memory.
template <bool kBf16>
struct RawSlice {
  uint32_t words[kBf16 ? 32 : 16];
  uint32_t scales;
  bool window;
};

template <bool kBf16>
__device__ inline void LoadSlice(const uint8_t* reference, int slice, RawSlice<kBf16>& raw) {
  const auto bits = reinterpret_cast<uintptr_t>(reference);
  const auto* record = reinterpret_cast<const uint8_t*>(bits & ~static_cast<uintptr_t>(1));
  raw.window = (bits & 1u) != 0;
  if constexpr (kBf16) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      Load16Bytes(record + slice * 2 * kSliceDim + 16 * i, raw.words + 4 * i);
  } else {
    // What both formats have is read without a branch: one read does not wait for another.
    const uint8_t* codes = record + slice * (raw.window ? kSliceDim : kSliceDim / 2);
    Load16Bytes(codes, raw.words);
    Load16Bytes(codes + 16, raw.words + 4);
    raw.scales = __ldg(reinterpret_cast<const uint32_t*>(
        record + (raw.window ? kDim + slice / 2 * 4 : kDim / 2 + slice * 4)));
    if (raw.window) {
      Load16Bytes(codes + 32, raw.words + 8);
      Load16Bytes(codes + 48, raw.words + 12);
    }
  }
}

// Writes the channels to row `key` of the values: two groups of 32.
template <bool kBf16>
__device__ inline void StoreSlice(const RawSlice<kBf16>& raw, int slice, int key, uint8_t* values) {
  uint4* row = reinterpret_cast<uint4*>(values + key * 128);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    RawGroup<kBf16> group = {};
    constexpr int kWords = kBf16 ? 16 : 8;
    if constexpr (kBf16) {
#pragma unroll
      for (int j = 0; j < kWords; ++j) group.words[j] = raw.words[kWords * i + j];
    } else if (raw.window) {
#pragma unroll
      for (int j = 0; j < kWords; ++j) group.words[j] = raw.words[kWords * i + j];
      group.scales = raw.scales >> (slice % 2 * 16 + 8 * i);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) group.words[j] = raw.words[4 * i + j];
      group.scales = (raw.scales >> (16 * i)) & 0xffffu;
    }
    uint4 pieces[4];
    DecodeGroup<kBf16>(group, raw.window, 0, pieces);
#pragma unroll
    for (int j = 0; j < 4; ++j) row[(4 * i + j) ^ (key & 7)] = pieces[j];
  }
}

template <bool kBf16>
__global__ void __launch_bounds__(kThreads, 1)
    FewRowsKernel(const AttentionParams p, ProbabilityStep* exchange) {
  auto& s = *DynamicShared<SharedMemory>();
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = LaneId();
  const int warp = UniformWarpId();
  const int group_thread = thread % 128;
  const int rank = static_cast<int>(ClusterRank());
  const int item_index = static_cast<int>(blockIdx.x) / kCluster;
  const Item item = ItemOf(p, item_index);
  exchange += static_cast<int64_t>(item_index) * kMaxSteps;
  WaitForPreviousKernel();
  AllowNextKernel();

  RowKeys keys = WindowKeys(p, item.row);
  keys.num_keys += SelectedCountWarp(p, item.row);
  const int num_keys = keys.num_keys;
  const int num_steps = (num_keys + kStepKeys - 1) / kStepKeys;
  const int steps_per_block = (num_steps + kCluster - 1) / kCluster;
  const int first_step = rank * steps_per_block;
  const int own_steps = max(0, min(steps_per_block, num_steps - first_step));

  // The second warpgroup reads its keys' slices early; with bf16 records they do not fit in
  // registers.
  constexpr int kSlices = kFewRowsMaxKeys / 128;
  const uint8_t* slice_records[kSlices] = {};
  RawSlice<kBf16> slices[kBf16 ? 1 : kSlices];
  if (num_keys == 0) {
    // Nothing to read.
  } else if (warp >= 4) {
    KeyReferences(p, keys, group_thread, 128, slice_records);
    if constexpr (!kBf16) {
#pragma unroll
      for (int i = 0; i < kSlices; ++i) LoadSlice(slice_records[i], rank, slices[i]);
    }
  } else if (thread < kOwnKeys) {
    const uint8_t* record[1];
    KeyReferences(p, keys, first_step * kStepKeys + thread, 0, record);
    s.records[thread] = record[0];
  }
  __syncthreads();

  // K: a warp decodes a quarter of the channels of eight keys at a time, as for many rows.
  {
    constexpr int kTasks = kOwnKeys / 8 * 4 / (kThreads / 32);
    const int lane_group = lane / 8;
    const auto own_key = [&](int i) { return (warp * kTasks + i) / 4 * 8 + lane % 8; };
    RawGroup<kBf16> raw[kTasks];
#pragma unroll
    for (int i = 0; i < kTasks; ++i) {
      if (own_steps == 0) continue;
      const uint8_t* reference = s.records[own_key(i)];
      const int quarter = (warp * kTasks + i) % 4;
      if constexpr (kBf16) {
        ReadBf16Group(reference, 4 * quarter + lane_group, raw[i]);
      } else {
        GroupReader(reference, lane_group).Read(quarter, raw[i]);
      }
    }
    // The reads of q and those of keys are under way together.
    CopyQueriesWarp(p, item, warp * kQueryHeads, s.scores.q[0]);
    FinishQueriesWarp(p, item, warp * kQueryHeads, s.scores.q[0]);
#pragma unroll
    for (int i = 0; i < kTasks; ++i) {
      const int key = own_key(i);
      if (key >= own_steps * kStepKeys) continue;
      const int quarter = (warp * kTasks + i) % 4;
      uint8_t* panel = s.scores.keys[2 * quarter + lane_group / 2];
      uint4 pieces[4];
      DecodeGroup<kBf16>(raw[i], IsWindowKey(s.records[key]), lane_group, pieces);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        *reinterpret_cast<uint4*>(panel + PanelOffset(key, lane_group % 2 * 4 + j)) = pieces[j];
      }
    }
  }
  FenceAsyncProxy();
  __syncthreads();

  float scores[kScoreColumns / 2];
  const int head = warp % 4 * 16 + lane / 4;  // of this lane, and 8 more
  if (warp < 4) {
    if (own_steps > 0) {
      const uint64_t q = SharedDescriptor(s.scores.q, 16, 1024, Swizzle::k128Bytes);
      const uint64_t k = SharedDescriptor(s.scores.keys, 16, 1024, Swizzle::k128Bytes);
      WarpgroupFenceRegisters(scores);
      WarpgroupFence();
#pragma unroll
      for (int step = 0; step < kDim / kStepKeys; ++step) {
        // Right half of the channels first.
        const int panel = (step / 4 + 4) % 8;
        const auto inside = static_cast<uint32_t>(step % 4 * 32);
        WarpgroupMmaShared<0>(
            scores, AdvanceDescriptor(q, static_cast<uint32_t>(panel * kPanelBytes) + inside),
            AdvanceDescriptor(k, static_cast<uint32_t>(panel * kKeyPanelBytes) + inside),
            step != 0);
      }
      WarpgroupCommit();
      WarpgroupWait<0>();
      WarpgroupFenceRegisters(scores);
    }
    // All four warps have read q and K.
    NamedBarrierSync(1, 128);
#pragma unroll
    for (int j = 0; j < kOwnSteps; ++j) {
      if (j >= own_steps) break;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float largest = -INFINITY;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = scores[8 * j + i / 2 * 4 + 2 * r + i % 2];
          const int key = (first_step + j) * kStepKeys + i / 2 * 8 + lane % 4 * 2 + i % 2;
          if (key >= num_keys) x = -INFINITY;
          largest = fmaxf(largest, x);
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        if (lane % 4 == 0) s.after.own_maximum[j][head + 8 * r] = largest;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      const int key = group_thread + 128 * i;
      if (key >= num_steps * kStepKeys) break;
      if constexpr (kBf16) {
        LoadSlice(slice_records[i], rank, slices[0]);
        StoreSlice(slices[0], rank, key, s.values[0]);
      } else {
        StoreSlice(slices[i], rank, key, s.values[0]);
      }
    }
  }
  ClusterSync();

  // Running maxima of all blocks of 64 keys, in every block of the cluster.
  for (int i = thread; i < num_steps * (kHeads / 4); i += kThreads) {
    const int step = i / (kHeads / 4);
    const int first = i % (kHeads / 4) * 4;
    const float4 x = LoadClusterFloat4(&s.after.own_maximum[step % steps_per_block][first],
                                       static_cast<uint32_t>(step / steps_per_block));
    *reinterpret_cast<float4*>(&s.after.maximum[step][first]) = x;
  }
  __syncthreads();
  if (thread < kHeads) {
    float maximum = kFirstMaximum;
    for (int block = 0; block * 4 < num_steps; ++block) {
      float largest = -INFINITY;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (block * 4 + j < num_steps)
          largest = fmaxf(largest, s.after.maximum[block * 4 + j][thread]);
      }
      const float next = fmaxf(maximum, largest * p.scale);
      s.after.rescale[block][thread] = Exp2(maximum - next);
      s.after.block_maximum[block][thread] = next;
      maximum = next;
    }
  }
  __syncthreads();

  if (warp < 4) {
#pragma unroll
    for (int j = 0; j < kOwnSteps; ++j) {
      if (j >= own_steps) break;
      float* x = scores + 8 * j;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float maximum = s.after.block_maximum[(first_step + j) / 4][head + 8 * r];
        float* y = x + 2 * r;
        y[0] = Exp2(fmaf(y[0], p.scale, -maximum));
        y[1] = Exp2(fmaf(y[1], p.scale, -maximum));
        y[4] = Exp2(fmaf(y[4], p.scale, -maximum));
        y[5] = Exp2(fmaf(y[5], p.scale, -maximum));
        s.after.own_sum[j][head + 8 * r][lane % 4] = (y[0] + y[1]) + (y[4] + y[5]);
      }
      exchange[first_step + j].lanes[warp][lane] =
          make_uint4(FloatsToBf16x2(x[0], x[1]), FloatsToBf16x2(x[2], x[3]),
                     FloatsToBf16x2(x[4], x[5]), FloatsToBf16x2(x[6], x[7]));
    }
  }
  ClusterSync();

  for (int i = thread; i < num_steps * 128; i += kThreads) {
    CopyAsync16(&s.after.probabilities[i / 128].lanes[0][i % 128],
                &exchange[i / 128].lanes[0][i % 128]);
  }
  CommitCopies();
  // Denominators of eight heads per block of the cluster.
  constexpr int kOwnHeads = kHeads / kCluster;
  for (int i = thread; i < num_steps * kOwnHeads; i += kThreads) {
    const int step = i / kOwnHeads;
    const int own_head = i % kOwnHeads;
    const float4 x =
        LoadClusterFloat4(s.after.own_sum[step % steps_per_block][rank * kOwnHeads + own_head],
                          static_cast<uint32_t>(step / steps_per_block));
    *reinterpret_cast<float4*>(s.after.sum[step][own_head]) = x;
  }
  __syncthreads();
  if (warp == 7) {
    const int h = rank * kOwnHeads + lane / 4;
    float sum = 0.0f;
    float maximum = kFirstMaximum;
    for (int block = 0; block * 4 < num_steps; ++block) {
      float step_sum[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        step_sum[j] =
            block * 4 + j < num_steps ? s.after.sum[block * 4 + j][lane / 4][lane % 4] : 0.0f;
      }
      sum = fmaf(sum, s.after.rescale[block][h],
                 (step_sum[0] + step_sum[1]) + (step_sum[2] + step_sum[3]));
      maximum = s.after.block_maximum[block][h];
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (lane % 4 == 0) {
      const float sink = __ldg(p.sink + min(item.first_head + h, p.heads - 1));
      s.normaliser[lane / 4] = Normaliser(sum, maximum, sink);
    }
  }
  WaitCopies<0>();
  __syncthreads();
  ClusterArrive();  // the normalisers are there

  // Values: a warp has 16 heads and 32 channels.
  float out[4][4] = {};
  const int first_column = warp / 4 * 32;
  const auto add_step = [&](int step) {
    const uint4 x = s.after.probabilities[step].lanes[warp % 4][lane];
    const uint32_t a[4] = {x.x, x.y, x.z, x.w};
    // Lane i addresses row i % 16 of the step's keys, and the left or right 8 channels of 16.
    const int key = step * kStepKeys + lane % 16;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int piece = first_column / 8 + 2 * j + lane / 16;
      uint32_t b[4];
      LoadMatrix4Transposed(b, s.values[0] + PanelOffset(key, piece));
      MmaBf16(out[2 * j], a, {b[0], b[1]});
      MmaBf16(out[2 * j + 1], a, {b[2], b[3]});
    }
  };
  constexpr int kBlockSteps = kBlockKeys / kStepKeys;
  for (int block = 0; block * kBlockSteps < num_steps; ++block) {
    if (block > 0) {
      const float first = s.after.rescale[block][head];
      const float second = s.after.rescale[block][head + 8];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        out[j][0] *= first;
        out[j][1] *= first;
        out[j][2] *= second;
        out[j][3] *= second;
      }
    }
    const int step = block * kBlockSteps;
    if (step + kBlockSteps <= num_steps) {
#pragma unroll
      for (int j = 0; j < kBlockSteps; ++j) add_step(step + j);
    } else {
      for (int j = step; j < num_steps; ++j) add_step(j);
    }
  }
  ClusterWait();
  float normaliser[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int h = head + 8 * r;
    normaliser[r] =
        LoadClusterFloat(&s.normaliser[h % kOwnHeads], static_cast<uint32_t>(h / kOwnHeads));
  }
  // No block ends while others read its shared memory; nobody waits for the results.
  ClusterArrive();
  const int first_channel = rank * kSliceDim + first_column;
  const bool rotated = first_channel >= kDim - kRotated;
  Angles angles;
  if (rotated) angles = LoadAngles(p, item.row, first_column / 32);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int h = item.first_head + head + 8 * r;
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = out[j / 2][2 * r + j % 2];
    uint4 values = FinishGroup(x, normaliser[r], rotated ? &angles : nullptr, p.production);
    if (num_keys == 0) values = make_uint4(0u, 0u, 0u, 0u);
    if (h < p.heads) {
      StoreVector(p.out + item.row * p.out_stride + static_cast<int64_t>(h) * kDim + first_channel +
                      lane % 4 * 8,
                  values);
    }
  }
  ClusterWait();
}

}  // namespace

Status FewRowsAttention(const AttentionParams& params, Stream& stream) {
  const int items = params.rows * ((params.heads + kHeads - 1) / kHeads);
  ScratchScope scope(stream);
  auto* exchange = scope.Allocate<ProbabilityStep>(static_cast<int64_t>(items) * kMaxSteps);
  LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(items * kCluster);
  config.block = kThreads;
  config.shared_bytes = static_cast<int>(sizeof(SharedMemory));
  config.cluster = kCluster;
  config.overlap_previous = true;
  return params.window_bf16 ? Launch("sparse_attention_few_rows_bf16", FewRowsKernel<true>, config,
                                     stream, params, exchange)
                            : Launch("sparse_attention_few_rows", FewRowsKernel<false>, config,
                                     stream, params, exchange);
}

}  // namespace deepinfer::cuda
