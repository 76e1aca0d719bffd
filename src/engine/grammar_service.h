// Descriptions of structured outputs are compiled here, beside the engine's thread: a few threads,
// a time limit, and results that are asked for without waiting. What compiles is a function that
// the owner gives, so that the engine knows no grammar library.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.h"
#include "deepinfer/structured_output.h"
#include "sample/token_constraint.h"

namespace deepinfer {

// Makes the constraint of one sequence, from its first token on; shared by the sequences of a
// request.
using ConstraintFactory = std::function<std::unique_ptr<TokenConstraint>()>;
// Compiles a description; trigger_token_ids and bound_token_id are not its matter. Called by
// several threads at once.
using ConstraintCompiler = std::function<Result<ConstraintFactory>(const StructuredOutput&)>;

struct GrammarServiceOptions {
  int num_threads = 2;  // compilations at once; at least 1
  // Of one compilation, from its beginning. One that takes longer is given up: its result is not
  // used, and its thread is free again when the compiler returns.
  double max_seconds = 20;
};

struct GrammarCounters {
  int64_t compiled = 0;
  int64_t failed = 0;
};

// One thread calls the methods.
class GrammarService {
 public:
  // `compiler` must not be empty.
  GrammarService(ConstraintCompiler compiler, const GrammarServiceOptions& options);
  // Waits for compilations that have begun.
  ~GrammarService();
  GrammarService(const GrammarService&) = delete;
  GrammarService& operator=(const GrammarService&) = delete;

  // `ticket` is not in use.
  void Start(int64_t ticket, StructuredOutput output);
  // Nobody wants the result any more; Poll will not report it.
  void Cancel(int64_t ticket);

  struct Finished {
    int64_t ticket = 0;
    // Errors: the compiler's; kDeadline when it took too long, or when it could not begin because
    // every thread is busy with one that did.
    Result<ConstraintFactory> factory;
  };
  // What has ended since the last call, in the order in which it ended.
  std::vector<Finished> Poll();
  // Returns when Poll has something to report, at the latest after `seconds`.
  void Wait(double seconds);

  GrammarCounters counters() const;

 private:
  using Clock = std::chrono::steady_clock;

  struct Job {
    int64_t ticket = 0;
    StructuredOutput output;
    Clock::time_point began;
    bool wanted = true;
  };

  void Loop();
  void GiveUpLateOnes();

  const ConstraintCompiler compiler_;
  const GrammarServiceOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  std::deque<std::unique_ptr<Job>> queue_;
  std::vector<Job*> running_;
  std::vector<Finished> finished_;
  GrammarCounters counters_;
  int num_idle_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;  // begun when there is work for them
};

}  // namespace deepinfer
