// The halves of `deepinfer bench slice` that its tests call: from options to what is run, and from
// there to times.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>

#include "apps/bench.h"
#include "apps/rank_slice.h"
#include "apps/roofline.h"
#include "base/error.h"
#include "model/config.h"
#include "model/step_probe.h"
#include "tensor/stream.h"

namespace deepinfer {

struct SliceSetup {
  ModelConfig config;
  RankSliceShape shape;
  int runs = 30;                          // timed steps
  int64_t copy_bytes = int64_t{1} << 30;  // of the copies that measure the device's memory
};
// Errors: kInvalidArgument with a sentence.
Result<SliceSetup> ResolveSlice(const BenchSliceOptions& options);

// The CUDA device of a name, with threads that make weights (0: one per usable core). Errors:
// kUnsupported for the CPU, and those of ChooseDevice.
Result<std::unique_ptr<Stream>> OpenSliceDevice(std::string_view name, int threads);

struct SliceTimes {
  bool graph = false;   // replayed, or launched kernel by kernel
  double median_s = 0;  // of the runs
  double p10_s = 0;
  double p90_s = 0;
  double load_s = 0;                                 // making weights and caches
  std::array<double, kNumStepParts> part_s{};        // per step, kernel by kernel
  std::array<int64_t, kNumStepParts> part_visits{};  // per step
  double copy_bytes_per_s = 0;  // read and written, measured in the same run; 0 on a CPU
  int64_t non_finite_logits = 0;
  int64_t peak_scratch_bytes = 0;
  StepWork work;
};
// Makes the slice on the stream's device and times its step, as a graph where there are any.
// Errors: kResourceExhausted, also when the device has too little memory, and those of operations.
Result<SliceTimes> MeasureSlice(const SliceSetup& setup, Stream& stream);

const char* StepPartName(StepPart part);

}  // namespace deepinfer
