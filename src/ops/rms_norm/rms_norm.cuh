// RMSNorm of rows whose channels lie in the registers of one or several warps, for all kernels that
// begin with one.
//
// A chunk is 256 channels, eight per lane. The sum of squares is fp32 in an order that depends on
// the row's width only: eight channels as a tree, then for each of the 32 lanes its chunks in
// ascending order, then a butterfly over the lanes. So it does not matter how many warps share a
// row.
#pragma once

#include "ops/cuda/rows.cuh"

namespace deepinfer::cuda {

inline constexpr int kChunkChannels = 32 * kLaneChannels;

inline int NumChunks(int64_t channels) {
  return static_cast<int>((channels + kChunkChannels - 1) / kChunkChannels);
}

__device__ inline float SquareSum(const float (&x)[kLaneChannels]) {
  float pair[4];
  for (int i = 0; i < 4; ++i) pair[i] = fmaf(x[2 * i + 1], x[2 * i + 1], x[2 * i] * x[2 * i]);
  return (pair[0] + pair[1]) + (pair[2] + pair[3]);
}

// 1 / sqrt(mean of squares + eps) of a row that `warps` warps hold: chunk warp + i * warps in
// `squares[i]`, 0 beyond the row's end. Several warps need `shared` with 32 floats for each of the
// warps * kChunks chunks, and a barrier of their own.
template <int kChunks>
__device__ inline float RmsScale(const float (&squares)[kChunks], int warps, int warp, int channels,
                                 float eps, float* shared, int barrier) {
  float sum = 0.0f;
  if (warps == 1) {
    for (int i = 0; i < kChunks; ++i) sum += squares[i];
  } else {
    for (int i = 0; i < kChunks; ++i) shared[(warp + i * warps) * 32 + LaneId()] = squares[i];
    NamedBarrierSync(barrier, warps * 32);
    for (int i = 0; i < warps * kChunks; ++i) sum += shared[i * 32 + LaneId()];
  }
  const float mean = WarpSum(sum) / static_cast<float>(channels);
  return 1.0f / sqrtf(mean + eps);
}

// bf16(weight * (x * scale)) as fp32 values.
__device__ inline void ScaleChannels(float (&x)[kLaneChannels], const Bf16x8& weight, float scale) {
  float w[kLaneChannels];
  Unpack(weight, w);
  for (int i = 0; i < kLaneChannels; ++i) x[i] = w[i] * (x[i] * scale);
  Unpack(Pack(x), x);
}

}  // namespace deepinfer::cuda
