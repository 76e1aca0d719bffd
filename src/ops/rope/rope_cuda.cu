// Rotation of heads, in place, and the table of angles.
//
// Rope is bound by memory. Of a query head of 512 channels only the 64 rotated ones are touched:
// eight lanes per head, 16 bytes each, 256 bytes read and written per head. Index queries are read
// and written whole, because they are quantised, four lanes to a group. A thread has kPieces
// pieces in flight where rows are many. RopeTable is bound by double-precision sincos, 32 per row.
#include "ops/quantize/group_quantize.cuh"
#include "ops/rope/rope.cuh"
#include "ops/rope/rope_impl.h"

namespace deepinfer::cuda {
namespace {

constexpr int kBlock = 256;

__global__ void RopeTableKernel(const int32_t* positions, int64_t scale, const float* frequencies,
                                float* table, int64_t table_stride, int64_t rows, int pairs) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  WaitForPreviousKernel();
  AllowNextKernel();
  const int64_t row = i / pairs;
  const int pair = static_cast<int>(i % pairs);
  if (row >= rows) return;
  const auto position = static_cast<float>(static_cast<int64_t>(positions[row]) * scale);
  const float angle = position * frequencies[pair];
  double sine = 0.0;
  double cosine = 0.0;
  sincos(static_cast<double>(angle), &sine, &cosine);
  float* out = table + row * table_stride + 2 * pair;
  out[0] = static_cast<float>(cosine);
  out[1] = static_cast<float>(sine);
}

struct RopeParams {
  uint16_t* x;
  int64_t row_stride;
  RotationTable table;
  int heads;
  int channels;         // of a head
  int first;            // channel that the first piece begins at
  int pieces_per_head;  // of eight channels
  int blocks_per_row;
  bool vector;
};

// Pieces of one row: those from `first` on of every head.
template <bool kQuantize, int kPieces>
__global__ void RopeKernel(const RopeParams p) {
  const int64_t row = blockIdx.x / p.blocks_per_row;
  const int begin = static_cast<int>(blockIdx.x % p.blocks_per_row) * (kBlock * kPieces) +
                    static_cast<int>(threadIdx.x);
  Bf16Rows head[kPieces];
  int channel[kPieces];
  Bf16x8 x[kPieces];
  WaitForPreviousKernel();
  AllowNextKernel();
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int piece = begin + i * kBlock;
    const int h = piece / p.pieces_per_head;
    channel[i] = p.first + piece % p.pieces_per_head * kLaneChannels;
    head[i].data = p.x + row * p.row_stride + static_cast<int64_t>(h) * p.channels;
    head[i].channels = h < p.heads ? p.channels : 0;
    head[i].vector = p.vector;
    x[i] = LoadChannels(head[i], 0, channel[i]);
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    float values[kLaneChannels];
    Unpack(x[i], values);
    RotateChannels(p.table, row, channel[i], head[i].channels, values);
    Bf16x8 out;
    if (kQuantize) {
      const Q4PScale scale(LaneGroupMax<4>(Amax(values)));
      uint32_t pairs[4];
      DecodeE2M1x8(E2M1Codes(values, scale), scale.bf16x2(), pairs);
      for (int j = 0; j < 4; ++j) out.pairs[j] = pairs[j];
    } else {
      out = Pack(values);
    }
    StoreChannels(head[i], 0, channel[i], out);
  }
}

}  // namespace

Status RopeTable(const RopeTableArgs& args, Stream& stream) {
  const int64_t rows = args.positions.rows();
  const int64_t pairs = args.frequencies.rows();
  const LaunchConfig config{.grid = {static_cast<uint32_t>((rows * pairs + kBlock - 1) / kBlock)},
                            .block = kBlock,
                            .overlap_previous = true};
  return Launch("RopeTable", RopeTableKernel, config, stream, args.positions.Row<int32_t>(0),
                args.scale, args.frequencies.Row<float>(0), args.table.Row<float>(0),
                args.table.row_stride(), rows, static_cast<int>(pairs));
}

Status Rope(const RopeArgs& args, Stream& stream) {
  const int64_t rows = args.x.rows();
  const auto channels = static_cast<int>(args.x.dim(2));
  RopeParams params{.x = args.x.Row<uint16_t>(0),
                    .row_stride = args.x.row_stride(),
                    .table = RotationTable(args.table, channels),
                    .heads = static_cast<int>(args.x.dim(1)),
                    .channels = channels,
                    .first = 0,
                    .pieces_per_head = 0,
                    .blocks_per_row = 0,
                    .vector = IsAligned(args.x.data(), 2 * args.x.row_stride(), 16) &&
                              channels % kLaneChannels == 0};
  params.first = args.quantize_q4p ? 0 : params.table.first / kLaneChannels * kLaneChannels;
  params.pieces_per_head = (channels - params.first + kLaneChannels - 1) / kLaneChannels;
  constexpr int kPieces = 2;
  const int pieces = rows > stream.sm_count() ? kPieces : 1;
  params.blocks_per_row =
      (params.heads * params.pieces_per_head + kBlock * pieces - 1) / (kBlock * pieces);
  const LaunchConfig config{.grid = {static_cast<uint32_t>(rows * params.blocks_per_row)},
                            .block = kBlock,
                            .overlap_previous = true};
  if (args.quantize_q4p) {
    return Launch("Rope", pieces == 1 ? RopeKernel<true, 1> : RopeKernel<true, kPieces>, config,
                  stream, params);
  }
  return Launch("Rope", pieces == 1 ? RopeKernel<false, 1> : RopeKernel<false, kPieces>, config,
                stream, params);
}

}  // namespace deepinfer::cuda
