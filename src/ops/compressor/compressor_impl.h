// The CUDA half of ops/compressor/compressor.h. Arguments have been validated.
#pragma once

#include "ops/compressor/compressor.h"

namespace deepinfer::cuda {

Status CompressPairs(const CompressPairsArgs& args, Stream& stream);

}  // namespace deepinfer::cuda
