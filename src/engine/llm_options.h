// The rules for LLMOptions that LLM::Load and commands that only look ahead have in common, so that
// both say the same.
#pragma once

#include "base/error.h"
#include "deepinfer/llm.h"
#include "model/config.h"

namespace deepinfer {

// The five drafted tokens of a step, and the one that a step launched ahead may have to take back.
inline constexpr int64_t kRollbackTokens = 6;

// LLMOptions::Validate as one error: the first field, all messages.
Status CheckOptions(const LLMOptions& options);

// What depends on the model. `options` are valid by themselves.
Status CheckOptionsForModel(const LLMOptions& options, const ModelConfig& config);

// For numbers of tokens at the end of a prompt that are computed with a cut window, 0 for the
// default: kInvalidArgument if they are too few for a sequence that is set back. `field` is the
// number's name.
Status CheckTailTokens(const ModelConfig& config, const char* field, int64_t tokens);
// What 0 means for LLMOptions::replay_keep_tokens.
int64_t DefaultTailTokens(const ModelConfig& config);

}  // namespace deepinfer
