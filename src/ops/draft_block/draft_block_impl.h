// The CUDA half of ops/draft_block/draft_block.h. Arguments have been validated.
#pragma once

#include "ops/draft_block/draft_block.h"

namespace deepinfer::cuda {

Status BlockRows(const BlockRowsArgs& args, Stream& stream);
Status BiasedArgmax(const BiasedArgmaxArgs& args, Stream& stream);
Status BlockConfidence(const BlockConfidenceArgs& args, Stream& stream);

}  // namespace deepinfer::cuda
