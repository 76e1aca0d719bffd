// Q8 on vectors: bitwise the reference's results.
//
// Bound by the caches: 4 bytes per bf16 element moved, about 20 vector operations per vector of
// elements. Groups of 32 are independent, so work is cut into blocks of channels as well as rows.
//
// Measured 2026-11-30, 2-core AMD EPYC (AVX2), one thread, processor time: 5120 channels 4.0 us per
// row (5.1 GB/s). Most of a group's time is the chain from its maximum to its scale.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantize/quantize_cpu.cc"
// The order matters: targets first, then the header that includes this file once per instruction
// set.
// clang-format off
#include "ops/simd_targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "ops/quantize/quantize_impl.h"
#include "ops/simd-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace deepinfer {
namespace HWY_NAMESPACE {
#if DI_SIMD_PASS

void QuantizeVector(const QuantizeFp8Args& args, int64_t row, int64_t begin, int64_t end) {
  const F32 d;
  Bf16* y = args.y.Row<Bf16>(row);
  if (args.x.dtype() == DType::kF32) {
    const float* x = args.x.Row<float>(row);
    for (int64_t i = begin; i < end; i += kQ8Group) Q8GroupToBf16(x + i, y + i);
    return;
  }
  const Bf16* x = args.x.Row<Bf16>(row);
  for (int64_t i = begin; i < end; i += kQ8Group) {
    HWY_ALIGN float group[kQ8Group];
    for (int64_t j = 0; j < kQ8Group; j += kLanes) hn::Store(LoadBf16(x + i + j), d, group + j);
    Q8GroupToBf16(group, y + i);
  }
}

#endif  // DI_SIMD_PASS
}  // namespace HWY_NAMESPACE
}  // namespace deepinfer
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deepinfer::cpu {

void QuantizeFp8(CpuLevel level, const QuantizeFp8Args& args, int64_t row, int64_t begin,
                 int64_t end) {
  DI_SIMD_FUNCTION(level, QuantizeVector)(args, row, begin, end);
}

}  // namespace deepinfer::cpu
#endif  // HWY_ONCE
