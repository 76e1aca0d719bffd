// Plain scores of the indexer, for shapes that the tensor kernel does not take, for reference
// numerics and as its reference on the device: dot products in fp32 with channels ascending, heads
// ascending, one rounding per operation, so the bits are those of the CPU's reference.
//
// A block takes tiles of 16 entries of one row: their keys are decoded into shared memory once;
// each of 128 threads computes every eighth head of an entry; one thread per entry adds up the
// heads. Bound by fp32 arithmetic.
#include <algorithm>

#include "ops/indexer/indexer_cuda.cuh"

namespace deepinfer::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTile = 16;
constexpr int kHeadThreads = kThreads / kTile;
constexpr int kGroup = 32;  // channels with one scale

__device__ float RoundBf16(float x) {
  return Bf16ToFloat(FloatToBf16(x));
}

__device__ float E2M1Value(uint32_t code) {
  const uint32_t exponent = (code >> 1) & 3u;
  const float mantissa = static_cast<float>(code & 1u);
  const float magnitude = exponent == 0
                              ? 0.5f * mantissa
                              : (1.0f + 0.5f * mantissa) * __uint_as_float((exponent + 126u) << 23);
  return (code & 8u) != 0 ? -magnitude : magnitude;
}

// The entry at a position of a score row, or -1.
__device__ int EntryAt(const IndexerProblem& problem, bool listed, int row, int position) {
  if (!listed) return position;
  const int block = position / problem.candidate_block_size;
  if (block >= problem.num_candidates) return -1;
  const int number = problem.candidates[row * problem.candidates_stride + block];
  if (number < 0) return -1;
  return number * problem.candidate_block_size + position % problem.candidate_block_size;
}

__device__ float KeyChannel(const IndexerProblem& problem, const uint8_t* record, int channel) {
  if (!problem.packed) return Bf16ToFloat(reinterpret_cast<const uint16_t*>(record)[channel]);
  const uint32_t code = (static_cast<uint32_t>(record[channel / 2]) >> (channel % 2 * 4)) & 15u;
  const uint32_t scale = record[problem.channels / 2 + channel / kGroup];
  return E2M1Value(code) * __uint_as_float(scale << 23);
}

__global__ void __launch_bounds__(kThreads) PlainScoresKernel(const IndexerProblem problem) {
  const int row = problem.row_begin + static_cast<int>(blockIdx.y);
  const int n_vis = VisibleEntries(problem, row);
  if (!ScoresMatter(problem, n_vis)) return;
  const int positions = ScoredPositions(problem, n_vis);
  const int sequence = problem.row_sequence[row];
  const int channels = problem.channels;
  const int heads = problem.heads;
  // Rows padded by one word keep the threads of different entries on different banks.
  float* q = DynamicShared<float>();             // [heads, channels]
  float* keys = q + heads * channels;            // [kTile, channels + 1]
  float* terms = keys + kTile * (channels + 1);  // [kTile, heads + 1]
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < heads * channels; i += kThreads)
    q[i] = Bf16ToFloat(problem.q[row * problem.q_stride + i]);
  float* scores = problem.scores + int64_t{row - problem.row_begin} * problem.score_stride;
  const int tile_step = static_cast<int>(gridDim.x) * kTile;
  for (int first = static_cast<int>(blockIdx.x) * kTile; first < positions; first += tile_step) {
    __syncthreads();
    for (int i = thread; i < kTile * channels; i += kThreads) {
      const int position = first + i / channels;
      const int entry =
          position < positions ? EntryAt(problem, problem.compact, row, position) : -1;
      keys[i / channels * (channels + 1) + i % channels] =
          entry >= 0 && entry < n_vis
              ? KeyChannel(problem, Record(problem, sequence, entry), i % channels)
              : 0.0f;
    }
    __syncthreads();
    const int slot = thread % kTile;
    for (int h = thread / kTile; h < heads; h += kHeadThreads) {
      float dot = 0.0f;
      for (int d = 0; d < channels; ++d)
        dot = __fadd_rn(dot, __fmul_rn(q[h * channels + d], keys[slot * (channels + 1) + d]));
      if (problem.rounded) dot = RoundBf16(dot);
      const float weight = Bf16ToFloat(problem.weights[row * problem.weights_stride + h]);
      const float term = __fmul_rn(fmaxf(dot, 0.0f), weight);
      terms[slot * (heads + 1) + h] = problem.rounded ? RoundBf16(term) : term;
    }
    __syncthreads();
    if (thread < kTile && first + thread < positions) {
      float score = 0.0f;
      for (int h = 0; h < heads; ++h) score = __fadd_rn(score, terms[thread * (heads + 1) + h]);
      scores[first + thread] = problem.rounded ? RoundBf16(score) : score;
    }
  }
}

// One thread per block of scores.
__global__ void __launch_bounds__(kThreads)
    BlockMaximaKernel(const IndexerProblem problem, bool listed, int block_size, float* maxima,
                      int maxima_stride) {
  const int row = problem.row_begin + static_cast<int>(blockIdx.y);
  const int n_vis = VisibleEntries(problem, row);
  if (!ScoresMatter(problem, n_vis)) return;
  const int positions = listed ? problem.num_candidates * problem.candidate_block_size
                               : ScoredPositions(problem, n_vis);
  const int wave_row = row - problem.row_begin;
  const float* scores = problem.scores + int64_t{wave_row} * problem.score_stride;
  const int blocks = CeilDiv(positions, block_size);
  const int step = static_cast<int>(gridDim.x) * kThreads;
  for (int block = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
       block < blocks; block += step) {
    float best = -INFINITY;
    for (int p = block * block_size; p < min(positions, (block + 1) * block_size); ++p) {
      const int entry = EntryAt(problem, listed || problem.compact, row, p);
      if (entry < 0 || entry >= n_vis) break;
      best = fmaxf(best, scores[listed ? entry : p]);
    }
    if (block < maxima_stride) maxima[int64_t{wave_row} * maxima_stride + block] = best;
  }
}

}  // namespace

Status LaunchPlainScores(const IndexerProblem& problem, Stream& stream) {
  LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(std::clamp(problem.score_stride / kTile, 1, 64));
  config.grid.y = static_cast<uint32_t>(problem.row_end - problem.row_begin);
  config.block = kThreads;
  config.shared_bytes = static_cast<int>(sizeof(float)) *
                        (problem.heads * problem.channels + kTile * (problem.channels + 1) +
                         kTile * (problem.heads + 1));
  return Launch("PlainScores", PlainScoresKernel, config, stream, problem);
}

Status LaunchBlockMaxima(const IndexerProblem& problem, bool listed, int block_size, float* maxima,
                         int maxima_stride, Stream& stream) {
  LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(std::clamp(maxima_stride / kThreads, 1, 16));
  config.grid.y = static_cast<uint32_t>(problem.row_end - problem.row_begin);
  config.block = kThreads;
  return Launch("BlockMaxima", BlockMaximaKernel, config, stream, problem, listed, block_size,
                maxima, maxima_stride);
}

}  // namespace deepinfer::cuda
