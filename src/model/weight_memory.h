// Where the weights of a checkpoint go and how much memory they take there, from the configuration
// alone. Shared by `deepinfer inspect`, `deepinfer plan` and the executor.
#pragma once

#include <array>
#include <cstdint>

#include "model/config.h"
#include "model/inventory.h"

namespace deepinfer {

struct WeightMemory {
  std::array<int64_t, kNumTensorGroups> resident{};  // bytes in the device's memory
  std::array<int64_t, kNumTensorGroups> mapped{};    // bytes read from the checkpoint's files

  int64_t resident_bytes() const;
  int64_t mapped_bytes() const;
};

// On a CPU: linears are repacked, the embeddings and the Engram tables stay in the mapped files,
// the vision tower is not loaded, and the draft layers are where the model drafts.
WeightMemory CpuWeightMemory(const ModelConfig& config, bool drafting);

// Experts and Engram tables are divided over the ranks; everything else is on each of them.
bool IsSplitOverRanks(TensorGroup group);
// On each of `ranks` GPUs, as stored; the draft layers where the model drafts.
WeightMemory GpuWeightMemory(const ModelConfig& config, int64_t ranks, bool drafting);

}  // namespace deepinfer
