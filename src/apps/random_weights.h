// A model with random weights that are made where they are used, without a checkpoint: for
// measuring one rank's share of a model whose files would not fit.
#pragma once

#include <cstdint>

#include "base/error.h"
#include "model/config.h"
#include "model/model_weights.h"
#include "tensor/stream.h"

namespace deepinfer {

// All weights of `config`, but only `local_experts` routed experts per layer. Every weight has
// device memory of its own; the values repeat each other, since they come from one buffer of random
// bytes read from different places on. They are of a size that keeps activations finite. Errors:
// kResourceExhausted.
Result<ModelWeights> MakeRandomWeights(const ModelConfig& config, int64_t local_experts,
                                       uint64_t seed, Stream& stream);
// Bytes of device memory that these take, without what the device's allocator adds.
int64_t RandomWeightBytes(const ModelConfig& config, int64_t local_experts);

// Fills the view with copies of `bytes` bytes, which are a multiple of its element size: once from
// the host, then on the device.
Status FillRepeated(const void* pattern, int64_t bytes, const TensorView& view, Stream& stream);

}  // namespace deepinfer
