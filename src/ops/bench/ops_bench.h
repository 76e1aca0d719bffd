// Times CPU operations against what this machine can do: `RunOpsBench` first measures the ceilings
// (read bandwidth, peaks of the multiply-add instructions), then every registered case, and writes
// one JSON document. Used by the ops_bench program and by `deepinfer bench ops`; not linked into
// the engine.
//
// To add an operation: write `Status BenchRmsNorm(OpsBench& bench)` that prepares its inputs and
// calls bench.Measure() per case, declare it in ops_bench_cases.h and add it to the table in
// ops_bench.cc.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "base/error.h"

namespace deepinfer {

struct OpsBenchOptions {
  int threads = 0;          // 0: all processors this process may use
  int runs = 9;             // per case, at least 3; the median is reported
  bool all_levels = false;  // every instruction-set level of the host, not only the best
  bool compare = true;      // also time the comparison library where there is one
  // Count the calling thread's processor time instead of wall time. For machines that others use at
  // the same time; needs threads = 1.
  bool thread_cpu_time = false;
  std::string filter;  // only cases whose name contains this
  // Receives one line of plain text per result, for people who wait. May be empty.
  std::function<void(std::string_view)> progress;
};

// What the memory of this machine delivers to sequential reads of data that no cache holds.
struct ReadBandwidth {
  double median_gbps = 0;  // of whole passes
  double best_gbps = 0;    // of pieces as long as one bandwidth-bound operation
};
// Errors: kResourceExhausted.
Result<ReadBandwidth> MeasureReadBandwidth(int threads);

// Errors: kInvalidArgument (options), kNotFound (the filter selects no case; nothing has been
// measured then), kResourceExhausted.
Status RunOpsBench(const OpsBenchOptions& options, std::string* json);

}  // namespace deepinfer
