// The second half of RMSNorm on vectors, shared by the operations that end with it. Included once
// per instruction set.
#if defined(DEEPINFER_OPS_RMS_NORM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DEEPINFER_OPS_RMS_NORM_INL_H_
#undef DEEPINFER_OPS_RMS_NORM_INL_H_
#else
#define DEEPINFER_OPS_RMS_NORM_INL_H_
#endif

#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deepinfer {
namespace HWY_NAMESPACE {
#if DI_SIMD_PASS

// x[channels] with its sum of squares becomes bf16(weight * (x * r)): stored to y and, on the Q8
// grid, to y_grid. Either may be null. x is overwritten.
HWY_INLINE void FinishRmsNorm(float* x, double square_sum, const Bf16* weight, int64_t channels,
                              float eps, Bf16* y, Bf16* y_grid) {
  const F32 d;
  const float mean = static_cast<float>(square_sum / static_cast<double>(channels));
  const VecF32 r = hn::Set(d, 1.0f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < channels; i += kLanes) {
    const VecF32 value = RoundBf16(hn::Mul(LoadBf16(weight + i), hn::Mul(hn::LoadU(d, x + i), r)));
    hn::StoreU(value, d, x + i);
    if (y != nullptr) StoreBf16(value, y + i);
  }
  if (y_grid != nullptr) Q8RowToBf16(x, channels, y_grid);
}

#endif  // DI_SIMD_PASS
}  // namespace HWY_NAMESPACE
}  // namespace deepinfer
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
