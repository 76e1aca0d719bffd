// The CUDA half of ops/linear/linear.h. Arguments have been validated.
#pragma once

#include <span>
#include <vector>

#include "ops/linear/linear.h"

namespace deepinfer::cuda {

Status LinearBatch(std::span<const LinearArgs> batch, Stream& stream);
Status GroupedLinear(const GroupedLinearArgs& args, Stream& stream);
// Repacks weights for the kernels, all into one piece of device memory.
Result<std::vector<LinearWeight>> PackLinearStack(std::span<const LinearSource> sources,
                                                  Stream& stream);

}  // namespace deepinfer::cuda
