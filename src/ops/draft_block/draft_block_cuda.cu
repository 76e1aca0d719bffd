// What only the drafting of a block needs. Small beside the products around it:
//   rows: a thread per row, a launch.
//   bias and argmax: bound by memory, 12 bytes per entry of the vocabulary (1.55 MB per row of
//     129,280): blocks of 4096 entries keep their best as an integer that is larger for larger
//     logits and then for smaller ids, so the order in which blocks are compared does not matter; a
//     warp per row compares the blocks'.
//   confidence: 128 threads per row with eight channels each at a time, then a butterfly over the
//     lanes and the warps in ascending order: an order that depends on the width only.
#include "ops/cuda/rows.cuh"
#include "ops/draft_block/draft_block_impl.h"

namespace deepinfer::cuda {
namespace {

constexpr int kRowThreads = 128;

struct BlockRowsParams {
  const int32_t* anchors;
  const int32_t* lengths;
  int32_t* token_ids;
  int32_t* positions;
  int32_t* row_sequence;
  int32_t* sequence_start;
  int32_t filler;
  int rows;
  int slots;
};

__global__ void __launch_bounds__(kRowThreads) BlockRowsKernel(const BlockRowsParams p) {
  WaitForPreviousKernel();
  AllowNextKernel();
  const int row = static_cast<int>(blockIdx.x) * kRowThreads + static_cast<int>(threadIdx.x);
  if (row > p.rows) return;
  const int sequence = row / p.slots;
  const int slot = row - sequence * p.slots;
  if (slot == 0) p.sequence_start[sequence] = row;
  if (row == p.rows) return;
  p.token_ids[row] = slot == 0 ? p.anchors[sequence] : p.filler;
  p.positions[row] = p.lengths[sequence] + slot;
  p.row_sequence[row] = sequence;
}

// ---- Bias and argmax ---------------------------------------------------------------------------

constexpr int kArgmaxThreads = 256;
constexpr int kArgmaxUnits = 4;  // of four entries, a thread
constexpr int kArgmaxEntries = kArgmaxThreads * kArgmaxUnits * 4;
constexpr int kWinnerRows = 4;  // a block

struct BiasedArgmaxParams {
  float* logits;
  const float* bias;
  int32_t* tokens;  // null: the sum alone
  uint64_t* best;   // [rows, blocks per row]
  int64_t logits_stride;
  int64_t bias_stride;
  int rows;
  int vocab;
  int blocks_per_row;
};

// Larger for larger values, then for smaller ids. 0 in the upper half: NaN.
__device__ inline uint64_t Candidate(float x, int id) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // one zero
  const uint32_t order = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(x != x ? 0u : order) << 32 |
         (0xffffffffu - static_cast<uint32_t>(id));
}
__device__ inline uint64_t Better(uint64_t a, uint64_t b) {
  return a > b ? a : b;
}
__device__ inline uint64_t BestOfWarp(uint64_t best) {
  for (int mask = 16; mask > 0; mask /= 2)
    best = Better(best, __shfl_xor_sync(0xffffffffu, best, mask));
  return best;
}

template <bool kVector>
__global__ void __launch_bounds__(kArgmaxThreads) BiasedArgmaxKernel(const BiasedArgmaxParams p) {
  __shared__ uint64_t shared[kArgmaxThreads / 32];
  const int row = static_cast<int>(blockIdx.y);
  float* logits = p.logits + row * p.logits_stride;
  const float* bias = p.bias + row * p.bias_stride;
  const int first =
      static_cast<int>(blockIdx.x) * kArgmaxEntries + 4 * static_cast<int>(threadIdx.x);
  WaitForPreviousKernel();
  AllowNextKernel();
  uint64_t best = 0;
#pragma unroll
  for (int i = 0; i < kArgmaxUnits; ++i) {
    const int id = first + i * kArgmaxThreads * 4;
    if (id >= p.vocab) continue;
    if constexpr (kVector) {
      auto* target = reinterpret_cast<float4*>(logits + id);
      const float4 b = *reinterpret_cast<const float4*>(bias + id);
      float4 x = *target;
      x = make_float4(x.x + b.x, x.y + b.y, x.z + b.z, x.w + b.w);
      *target = x;
      best = Better(best, Better(Better(Candidate(x.x, id), Candidate(x.y, id + 1)),
                                 Better(Candidate(x.z, id + 2), Candidate(x.w, id + 3))));
    } else {
      for (int j = id; j < min(id + 4, p.vocab); ++j) {
        const float x = logits[j] + bias[j];
        logits[j] = x;
        best = Better(best, Candidate(x, j));
      }
    }
  }
  if (p.tokens == nullptr) return;
  best = BestOfWarp(best);
  if (LaneId() == 0) shared[WarpId()] = best;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kArgmaxThreads / 32; ++i) best = Better(best, shared[i]);
  p.best[static_cast<int64_t>(row) * p.blocks_per_row + blockIdx.x] = best;
}

__global__ void __launch_bounds__(32 * kWinnerRows) WinnerKernel(const BiasedArgmaxParams p) {
  const int row = static_cast<int>(blockIdx.x) * kWinnerRows + WarpId();
  WaitForPreviousKernel();
  AllowNextKernel();
  if (row >= p.rows) return;  // whole warps
  uint64_t best = 0;
  for (int i = LaneId(); i < p.blocks_per_row; i += 32)
    best = Better(best, p.best[static_cast<int64_t>(row) * p.blocks_per_row + i]);
  best = BestOfWarp(best);
  if (LaneId() == 0) {
    const bool found = best >> 32 != 0;
    p.tokens[row] = found ? static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(best)) : 0;
  }
}

// ---- Confidence --------------------------------------------------------------------------------

struct BlockConfidenceParams {
  Bf16Rows x;
  Bf16Rows weight;
  const float* temperatures;
  float* score;
  float* probability;
  int64_t score_stride;
  int64_t probability_stride;
  int slots;
};

__global__ void __launch_bounds__(kRowThreads)
    BlockConfidenceKernel(const BlockConfidenceParams p) {
  __shared__ float shared[kRowThreads / 32];
  const int row = static_cast<int>(blockIdx.x);
  WaitForPreviousKernel();
  AllowNextKernel();
  float sum = 0.0f;
  for (int channel = static_cast<int>(threadIdx.x) * kLaneChannels; channel < p.x.channels;
       channel += kRowThreads * kLaneChannels) {
    float x[kLaneChannels];
    float weight[kLaneChannels];
    Unpack(LoadChannels(p.x, row, channel), x);
    Unpack(LoadChannels(p.weight, 0, channel), weight);
    for (int i = 0; i < kLaneChannels; ++i) sum = fmaf(x[i], weight[i], sum);
  }
  __syncwarp();
  sum = WarpSum(sum);
  if (LaneId() == 0) shared[WarpId()] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kRowThreads / 32; ++i) sum += shared[i];
  const int sequence = row / p.slots;
  const int slot = row - sequence * p.slots;
  const float scaled = fminf(fmaxf(sum / p.temperatures[slot], -60.0f), 60.0f);
  p.score[slot * p.score_stride + sequence] = sum;
  p.probability[slot * p.probability_stride + sequence] = 1.0f / (1.0f + expf(-scaled));
}

}  // namespace

Status BlockRows(const BlockRowsArgs& args, Stream& stream) {
  const auto rows = static_cast<int>(args.token_ids.rows());
  const BlockRowsParams params{.anchors = args.anchors.Row<int32_t>(0),
                               .lengths = args.lengths.Row<int32_t>(0),
                               .token_ids = args.token_ids.Row<int32_t>(0),
                               .positions = args.positions.Row<int32_t>(0),
                               .row_sequence = args.row_sequence.Row<int32_t>(0),
                               .sequence_start = args.sequence_start.Row<int32_t>(0),
                               .filler = args.filler,
                               .rows = rows,
                               .slots = rows / static_cast<int>(args.anchors.rows())};
  // One more, for the end of the last block.
  const LaunchConfig config{.grid = {static_cast<uint32_t>(rows / kRowThreads + 1)},
                            .block = kRowThreads,
                            .overlap_previous = true};
  return Launch("BlockRows", BlockRowsKernel, config, stream, params);
}

Status BiasedArgmax(const BiasedArgmaxArgs& args, Stream& stream) {
  ScratchScope scratch(stream);
  const int64_t rows = args.logits.rows();
  const int64_t vocab = args.logits.dim(1);
  const bool wants_tokens = args.tokens.rank() > 0;
  BiasedArgmaxParams params{
      .logits = args.logits.Row<float>(0),
      .bias = args.bias.Row<float>(0),
      .tokens = wants_tokens ? args.tokens.Row<int32_t>(0) : nullptr,
      .best = nullptr,
      .logits_stride = args.logits.row_stride(),
      .bias_stride = args.bias.row_stride(),
      .rows = static_cast<int>(rows),
      .vocab = static_cast<int>(vocab),
      .blocks_per_row = static_cast<int>((vocab + kArgmaxEntries - 1) / kArgmaxEntries)};
  if (wants_tokens) params.best = scratch.Allocate<uint64_t>(rows * params.blocks_per_row);
  const bool vector = vocab % 4 == 0 && IsAligned(params.logits, 4 * params.logits_stride, 16) &&
                      IsAligned(params.bias, 4 * params.bias_stride, 16);
  const LaunchConfig config{
      .grid = {static_cast<uint32_t>(params.blocks_per_row), static_cast<uint32_t>(rows)},
      .block = kArgmaxThreads,
      .overlap_previous = true};
  DI_RETURN_IF_ERROR(Launch("BiasedArgmax",
                            vector ? BiasedArgmaxKernel<true> : BiasedArgmaxKernel<false>, config,
                            stream, params));
  if (!wants_tokens) return {};
  const LaunchConfig winner{.grid = {static_cast<uint32_t>((rows + kWinnerRows - 1) / kWinnerRows)},
                            .block = 32 * kWinnerRows,
                            .overlap_previous = true};
  return Launch("BiasedArgmax winner", WinnerKernel, winner, stream, params);
}

Status BlockConfidence(const BlockConfidenceArgs& args, Stream& stream) {
  const BlockConfidenceParams params{.x = Bf16Rows(args.x),
                                     .weight = Bf16Rows(args.weight),
                                     .temperatures = args.temperatures.Row<float>(0),
                                     .score = args.score.Row<float>(0),
                                     .probability = args.probability.Row<float>(0),
                                     .score_stride = args.score.row_stride(),
                                     .probability_stride = args.probability.row_stride(),
                                     .slots = static_cast<int>(args.temperatures.rows())};
  const LaunchConfig config{.grid = {static_cast<uint32_t>(args.x.rows())},
                            .block = kRowThreads,
                            .overlap_previous = true};
  return Launch("BlockConfidence", BlockConfidenceKernel, config, stream, params);
}

}  // namespace deepinfer::cuda
