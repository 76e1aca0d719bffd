// The CUDA half of ops/sample_rows/sample_rows.h. Arguments have been validated.
#pragma once

#include "ops/sample_rows/sample_rows.h"

namespace deepinfer::cuda {

Status SampleRows(const SampleRowsArgs& args, Stream& stream);
Status PlaceSampledTokens(const PlaceSampledTokensArgs& args, Stream& stream);

}  // namespace deepinfer::cuda
