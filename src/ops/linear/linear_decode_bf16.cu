#include "ops/linear/linear_decode.cuh"

namespace deepinfer::cuda {

template Status LaunchDecodeKernel<WeightFormat::kBf16>(const DecodeWork&, const LaunchConfig&,
                                                        Stream&);

}  // namespace deepinfer::cuda
