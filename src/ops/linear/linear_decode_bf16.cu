#include "ops/linear/linear_decode.cuh"

namespace deepinfer::cuda {

template Status LaunchDecodeKernel<WeightFormat::kBf16>(const DecodeWork&, LaunchConfig, Stream&);

}  // namespace deepinfer::cuda
