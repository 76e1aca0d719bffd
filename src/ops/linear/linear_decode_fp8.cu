#include "ops/linear/linear_decode.cuh"

namespace deepinfer::cuda {

template Status LaunchDecodeKernel<WeightFormat::kFp8Block>(const DecodeWork&, LaunchConfig,
                                                            Stream&);

}  // namespace deepinfer::cuda
