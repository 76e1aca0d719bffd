// Rows of bf16 channels as row kernels see them: a lane has eight consecutive channels, 16 bytes.
// Rows whose place or width does not allow 16-byte accesses are moved element by element; such rows
// occur in small test models only.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "device.cuh"
#include "tensor/tensor_view.h"

namespace deepinfer::cuda {

inline constexpr int kLaneChannels = 8;

inline bool IsAligned(const void* data, int64_t row_bytes, int64_t alignment) {
  return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(row_bytes)) %
             static_cast<uintptr_t>(alignment) ==
         0;
}

struct Bf16Rows {
  Bf16Rows() = default;
  // The rows of a tensor; a tensor of one axis is a row.
  explicit Bf16Rows(const TensorView& view)
      : data(static_cast<uint16_t*>(view.data())),
        stride(view.row_stride()),
        channels(static_cast<int>(view.rank() == 1 ? view.dim(0) : view.row_size())),
        vector(IsAligned(view.data(), 2 * view.row_stride(), 16) && channels % kLaneChannels == 0) {
  }
  uint16_t* data = nullptr;
  int64_t stride = 0;  // elements
  int channels = 0;
  bool vector = false;
};

// Eight channels, two to a word.
struct Bf16x8 {
  uint32_t pairs[4];
};

// Channels beyond the row's end are zero.
__device__ inline Bf16x8 LoadChannels(const Bf16Rows& rows, int64_t row, int channel) {
  Bf16x8 x = {};
  if (channel >= rows.channels) return x;
  const uint16_t* data = rows.data + row * rows.stride + channel;
  if (rows.vector) {
    const uint4 v = *reinterpret_cast<const uint4*>(data);
    return {{v.x, v.y, v.z, v.w}};
  }
  for (int i = 0; i < kLaneChannels; ++i) {
    if (channel + i < rows.channels)
      x.pairs[i / 2] |= static_cast<uint32_t>(data[i]) << (16 * (i % 2));
  }
  return x;
}

__device__ inline void StoreChannels(const Bf16Rows& rows, int64_t row, int channel,
                                     const Bf16x8& x) {
  if (channel >= rows.channels) return;
  uint16_t* data = rows.data + row * rows.stride + channel;
  if (rows.vector) {
    *reinterpret_cast<uint4*>(data) = make_uint4(x.pairs[0], x.pairs[1], x.pairs[2], x.pairs[3]);
    return;
  }
  for (int i = 0; i < kLaneChannels; ++i) {
    if (channel + i < rows.channels)
      data[i] = static_cast<uint16_t>(x.pairs[i / 2] >> (16 * (i % 2)));
  }
}

__device__ inline void Unpack(const Bf16x8& x, float (&out)[kLaneChannels]) {
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = Bf16LowToFloat(x.pairs[i]);
    out[2 * i + 1] = Bf16HighToFloat(x.pairs[i]);
  }
}

__device__ inline Bf16x8 Pack(const float (&x)[kLaneChannels]) {
  Bf16x8 packed;
  for (int i = 0; i < 4; ++i) packed.pairs[i] = FloatsToBf16x2(x[2 * i], x[2 * i + 1]);
  return packed;
}

// The sum over the lanes of a warp, the same bits in all of them. Warp.
__device__ inline float WarpSum(float x) {
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

}  // namespace deepinfer::cuda
