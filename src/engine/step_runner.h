// Runs steps and draws their tokens, one step at a time and in order: on a thread of its own, so
// that the engine can plan, detokenise and write meanwhile, or on the caller's. The interface is
// that of a device queue: Launch puts a step behind the others, Wait takes the results of the
// oldest.
//
// Where the device draws tokens (ModelBackend::draws_tokens), a step is put into its queue before
// the one in front of it is finished: rows of step n + 1, then the results of step n are taken in
// while they run, then the draws of step n + 1, which may depend on tokens of step n (structured
// outputs, penalties, bad words). The device waits for the host only if that takes longer than the
// rows.
//
// Structured outputs: the masks of constrained draws are filled while rows run, as soon as
// everything drawn before has been accepted.
//
// Ownership: from Launch to Wait a job, the spans in it, and the samplers that it names belong to
// the runner.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/trace.h"
#include "engine/mask_filler.h"
#include "engine/model_backend.h"
#include "sample/sampler.h"
#include "sched/scheduler.h"

namespace deepinfer {

// One chunk's part of a job, beside its chunk of the plan.
struct StepDraw {
  SequenceSampler* sampler = nullptr;  // draws from the last row, and accepts the token
  bool constrained = false;            // sampler->constrained()
  int64_t mask = -1;                   // of a constrained draw; the runner's own
  // Prompt log-probabilities: the first of the chunk's logit rows belong to these following tokens.
  std::span<const int32_t> next_tokens;
  int64_t num_top = 0;
};

struct StepOutcome {
  std::optional<SampledToken> token;
  std::optional<Error> error;  // of this sequence alone
  std::vector<TokenLogprobs> prompt_logprobs;
};

struct StepJob {
  StepPlan plan;
  std::vector<StepDraw> draws;        // one per chunk
  std::vector<StepOutcome> outcomes;  // one per chunk, filled by the runner
  std::optional<Error> error;         // the whole step failed
  // What the engine keeps beside its step; the runner does not look at it.
  std::vector<Scheduler::ChunkResult> results;
  double launched = 0;
  double run_seconds = 0;  // rows and draws
  int64_t num_masks = 0;
  double mask_seconds = 0;       // filling masks, over all threads
  double mask_wait_seconds = 0;  // after the rows, until the last mask was there
};

class StepRunner {
 public:
  // `backend`, and `trace` unless it is null, must outlive the runner.
  // `mask_threads` fill masks; 0: the thread that draws does it.
  StepRunner(ModelBackend& backend, bool own_thread, int mask_threads = 0,
             TraceRecorder* trace = nullptr);
  // Waits for what has been launched.
  ~StepRunner();
  StepRunner(const StepRunner&) = delete;
  StepRunner& operator=(const StepRunner&) = delete;

  static constexpr size_t kMaxInFlight = 4;

  // `job` stays valid until Wait has returned it; at most kMaxInFlight are in flight.
  void Launch(StepJob* job);
  // The oldest launched job, when it has run. At least one must be in flight.
  StepJob* Wait();
  int64_t in_flight() const {
    return in_flight_;
  }

 private:
  // Holds as many as can be in flight, and allocates nothing.
  class Fifo {
   public:
    bool empty() const {
      return size_ == 0;
    }
    void Push(StepJob* job);
    StepJob* Pop();

   private:
    std::array<StepJob*, kMaxInFlight> jobs_ = {};
    size_t first_ = 0;
    size_t size_ = 0;
  };

  // Runs a job, or puts it into the device's queue, where it is the pending one.
  void Start(StepJob* job);
  void Run(StepJob& job);
  void Clear(StepJob& job);
  void Begin(StepJob* job);
  void Prepare(StepJob& job);
  // Waits for the pending job, if there is one, and takes in what it has drawn.
  void CompletePending();
  void TakeIn(StepJob& job, size_t chunk, const DrawnRows& drawn, SamplerScratch& scratch);
  void Hand(StepJob* job);
  void FailJob(StepJob& job, Error error);
  void StartMasks(StepJob& job);
  void FinishMasks(StepJob& job);
  void Draw(StepJob& job, size_t chunk, SamplerScratch& scratch);
  void Loop();

  ModelBackend& backend_;
  TraceRecorder* const trace_;
  std::vector<SamplerScratch> scratch_;  // by worker
  std::vector<int64_t> first_row_;       // of each chunk's logits
  std::span<const float> logits_;        // of the step that is running
  MaskFiller masks_;
  int64_t in_flight_ = 0;

  // Where the device draws.
  struct ChunkDraw {
    PreparedDraw prepared;
    Status status;              // of the preparation
    int64_t first_row = 0;      // of the drawn rows; the draw is behind those of prompt tokens
    int64_t first_logits = -1;  // of the rows whose logits the host sees, or -1
  };
  StepJob* pending_ = nullptr;
  std::chrono::steady_clock::time_point pending_since_;
  std::vector<ChunkDraw> chunk_draws_;  // of the pending job; only grows
  std::vector<ListedDraw> draws_;
  std::vector<int32_t> host_rows_;

  std::mutex mutex_;
  std::condition_variable changed_;
  Fifo launched_;
  Fifo finished_;
  bool waiting_ = false;  // somebody waits for a finished job
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace deepinfer
