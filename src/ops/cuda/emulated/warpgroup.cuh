// Matrix instructions of a warpgroup, on the CPU: the interface of
// src/ops/cuda/native/warpgroup.cuh, for tests without a GPU; keep the two in step. Descriptors are
// decoded and shared memory is addressed as the hardware does it.
#pragma once

#include <cstdint>

#include "device.cuh"

namespace deepinfer::cuda {

enum class Swizzle : uint32_t { kNone = 0, k128Bytes = 1, k64Bytes = 2, k32Bytes = 3 };

inline uint64_t SharedDescriptor(const void* shared, uint32_t leading_bytes, uint32_t stride_bytes,
                                 Swizzle swizzle) {
  if (leading_bytes % 16 != 0 || stride_bytes % 16 != 0 || leading_bytes > 0x3ffffu ||
      stride_bytes > 0x3ffffu)
    emulated::KernelFailed("SharedDescriptor of offsets %u and %u", leading_bytes, stride_bytes);
  emulated::CheckAligned(shared, 16, "SharedDescriptor");
  const uint64_t address = SharedAddress(shared);
  return ((address & 0x3ffffu) >> 4) | (static_cast<uint64_t>(leading_bytes >> 4) << 16) |
         (static_cast<uint64_t>(stride_bytes >> 4) << 32) | (static_cast<uint64_t>(swizzle) << 62);
}
inline uint64_t AdvanceDescriptor(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

inline void WarpgroupFence() {}
inline void WarpgroupCommit() {
  emulated::CommitWarpgroupMmas();
}
template <int kPending>
inline void WarpgroupWait() {
  static_assert(kPending >= 0 && kPending <= 7);
  emulated::WaitForWarpgroupMmas(kPending);
}
template <int kCount>
inline void WarpgroupFenceRegisters(float (&)[kCount]) {}
template <int kCount>
inline void WarpgroupFenceRegisters(uint32_t (&)[kCount]) {}

template <int kTransB, int kCount>
inline void WarpgroupMmaShared(float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate) {
  emulated::WarpgroupMma mma{.d = d,
                             .count = kCount,
                             .a_registers = nullptr,
                             .a = a,
                             .b = b,
                             .accumulate = accumulate,
                             .transposed_b = kTransB != 0};
  emulated::RunWarpgroupMma("WarpgroupMmaShared", &mma, &emulated::RunWarpgroupMmaBf16);
}
template <int kTransB, int kCount>
inline void WarpgroupMmaRegisters(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b,
                                  bool accumulate) {
  emulated::WarpgroupMma mma{.d = d,
                             .count = kCount,
                             .a_registers = a,
                             .a = 0,
                             .b = b,
                             .accumulate = accumulate,
                             .transposed_b = kTransB != 0};
  emulated::RunWarpgroupMma("WarpgroupMmaRegisters", &mma, &emulated::RunWarpgroupMmaBf16);
}
template <int kCount>
inline void WarpgroupMmaSharedE4M3(float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate) {
  emulated::WarpgroupMma mma{.d = d,
                             .count = kCount,
                             .a_registers = nullptr,
                             .a = a,
                             .b = b,
                             .accumulate = accumulate,
                             .transposed_b = false};
  emulated::RunWarpgroupMma("WarpgroupMmaSharedE4M3", &mma, &emulated::RunWarpgroupMmaE4M3);
}

}  // namespace deepinfer::cuda
