// Q8 of rows.
//
// Bound by memory: 4 bytes per bf16 channel, 6 per fp32 channel. A lane has eight channels, four
// lanes a group; a thread has kPieces loads in flight. Groups do not depend on each other, so dense
// tensors are one long row.
#include "ops/cuda/rows.cuh"
#include "ops/quantize/group_quantize.cuh"
#include "ops/quantize/quantize_impl.h"

namespace deepinfer::cuda {
namespace {

constexpr int kBlock = 128;
constexpr int kPieces = 4;

struct QuantizeParams {
  const void* x;
  uint16_t* y;
  int64_t x_stride;  // elements
  int64_t y_stride;
  int64_t pieces;  // of eight channels in a row
  int64_t blocks_per_row;
  bool x_vector;
  bool y_vector;
};

struct Floats8 {
  float x[kLaneChannels];
};

template <class T>
__device__ inline Floats8 LoadFloats(const T* data, bool vector) {
  Floats8 out;
  if constexpr (sizeof(T) == 4) {
    if (vector) {
      const float4 low = *reinterpret_cast<const float4*>(data);
      const float4 high = *reinterpret_cast<const float4*>(data + 4);
      return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
    }
    for (int i = 0; i < kLaneChannels; ++i) out.x[i] = data[i];
  } else {
    if (vector) {
      const uint4 v = *reinterpret_cast<const uint4*>(data);
      Unpack({{v.x, v.y, v.z, v.w}}, out.x);
      return out;
    }
    for (int i = 0; i < kLaneChannels; ++i) out.x[i] = Bf16ToFloat(data[i]);
  }
  return out;
}

template <class T>
__global__ void QuantizeKernel(const QuantizeParams p) {
  const int64_t row = blockIdx.x / p.blocks_per_row;
  const int64_t begin = (blockIdx.x % p.blocks_per_row) * (kBlock * kPieces) + threadIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  Bf16Rows y;
  y.data = p.y + row * p.y_stride;
  y.channels = kLaneChannels;
  y.vector = p.y_vector;
  Floats8 values[kPieces];
  WaitForPreviousKernel();
  AllowNextKernel();
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int64_t piece = begin + i * kBlock;
    values[i] = piece < p.pieces ? LoadFloats(x + piece * kLaneChannels, p.x_vector) : Floats8{};
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int64_t piece = begin + i * kBlock;
    const Q8Scale scale(LaneGroupMax<4>(Amax(values[i].x)));
    if (piece >= p.pieces) continue;
    Bf16x8 out;
    for (int j = 0; j < 4; ++j)
      out.pairs[j] = Q8Grid(values[i].x[2 * j], values[i].x[2 * j + 1], scale);
    Bf16Rows at = y;
    at.data += piece * kLaneChannels;
    StoreChannels(at, 0, 0, out);
  }
}

}  // namespace

Status QuantizeFp8(const QuantizeFp8Args& args, Stream& stream) {
  int64_t rows = args.x.rows();
  const int64_t element = DTypeBytes(args.x.dtype());
  QuantizeParams params{.x = args.x.data(),
                        .y = args.y.Row<uint16_t>(0),
                        .x_stride = args.x.row_stride(),
                        .y_stride = args.y.row_stride(),
                        .pieces = args.x.row_size() / kLaneChannels,
                        .blocks_per_row = 0,
                        .x_vector = IsAligned(args.x.data(), element * args.x.row_stride(), 16),
                        .y_vector = IsAligned(args.y.data(), 2 * args.y.row_stride(), 16)};
  if (args.x.contiguous() && args.y.contiguous()) {
    params.pieces *= rows;
    rows = rows > 0 ? 1 : 0;
  }
  params.blocks_per_row = (params.pieces + kBlock * kPieces - 1) / (kBlock * kPieces);
  const LaunchConfig config{.grid = {static_cast<uint32_t>(rows * params.blocks_per_row)},
                            .block = kBlock,
                            .overlap_previous = true};
  return Launch("QuantizeFp8",
                args.x.dtype() == DType::kF32 ? QuantizeKernel<float> : QuantizeKernel<uint16_t>,
                config, stream, params);
}

}  // namespace deepinfer::cuda
