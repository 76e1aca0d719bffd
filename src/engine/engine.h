// The step loop: joins requests, cache memory, the model, the sampler and the text of completions.
// Each completion of a request is one sequence. Called by LLM (engine/llm.cc) on one thread; not
// for parsing, tokenising prompts or files.
//
// Life of a sequence:
//
//   waiting --Admit--> running --Commit--> finished
//      ^                  |
//      +----- MakeRoom ---+   (preempted: cache memory given back, output kept, recomputed later
//      with the same result)
//
// Invariants: waiting and running sequences are ordered by arrival, and every running one arrived
// before every waiting one that was never admitted. Running sequences own a slot of the backend and
// blocks for every token they know. A request is accepted only if it fits the whole pool by itself,
// so the oldest sequence can always go on.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "deepinfer/request_output.h"
#include "deepinfer/sampling_params.h"
#include "engine/completion_text.h"
#include "engine/model_backend.h"
#include "sample/sampler.h"
#include "text/tokenizer.h"

namespace deepinfer {

struct EngineOptions {
  int64_t max_model_len = 0;             // prompt + output of a sequence; at least 1
  int64_t max_num_seqs = 64;             // sequences in one step
  int64_t max_num_batched_tokens = 512;  // rows in one step; at least max_num_seqs
  // Rows of one step whose logits may be asked for beyond one per sequence (prompt
  // log-probabilities); each takes vocab_size floats of memory.
  int64_t max_prompt_logit_rows = 256;
  std::vector<int32_t> end_ids;   // tokens that end a completion unless ignore_eos
  std::function<double()> clock;  // seconds, never decreasing; empty: the system's steady clock
};

struct EngineRequest {
  std::string id;
  std::vector<int32_t> prompt;
  SamplingParams params;                        // params.seq_seed is ignored
  std::vector<std::vector<int32_t>> bad_words;  // all of them as tokens
  uint64_t seed = 0;
};

struct EngineEvents {
  // Text or tokens of one completion; the last event of a completion carries its finish reason.
  // Views are valid during the call.
  std::function<void(int64_t request, int64_t completion, std::string_view text,
                     std::span<const int32_t> token_ids, FinishReason finish_reason)>
      on_delta;
  // All completions of a request have ended.
  std::function<void(int64_t request, RequestOutput output)> on_finished;
};

struct EngineCounters {
  int64_t steps = 0;
  int64_t prompt_tokens = 0;      // prompt rows run for the first time
  int64_t completion_tokens = 0;  // tokens sampled
  int64_t recomputed_tokens = 0;  // rows run again after a preemption
  int64_t preemptions = 0;
};

class Engine {
 public:
  // `backend` and `tokenizer` must outlive the engine.
  Engine(ModelBackend& backend, const Tokenizer& tokenizer, EngineOptions options,
         EngineEvents events);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // The largest prompt + output of a sequence: max_model_len, or what the whole cache holds if that
  // is less.
  int64_t max_sequence_tokens() const {
    return max_sequence_tokens_;
  }

  // Queues a request and returns its number (0, 1, ...), which events carry. Errors, with nothing
  // queued: kInvalidArgument for bad parameters, an empty prompt, ids out of range, a prompt that
  // does not fit.
  Result<int64_t> Submit(EngineRequest request);

  // Runs one step. False, without doing anything, when no request is left.
  bool Step();

  // Ends every request with FinishReason::kAbort; output so far is reported.
  void Abort();

  int64_t num_waiting() const {
    return static_cast<int64_t>(waiting_.size());
  }
  int64_t num_running() const {
    return static_cast<int64_t>(running_.size());
  }
  const EngineCounters& counters() const {
    return counters_;
  }

 private:
  struct Request;
  struct Sequence;
  // One sequence's part of a step.
  struct PlannedChunk {
    Sequence* sequence = nullptr;
    int64_t begin = 0;  // tokens [begin, end) of prompt + output
    int64_t end = 0;
    int64_t num_logit_rows = 0;
  };

  Status CheckRequest(const EngineRequest& request) const;
  void MakeRoom();
  void Admit();
  std::vector<PlannedChunk> Schedule() const;
  Result<std::span<const float>> Run(const std::vector<PlannedChunk>& plan);
  // Takes in one chunk's logits: prompt log-probabilities and, if all known tokens have run, the
  // next token.
  void Commit(const PlannedChunk& chunk, std::span<const float> logits);
  void CommitPromptLogprobs(const PlannedChunk& chunk, std::span<const float> logits);
  void CommitToken(Sequence& sequence, SampledToken token);
  void Finish(Sequence& sequence, FinishReason reason);
  void EndWithError(Sequence& sequence, Error error);
  void Emit(Sequence& sequence, FinishReason reason);
  void PreemptYoungest();
  void RemoveFinished();
  int64_t BlocksFor(int64_t tokens) const;
  double Now() const;

  ModelBackend& backend_;
  const Tokenizer& tokenizer_;
  EngineOptions options_;
  EngineEvents events_;
  int64_t max_sequence_tokens_ = 0;
  int64_t next_request_ = 0;
  std::deque<std::unique_ptr<Sequence>> waiting_;   // by arrival
  std::vector<std::unique_ptr<Sequence>> running_;  // by arrival
  SamplerScratch scratch_;
  EngineCounters counters_;
};

}  // namespace deepinfer
