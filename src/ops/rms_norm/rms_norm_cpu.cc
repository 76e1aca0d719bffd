// RMSNorm on vectors.
//
// Bound by the first- and second-level cache: a row is read once (2 bytes per channel), held as
// fp32 (20 KB for 5120 channels), written once or twice. The sum of squares is kept in double
// lanes, so the statistic has the reference's bits but for cases of probability about 1e-8, at
// every vector width; everything else is exact, so results practically never differ from the
// reference.
//
// Measured 2026-11-30, 2-core AMD EPYC (AVX2), one thread, processor time: 5120 channels with both
// outputs 6.3 us per row (4.9 GB/s), of which two thirds is Q8.
#include <cmath>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rms_norm/rms_norm_cpu.cc"
// The order matters: targets first, then the header that includes this file once per instruction
// set.
// clang-format off
#include "ops/simd_targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "ops/rms_norm/rms_norm-inl.h"
#include "ops/rms_norm/rms_norm_impl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace deepinfer {
namespace HWY_NAMESPACE {
#if DI_SIMD_PASS

void RmsNormVector(const RmsNormArgs& args, int64_t row_begin, int64_t row_end) {
  const F32 d;
  const int64_t channels = args.x.row_size();
  std::vector<float> row(static_cast<size_t>(channels));
  for (int64_t t = row_begin; t < row_end; ++t) {
    const Bf16* x = args.x.Row<Bf16>(t);
    VecF64 low = hn::Zero(F64());
    VecF64 high = hn::Zero(F64());
    for (int64_t i = 0; i < channels; i += kLanes) {
      const VecF32 value = LoadBf16(x + i);
      hn::StoreU(value, d, row.data() + i);
      AddSquares(value, low, high);
    }
    FinishRmsNorm(row.data(), SumLanes(low, high), args.weight.Row<Bf16>(0), channels, args.eps,
                  args.y.empty() ? nullptr : args.y.Row<Bf16>(t),
                  args.y_grid.empty() ? nullptr : args.y_grid.Row<Bf16>(t));
  }
}

#endif  // DI_SIMD_PASS
}  // namespace HWY_NAMESPACE
}  // namespace deepinfer
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deepinfer::cpu {

void RmsNorm(CpuLevel level, const RmsNormArgs& args, int64_t row_begin, int64_t row_end) {
  DI_SIMD_FUNCTION(level, RmsNormVector)(args, row_begin, row_end);
}

}  // namespace deepinfer::cpu
#endif  // HWY_ONCE
