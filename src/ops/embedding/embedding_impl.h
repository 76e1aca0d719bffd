// The CUDA half of ops/embedding/embedding.h. Arguments have been validated.
#pragma once

#include "ops/embedding/embedding.h"

namespace deepinfer::cuda {

Status Embedding(const EmbeddingArgs& args, Stream& stream);

}  // namespace deepinfer::cuda
