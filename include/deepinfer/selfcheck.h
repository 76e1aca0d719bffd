// Proof on the user's machine that nothing that makes generation faster changes an answer: a set of
// requests runs alone, from an empty cache, synchronously and unchunked, and then under
// combinations of batching, chunking, prefix cache, preemption and asynchronous scheduling. Tokens
// and log-probabilities must be the same, bit for bit. Part of the public interface.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "deepinfer/error.h"

namespace deepinfer {

struct SelfcheckOptions {
  int64_t num_requests = 16;       // 2 ... 1,024
  int64_t max_prompt_tokens = 0;   // 0: about three cache blocks, or what the context allows
  int64_t max_output_tokens = 12;  // 1 ... 4,096
  uint64_t seed = 1;               // of the requests
  // Every combination of the features instead of each feature alone, some pairs, and all together.
  bool thorough = false;

  // Every problem, each with the field's name.
  std::vector<Error> Validate() const;
};

// One way of running the requests.
struct SelfcheckVariant {
  bool batched = false;       // all requests at once
  int64_t chunk_tokens = 0;   // rows of a prompt in one step; 0: whole
  bool prefix_cache = false;  // with the beginnings of all prompts in it
  bool async_scheduling = false;
  int64_t preempt_every = 0;  // steps; 0: never
  bool preempt_by_saving = false;

  // "batched, chunks of 7, prefix cache, asynchronous, preempted every 5 steps"; "plain".
  std::string Name() const;
};

struct SelfcheckDifference {
  SelfcheckVariant variant;
  // The features of the variant without which the difference is gone.
  std::vector<std::string> causes;
  int64_t request = 0;
  int64_t completion = 0;
  int64_t position = 0;  // of the token in the output; -1: a prompt log-probability, or the request
  std::string what;      // a sentence with both values
};

struct SelfcheckReport {
  int64_t variants = 0;                           // that ran, the plain one not counted
  int64_t requests = 0;                           // in each
  int64_t tokens = 0;                             // compared, over all variants
  int64_t cached_tokens = 0;                      // that variants took from the prefix cache
  int64_t preemptions = 0;                        // over all variants
  std::optional<SelfcheckDifference> difference;  // the first one
  double seconds = 0;
  bool complete = false;  // not stopped before the end

  bool passed() const {
    return complete && !difference.has_value();
  }
};

struct SelfcheckProgress {
  int64_t variants_done = 0;
  int64_t variants_total = 0;
  std::string variant;        // that runs now
  int64_t variant_steps = 0;  // that it has run so far; 0: it is about to begin
};

// Called before each variant and after each step of the model, so that a caller need not wait for
// the end of a variant; false stops after the step, with what has been checked so far. A variant
// that was stopped counts as one that did not run.
using SelfcheckCallback = std::function<bool(const SelfcheckProgress&)>;

}  // namespace deepinfer
