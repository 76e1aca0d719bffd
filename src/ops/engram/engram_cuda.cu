// Engram on the GPU.
//
// EngramHash: one thread per look-up; 64-bit remainders, 24 per row. EngramGather: 264 bytes at
// random places of a table of gigabytes, in device memory or in page-locked memory of the host, 512
// bytes written per look-up: bound by the latency of those reads. A warp reads a row of 256 codes
// with one 8-byte load per lane, so that the 16 bytes a lane writes are consecutive; it has kPieces
// rows in flight. Over the bus, a grid of no more than one block per multiprocessor walks the
// look-ups, because more rows in flight than the bus and the address translation hold only get in
// each other's way. EngramApply: a block per residual stream of a row; 133 KB per row of hidden
// size 5120, bound by memory; everything is loaded before the reduction and stays in registers.
#include <algorithm>

#include "ops/cuda/rows.cuh"
#include "ops/engram/engram_impl.h"
#include "ops/quantize/group_quantize.cuh"

namespace deepinfer::cuda {
namespace {

// ---- Hash
// ----------------------------------------------------------------------------------------

constexpr int kMaxNgram = 8;
constexpr int kMaxLookups = 64;
constexpr int kHashBlock = 128;

struct HashParams {
  const int32_t* lookback;
  int64_t lookback_stride;
  int64_t* table_rows;
  int64_t table_rows_stride;
  int64_t rows;
  int lookups;
  int heads;
  int64_t multipliers[kMaxNgram];
  int64_t primes[kMaxLookups];
  int64_t offsets[kMaxLookups];
};

__global__ void EngramHashKernel(const __grid_constant__ HashParams p) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kHashBlock + threadIdx.x;
  const int64_t row = thread / p.lookups;
  const int lookup = static_cast<int>(thread % p.lookups);
  WaitForPreviousKernel();
  AllowNextKernel();
  if (row >= p.rows) return;
  const int32_t* ids = p.lookback + row * p.lookback_stride;
  int64_t hash = ids[0] * p.multipliers[0];
  for (int n = 1; n <= lookup / p.heads + 1; ++n) hash ^= ids[n] * p.multipliers[n];
  p.table_rows[row * p.table_rows_stride + lookup] = hash % p.primes[lookup] + p.offsets[lookup];
}

// ---- Gather
// --------------------------------------------------------------------------------------

constexpr int kGatherBlock = 128;

struct GatherParams {
  const int64_t* table_rows;
  int64_t table_rows_stride;
  const uint8_t* weight;
  int64_t weight_stride;
  const uint8_t* scale;
  int64_t scale_stride;
  uint16_t* out;
  int64_t out_stride;
  int64_t pieces;  // of eight channels, of all look-ups
  int lookups;
  int pieces_per_lookup;
  bool vector;      // codes are read 8 bytes at a time
  bool out_vector;  // outputs are written 16 bytes at a time
};

template <int kPieces>
__global__ void EngramGatherKernel(const GatherParams p) {
  WaitForPreviousKernel();
  AllowNextKernel();
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kGatherBlock * kPieces);
  for (int64_t begin = static_cast<int64_t>(blockIdx.x) * (kGatherBlock * kPieces) + threadIdx.x;
       begin < p.pieces; begin += step) {
    int64_t source_row[kPieces];
    int64_t row[kPieces];
    int column[kPieces];  // of the output row, in pieces
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int64_t piece = begin + i * kGatherBlock;
      const int64_t per_row = static_cast<int64_t>(p.lookups) * p.pieces_per_lookup;
      row[i] = piece / per_row;
      column[i] = static_cast<int>(piece - row[i] * per_row);
      source_row[i] = 0;
      if (piece < p.pieces) {
        source_row[i] =
            p.table_rows[row[i] * p.table_rows_stride + column[i] / p.pieces_per_lookup];
      }
    }
    uint2 codes[kPieces] = {};
    uint32_t scale[kPieces] = {};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (begin + i * kGatherBlock >= p.pieces) continue;
      const int channel = column[i] % p.pieces_per_lookup * kLaneChannels;
      const uint8_t* source = p.weight + source_row[i] * p.weight_stride + channel;
      if (p.vector) {
        codes[i] = *reinterpret_cast<const uint2*>(source);
      } else {
        for (int j = 0; j < 4; ++j) {
          codes[i].x |= static_cast<uint32_t>(source[j]) << (8 * j);
          codes[i].y |= static_cast<uint32_t>(source[j + 4]) << (8 * j);
        }
      }
      scale[i] = p.scale[source_row[i] * p.scale_stride + channel / 32];
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (begin + i * kGatherBlock >= p.pieces) continue;
      uint32_t pairs[4];
      DecodeAnyE4M3x4(codes[i].x, scale[i], pairs);
      DecodeAnyE4M3x4(codes[i].y, scale[i], pairs + 2);
      Bf16Rows out;
      out.data = p.out + row[i] * p.out_stride + static_cast<int64_t>(column[i]) * kLaneChannels;
      out.channels = kLaneChannels;
      out.vector = p.out_vector;
      StoreChannels(out, 0, 0, {{pairs[0], pairs[1], pairs[2], pairs[3]}});
    }
  }
}

// ---- Gate and update
// -----------------------------------------------------------------------------

constexpr int kStreams = 4;
constexpr int kMaxApplyWarps = 32;

struct ApplyParams {
  const uint16_t* kv;
  int64_t kv_stride;
  uint16_t* streams;
  int64_t streams_stride;
  Bf16Rows q_weight;
  Bf16Rows k_weight;
  int hidden;
  bool vector;
  float eps;
  float root;  // hidden^-0.5
};

__device__ inline float GateOf(float dot) {
  const float root = copysignf(sqrtf(fmaxf(fabsf(dot), 1e-6f)), dot);
  return 1.0f / (1.0f + expf(-root));
}

// The block's sum of each of three values, in a fixed order, for all threads.
__device__ inline void BlockSums(float (&x)[3]) {
  __shared__ float sums[3][kMaxApplyWarps];
  const int warps = static_cast<int>(blockDim.x / 32u);
  const int warp = WarpId();
  for (int i = 0; i < 3; ++i) x[i] = WarpSum(x[i]);
  if (LaneId() == 0) {
    for (int i = 0; i < 3; ++i) sums[i][warp] = x[i];
  }
  __syncthreads();
  for (int i = 0; i < 3; ++i) x[i] = WarpSum(LaneId() < warps ? sums[i][LaneId()] : 0.0f);
}

template <int kPieces>
__global__ void EngramApplyKernel(const ApplyParams p) {
  const int64_t row = blockIdx.x / kStreams;
  const int s = static_cast<int>(blockIdx.x % kStreams);
  const auto channel_of = [&](int i) {
    return (static_cast<int>(threadIdx.x) + i * static_cast<int>(blockDim.x)) * kLaneChannels;
  };
  Bf16x8 q_weight[kPieces], k_weight[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    q_weight[i] = LoadChannels(p.q_weight, s, channel_of(i));
    k_weight[i] = LoadChannels(p.k_weight, s, channel_of(i));
  }
  Bf16Rows h, key, value;
  h.data = p.streams + row * p.streams_stride + static_cast<int64_t>(s) * p.hidden;
  key.data = const_cast<uint16_t*>(p.kv) + row * p.kv_stride + static_cast<int64_t>(s) * p.hidden;
  value.data =
      const_cast<uint16_t*>(p.kv) + row * p.kv_stride + static_cast<int64_t>(kStreams) * p.hidden;
  h.channels = key.channels = value.channels = p.hidden;
  h.vector = key.vector = value.vector = p.vector;
  WaitForPreviousKernel();
  AllowNextKernel();
  Bf16x8 hs[kPieces], keys[kPieces], values[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    hs[i] = LoadChannels(h, 0, channel_of(i));
    keys[i] = LoadChannels(key, 0, channel_of(i));
    values[i] = LoadChannels(value, 0, channel_of(i));
  }
  float sums[3] = {0.0f, 0.0f, 0.0f};  // dot, h^2, key^2
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    float hx[kLaneChannels], kx[kLaneChannels], qw[kLaneChannels], kw[kLaneChannels];
    Unpack(hs[i], hx);
    Unpack(keys[i], kx);
    Unpack(q_weight[i], qw);
    Unpack(k_weight[i], kw);
    for (int j = 0; j < kLaneChannels; ++j) {
      sums[0] = fmaf(hx[j] * (qw[j] * kw[j]), kx[j], sums[0]);
      sums[1] = fmaf(hx[j], hx[j], sums[1]);
      sums[2] = fmaf(kx[j], kx[j], sums[2]);
    }
  }
  BlockSums(sums);
  const auto n = static_cast<float>(p.hidden);
  const float h_scale = 1.0f / sqrtf(sums[1] / n + p.eps);
  const float k_scale = 1.0f / sqrtf(sums[2] / n + p.eps);
  const float gate = GateOf(sums[0] * h_scale * k_scale * p.root);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    float hx[kLaneChannels], vx[kLaneChannels];
    Unpack(hs[i], hx);
    Unpack(values[i], vx);
    for (int j = 0; j < kLaneChannels; ++j) hx[j] += gate * vx[j];
    StoreChannels(h, 0, channel_of(i), Pack(hx));
  }
}

}  // namespace

Status EngramHash(const EngramHashArgs& args, Stream& stream) {
  if (args.multipliers.size() > kMaxNgram || args.primes.size() > kMaxLookups) {
    return Fail(Code::kUnsupported,
                fmt::format("EngramHash: {} look-ups of n-grams up to {} are more than the {} and "
                            "{} that the CUDA kernel takes.",
                            args.primes.size(), args.multipliers.size(), kMaxLookups, kMaxNgram));
  }
  const auto lookups = static_cast<int>(args.primes.size());
  HashParams params{.lookback = args.lookback.Row<int32_t>(0),
                    .lookback_stride = args.lookback.row_stride(),
                    .table_rows = args.table_rows.Row<int64_t>(0),
                    .table_rows_stride = args.table_rows.row_stride(),
                    .rows = args.lookback.rows(),
                    .lookups = lookups,
                    .heads = lookups / (static_cast<int>(args.multipliers.size()) - 1),
                    .multipliers = {},
                    .primes = {},
                    .offsets = {}};
  std::copy(args.multipliers.begin(), args.multipliers.end(), params.multipliers);
  std::copy(args.primes.begin(), args.primes.end(), params.primes);
  std::copy(args.offsets.begin(), args.offsets.end(), params.offsets);
  const LaunchConfig config{
      .grid = {static_cast<uint32_t>((params.rows * lookups + kHashBlock - 1) / kHashBlock)},
      .block = kHashBlock,
      .overlap_previous = true};
  return Launch("EngramHash", EngramHashKernel, config, stream, params);
}

Status EngramGather(const EngramGatherArgs& args, Stream& stream) {
  const int64_t rows = args.table_rows.rows();
  const int64_t lookups = args.table_rows.dim(1);
  const int64_t channels = args.weight.dim(1);
  const GatherParams params{
      .table_rows = args.table_rows.Row<int64_t>(0),
      .table_rows_stride = args.table_rows.row_stride(),
      .weight = args.weight.Row<uint8_t>(0),
      .weight_stride = args.weight.row_stride(),
      .scale = args.scale.Row<uint8_t>(0),
      .scale_stride = args.scale.row_stride(),
      .out = args.out.Row<uint16_t>(0),
      .out_stride = args.out.row_stride(),
      .pieces = rows * lookups * channels / kLaneChannels,
      .lookups = static_cast<int>(lookups),
      .pieces_per_lookup = static_cast<int>(channels / kLaneChannels),
      .vector = IsAligned(args.weight.data(), args.weight.row_stride(), 8),
      .out_vector = IsAligned(args.out.data(), 2 * args.out.row_stride(), 16)};
  // Few look-ups: spread as widely as possible, one row per warp.
  constexpr int kPieces = 4;
  const bool few = params.pieces <= static_cast<int64_t>(stream.sm_count()) * kGatherBlock * 4;
  const int64_t per_block = kGatherBlock * (few ? 1 : kPieces);
  int64_t blocks = (params.pieces + per_block - 1) / per_block;
  if (args.weight.device().kind != DeviceKind::kCuda)
    blocks = std::min<int64_t>(blocks, stream.sm_count());
  const LaunchConfig config{
      .grid = {static_cast<uint32_t>(blocks)}, .block = kGatherBlock, .overlap_previous = true};
  return Launch("EngramGather", few ? EngramGatherKernel<1> : EngramGatherKernel<kPieces>, config,
                stream, params);
}

Status EngramApply(const EngramApplyArgs& args, Stream& stream) {
  const int64_t hidden = args.streams.dim(2);
  const ApplyParams params{
      .kv = args.kv.Row<uint16_t>(0),
      .kv_stride = args.kv.row_stride(),
      .streams = args.streams.Row<uint16_t>(0),
      .streams_stride = args.streams.row_stride(),
      .q_weight = Bf16Rows(args.q_weight),
      .k_weight = Bf16Rows(args.k_weight),
      .hidden = static_cast<int>(hidden),
      .vector = hidden % kLaneChannels == 0 &&
                IsAligned(args.kv.data(), 2 * args.kv.row_stride(), 16) &&
                IsAligned(args.streams.data(), 2 * args.streams.row_stride(), 16),
      .eps = args.eps,
      .root = static_cast<float>(1.0 / std::sqrt(static_cast<double>(hidden)))};
  const int64_t pieces = (hidden + kLaneChannels - 1) / kLaneChannels;
  const auto launch = [&](auto kernel, int64_t per_thread) {
    const int64_t threads = (pieces + per_thread - 1) / per_thread;
    const LaunchConfig config{.grid = {static_cast<uint32_t>(args.streams.rows() * kStreams)},
                              .block = static_cast<int>((threads + 31) / 32 * 32),
                              .overlap_previous = true};
    return Launch("EngramApply", kernel, config, stream, params);
  };
  if (pieces <= 256) return launch(EngramApplyKernel<1>, 1);
  if (pieces <= 2048) return launch(EngramApplyKernel<2>, 2);
  if (pieces <= 4096) return launch(EngramApplyKernel<4>, 4);
  return Fail(
      Code::kUnsupported,
      fmt::format("EngramApply: a hidden size of {} is larger than a GPU's block holds.", hidden),
      "streams");
}

}  // namespace deepinfer::cuda
