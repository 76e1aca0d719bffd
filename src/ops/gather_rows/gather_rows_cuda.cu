// Rows gathered as bytes. Bound by memory: every byte read and written once, kUnits 16-byte loads
// of a thread in flight.
#include "ops/cuda/rows.cuh"
#include "ops/gather_rows/gather_rows_impl.h"

namespace deepinfer::cuda {
namespace {

constexpr int kBlock = 128;
constexpr int kUnits = 4;

struct GatherRowsParams {
  const uint8_t* source;
  uint8_t* out;
  int64_t source_stride;  // bytes
  int64_t out_stride;
  const int32_t* row_index;
  int64_t units;  // per row
  int64_t blocks_per_row;
};

template <class Unit>
__global__ void GatherRowsKernel(const GatherRowsParams p) {
  const int64_t row = blockIdx.x / p.blocks_per_row;
  const int64_t begin = (blockIdx.x % p.blocks_per_row) * (kBlock * kUnits) + threadIdx.x;
  WaitForPreviousKernel();
  AllowNextKernel();
  const Unit* source = reinterpret_cast<const Unit*>(p.source + p.row_index[row] * p.source_stride);
  Unit* out = reinterpret_cast<Unit*>(p.out + row * p.out_stride);
  Unit value[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    if (begin + i * kBlock < p.units) value[i] = source[begin + i * kBlock];
  }
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    if (begin + i * kBlock < p.units) out[begin + i * kBlock] = value[i];
  }
}

}  // namespace

Status GatherRows(const GatherRowsArgs& args, Stream& stream) {
  const int64_t element = DTypeBytes(args.source.dtype());
  const int64_t row_bytes = element * args.source.row_size();
  GatherRowsParams params{.source = static_cast<const uint8_t*>(args.source.data()),
                          .out = static_cast<uint8_t*>(args.out.data()),
                          .source_stride = element * args.source.row_stride(),
                          .out_stride = element * args.out.row_stride(),
                          .row_index = args.row_index.Row<int32_t>(0),
                          .units = 0,
                          .blocks_per_row = 0};
  const auto launch = [&](auto kernel, int64_t unit) {
    params.units = row_bytes / unit;
    params.blocks_per_row = (params.units + kBlock * kUnits - 1) / (kBlock * kUnits);
    const LaunchConfig config{
        .grid = {static_cast<uint32_t>(args.row_index.rows() * params.blocks_per_row)},
        .block = kBlock,
        .overlap_previous = true};
    return Launch("GatherRows", kernel, config, stream, params);
  };
  const auto fits = [&](int64_t unit) {
    return IsAligned(params.source, params.source_stride, unit) &&
           IsAligned(params.out, params.out_stride, unit) && row_bytes % unit == 0;
  };
  if (fits(16)) return launch(GatherRowsKernel<uint4>, 16);
  if (fits(4)) return launch(GatherRowsKernel<uint32_t>, 4);
  return launch(GatherRowsKernel<uint8_t>, 1);
}

}  // namespace deepinfer::cuda
