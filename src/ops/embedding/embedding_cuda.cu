// Embedding rows, copied to every residual stream.
//
// Bound by writing: 10 KB read and 40 KB written per row of 5120 channels and four streams. A
// thread reads 16 bytes once and writes them to all streams.
#include "ops/cuda/rows.cuh"
#include "ops/embedding/embedding_impl.h"

namespace deepinfer::cuda {
namespace {

constexpr int kBlock = 128;

struct EmbeddingParams {
  const int32_t* ids;
  const uint8_t* table;
  int64_t table_stride;  // bytes
  uint8_t* streams;
  int64_t streams_stride;  // bytes
  int64_t row_bytes;
  float* first_pre;
  int64_t first_pre_stride;
  int num_streams;
  int units;  // per row
  int blocks_per_row;
};

template <class Unit>
__global__ void EmbeddingKernel(const EmbeddingParams p) {
  const int64_t row = blockIdx.x / p.blocks_per_row;
  const int unit =
      static_cast<int>(blockIdx.x % p.blocks_per_row) * kBlock + static_cast<int>(threadIdx.x);
  WaitForPreviousKernel();
  AllowNextKernel();
  if (p.first_pre != nullptr && unit < p.num_streams)
    p.first_pre[row * p.first_pre_stride + unit] = unit == 0 ? 1.0f : 0.0f;
  if (unit >= p.units) return;
  const Unit value = reinterpret_cast<const Unit*>(p.table + p.ids[row] * p.table_stride)[unit];
  for (int s = 0; s < p.num_streams; ++s) {
    reinterpret_cast<Unit*>(p.streams + row * p.streams_stride + s * p.row_bytes)[unit] = value;
  }
}

}  // namespace

Status Embedding(const EmbeddingArgs& args, Stream& stream) {
  const bool vector = IsAligned(args.table.data(), 2 * args.table.row_stride(), 16) &&
                      IsAligned(args.streams.data(), 2 * args.streams.row_stride(), 16) &&
                      args.table.dim(1) % kLaneChannels == 0;
  EmbeddingParams params{
      .ids = args.ids.Row<int32_t>(0),
      .table = static_cast<const uint8_t*>(args.table.data()),
      .table_stride = 2 * args.table.row_stride(),
      .streams = static_cast<uint8_t*>(args.streams.data()),
      .streams_stride = 2 * args.streams.row_stride(),
      .row_bytes = 2 * args.table.dim(1),
      .first_pre = static_cast<float*>(args.first_pre.data()),
      .first_pre_stride = args.first_pre.row_stride(),
      .num_streams = static_cast<int>(args.streams.dim(1)),
      .units = static_cast<int>(args.table.dim(1)) / (vector ? kLaneChannels : 1),
      .blocks_per_row = 0};
  const int threads = params.units > params.num_streams ? params.units : params.num_streams;
  params.blocks_per_row = (threads + kBlock - 1) / kBlock;
  const LaunchConfig config{
      .grid = {static_cast<uint32_t>(args.ids.rows() * params.blocks_per_row)},
      .block = kBlock,
      .overlap_previous = true};
  return Launch("Embedding", vector ? EmbeddingKernel<uint4> : EmbeddingKernel<uint16_t>, config,
                stream, params);
}

}  // namespace deepinfer::cuda
