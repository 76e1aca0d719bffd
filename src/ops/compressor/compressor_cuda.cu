// The gated pooling of pairs and the sequences' remainders, in one launch.
//
// Bound by memory: 8 KB of fp32 key and gate per row of 512 channels. A thread has four channels.
// Blocks of two kinds: one per entry whose pair lies in this step, and one per sequence, which
// pools the entry that a remainder completes, if there is one, before it overwrites the remainders.
// The thread that reads a carried value is the one that overwrites it, so nothing else orders the
// two.
#include <algorithm>

#include "ops/compressor/compressor_impl.h"
#include "ops/cuda/rows.cuh"

namespace deepinfer::cuda {
namespace {

constexpr int kBlock = 128;

struct CompressParams {
  const float* key;
  const float* gate;
  int64_t key_stride;
  int64_t gate_stride;
  const int32_t* positions;
  const int32_t* sequence_start;
  const int32_t* sequence_slot;
  const int32_t* last_row;
  const int32_t* sequence;
  const int32_t* index;
  float* remainders;
  int64_t slot_stride;
  uint16_t* pooled;
  int64_t pooled_stride;
  int entries;
  int remainder_rows;
  int dim;
};

template <int kWidth>
struct Channels {
  float x[kWidth];
};

template <int kWidth>
__device__ inline Channels<kWidth> Load(const float* data) {
  if constexpr (kWidth == 4) {
    const float4 v = *reinterpret_cast<const float4*>(data);
    return {{v.x, v.y, v.z, v.w}};
  } else {
    return {{*data}};
  }
}

template <int kWidth>
__device__ inline void Copy(const float* from, float* to) {
  if constexpr (kWidth == 4) {
    *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
  } else {
    *to = *from;
  }
}

// pooled[entry] of kWidth channels from `d` on.
template <int kWidth>
__device__ inline void Pool(const CompressParams& p, int entry, int d, const float* first_key,
                            const float* first_gate, int second_row) {
  const auto k0 = Load<kWidth>(first_key + d);
  const auto g0 = Load<kWidth>(first_gate + d);
  const auto k1 = Load<kWidth>(p.key + second_row * p.key_stride + d);
  const auto g1 = Load<kWidth>(p.gate + second_row * p.gate_stride + d);
  float out[kWidth];
  for (int i = 0; i < kWidth; ++i) {
    const float largest = fmaxf(g0.x[i], g1.x[i]);
    const float e0 = expf(g0.x[i] - largest);
    const float e1 = expf(g1.x[i] - largest);
    const float sum = e0 + e1;
    out[i] = e0 / sum * k0.x[i] + e1 / sum * k1.x[i];
  }
  uint16_t* pooled = p.pooled + entry * p.pooled_stride + d;
  if constexpr (kWidth == 4) {
    *reinterpret_cast<uint2*>(pooled) =
        make_uint2(FloatsToBf16x2(out[0], out[1]), FloatsToBf16x2(out[2], out[3]));
  } else {
    *pooled = FloatToBf16(out[0]);
  }
}

template <int kWidth>
__global__ void CompressPairsKernel(const CompressParams p) {
  WaitForPreviousKernel();
  AllowNextKernel();
  const auto block = static_cast<int>(blockIdx.x);
  if (block < p.entries) {
    if (p.index[block] < 0) return;
    const int second = p.last_row[block];
    if (second - 1 < p.sequence_start[p.sequence[block]]) return;  // its sequence's block does it
    for (int d = static_cast<int>(threadIdx.x) * kWidth; d < p.dim; d += kBlock * kWidth) {
      Pool<kWidth>(p, block, d, p.key + (second - 1) * p.key_stride,
                   p.gate + (second - 1) * p.gate_stride, second);
    }
    return;
  }
  const int s = block - p.entries;
  const int begin = p.sequence_start[s];
  const int end = p.sequence_start[s + 1];
  if (begin == end) return;
  float* slot = p.remainders + p.sequence_slot[s] * p.slot_stride;
  const auto remainder_of = [&](int position) {
    return slot + static_cast<int64_t>(position % p.remainder_rows) * 2 * p.dim;
  };
  __shared__ int carried;  // the entry whose first half is a remainder
  const int first_position = p.positions[begin];
  if (threadIdx.x == 0) carried = -1;
  __syncthreads();
  if (first_position % 2 != 0) {
    for (int e = static_cast<int>(threadIdx.x); e < p.entries; e += kBlock) {
      if (p.index[e] >= 0 && p.sequence[e] == s && p.last_row[e] == begin) carried = e;
    }
  }
  __syncthreads();
  for (int d = static_cast<int>(threadIdx.x) * kWidth; d < p.dim; d += kBlock * kWidth) {
    if (carried >= 0) {
      const float* remainder = remainder_of(first_position - 1);
      Pool<kWidth>(p, carried, d, remainder, remainder + p.dim, begin);
    }
    const int first = end - p.remainder_rows > begin ? end - p.remainder_rows : begin;
    for (int row = first; row < end; ++row) {
      float* remainder = remainder_of(p.positions[row]);
      Copy<kWidth>(p.key + row * p.key_stride + d, remainder + d);
      Copy<kWidth>(p.gate + row * p.gate_stride + d, remainder + p.dim + d);
    }
  }
}

}  // namespace

Status CompressPairs(const CompressPairsArgs& args, Stream& stream) {
  const int64_t dim = args.key.dim(1);
  const CompressParams params{.key = args.key.Row<float>(0),
                              .gate = args.gate.Row<float>(0),
                              .key_stride = args.key.row_stride(),
                              .gate_stride = args.gate.row_stride(),
                              .positions = args.layout.positions.Row<int32_t>(0),
                              .sequence_start = args.layout.sequence_start.Row<int32_t>(0),
                              .sequence_slot = args.layout.sequence_slot.Row<int32_t>(0),
                              .last_row = args.entries.last_row.Row<int32_t>(0),
                              .sequence = args.entries.sequence.Row<int32_t>(0),
                              .index = args.entries.index.Row<int32_t>(0),
                              .remainders = args.remainders.Row<float>(0),
                              .slot_stride = args.remainders.row_stride(),
                              .pooled = args.pooled.Row<uint16_t>(0),
                              .pooled_stride = args.pooled.row_stride(),
                              .entries = static_cast<int>(args.entries.count()),
                              .remainder_rows = static_cast<int>(args.remainders.dim(1)),
                              .dim = static_cast<int>(dim)};
  const bool vector = dim % 4 == 0 && IsAligned(params.key, 4 * params.key_stride, 16) &&
                      IsAligned(params.gate, 4 * params.gate_stride, 16) &&
                      IsAligned(params.remainders, 4 * params.slot_stride, 16) &&
                      IsAligned(params.pooled, 2 * params.pooled_stride, 8);
  const LaunchConfig config{
      .grid = {static_cast<uint32_t>(args.entries.count() + args.layout.num_sequences())},
      .block = kBlock,
      .overlap_previous = true};
  return Launch("CompressPairs", vector ? CompressPairsKernel<4> : CompressPairsKernel<1>, config,
                stream, params);
}

}  // namespace deepinfer::cuda
