// Speed-of-light times of the text model on one GPU of an expert-parallel deployment: what a step
// must move and multiply at least, over what the device can move and multiply. All sizes come from
// the configuration. The model's own numerics are assumed: products of exact bf16 numbers, so one
// rate of multiplication for all of them.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "model/config.h"
#include "model/step_probe.h"

namespace deepinfer {

// Rates that an H200 has been seen to reach: a copy on the device, bytes read and bytes written,
// and a bf16 matrix product of 8192^3.
struct Ceilings {
  double bytes_per_s = 4.3e12;
  double flops_per_s = 790e12;
};

struct Cost {
  double bytes = 0;
  double flops = 0;
  double Seconds(const Ceilings& ceilings) const;
};

struct SpeedOfLight {  // seconds
  double experts = 0;
  double dense = 0;  // everything else with weights
  double attention = 0;
  double indexer = 0;
  double hyper_connections = 0;
  double total() const {
    return experts + dense + attention + indexer + hyper_connections;
  }
};

// A decode step of `batch` rows, each of a sequence of `context` tokens, on one of `ranks` GPUs
// that share the experts and have as many rows each.
SpeedOfLight DecodeSpeedOfLight(const ModelConfig& config, int64_t batch, int64_t context,
                                int64_t ranks, const Ceilings& ceilings);
// `tokens` prompt tokens behind `before` others, of one sequence, through the layers before
// config.decoder_start() and the compressor there. Weights are read once for so many tokens that
// the products bound them; the rows that run the other layers are so few that they are left out.
SpeedOfLight PrefillSpeedOfLight(const ModelConfig& config, int64_t before, int64_t tokens,
                                 const Ceilings& ceilings);

// What a step of a rank does.
struct StepWork {
  int64_t sequences = 1;
  int64_t before = 0;        // tokens of each sequence before its rows
  int64_t rows = 1;          // of each sequence
  int64_t decoder_rows = 1;  // of each sequence, that the layers from decoder_start() on run
  std::vector<int64_t> expert_rows;      // per layer: rows times local experts they are sent to
  std::vector<int64_t> touched_experts;  // per layer: local experts with rows
};
// The least that each part moves and multiplies, over all layers.
std::array<Cost, kNumStepParts> StepCosts(const ModelConfig& config, const StepWork& work);

}  // namespace deepinfer
