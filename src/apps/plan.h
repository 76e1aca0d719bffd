// `deepinfer plan`: what a run would take of memory, and what would fit, without loading anything
// but config.json.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "deepinfer/llm.h"
#include "runtime/memory_plan.h"

namespace deepinfer {

struct PlanOptions {
  LLMOptions llm;              // of the run; of each rank, if there are several
  std::string device = "cpu";  // or a name of PlanDeviceNames()
  int64_t memory_bytes = 0;    // that may be used on each device; 0: nine tenths of what it has
  int64_t ranks = 1;           // GPUs
  int64_t draft_tokens = 0;    // of a drafted block; 0: no drafting
  bool force_draft_tokens = false;
  bool json = false;
};

std::vector<std::string> PlanDeviceNames();

struct PlanReport {
  std::string model_dir;
  std::string device;
  int64_t ranks = 0;  // 0: a CPU
  int64_t device_bytes = 0;
  MemoryRequest request;
  MemoryPlan plan;
  bool fits = false;
  std::string problem;  // if it does not fit
  struct Fit {
    int64_t tokens = 0;
    int64_t sequences = 0;
  };
  std::vector<Fit> fit;  // ascending, up to the longest sequence
};

// Errors: those of the configuration, and options that a run would refuse.
Result<PlanReport> MakePlan(const PlanOptions& options);
std::string PlanText(const PlanReport& report);
std::string PlanJson(const PlanReport& report);

// Returns the exit status: kExitFailure also when the plan does not fit.
int RunPlan(const PlanOptions& options);

}  // namespace deepinfer
