// The kernels for many rows with FP4 weights, whose K is one segment.
#include "base/check.h"
#include "ops/linear/linear_prefill.cuh"

namespace deepinfer::cuda::prefill {

template <>
Status LaunchPrefillKernel<WeightFormat::kFp4Group>(bool gated, bool chained, const Params& params,
                                                    Stream& stream) {
  constexpr WeightFormat kFormat = WeightFormat::kFp4Group;
  DI_CHECK(!chained);
  return gated ? LaunchShape<Shape<kFormat, true, false>>(params, stream)
               : LaunchShape<Shape<kFormat, false, false>>(params, stream);
}

}  // namespace deepinfer::cuda::prefill
