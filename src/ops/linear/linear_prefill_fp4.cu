// The kernels for many rows with FP4 weights, whose K is one segment.
#include "base/check.h"
#include "ops/linear/linear_prefill.cuh"

namespace deepinfer::cuda::prefill {

template <>
Status LaunchPrefillKernel<WeightFormat::kFp4Group>(bool gated, bool chained, int group_steps,
                                                    const Params& params, Stream& stream) {
  constexpr WeightFormat kFormat = WeightFormat::kFp4Group;
  DI_CHECK(!chained);
  const auto launch = [&]<bool kGated>() {
    return group_steps == 1 ? LaunchShape<Shape<kFormat, kGated, false, 1>>(params, stream)
                            : LaunchShape<Shape<kFormat, kGated, false, 2>>(params, stream);
  };
  return gated ? launch.template operator()<true>() : launch.template operator()<false>();
}

}  // namespace deepinfer::cuda::prefill
