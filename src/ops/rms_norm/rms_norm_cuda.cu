// RMSNorm of rows, optionally with a copy on the Q8 grid.
//
// Bound by memory: 4 bytes per channel, 6 with both outputs. Few rows: up to 16 warps share a row,
// and one 16-byte load per thread is all that stands between the launch and the reduction. Many
// rows of up to 2048 channels: a warp per row with all its loads in flight and no barrier. Both add
// in the same order (rms_norm.cuh).
#include <algorithm>

#include "ops/quantize/group_quantize.cuh"
#include "ops/rms_norm/rms_norm.cuh"
#include "ops/rms_norm/rms_norm_impl.h"

namespace deepinfer::cuda {
namespace {

struct RmsNormParams {
  Bf16Rows x, weight, y, y_grid;
  int64_t rows;
  int warps_per_row;
  float eps;
};

template <int kChunks>
__global__ void RmsNormKernel(const RmsNormParams p) {
  const int warps = p.warps_per_row;
  const int warp = WarpId() % warps;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32u / warps) + WarpId() / warps;
  if (row >= p.rows) return;  // a row's warps together
  const auto channel_of = [&](int i) {
    return (warp + i * warps) * kChunkChannels + LaneId() * kLaneChannels;
  };
  Bf16x8 weight[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) weight[i] = LoadChannels(p.weight, 0, channel_of(i));
  WaitForPreviousKernel();
  AllowNextKernel();
  Bf16x8 x[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) x[i] = LoadChannels(p.x, row, channel_of(i));
  float squares[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    float values[kLaneChannels];
    Unpack(x[i], values);
    squares[i] = SquareSum(values);
  }
  const float scale =
      RmsScale(squares, warps, warp, p.x.channels, p.eps, DynamicShared<float>(), 1);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    float values[kLaneChannels];
    Unpack(x[i], values);
    ScaleChannels(values, weight[i], scale);
    if (p.y.data != nullptr) StoreChannels(p.y, row, channel_of(i), Pack(values));
    if (p.y_grid.data == nullptr) continue;
    const Q8Scale q8(LaneGroupMax<4>(Amax(values)));
    Bf16x8 grid;
    for (int j = 0; j < 4; ++j) grid.pairs[j] = Q8Grid(values[2 * j], values[2 * j + 1], q8);
    StoreChannels(p.y_grid, row, channel_of(i), grid);
  }
}

template <int kChunks>
Status LaunchRmsNorm(RmsNormParams params, int warps_per_row, int rows_per_block, Stream& stream) {
  params.warps_per_row = warps_per_row;
  const LaunchConfig config{
      .grid = {static_cast<uint32_t>((params.rows + rows_per_block - 1) / rows_per_block)},
      .block = 32 * warps_per_row * rows_per_block,
      .shared_bytes = warps_per_row == 1 ? 0 : 128 * warps_per_row * kChunks,
      .overlap_previous = true};
  return Launch("RmsNorm", RmsNormKernel<kChunks>, config, stream, params);
}

}  // namespace

Status RmsNorm(const RmsNormArgs& args, Stream& stream) {
  const RmsNormParams params{.x = Bf16Rows(args.x),
                             .weight = Bf16Rows(args.weight),
                             .y = Bf16Rows(args.y),
                             .y_grid = Bf16Rows(args.y_grid),
                             .rows = args.x.rows(),
                             .warps_per_row = 1,
                             .eps = args.eps};
  const int chunks = NumChunks(params.x.channels);
  if (chunks <= 1) return LaunchRmsNorm<1>(params, 1, 4, stream);
  if (params.rows > 4 * stream.sm_count()) {
    if (chunks <= 2) return LaunchRmsNorm<2>(params, 1, 4, stream);
    if (chunks <= 4) return LaunchRmsNorm<4>(params, 1, 4, stream);
    if (chunks <= 8) return LaunchRmsNorm<8>(params, 1, 4, stream);
  }
  constexpr int kMaxWarps = 16;
  if (chunks <= kMaxWarps) return LaunchRmsNorm<1>(params, chunks, 1, stream);
  if (chunks <= 2 * kMaxWarps) return LaunchRmsNorm<2>(params, (chunks + 1) / 2, 1, stream);
  if (chunks <= 4 * kMaxWarps) return LaunchRmsNorm<4>(params, (chunks + 3) / 4, 1, stream);
  return Fail(Code::kUnsupported,
              fmt::format("RmsNorm: rows of {} channels are wider than the {} that a GPU's block "
                          "holds.",
                          params.x.channels, 4 * kMaxWarps * kChunkChannels),
              "x");
}

}  // namespace deepinfer::cuda
