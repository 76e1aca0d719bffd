// A run of the scheduler as text: every call with its arguments, and of every step a digest of what
// was decided. Replaying the text needs no model: it makes the same calls on a fresh scheduler and
// reports the first decision that differs. Used to reproduce a run elsewhere and to see what a
// changed policy would have done.
//
// Format: lines of words; the first line names the version. Every line ends with a checksum of the
// text up to there, so that a changed file is told from a changed decision. Text that ends after
// any line is a recording of a shorter run.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"
#include "sched/scheduler.h"

namespace deepinfer {

// A number for everything that a step says.
uint64_t DigestOf(const SchedulerStep& step);

// Call its methods beside those of the scheduler, in the same order, from the first call on: replay
// starts with empty pools and an empty prefix cache.
class ScheduleRecorder {
 public:
  // At most about `max_bytes` of text; what comes later is not recorded.
  ScheduleRecorder(const SchedulerOptions& options, const StatePools& pools, bool has_prefix_cache,
                   int64_t max_bytes = int64_t{64} << 20);

  void Add(const SequenceSpec& spec, double now, bool accepted);
  void Release(SeqId id);
  void Schedule(double now, const SchedulerStep& step);
  void Commit(std::span<const Scheduler::ChunkResult> results, bool ran = true);
  void End(SeqId id);

  bool full() const {
    return full_;
  }
  // What has been recorded since the last call; may be written to a file piece by piece.
  std::string TakeText();

 private:
  void Finish(std::string line);

  int64_t max_bytes_;
  int64_t num_bytes_ = 0;
  uint64_t checksum_ = 0;
  bool full_ = false;
  std::string text_;
};

struct ScheduleReplay {
  struct Divergence {
    int64_t line = 0;         // of the recording, from 1
    std::string description;  // a sentence
  };
  int64_t num_calls = 0;
  int64_t num_steps = 0;
  std::optional<Divergence> first_divergence;  // replay stops there
  SchedulerCounters counters;
};

// Errors: kDataLoss if the text is damaged or incomplete within a line, kUnsupported for another
// version, kInvalidArgument if it says what no run can say.
Result<ScheduleReplay> ReplaySchedule(std::string_view text);

}  // namespace deepinfer
