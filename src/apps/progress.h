// The progress line of long jobs, on standard error: rewritten in place on a terminal, a plain line
// now and then elsewhere.
#pragma once

#include <cstdint>
#include <string>

namespace deepinfer {

struct ProgressSample {
  int64_t done = 0;
  int64_t total = 0;        // -1: not known
  int64_t failed = 0;       // among the done ones
  int64_t done_before = 0;  // among them, in earlier runs of a job that was continued
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  double seconds = 0;  // since the start
};

// "120/1000 done (3 failed), prompt 812.4 tok/s, output 95.1 tok/s, 02:41 left", or "120 done (3
// failed), ..." while the total is not known. Rates are averages since the start.
std::string ProgressText(const ProgressSample& sample);

class ProgressLine {
 public:
  explicit ProgressLine(std::string name);

  // Prints if enough time has passed since the last time: 0.2 s on a terminal, 10 s elsewhere.
  void Update(const ProgressSample& sample);
  // Prints the final state.
  void Finish(const ProgressSample& sample);

 private:
  void Print(const ProgressSample& sample, bool last);

  std::string name_;
  bool terminal_;
  double last_seconds_ = 0;
};

}  // namespace deepinfer
