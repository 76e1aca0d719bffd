#include "ops/linear/linear_decode.cuh"

namespace deepinfer::cuda {

template Status LaunchDecodeKernel<WeightFormat::kFp4Group>(const DecodeWork&, LaunchConfig,
                                                            Stream&);

}  // namespace deepinfer::cuda
