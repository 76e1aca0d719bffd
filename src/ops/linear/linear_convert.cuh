// Weight codes to bf16 fragments, in the registers of the lane that multiplies them: the hot part
// of the kernels for few rows (linear_decode.cuh) and for many (linear_prefill.cuh).
//
// Codes are put into place by rotations and masks and multiplied by a power of two, which is exact.
// On Hopper integer and logic instructions are half as fast as others, and both kernels are bound
// by them where they are not bound by memory or tensor cores: the layout (cuda_layout.h) is made so
// that two k16 steps of FP4 take 9 logic operations, 3 rotations, 4 shifts (which multiply-adds can
// do) and 8 multiplications, and one step of FP8 takes 6, 2, 2 and 4.
#pragma once

#include <cstdint>

#include "device.cuh"
#include "ops/linear/cuda_layout.h"

namespace deepinfer::cuda {

__device__ inline uint32_t RotateLeft(uint32_t word, int by) {
  return __funnelshift_l(word, word, static_cast<unsigned int>(by));
}

// The scales of rows g (low half) and g + 8 in block kBlock of 32 columns of a unit of FP4.
template <int kBlock>
__device__ inline uint32_t Fp4Scales(uint32_t word) {
  return (kBlock == 0 ? word : RotateLeft(word, 8)) & 0x7f807f80u;
}

// A word that step kStep's register kFragment can be masked from.
template <int kStep, int kFragment>
__device__ inline uint32_t Fp4Place(uint32_t first, uint32_t second) {
  const uint32_t own = kStep == 0 ? first : second;
  if constexpr (kFragment == 0) {
    return own << CudaFp4Rotation(0);
  } else if constexpr (kFragment == 1) {
    return own;
  } else if constexpr (kFragment == 2) {
    return RotateLeft(own, CudaFp4Rotation(2));
  } else {
    const uint32_t rest = SelectBits(kCudaFp4RestMask, first, second << kCudaFp4RestShift);
    return kStep == 0 ? rest << CudaFp4RestRotation(0) : RotateLeft(rest, CudaFp4RestRotation(1));
  }
}

// The A fragment of step kStep of the two (32 columns) that a pair of words holds. `scales`: of
// Fp4Scales. Both steps of a pair share instructions: call it for both.
template <int kStep>
__device__ inline void ConvertFp4(uint32_t first, uint32_t second, uint32_t scales,
                                  uint32_t (&a)[4]) {
  a[0] = MulBf16x2ByLow(Fp4Place<kStep, 0>(first, second) & kCudaFp4Mask, scales);
  a[1] = MulBf16x2ByHigh(Fp4Place<kStep, 1>(first, second) & kCudaFp4Mask, scales);
  a[2] = MulBf16x2ByLow(Fp4Place<kStep, 2>(first, second) & kCudaFp4Mask, scales);
  a[3] = MulBf16x2ByHigh(Fp4Place<kStep, 3>(first, second) & kCudaFp4Mask, scales);
}

// The A fragment of the step that two words hold. `scale`: the same in both halves.
__device__ inline void ConvertFp8(uint32_t first, uint32_t second, uint32_t scale,
                                  uint32_t (&a)[4]) {
  const auto odd = [](uint32_t word) {
    return (RotateLeft(word, 28) & kCudaFp8HighMask) | ((word << 4) & kCudaFp8LowMask);
  };
  a[0] = MulBf16x2(first & kCudaFp8Mask, scale);
  a[1] = MulBf16x2(odd(first), scale);
  a[2] = MulBf16x2(second & kCudaFp8Mask, scale);
  a[3] = MulBf16x2(odd(second), scale);
}

}  // namespace deepinfer::cuda
