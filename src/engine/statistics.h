// Counts what the engine does. The engine's thread calls the Record... methods with values it has
// (there is no clock here, and nothing is allocated); any thread may take a snapshot. What is
// counted, and how it is written down: include/deepinfer/statistics.h and metrics.cc.
//
// When to call what:
//
//   A request comes in                        RecordSubmitted()
//     it is refused                           RecordRefused(); nothing more for this request
//     each of its completions is added        RecordCreated(prompt tokens), before or after they
//     run
//   A step has been planned and launched      RecordPlanned({...}), steps without rows left out.
//                                             Values are those of this step alone: differences of
//                                             the scheduler's counters before and after Schedule
//     a chunk holds a sequence's first rows   RecordStarted(seconds since the request came in),
//                                             once per sequence, not after preemptions
//   A step without rows preempted some      RecordPreempted(how many)
//   A structured output has been compiled       RecordGrammar(true), or false if that failed,
//   unless
//                                             its request has ended before
//   The results of a step have been taken in  RecordCommitted({...}), once per planned step, in
//                                             order, after the calls below for what ended in it
//     a sequence's first token                RecordFirstToken(seconds since the request came in)
//   A completion has ended, for any reason    RecordSequenceEnded(reason, {...})
//   All completions of a request have ended   RecordRequestEnded(reason): with several reasons, the
//                                             one of StrongerReason
//
// A token counts when it becomes part of a completion: a row that ran ahead of an end token and is
// ignored counts as a row, not as a token. Tokens of a step are reported by RecordCommitted after
// the RecordSequenceEnded calls of the same step; FindViolation may be asked after either of
// RecordPlanned and RecordCommitted.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "deepinfer/statistics.h"

namespace deepinfer {

// What a sequence has had so far. The engine sums it up per sequence, and hands it over at the end.
struct SequenceTotals {
  int64_t prompt_tokens = 0;
  int64_t prompt_tokens_computed = 0;  // rows planned for the first time: CountRows
  int64_t prompt_tokens_cached = 0;    // at the first admission
  int64_t completion_tokens = 0;
  int64_t preemptions = 0;
  bool started = false;
  double first_token_seconds = -1;  // since the request came in; below 0: no token
  double total_seconds = 0;         // since the request came in
};

// A planned chunk of rows [begin, end) by kind.
struct RowCounts {
  int64_t prompt = 0;  // for the first time
  int64_t decode = 0;  // for the first time
  int64_t recomputed = 0;
};
RowCounts CountRows(int64_t begin, int64_t end, int64_t num_recomputed, int64_t prompt_tokens);

struct PlannedStep {
  RowCounts rows;
  int64_t prompt_tokens_cached = 0;  // of sequences admitted for the first time
  int64_t preemptions = 0;
  double plan_seconds = 0;  // host time of planning and launching
};

struct CommittedStep {
  int64_t completion_tokens = 0;
  double step_seconds = 0;    // from the launch to the results
  double commit_seconds = 0;  // host time of taking them in
  int64_t grammars_waiting = 0;
  int64_t num_masks = 0;         // of constrained draws; the times count when there are any
  double mask_seconds = 0;       // over all threads
  double mask_wait_seconds = 0;  // after the rows
  int64_t sequences_held = 0;
  int64_t sequences_waiting = 0;
  int64_t sequences_running = 0;
  PoolUse blocks = {};
  PoolUse window_pages = {};
  PoolUse slots = {};
};

// Sums over the sequences that are held, waiting or running, for FindViolation.
struct LivingTotals {
  int64_t requests = 0;
  int64_t sequences = 0;
  int64_t started = 0;
  int64_t with_first_token = 0;
  SequenceTotals tokens;  // sums; times are not used

  void Add(const SequenceTotals& sequence);
};

// The reason that tells more about a request with both: error, deadline, abort, length, stop.
EndReason StrongerReason(EndReason a, EndReason b);

class EngineStatistics {
 public:
  // `model` names the checkpoint in what is written.
  explicit EngineStatistics(std::string model);
  EngineStatistics(const EngineStatistics&) = delete;
  EngineStatistics& operator=(const EngineStatistics&) = delete;

  void RecordSubmitted();
  void RecordRefused();
  void RecordCreated(int64_t prompt_tokens);
  void RecordStarted(double queue_seconds);
  void RecordPlanned(const PlannedStep& step);
  void RecordPreempted(int64_t sequences);
  void RecordFirstToken(double seconds);
  void RecordGrammar(bool compiled);
  void RecordCommitted(const CommittedStep& step);
  void RecordSequenceEnded(EndReason reason, const SequenceTotals& sequence);
  void RecordRequestEnded(EndReason reason);

  // From any thread.
  StatisticsSnapshot Snapshot() const;

  // Empty, or the first rule that the numbers break. `living` is what the engine finds when it goes
  // through its sequences.
  std::string FindViolation(const LivingTotals& living) const;

 private:
  mutable std::mutex mutex_;
  StatisticsSnapshot now_;
  // What FindViolation needs besides.
  SequenceTotals ended_;  // sums
  int64_t ended_started_ = 0;
  int64_t ended_with_first_token_ = 0;
  int64_t ended_with_two_tokens_ = 0;
  int64_t committed_steps_ = 0;
  int64_t living_when_committed_ = 0;  // sequences, at the last RecordCommitted
};

}  // namespace deepinfer
