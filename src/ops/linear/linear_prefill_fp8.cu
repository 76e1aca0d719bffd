// The kernels for many rows with FP8 weights.
#include "ops/linear/linear_prefill.cuh"

namespace deepinfer::cuda::prefill {

template <>
Status LaunchPrefillKernel<WeightFormat::kFp8Block>(bool gated, bool chained, const Params& params,
                                                    Stream& stream) {
  constexpr WeightFormat kFormat = WeightFormat::kFp8Block;
  if (gated) {
    return chained ? LaunchShape<Shape<kFormat, true, true>>(params, stream)
                   : LaunchShape<Shape<kFormat, true, false>>(params, stream);
  }
  return chained ? LaunchShape<Shape<kFormat, false, true>>(params, stream)
                 : LaunchShape<Shape<kFormat, false, false>>(params, stream);
}

}  // namespace deepinfer::cuda::prefill
