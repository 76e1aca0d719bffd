// Router scores: see router_scores.h.
//
// A block takes one segment of K, some strips of 16 outputs and up to 64 rows. Weights are as
// packed for linears (ops/linear/cuda_pack.h: 16 bytes of a unit are a lane's A fragment), rows are
// the narrow operand. Both go through a ring of stages of 128 columns in shared memory, the weights
// of the first stages before the wait for the kernel in front. A ring of five holds nearly a whole
// segment, so all loads of a block are under way at once.
//
// Cost at 256 rows x 384 outputs x 5120: 112 blocks of 64 rows x 96 outputs x 768 columns. Each
// reads 246 KB from the L2 (about 3 us at 40 bytes per clock), 1,540 clocks of shared memory reads
// per operand, 1,150 clocks of matrix instructions. One row: 84 blocks read 49 KB of weights each.
//
// Numbers: a segment's sum takes k16 steps in ascending order from zero, as in ops/linear; tiles do
// not change them.
#include <algorithm>

#include "base/ceil_div.h"
#include "device.cuh"
#include "ops/linear/cuda_layout.h"
#include "ops/linear/cuda_pack.h"
#include "ops/linear/linear_pack.h"
#include "ops/moe/router_scores.h"

namespace deepinfer::cuda {
namespace {

constexpr int kStages = 5;
constexpr int kStageColumns = 128;
constexpr int kUnitColumns = 16;
constexpr int kStageUnits = kStageColumns / kUnitColumns;
constexpr int kUnitBytes = static_cast<int>(kCudaUnitBytes);
constexpr int kStripOutputs = static_cast<int>(kCudaStripOutputs);
constexpr int kStripStageBytes = kStageUnits * kUnitBytes;
constexpr int kPieces = kStageColumns / 8;       // of 16 bytes in a row of x
constexpr int kXPitch = 2 * kStageColumns + 16;  // eight rows in different banks
constexpr int kMaxStripWarps = 3;

struct ScoreParams {
  int rows;
  int strips;
  int k;
  int padded_k;
  int segment_columns;
  int strip_warps;  // of a block
  const uint8_t* weight;
  int64_t strip_bytes;
  const uint16_t* x;
  int64_t x_stride;
  RouterScores scores;
  int* arrivals;
};

// A warp multiplies kStrips strips with 8 * kTiles rows; kRowGroups warps share strips.
template <int kTiles, int kStrips, int kRowGroups>
__global__ void __launch_bounds__(32 * kMaxStripWarps * kRowGroups)
    ScoreKernel(const __grid_constant__ ScoreParams p) {
  static_assert(kTiles == 1 || kTiles % 2 == 0, "ldmatrix reads two tiles, or two steps of one");
  constexpr int kRows = 8 * kTiles * kRowGroups;
  AllowNextKernel();
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int lane = LaneId();
  const int strip_warp = WarpId() / kRowGroups;
  const int row_group = WarpId() % kRowGroups;
  const int block_strips = p.strip_warps * kStrips;
  const int first_strip = static_cast<int>(blockIdx.x) * block_strips;
  const int strips = min(block_strips, p.strips - first_strip);
  const int begin = static_cast<int>(blockIdx.y) * p.segment_columns;
  const int columns = min(p.segment_columns, p.padded_k - begin);
  const int first_row = static_cast<int>(blockIdx.z) * kRows;
  const int rows = min(kRows, p.rows - first_row);
  const int stages = (columns + kStageColumns - 1) / kStageColumns;
  const int stage_bytes = block_strips * kStripStageBytes + kRows * kXPitch;
  uint8_t* const shared = DynamicShared<uint8_t>();

  const auto copy_weights = [&](int stage) {
    uint8_t* const to = shared + stage % kStages * stage_bytes;
    const int units = min(kStageUnits, (columns - stage * kStageColumns) / kUnitColumns);
    const uint8_t* const from = p.weight + first_strip * p.strip_bytes +
                                (begin + stage * kStageColumns) / kUnitColumns * kUnitBytes;
    for (int i = thread; i < strips * (kStripStageBytes / 16); i += threads) {
      const int strip = i / (kStripStageBytes / 16);
      const int at = i % (kStripStageBytes / 16) * 16;
      if (at < units * kUnitBytes)
        CopyAsync16(to + strip * kStripStageBytes + at, from + strip * p.strip_bytes + at);
    }
  };
  // Rows that do not exist are zero; so are columns beyond k, as those of the weights.
  const auto copy_x = [&](int stage) {
    uint8_t* const to = shared + stage % kStages * stage_bytes + block_strips * kStripStageBytes;
    for (int i = thread; i < kRows * kPieces; i += threads) {
      const int row = i / kPieces;
      const int piece = i % kPieces;
      const int column = begin + stage * kStageColumns + 8 * piece;
      const bool valid = row < rows && column < p.k;
      const uint16_t* const from = p.x + (first_row + (valid ? row : 0)) * p.x_stride;
      CopyAsync16OrZero(to + row * kXPitch + 16 * piece, from + (valid ? column : 0), valid);
    }
  };

  for (int stage = 0; stage < min(kStages, stages); ++stage) copy_weights(stage);
  WaitForPreviousKernel();
  if (thread == 0 && blockIdx.x + blockIdx.y + blockIdx.z == 0) *p.arrivals = 0;
  for (int stage = 0; stage < kStages; ++stage) {
    if (stage < stages) copy_x(stage);
    CommitCopies();
  }

  float sums[kStrips][kTiles][4] = {};
  for (int stage = 0; stage < stages; ++stage) {
    WaitCopies<kStages - 1>();
    __syncthreads();
    const uint8_t* const weights = shared + stage % kStages * stage_bytes +
                                   strip_warp * kStrips * kStripStageBytes + 16 * lane;
    const uint8_t* const x = shared + stage % kStages * stage_bytes +
                             block_strips * kStripStageBytes + row_group * 8 * kTiles * kXPitch;
    const int units = min(kStageUnits, (columns - stage * kStageColumns) / kUnitColumns);
#pragma unroll
    for (int unit = 0; unit < kStageUnits; unit += 2) {
      if (unit >= units) break;  // an even number
      uint32_t b[2][kTiles][2];
      if constexpr (kTiles == 1) {
        uint32_t r[4];
        LoadMatrix4(r, x + lane % 8 * kXPitch + unit * 32 + lane / 8 * 16);
        b[0][0][0] = r[0];
        b[0][0][1] = r[1];
        b[1][0][0] = r[2];
        b[1][0][1] = r[3];
      } else {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
          for (int tile = 0; tile < kTiles; tile += 2) {
            uint32_t r[4];
            LoadMatrix4(r, x + (8 * tile + lane / 16 * 8 + lane % 8) * kXPitch +
                               (unit + step) * 32 + lane / 8 % 2 * 16);
            b[step][tile][0] = r[0];
            b[step][tile][1] = r[1];
            b[step][tile + 1][0] = r[2];
            b[step][tile + 1][1] = r[3];
          }
        }
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int s = 0; s < kStrips; ++s) {
          const uint4 words = *reinterpret_cast<const uint4*>(weights + s * kStripStageBytes +
                                                              (unit + step) * kUnitBytes);
          const uint32_t a[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) MmaBf16(sums[s][tile], a, b[step][tile]);
        }
      }
    }
    if (stage + kStages < stages) {
      __syncthreads();  // everyone is done with the place that is filled now
      copy_weights(stage + kStages);
      copy_x(stage + kStages);
    }
    CommitCopies();
  }

#pragma unroll
  for (int s = 0; s < kStrips; ++s) {
    const int strip = first_strip + strip_warp * kStrips + s;
    if (strip >= p.strips) continue;
    float* const to =
        p.scores.sums + blockIdx.y * p.scores.segment_stride + strip * kStripOutputs + lane / 4;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first_row + (row_group * kTiles + tile) * 8 + 2 * (lane % 4) + i;
        if (row >= p.rows) continue;
        to[row * p.scores.row_stride] = sums[s][tile][i];
        to[row * p.scores.row_stride + 8] = sums[s][tile][2 + i];
      }
    }
  }
}

// `strip_warps` 0: as many as leave one block for each multiprocessor.
template <int kTiles, int kStrips, int kRowGroups>
Status LaunchTiles(ScoreParams params, int strip_warps, Stream& stream) {
  constexpr int kRows = 8 * kTiles * kRowGroups;
  LaunchConfig config;
  config.grid.y = static_cast<uint32_t>(params.scores.segments);
  config.grid.z = static_cast<uint32_t>(CeilDiv(params.rows, kRows));
  const auto strip_blocks = [&](int warps) {
    return static_cast<uint32_t>(CeilDiv(params.strips, warps * kStrips));
  };
  if (strip_warps == 0) {
    strip_warps = 1;
    while (strip_warps < kMaxStripWarps &&
           int64_t{strip_blocks(strip_warps)} * config.grid.y * config.grid.z > stream.sm_count())
      ++strip_warps;
  }
  params.strip_warps = strip_warps;
  config.grid.x = strip_blocks(strip_warps);
  config.block = 32 * strip_warps * kRowGroups;
  config.shared_bytes = kStages * (strip_warps * kStrips * kStripStageBytes + kRows * kXPitch);
  config.overlap_previous = true;
  return Launch("RouterScores", &ScoreKernel<kTiles, kStrips, kRowGroups>, config, stream, params);
}

}  // namespace

bool TakesRouterScores(const TensorView& x, const LinearWeight& weight, const Stream& stream) {
  if (stream.use_reference() || weight.format() != WeightFormat::kBf16 ||
      weight.packed() == nullptr || weight.packed()->layout != LinearLayout::kCuda)
    return false;
  const CudaLinearWeight& packed = *weight.packed()->cuda;
  return x.rows() > 0 && x.rows() <= kMaxScoreRows && packed.segments.count <= kMaxScoreSegments &&
         packed.output_exponent == 0 && weight.k() % 8 == 0 && x.row_stride() % 8 == 0 &&
         reinterpret_cast<uintptr_t>(x.data()) % 16 == 0;
}

RouterScores RouterScoresOf(int64_t rows, const LinearWeight& weight) {
  RouterScores scores;
  scores.segments = static_cast<int>(weight.packed()->cuda->segments.count);
  scores.row_stride = CeilDiv(weight.n(), kCudaStripOutputs) * kCudaStripOutputs;
  scores.segment_stride = rows * scores.row_stride;
  return scores;
}

Status LaunchRouterScores(const TensorView& x, const LinearWeight& weight,
                          const RouterScores& scores, int* arrivals, Stream& stream) {
  const CudaLinearWeight& packed = *weight.packed()->cuda;
  ScoreParams params = {};
  params.rows = static_cast<int>(x.rows());
  params.strips = static_cast<int>(scores.row_stride / kCudaStripOutputs);
  params.k = static_cast<int>(weight.k());
  params.padded_k = static_cast<int>(packed.padded_k);
  params.segment_columns = static_cast<int>(packed.segments.columns);
  params.weight = packed.data;
  params.strip_bytes = packed.strip_bytes;
  params.x = static_cast<const uint16_t*>(x.data());
  params.x_stride = x.row_stride();
  params.scores = scores;
  params.arrivals = arrivals;
  if (params.rows <= 8) return LaunchTiles<1, 1, 1>(params, 2, stream);
  if (params.rows <= 16) return LaunchTiles<2, 1, 1>(params, 2, stream);
  if (params.rows <= 32) return LaunchTiles<4, 1, 1>(params, 2, stream);
  return LaunchTiles<4, 2, 2>(params, 0, stream);
}

}  // namespace deepinfer::cuda
