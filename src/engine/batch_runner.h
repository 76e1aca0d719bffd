// Runs requests to the end: takes them from a source or a list as there is room, resolves prompts
// to tokens, keeps the engine supplied, and hands out results. The part of LLM that does not care
// which model runs. What is kept per request is bounded by what is in the engine.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "deepinfer/llm.h"
#include "engine/engine.h"
#include "engine/model_backend.h"
#include "text/tokenizer.h"

namespace deepinfer {

struct BatchContext {
  // Idle; keeps its prefix cache from run to run. Its events are set for the run.
  Engine& engine;
  const Tokenizer& tokenizer;
  std::function<uint64_t()> fresh_seed;  // for requests without one
};

// LLM::GenerateStream.
void RunStream(const BatchContext& context, const RequestSource& next,
               const GenerateCallbacks& callbacks);

// LLM::Generate.
std::vector<RequestOutput> RunBatch(const BatchContext& context, std::span<const Request> requests,
                                    const GenerateCallbacks& callbacks);

}  // namespace deepinfer
