// The kernels for many rows with FP8 weights.
#include "ops/linear/linear_prefill.cuh"

namespace deepinfer::cuda::prefill {

template <>
Status LaunchPrefillKernel<WeightFormat::kFp8Block>(bool gated, bool chained, int group_steps,
                                                    const Params& params, Stream& stream) {
  constexpr WeightFormat kFormat = WeightFormat::kFp8Block;
  // Totals leave no room for fragments of single steps.
  const auto launch = [&]<bool kGated>() {
    return chained            ? LaunchShape<Shape<kFormat, kGated, true, 2>>(params, stream)
           : group_steps == 1 ? LaunchShape<Shape<kFormat, kGated, false, 1>>(params, stream)
                              : LaunchShape<Shape<kFormat, kGated, false, 2>>(params, stream);
  };
  return gated ? launch.template operator()<true>() : launch.template operator()<false>();
}

}  // namespace deepinfer::cuda::prefill
