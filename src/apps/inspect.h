// `deepinfer inspect DIR`: what a checkpoint is, what it holds, and which memory it needs. Reads
// headers only, so it works on the full-size model on any machine.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "model/config.h"
#include "model/inventory.h"

namespace deepinfer {

struct InspectOptions {
  std::string dir;
  bool json = false;
};

struct InspectReport {
  std::string dir;
  ModelConfig config;
  int64_t num_shards = 0;
  int64_t num_tensors = 0;
  int64_t tensor_bytes = 0;
  std::array<GroupSize, kNumTensorGroups> groups = {};

  // A CPU run repacks the text model's weights into memory and leaves the embedding and the Engram
  // tables in the files.
  int64_t cpu_packed_bytes = 0;
  int64_t cpu_mapped_bytes = 0;
  int64_t cpu_draft_bytes = 0;  // packed in addition where the model drafts

  // Weights per GPU when g ranks split the routed and draft experts and the Engram tables evenly
  // and hold the rest each.
  struct RankNeed {
    int64_t ranks = 1;
    int64_t weight_bytes = 0;
  };
  std::vector<RankNeed> ranks;

  // State of one sequence: what grows with its tokens and what does not. Exact averages: a ratio-2
  // cache adds an entry every second token.
  double kv_bytes_per_token = 0;
  int64_t window_bytes = 0;      // rings of all layers, draft layers included
  int64_t compressor_bytes = 0;  // incomplete groups of ratio-2 layers
};

// Opens, validates against the configuration, and counts.
Result<InspectReport> InspectCheckpoint(const std::string& dir);
std::string ReportText(const InspectReport& report);
std::string ReportJson(const InspectReport& report);

// Returns the exit status of the program.
int RunInspect(const InspectOptions& options);

}  // namespace deepinfer
