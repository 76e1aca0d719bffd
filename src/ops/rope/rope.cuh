// The rotation of a vector's last channels, eight channels per lane; ops/rope/rotate.h on the
// device.
#pragma once

#include "ops/cuda/rows.cuh"

namespace deepinfer::cuda {

struct RotationTable {
  RotationTable() = default;
  // For vectors of `vector_channels` channels.
  RotationTable(const TensorView& table, int64_t vector_channels)
      : data(static_cast<const float*>(table.data())),
        stride(table.row_stride()),
        first(static_cast<int>(vector_channels - 2 * table.dim(1))),
        vector(IsAligned(table.data(), 4 * table.row_stride(), 16) && first % kLaneChannels == 0 &&
               vector_channels % kLaneChannels == 0) {}
  const float* data = nullptr;
  int64_t stride = 0;
  int first = 0;  // the first rotated channel
  bool vector = false;
};

// Rotates the lane's channels [channel, channel + 8) as far as they belong to pairs of the table,
// and rounds those to bf16.
__device__ inline void RotateChannels(const RotationTable& table, int64_t row, int channel,
                                      int vector_channels, float (&x)[kLaneChannels]) {
  if (channel + kLaneChannels <= table.first || channel >= vector_channels) return;
  const float* cos_sin = table.data + row * table.stride + (channel - table.first);
  float t[kLaneChannels];
  if (table.vector) {
    const float4 low = *reinterpret_cast<const float4*>(cos_sin);
    const float4 high = *reinterpret_cast<const float4*>(cos_sin + 4);
    t[0] = low.x, t[1] = low.y, t[2] = low.z, t[3] = low.w;
    t[4] = high.x, t[5] = high.y, t[6] = high.z, t[7] = high.w;
  }
  for (int i = 0; i < kLaneChannels; i += 2) {
    if (!table.vector) {
      if (channel + i < table.first || channel + i >= vector_channels) continue;
      t[i] = cos_sin[i];
      t[i + 1] = cos_sin[i + 1];
    }
    const float x0 = x[i];
    const float x1 = x[i + 1];
    const uint32_t pair =
        FloatsToBf16x2(fmaf(x0, t[i], -(x1 * t[i + 1])), fmaf(x0, t[i + 1], x1 * t[i]));
    x[i] = Bf16LowToFloat(pair);
    x[i + 1] = Bf16HighToFloat(pair);
  }
}

}  // namespace deepinfer::cuda
