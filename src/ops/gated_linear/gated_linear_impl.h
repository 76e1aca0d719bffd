// The CUDA half of ops/gated_linear/gated_linear.h. Arguments have been validated.
#pragma once

#include "ops/gated_linear/gated_linear.h"

namespace deepinfer::cuda {

Status GatedLinear(const GatedLinearArgs& args, Stream& stream);

}  // namespace deepinfer::cuda
