// What the benchmark of one operation sees: the stream to run on, the ceilings, and Measure().
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "ops/bench/ops_bench.h"
#include "tensor/stream.h"

namespace deepinfer {

// Measured at the start of the run, all with the run's number of threads unless the name says
// otherwise. Peaks that the host lacks are 0. Bandwidth and peaks are the best of many pieces of
// the length of one call.
struct MachineCeilings {
  double read_gbps_one_thread = 0;
  double read_gbps = 0;
  double read_median_gbps = 0;  // of whole passes
  double fp32_gflops_avx2 = 0;
  double fp32_gflops_avx512 = 0;
  double bf16_dot_gflops = 0;
  double bf16_amx_gflops = 0;
};

struct OpsBenchCase {
  std::string op;    // "linear"
  std::string name;  // "mxfp4 2304x5120 m=1"
  double bytes = 0;  // least memory traffic of one call
  double flops = 0;
  // Which ceiling decides: the larger of bytes / bandwidth and flops / peak_gflops. 0: this level's
  // fp32 peak.
  double peak_gflops = 0;
  // One call on cold data; implementations rotate through copies (CopiesForColdData) on their own.
  std::function<Status()> run;
  // The same job in another library; empty if there is none.
  std::string other_name;
  std::function<Status()> other;
};

class OpsBench {
 public:
  // What cases there are.
  struct Survey {
    std::vector<std::string> ops;  // each once
    bool any_wanted = false;       // the filter selects at least one case
  };

  // With a survey nothing is measured: Wants notes what it is asked and answers no.
  OpsBench(const OpsBenchOptions& options, const MachineCeilings& ceilings, Stream& stream,
           Survey* survey = nullptr);

  Stream& stream() {
    return stream_;
  }
  const OpsBenchOptions& options() const {
    return options_;
  }
  const MachineCeilings& ceilings() const {
    return ceilings_;
  }
  // Whether the filter selects the case. Check before preparing expensive inputs.
  bool Wants(std::string_view op, std::string_view name) const;
  // Copies of `bytes` that together exceed four times the last-level cache.
  static int64_t CopiesForColdData(int64_t bytes);
  // Fp32 peak of the stream's level.
  double fp32_gflops() const;

  Status Measure(const OpsBenchCase& bench_case);

  struct Result {
    OpsBenchCase bench_case;
    CpuLevel level = CpuLevel::kScalar;
    double median_us = 0;
    double min_us = 0;
    double max_us = 0;
    double best_us = 0;          // of single calls
    double other_median_us = 0;  // 0: not measured
    double other_best_us = 0;
  };
  // The share of the deciding ceiling that a result reaches: medians against the median ceiling,
  // and the best call against the best ceiling. On a quiet machine the two agree; where others use
  // the machine, only the second means something.
  struct Share {
    double median = 0;
    double best = 0;
    std::string ceiling;
  };
  const std::vector<Result>& results() const {
    return results_;
  }
  Share ShareOf(const Result& result) const;

 private:
  const OpsBenchOptions& options_;
  const MachineCeilings& ceilings_;
  Stream& stream_;
  Survey* survey_;  // may be null
  std::vector<Result> results_;
};

Status BenchLinear(OpsBench& bench);

}  // namespace deepinfer
