// The CUDA half of ops/gather_rows/gather_rows.h. Arguments have been validated.
#pragma once

#include "ops/gather_rows/gather_rows.h"

namespace deepinfer::cuda {

Status GatherRows(const GatherRowsArgs& args, Stream& stream);

}  // namespace deepinfer::cuda
