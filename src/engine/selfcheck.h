// The checks behind include/deepinfer/selfcheck.h, over any backend. Also the identity table of the
// repository's tests.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "deepinfer/request_output.h"
#include "deepinfer/selfcheck.h"
#include "engine/engine.h"
#include "engine/model_backend.h"
#include "text/tokenizer.h"

namespace deepinfer {

// Requests of mixed kinds from a seed: lengths on both sides of window and block edges, shared
// beginnings, greedy and drawn, penalties, several completions, prompt log-probabilities. With
// `structured`, a quarter of them has a structured output, at once or behind a trigger; the others
// are the same as without.
std::vector<EngineRequest> SelfcheckRequests(const SelfcheckOptions& options, int64_t vocab_size,
                                             int64_t window_tokens, int64_t max_model_len,
                                             bool structured = false);

// The features alone, pairs, and all together; or every combination.
std::vector<SelfcheckVariant> SelfcheckVariants(bool thorough);

// What one variant gives. `base` has the limits; the variant decides the rest. `go_on` is asked
// after each step; after false the run is `stopped` and its outputs mean nothing.
struct VariantRun {
  std::vector<RequestOutput> outputs;
  EngineCounters counters;
  bool stopped = false;
};
VariantRun RunVariant(ModelBackend& backend, const Tokenizer& tokenizer, const EngineOptions& base,
                      const SelfcheckVariant& variant, std::span<const EngineRequest> requests,
                      const std::function<bool()>& go_on = {});

// The first difference between the outputs, if there is one; its variant and causes are left empty.
std::optional<SelfcheckDifference> FindDifference(std::span<const RequestOutput> expected,
                                                  std::span<const RequestOutput> got);

SelfcheckReport RunSelfcheck(ModelBackend& backend, const Tokenizer& tokenizer,
                             const EngineOptions& base, const SelfcheckOptions& options,
                             const SelfcheckCallback& progress = {});

}  // namespace deepinfer
