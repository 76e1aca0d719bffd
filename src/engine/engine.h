// The step loop: joins requests, the scheduler, the model, the sampler and the text of completions.
// Each completion of a request is one sequence. Called by LLM (engine/llm.cc) on one thread; not
// for parsing, tokenising prompts or files, nor for deciding who runs (sched/scheduler.h).
//
// A step goes through Plan > Launch > (run and draw, on the runner's thread) > Collect > Emit. With
// asynchronous scheduling the next step is planned and launched before the results of the last one
// are collected, so planning, stop rules, text and callbacks overlap with the model; the ends of
// sequences are then seen one step late, and what such a sequence ran in between is ignored.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/trace.h"
#include "deepinfer/request_output.h"
#include "deepinfer/sampling_params.h"
#include "engine/grammar_service.h"
#include "engine/model_backend.h"
#include "engine/statistics.h"
#include "engine/step_runner.h"
#include "sched/recorder.h"
#include "sched/scheduler.h"
#include "state/prefix_cache.h"
#include "text/output_parser.h"
#include "text/tokenizer.h"

namespace deepinfer {

struct EngineOptions {
  int64_t max_model_len = 0;      // prompt + output of a sequence; at least 1
  SchedulerOptions scheduler;     // who runs, chunks, prefix cache, replay, preemption
  bool async_scheduling = true;   // one step ahead
  std::vector<int32_t> end_ids;   // tokens that end a completion unless ignore_eos
  std::function<double()> clock;  // seconds, never decreasing; empty: the system's steady clock
  // Compiles structured outputs, which are refused without it.
  ConstraintCompiler compile_constraint;
  GrammarServiceOptions grammars;
  // That fill masks while rows run, begun with the first constrained draw; -1: two, or one where
  // this process may use one core only.
  int mask_threads = -1;
  // Both may be null, and outlive the engine.
  EngineStatistics* statistics = nullptr;
  TraceRecorder* trace = nullptr;
  // Keep what the scheduler is told and decides, for TakeSchedule.
  bool record_schedule = false;
};

struct EngineRequest {
  std::string id;
  std::vector<int32_t> prompt;
  SamplingParams params;                        // params.seq_seed is ignored
  std::vector<std::vector<int32_t>> bad_words;  // all of them as tokens
  uint64_t seed = 0;
  std::string user_id;
  int32_t priority = 0;
  double timeout_seconds = std::numeric_limits<double>::infinity();
  std::string cache_salt;
  // A conversation: how its answer is read. The text is then the answer's content.
  std::optional<OutputParserOptions> answer;
  // The field that the structured output comes from, for errors.
  std::string constraint_field = "structured_output";
};

// News of one completion. Views are valid during the call.
struct EngineDelta {
  int64_t request = 0;
  int64_t completion = 0;
  std::string_view text;
  std::string_view reasoning;  // of a conversation's answer
  std::span<const int32_t> token_ids;
  FinishReason finish_reason = FinishReason::kNone;  // the completion's last delta carries one
};

struct EngineEvents {
  std::function<void(const EngineDelta& delta)> on_delta;
  // All completions of a request have ended.
  std::function<void(int64_t request, RequestOutput output)> on_finished;
};

struct EngineCounters {
  int64_t steps = 0;
  int64_t prompt_tokens = 0;      // prompt rows run for the first time
  int64_t cached_tokens = 0;      // prompt tokens that were in the prefix cache
  int64_t completion_tokens = 0;  // tokens sampled
  int64_t recomputed_tokens = 0;  // rows run again after a preemption
  int64_t preemptions = 0;
  int64_t grammars_compiled = 0;
  int64_t grammars_failed = 0;  // each ended its request
};

class Engine {
 public:
  // `backend` and `tokenizer` must outlive the engine. One engine uses a backend at a time.
  Engine(ModelBackend& backend, const Tokenizer& tokenizer, EngineOptions options,
         EngineEvents events);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // For what ends or is drawn from now on.
  void set_events(EngineEvents events) {
    events_ = std::move(events);
  }
  int64_t vocab_size() const {
    return backend_.vocab_size();
  }
  int64_t max_num_seqs() const {
    return options_.scheduler.max_num_seqs;
  }
  // The largest prompt + output of a sequence: max_model_len, or what the whole cache holds if that
  // is less.
  int64_t max_sequence_tokens() const {
    return max_sequence_tokens_;
  }

  // Queues a request and returns its number (0, 1, ...), which events carry. Errors, with nothing
  // queued: kInvalidArgument for bad parameters, an empty prompt, ids out of range, a prompt that
  // does not fit; the error of the step that has lost the device, if one has; kUnsupported for
  // structured output without a compiler. A request with structured output waits, held, until its
  // description is compiled; if that fails, on_finished reports it with RequestOutput::error.
  Result<int64_t> Submit(EngineRequest request);
  // Counts a request that was refused before it could be handed in, as if Submit had refused it.
  void CountRefused();

  // Plans and launches a step, and takes in the results of the oldest one when enough are in
  // flight. Sleeps a little when all there is waits for compilations. False, without doing
  // anything, when no request is left.
  bool Step();

  // Ends one request with FinishReason::kAbort; output so far is reported. False if there is no
  // such request (any more).
  bool Abort(int64_t request);
  // Ends all of them.
  void Abort();

  int64_t num_waiting() const;
  int64_t num_running() const;
  EngineCounters counters() const;
  // What the scheduler was told and decided since the last call, as text that ReplaySchedule
  // (sched/recorder.h) reads; it holds prompts as token ids. Empty without record_schedule.
  std::string TakeSchedule();
  // Host time of the last step outside the model: planning, and taking in results. Seconds.
  double last_plan_seconds() const {
    return last_plan_seconds_;
  }
  double last_collect_seconds() const {
    return last_collect_seconds_;
  }
  // Empty, or what is wrong with the invariants of scheduler, pools, prefix cache and statistics.
  // Statistics can be judged only if no other engine has fed them.
  std::string FindViolation() const;

 private:
  struct Request;
  struct Sequence;
  struct Job;

  Status CheckRequest(const EngineRequest& request) const;
  // True if rows were launched.
  bool PlanAndLaunch();
  void TakeInGrammars();
  void BeginConstrained(Request& request, const ConstraintFactory& factory);
  void EndUnstarted(const std::shared_ptr<Request>& request, Error error);
  void Fill(Job& job);
  void RecordPlan(double seconds);
  void RecordCommit(const StepJob& job, double seconds);
  void Collect();
  void TakeIn(Sequence& sequence, const StepChunk& chunk, StepOutcome& outcome);
  void CommitToken(Sequence& sequence, SampledToken token);
  void Finish(Sequence& sequence, FinishReason reason);
  void EndWithError(Sequence& sequence, Error error);
  // Everything that runs or waits; later requests are refused with the same error.
  void EndForLostDevice(const Error& error);
  void Emit(Sequence& sequence, FinishReason reason);
  void RecordEnd(Sequence& sequence, EndReason reason);
  // Of the completions that still live, in order of arrival.
  std::vector<SeqId> LivingSequencesOf(int64_t request) const;
  Sequence* Find(SeqId id);
  void EraseIfDone(const Sequence& sequence);
  // In order of arrival.
  void AbortAll(const std::vector<SeqId>& ids);
  void EndInScheduler(SeqId id);
  double Now() const;

  ModelBackend& backend_;
  const Tokenizer& tokenizer_;
  EngineOptions options_;
  EngineEvents events_;
  StatePools pools_;
  PrefixCache prefix_cache_;
  Scheduler scheduler_;
  std::unique_ptr<ScheduleRecorder> recorder_;  // may be null
  int64_t max_sequence_tokens_ = 0;
  int64_t next_request_ = 0;
  SeqId next_sequence_ = 0;
  std::unordered_map<SeqId, std::unique_ptr<Sequence>> sequences_;  // living, or in flight
  // Between Wait and the end of Collect, sequences that a callback ends are kept: they may be in
  // the job that is being taken in.
  bool collecting_ = false;
  std::vector<SeqId> ended_while_collecting_;
  std::vector<SeqId> scored_at_once_;  // ask for nothing: they end with the next step
  // Requests whose descriptions are compiled, by number.
  std::unordered_map<int64_t, std::shared_ptr<Request>> compiling_;
  SchedulerStep step_;
  // In flight at most two; the third can be filled meanwhile.
  std::array<std::unique_ptr<Job>, 3> jobs_;
  size_t next_job_ = 0;
  int64_t completion_tokens_ = 0;
  // What the statistics have been told.
  int64_t recorded_tokens_ = 0;
  SchedulerCounters recorded_;
  double last_plan_seconds_ = 0;
  std::optional<Error> device_lost_;
  double last_collect_seconds_ = 0;
  std::unique_ptr<GrammarService> grammars_;  // null: nothing compiles
  StepRunner runner_;                         // last: its thread must end before the rest
};

}  // namespace deepinfer
