// Decoder bounded replay: the layers from decoder_start() on run for the last tokens of a prompt
// only. What a model must look like for that.
#pragma once

#include "base/error.h"
#include "model/config.h"

namespace deepinfer {

// kUnsupported with a sentence if the decoder half needs more of dropped rows than the compressed
// keys of its first layer, or if something else than layers reads what dropped rows do not have.
Status CheckDecoderReplay(const ModelConfig& config);

}  // namespace deepinfer
