// What the kernels of hyper-connections share: how a row is cut, the arithmetic of one lane, and
// coefficients and norms of rows.
#pragma once

#include <algorithm>
#include <cmath>

#include "device.cuh"
#include "ops/hyper_connection/hyper_connection_impl.h"
#include "ops/quantize/group_quantize.cuh"

namespace deepinfer::cuda::hc {

inline constexpr int kLaneChannels = 8;
inline constexpr int kUnitChannels = 32;
inline constexpr int kMaxRanks = 16;
inline constexpr int kMaxUnitsPerBlock = 10;  // what shared memory holds of fn
inline constexpr int kStreams = static_cast<int>(kHcStreams);
inline constexpr int kOutputs = static_cast<int>(kHcCoefficients);
inline constexpr int kOutputTiles = kOutputs / 8;
inline constexpr int kParts = 3;               // bf16 parts of an fp32 weight
inline constexpr int kRowSums = kOutputs + 2;  // the products, squares of the streams, squares of x
inline constexpr int kStreamSquares = kOutputs;
inline constexpr int kCollapsedSquares = kOutputs + 1;
// Coefficients of a row in shared memory: post, comb and pre, as float4. 28 words between rows keep
// eight rows apart in the banks.
inline constexpr int kCoefficientPieces = 6;
inline constexpr int kCoefficientStride = 28;

// How the channels of a row are spread; depends on the width only.
struct Partition {
  int units;
  int ranks_log2;
  int ranks;  // blocks that share a row
  int units_per_block;
};

inline Partition PartitionOf(int64_t hidden) {
  Partition partition = {static_cast<int>(hidden / kUnitChannels), 0, 1, 0};
  while (2 * partition.ranks <= std::min(kMaxRanks, partition.units)) {
    ++partition.ranks_log2;
    partition.ranks *= 2;
  }
  partition.units_per_block = (partition.units + partition.ranks - 1) / partition.ranks;
  return partition;
}

struct Params {
  int rows;
  int hidden;
  Partition partition;
  uint16_t* streams;
  int64_t streams_stride;
  const int* row_index;  // null: rows in order
  // Expand.
  const uint16_t* x;
  int64_t x_stride;
  const float* post;
  int64_t post_stride;
  const float* comb;
  int64_t comb_stride;
  // Mix.
  const float* fn;
  int64_t fn_stride;
  const float* base;
  const float* scale;
  float* new_pre;
  int64_t new_pre_stride;
  float* new_post;
  int64_t new_post_stride;
  float* new_comb;
  int64_t new_comb_stride;
  int sinkhorn_iterations;
  float eps;
  float mix_norm_eps;
  // Collapse.
  const float* pre;
  int64_t pre_stride;
  const uint16_t* weight;
  uint16_t* y;
  int64_t y_stride;
  uint16_t* y_grid;  // may be null
  int64_t y_grid_stride;
  float norm_eps;
  // Many rows: [rank][row][kRowSums].
  float* row_sums;
};

// ---- Expand and collapse of eight channels
// ---------------------------------------------------------

struct ExpandCoefficients {
  float post[kStreams];
  float comb[kStreams][kStreams];
};

__device__ inline void Unpack4(float (&out)[4], const float4& v) {
  out[0] = v.x;
  out[1] = v.y;
  out[2] = v.z;
  out[3] = v.w;
}

// Two channels of the new streams in place of the old.
__device__ inline void ExpandPair(const ExpandCoefficients& c, uint32_t x,
                                  uint32_t (&streams)[kStreams]) {
  const float x_low = Bf16LowToFloat(x);
  const float x_high = Bf16HighToFloat(x);
  float low[kStreams];
  float high[kStreams];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    low[j] = c.post[j] * x_low;
    high[j] = c.post[j] * x_high;
  }
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    const float h_low = Bf16LowToFloat(streams[i]);
    const float h_high = Bf16HighToFloat(streams[i]);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      low[j] = fmaf(c.comb[i][j], h_low, low[j]);
      high[j] = fmaf(c.comb[i][j], h_high, high[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < kStreams; ++j) streams[j] = FloatsToBf16x2(low[j], high[j]);
}

// A lane's channels of a row: x and the streams, as words of two.
struct LaneRow {
  uint4 x;
  uint4 streams[kStreams];
};

// What a lane adds up over its channels.
struct LaneSquares {
  float streams = 0.0f;
  float collapsed = 0.0f;
};

__device__ inline uint32_t& Word(uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// A lane's channels: the new streams in place of the old, the collapsed row, and their squares.
template <bool kExpand, bool kMix, bool kCollapse>
__device__ inline void ExpandAndCollapse(const ExpandCoefficients& expand,
                                         const float (&pre)[kStreams], LaneRow& row,
                                         uint4& collapsed, LaneSquares& squares) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    uint32_t words[kStreams];
#pragma unroll
    for (int s = 0; s < kStreams; ++s) words[s] = Word(row.streams[s], w);
    if constexpr (kExpand) {
      ExpandPair(expand, Word(row.x, w), words);
#pragma unroll
      for (int s = 0; s < kStreams; ++s) Word(row.streams[s], w) = words[s];
    }
    float low_sum = 0.0f;
    float high_sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      const float low = Bf16LowToFloat(words[s]);
      const float high = Bf16HighToFloat(words[s]);
      if constexpr (kMix) {
        squares.streams = fmaf(low, low, squares.streams);
        squares.streams = fmaf(high, high, squares.streams);
      }
      if constexpr (kCollapse) {
        low_sum = s == 0 ? pre[0] * low : fmaf(pre[s], low, low_sum);
        high_sum = s == 0 ? pre[0] * high : fmaf(pre[s], high, high_sum);
      }
    }
    if constexpr (kCollapse) {
      const uint32_t pair = FloatsToBf16x2(low_sum, high_sum);
      Word(collapsed, w) = pair;
      const float low = Bf16LowToFloat(pair);
      const float high = Bf16HighToFloat(pair);
      squares.collapsed = fmaf(low, low, squares.collapsed);
      squares.collapsed = fmaf(high, high, squares.collapsed);
    }
  }
}

__device__ inline float QuadSum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <bool kExpand>
__device__ inline void LoadRow(const Params& p, int row, int channel, LaneRow& out) {
  if (row >= p.rows) {
    out = {};
    return;
  }
  const int64_t source = p.row_index == nullptr ? row : p.row_index[row];
  const uint16_t* streams = p.streams + source * p.streams_stride + channel;
  if constexpr (kExpand) out.x = *reinterpret_cast<const uint4*>(p.x + row * p.x_stride + channel);
#pragma unroll
  for (int s = 0; s < kStreams; ++s)
    out.streams[s] = *reinterpret_cast<const uint4*>(streams + static_cast<int64_t>(s) * p.hidden);
}

__device__ inline void StoreStreams(const Params& p, int64_t row, int channel,
                                    const LaneRow& values) {
  uint16_t* streams = p.streams + row * p.streams_stride + channel;
#pragma unroll
  for (int s = 0; s < kStreams; ++s)
    StoreVector(streams + static_cast<int64_t>(s) * p.hidden, values.streams[s]);
}

// ---- fn
// --------------------------------------------------------------------------------------------

// Two weights as words of two bf16 parts: w = hi + mid + lo exactly (mantissa bits 24 to 17, 16 to
// 9, 8 to 1; parts below the smallest subnormal are lost).
__device__ inline void SplitPair(float low, float high, uint32_t (&parts)[kParts]) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const uint32_t low_bits = __float_as_uint(low);
    const uint32_t high_bits = __float_as_uint(high);
    parts[part] = __byte_perm(low_bits, high_bits, 0x7632);
    low -= __uint_as_float(low_bits & 0xffff0000u);
    high -= __uint_as_float(high_bits & 0xffff0000u);
  }
}

// Loads and splits a unit's weights of one stream. Lane 4 g + t has, for output 8 j + g, channels 8
// t to 8 t + 7 of the unit, as the streams' lanes do; `channel` is the first of these. keep(part,
// j, words) gets them.
template <class Keep>
__device__ inline void PrepareFragments(const Params& p, int stream, int channel, int lane,
                                        const Keep& keep) {
  const float* fn =
      p.fn + (lane / 4) * p.fn_stride + static_cast<int64_t>(stream) * p.hidden + channel;
  float4 weights[kOutputTiles][2];
#pragma unroll
  for (int j = 0; j < kOutputTiles; ++j) {
    const auto* source = reinterpret_cast<const float4*>(fn + 8 * j * p.fn_stride);
    weights[j][0] = __ldg(source);
    weights[j][1] = __ldg(source + 1);
  }
#pragma unroll
  for (int j = 0; j < kOutputTiles; ++j) {
    uint32_t words[4][kParts];
    SplitPair(weights[j][0].x, weights[j][0].y, words[0]);
    SplitPair(weights[j][0].z, weights[j][0].w, words[1]);
    SplitPair(weights[j][1].x, weights[j][1].y, words[2]);
    SplitPair(weights[j][1].z, weights[j][1].w, words[3]);
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      keep(part, j, make_uint4(words[0][part], words[1][part], words[2][part], words[3][part]));
  }
}

// ---- Coefficients
// ----------------------------------------------------------------------------------

__device__ inline float Sigmoid(float x) {
  return 1.0f / (1.0f + expf(-x));
}

// c[i] / sum for all i, within 1 ulp: the correction of the reciprocal runs beside the
// multiplication, which keeps it out of the chain of dependent instructions.
__device__ inline void DivideAll(float (&c)[4], float sum) {
  const float reciprocal = Reciprocal(sum);
  const float error = fmaf(-sum, reciprocal, 1.0f);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float quotient = c[i] * reciprocal;
    c[i] = fmaf(quotient, error, quotient);
  }
}

__device__ inline float Sum4(float a, float b, float c, float d) {
  return (a + b) + (c + d);
}

__device__ inline void NormaliseColumns(float (&c)[4][4], float eps) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float column[4] = {c[0][j], c[1][j], c[2][j], c[3][j]};
    DivideAll(column, Sum4(column[0], column[1], column[2], column[3]) + eps);
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i][j] = column[i];
  }
}

// From the exponentials of comb to comb.
__device__ inline void Sinkhorn(float (&c)[4][4], int iterations, float eps) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    DivideAll(c[i], Sum4(c[i][0], c[i][1], c[i][2], c[i][3]));
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i][j] += eps;
  }
  NormaliseColumns(c, eps);
  for (int iteration = 1; iteration < iterations; ++iteration) {
#pragma unroll
    for (int i = 0; i < 4; ++i) DivideAll(c[i], Sum4(c[i][0], c[i][1], c[i][2], c[i][3]) + eps);
    NormaliseColumns(c, eps);
  }
}

// What the sums of products are multiplied by.
__device__ inline float MixScale(const Params& p, float stream_squares) {
  const float mean = stream_squares / static_cast<float>(4 * p.hidden);
  return 1.0f / sqrtf(mean + p.mix_norm_eps);
}

// HcCoefficients of one row by a warp. Lane k < 24 brings sum k, lane 24 the sum of squares.
__device__ inline void WriteCoefficients(const Params& p, int64_t row, float sum, float base,
                                         float scale) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = LaneId();
  const float r = MixScale(p, __shfl_sync(kAll, sum, kStreamSquares));
  const float value = sum * r * scale + base;
  if (lane < 4) p.new_pre[row * p.new_pre_stride + lane] = Sigmoid(value) + p.eps;
  if (lane >= 4 && lane < 8) p.new_post[row * p.new_post_stride + lane - 4] = 2.0f * Sigmoid(value);
  // Softmax of the rows of comb: lanes 8 + 4 i + j.
  float largest = fmaxf(value, __shfl_xor_sync(kAll, value, 1));
  largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
  const float exponential = expf(value - largest);
  float c[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i][j] = __shfl_sync(kAll, exponential, 8 + 4 * i + j);
  }
  Sinkhorn(c, p.sinkhorn_iterations, p.eps);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (lane == i) {
      *reinterpret_cast<float4*>(p.new_comb + row * p.new_comb_stride + 4 * i) =
          make_float4(c[i][0], c[i][1], c[i][2], c[i][3]);
    }
  }
}

// The same of one row by a thread, from 24 sums and the sum of squares.
__device__ inline void WriteCoefficientsOfThread(const Params& p, int64_t row, const float* sums) {
  const float r = MixScale(p, sums[kStreamSquares]);
  const auto value = [&](int k) {
    return sums[k] * r * __ldg(p.scale + (k < 4 ? 0 : k < 8 ? 1 : 2)) + __ldg(p.base + k);
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    p.new_pre[row * p.new_pre_stride + i] = Sigmoid(value(i)) + p.eps;
    p.new_post[row * p.new_post_stride + i] = 2.0f * Sigmoid(value(4 + i));
  }
  float c[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i][j] = value(8 + 4 * i + j);
    const float largest = fmaxf(fmaxf(c[i][0], c[i][1]), fmaxf(c[i][2], c[i][3]));
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i][j] = expf(c[i][j] - largest);
  }
  Sinkhorn(c, p.sinkhorn_iterations, p.eps);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<float4*>(p.new_comb + row * p.new_comb_stride + 4 * i) =
        make_float4(c[i][0], c[i][1], c[i][2], c[i][3]);
  }
}

// ---- Norm
// ------------------------------------------------------------------------------------------

__device__ inline float NormScale(const Params& p, float squares) {
  return 1.0f / sqrtf(squares / static_cast<float>(p.hidden) + p.norm_eps);
}

// y and its copy on the Q8 grid of a lane's channels. Four lanes with consecutive channels take
// part; `valid` is the same for them.
__device__ inline void NormaliseChannels(const Params& p, int64_t row, int channel, bool valid,
                                         float r, uint4 collapsed, uint4 weight) {
  float values[kLaneChannels];
  uint4 y;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t x = Word(collapsed, w);
    const uint32_t pair =
        FloatsToBf16x2(Bf16LowToFloat(Word(weight, w)) * (Bf16LowToFloat(x) * r),
                       Bf16HighToFloat(Word(weight, w)) * (Bf16HighToFloat(x) * r));
    Word(y, w) = pair;
    values[2 * w] = Bf16LowToFloat(pair);
    values[2 * w + 1] = Bf16HighToFloat(pair);
  }
  if (valid) StoreVector(p.y + row * p.y_stride + channel, y);
  if (p.y_grid == nullptr) return;
  const Q8Scale scale(LaneGroupMax<4>(Amax(values)));
  uint4 grid;
#pragma unroll
  for (int w = 0; w < 4; ++w) Word(grid, w) = Q8Grid(values[2 * w], values[2 * w + 1], scale);
  if (valid) StoreVector(p.y_grid + row * p.y_grid_stride + channel, grid);
}

}  // namespace deepinfer::cuda::hc
