// The interface of src/ops/cuda/native/packed_integers.cuh on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device.cuh"

namespace deepinfer::cuda {

inline uint32_t MaxU16x2(uint32_t a, uint32_t b) {
  return std::max(a & 0xffffu, b & 0xffffu) | (std::max(a >> 16, b >> 16) << 16);
}
inline uint32_t MinU16x2(uint32_t a, uint32_t b) {
  return std::min(a & 0xffffu, b & 0xffffu) | (std::min(a >> 16, b >> 16) << 16);
}

inline uint32_t SelectBytes(uint32_t low, uint32_t high, uint32_t selectors) {
  return __byte_perm(low, high, selectors);
}

}  // namespace deepinfer::cuda
