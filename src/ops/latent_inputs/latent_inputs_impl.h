// The CUDA half of ops/latent_inputs/latent_inputs.h. Arguments have been validated.
#pragma once

#include "ops/latent_inputs/latent_inputs.h"

namespace deepinfer::cuda {

Status LatentInputs(const LatentInputsArgs& args, Stream& stream);

}  // namespace deepinfer::cuda
