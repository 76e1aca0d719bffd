// The residual streams as one vector. Bound by memory: 40 KB read and 10 KB written per row of 5120
// channels. A lane has eight channels of all four streams; four lanes have a group of the Q8 grid.
#include "ops/cuda/rows.cuh"
#include "ops/hyper_connection/hc_collapse_impl.h"
#include "ops/hyper_connection/hyper_connection.h"
#include "ops/quantize/group_quantize.cuh"

namespace deepinfer::cuda {
namespace {

constexpr int kBlock = 128;
constexpr int kStreams = static_cast<int>(kHcStreams);

struct HcCollapseParams {
  Bf16Rows streams;  // one row per stream: 4 t + s
  Bf16Rows y;
  const float* pre;  // null: the mean
  int64_t pre_stride;
  int64_t token_stride;  // of the streams, elements
  int blocks_per_row;
  bool quantize;
};

__global__ void __launch_bounds__(kBlock) HcCollapseKernel(const HcCollapseParams p) {
  const int64_t row = blockIdx.x / p.blocks_per_row;
  const int channel =
      (static_cast<int>(blockIdx.x % p.blocks_per_row) * kBlock + static_cast<int>(threadIdx.x)) *
      kLaneChannels;
  WaitForPreviousKernel();
  AllowNextKernel();
  Bf16Rows streams = p.streams;
  streams.data += row * p.token_stride;
  Bf16x8 x[kStreams];
#pragma unroll
  for (int s = 0; s < kStreams; ++s) x[s] = LoadChannels(streams, s, channel);
  float sum[kLaneChannels];
#pragma unroll
  for (int s = 0; s < kStreams; ++s) {
    const float weight = p.pre == nullptr ? 0.25f : p.pre[row * p.pre_stride + s];
    float values[kLaneChannels];
    Unpack(x[s], values);
    for (int i = 0; i < kLaneChannels; ++i)
      sum[i] = s == 0 ? weight * values[i] : fmaf(weight, values[i], sum[i]);
  }
  Bf16x8 y = Pack(sum);
  if (p.quantize) {
    float values[kLaneChannels];
    Unpack(y, values);
    const Q8Scale q8(LaneGroupMax<4>(Amax(values)));
    for (int i = 0; i < 4; ++i) y.pairs[i] = Q8Grid(values[2 * i], values[2 * i + 1], q8);
  }
  StoreChannels(p.y, row, channel, y);
}

}  // namespace

Status HcCollapse(const HcCollapseArgs& args, Stream& stream) {
  const int64_t hidden = args.streams.dim(2);
  HcCollapseParams params{.streams = {},
                          .y = Bf16Rows(args.y),
                          .pre = static_cast<const float*>(args.pre.data()),
                          .pre_stride = args.pre.row_stride(),
                          .token_stride = args.streams.row_stride(),
                          .blocks_per_row = 1,
                          .quantize = args.quantize};
  params.streams.data = static_cast<uint16_t*>(args.streams.data());
  params.streams.stride = hidden;
  params.streams.channels = static_cast<int>(hidden);
  params.streams.vector = IsAligned(args.streams.data(), 2 * args.streams.row_stride(), 16) &&
                          hidden % kLaneChannels == 0;
  constexpr int kBlockChannels = kBlock * kLaneChannels;
  params.blocks_per_row = static_cast<int>((hidden + kBlockChannels - 1) / kBlockChannels);
  const LaunchConfig config{
      .grid = {static_cast<uint32_t>(args.streams.rows() * params.blocks_per_row)},
      .block = kBlock,
      .overlap_previous = true};
  return Launch("HcCollapse", HcCollapseKernel, config, stream, params);
}

}  // namespace deepinfer::cuda
