// `deepinfer bench ops` and `deepinfer bench decode`: speed against what this machine can do,
// measured in the same run.
#pragma once

#include <cstdint>
#include <string>

namespace deepinfer {

struct BenchOpsOptions {
  int threads = 0;          // 0: one per usable core
  int runs = 9;             // per case; the median is reported
  bool all_levels = false;  // every instruction-set level of the host, not only the best
  bool compare = true;      // time oneDNN beside, where this build has it
  std::string filter;       // only cases whose name contains this
  std::string json;         // file for the results; empty: none
};
int RunBenchOps(const BenchOpsOptions& options);

struct BenchDecodeOptions {
  std::string model_dir;
  int threads = 0;      // 0: one per usable core
  int64_t batch = 1;    // sequences that decode together
  int64_t prompt = 64;  // tokens of each prompt (random ids)
  int64_t tokens = 32;  // decode steps timed
  std::string json;     // file for the results; empty: none
};
// Whole-model decode: tokens per second, and the share of the bandwidth bound (weights read per
// step over measured read bandwidth). Also the prefill rate of the prompts.
int RunBenchDecode(const BenchDecodeOptions& options);

struct BenchHostOptions {
  std::string model_dir;   // for its tokenizer
  int64_t context = 2048;  // tokens of each running sequence
  int64_t steps = 400;     // timed
  std::string json;        // file for the results; empty: none
};
// Host time per decode step, on a model that costs nothing, at 1, 256 and 1,024 running sequences.
int RunBenchHost(const BenchHostOptions& options);

}  // namespace deepinfer
