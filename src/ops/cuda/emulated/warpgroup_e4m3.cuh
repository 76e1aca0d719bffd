// The interface of src/ops/cuda/native/warpgroup_e4m3.cuh on the CPU.
#pragma once

#include "warpgroup.cuh"

namespace deepinfer::cuda {

template <int kCount>
inline void WarpgroupMmaRegistersE4M3(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b,
                                      bool accumulate) {
  emulated::WarpgroupMma mma{.d = d,
                             .count = kCount,
                             .a_registers = a,
                             .a = 0,
                             .b = b,
                             .accumulate = accumulate,
                             .transposed_b = false};
  emulated::RunWarpgroupMma("WarpgroupMmaRegistersE4M3", &mma, &emulated::RunWarpgroupMmaE4M3);
}

}  // namespace deepinfer::cuda
