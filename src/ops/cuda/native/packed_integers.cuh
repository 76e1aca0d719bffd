// Operations on two unsigned 16-bit numbers in a word.
#pragma once

#include <cstdint>

namespace deepinfer::cuda {

__device__ inline uint32_t MaxU16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("max.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ inline uint32_t MinU16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("min.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

}  // namespace deepinfer::cuda
