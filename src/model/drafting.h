// Conditions of drafting with the model's own draft layers (mtp.*, model description, section 13).
#pragma once

#include <cstdint>

#include "base/error.h"
#include "model/config.h"

namespace deepinfer {

inline constexpr int64_t kMaxDraftTokens = 64;

// Whether blocks of `draft_tokens` tokens can be drafted; 0 is always possible: no drafting.
// Errors: kInvalidArgument with field "draft_tokens" for a checkpoint without draft layers, and for
// another length than the block the layers were trained on, unless `force`: the slots of a block
// see each other, so that another block is another input.
Status CheckDrafting(const ModelConfig& config, int64_t draft_tokens, bool force);

}  // namespace deepinfer
