// Operations on two unsigned 16-bit numbers, or on the bytes, of a word.
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

// Byte i of the result is byte number (selectors >> 4 i) & 15, below 8, of low and high. Unlike
// __byte_perm, which clears the fourth bit of each selector, this is one instruction.
__device__ inline uint32_t SelectBytes(uint32_t low, uint32_t high, uint32_t selectors) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(selectors));
  return d;
}

}  // namespace deepinfer::cuda
