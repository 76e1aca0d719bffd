// The halves of `deepinfer bench layer` that its tests call: two slices of the model that differ in
// plain layers only, and what one of these layers takes.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "apps/bench.h"
#include "apps/bench_slice.h"
#include "apps/roofline.h"
#include "base/error.h"
#include "model/config.h"
#include "model/step_probe.h"

namespace deepinfer {

// The larger slice has the layers of the smaller one, in the same number of every special kind
// (sources of compressed keys, of index keys and of selections, Engram), and this many plain ones
// beside them. All experts are local.
inline constexpr int64_t kSmallerSliceLayers = 8;
inline constexpr int64_t kPlainLayers = 4;

struct LayerSetup {
  SliceSetup smaller;
  SliceSetup larger;
};
// For one of the batch sizes. Errors: kInvalidArgument with a sentence.
Result<LayerSetup> ResolveLayer(const BenchLayerOptions& options, int64_t batch);

// Of a plain layer.
struct LayerTimes {
  double seconds = 0;                               // in a replayed graph
  double bound_s = 0;                               // sum of what bounds the parts
  std::array<double, kNumStepParts> part_s{};       // kernel by kernel
  std::array<double, kNumStepParts> part_visits{};  // of these, per layer
  std::array<Cost, kNumStepParts> costs{};
  double touched_experts = 0;
};
// From the times of the two slices, whose difference is that of kPlainLayers layers.
LayerTimes DivideByLayers(const LayerSetup& setup, const SliceTimes& smaller,
                          const SliceTimes& larger, const Ceilings& ceilings);

}  // namespace deepinfer
