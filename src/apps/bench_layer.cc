#include "apps/bench_layer.h"

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "apps/output.h"
#include "apps/print.h"
#include "tensor/cuda_device.h"

namespace deepinfer {
namespace {

// The scoreboard's rows. One sequence is held against a time, more against their roofline.
constexpr double kFloorUs = 134;
constexpr double kTargetUs = 100;
constexpr double kFloorRatio = 2.0;
constexpr double kTargetRatio = 1.45;

double Difference(double larger, double smaller) {
  return (larger - smaller) / static_cast<double>(kPlainLayers);
}

struct Measured {
  int64_t batch = 0;
  LayerTimes times;
};

std::string TableOfParts(const Measured& measured, const Ceilings& ceilings) {
  const LayerTimes& times = measured.times;
  std::string text = fmt::format("\n{:<20}{:>8}{:>11}{:>10}{:>10}{:>12}{:>9}\n",
                                 fmt::format("batch {}", measured.batch), "visits", "us/layer",
                                 "MB", "GFLOP", "bound, us", "share");
  double total = 0;
  for (size_t p = 0; p < kNumStepParts; ++p) {
    if (times.part_visits[p] == 0) continue;
    const double bound = times.costs[p].Seconds(ceilings);
    total += times.part_s[p];
    text += fmt::format("{:<20}{:>8.0f}{:>11.2f}{:>10.2f}{:>10.2f}{:>12.2f}{:>8.1f}%\n",
                        StepPartName(static_cast<StepPart>(p)), times.part_visits[p],
                        times.part_s[p] * 1e6, times.costs[p].bytes * 1e-6,
                        times.costs[p].flops * 1e-9, bound * 1e6, 100 * bound / times.part_s[p]);
  }
  text += fmt::format(
      "{:<20}{:>8}{:>11.2f}   with a mark between the parts; {:.1f} experts have "
      "rows\n",
      "launched one by one", "", total * 1e6, times.touched_experts);
  return text;
}

std::string ScoreLine(const Measured& measured) {
  const double us = measured.times.seconds * 1e6;
  const double bound_us = measured.times.bound_s * 1e6;
  if (measured.batch == 1) {
    return fmt::format(
        "row 14: layer at B=1: {:.1f} us, {:.2f} times its roofline of {:.1f} us; floor {:.0f}, "
        "target {:.0f} us\n",
        us, us / bound_us, bound_us, kFloorUs, kTargetUs);
  }
  return fmt::format(
      "row 15: layer at B={}: {:.1f} us, {:.2f} times its roofline of {:.1f} us; floor {:.2f}, "
      "target {:.2f} times\n",
      measured.batch, us, us / bound_us, bound_us, kFloorRatio, kTargetRatio);
}

nlohmann::ordered_json JsonCase(const Measured& measured, const Ceilings& ceilings) {
  const LayerTimes& times = measured.times;
  nlohmann::ordered_json parts = nlohmann::ordered_json::array();
  for (size_t p = 0; p < kNumStepParts; ++p) {
    if (times.part_visits[p] == 0) continue;
    parts.push_back({{"part", StepPartName(static_cast<StepPart>(p))},
                     {"us", times.part_s[p] * 1e6},
                     {"bytes", times.costs[p].bytes},
                     {"flops", times.costs[p].flops},
                     {"bound_us", times.costs[p].Seconds(ceilings) * 1e6}});
  }
  return {{"batch", measured.batch},
          {"us", times.seconds * 1e6},
          {"bound_us", times.bound_s * 1e6},
          {"ratio", times.seconds / times.bound_s},
          {"touched_experts", times.touched_experts},
          {"parts", parts}};
}

Result<LayerTimes> Measure(const LayerSetup& setup, const Ceilings& ceilings, Stream& stream) {
  DI_ASSIGN_OR_RETURN(const SliceTimes smaller, MeasureSlice(setup.smaller, stream));
  DI_ASSIGN_OR_RETURN(const SliceTimes larger, MeasureSlice(setup.larger, stream));
  const int64_t non_finite = smaller.non_finite_logits + larger.non_finite_logits;
  if (non_finite > 0) {
    return Fail(
        Code::kInternal,
        fmt::format("{} logits are not finite: times of such values say nothing.", non_finite));
  }
  return DivideByLayers(setup, smaller, larger, ceilings);
}

}  // namespace

Result<LayerSetup> ResolveLayer(const BenchLayerOptions& options, int64_t batch) {
  const auto slice = [&](int64_t layers) {
    return ResolveSlice({.device = options.device,
                         .threads = options.threads,
                         .layers = layers,
                         .ep = 1,
                         .batch = batch,
                         .context = options.context,
                         .engram_rows = 1 << 16,
                         .runs = options.runs,
                         .seed = options.seed});
  };
  DI_ASSIGN_OR_RETURN(SliceSetup smaller, slice(kSmallerSliceLayers));
  DI_ASSIGN_OR_RETURN(SliceSetup larger, slice(kSmallerSliceLayers + kPlainLayers));
  return LayerSetup{.smaller = std::move(smaller), .larger = std::move(larger)};
}

LayerTimes DivideByLayers(const LayerSetup& setup, const SliceTimes& smaller,
                          const SliceTimes& larger, const Ceilings& ceilings) {
  LayerTimes times;
  times.seconds = Difference(larger.median_s, smaller.median_s);
  const auto few = StepCosts(setup.smaller.config, smaller.work);
  const auto many = StepCosts(setup.larger.config, larger.work);
  for (size_t p = 0; p < kNumStepParts; ++p) {
    times.part_visits[p] = Difference(static_cast<double>(larger.part_visits[p]),
                                      static_cast<double>(smaller.part_visits[p]));
    if (times.part_visits[p] == 0) continue;
    times.part_s[p] = Difference(larger.part_s[p], smaller.part_s[p]);
    times.costs[p] = {.bytes = Difference(many[p].bytes, few[p].bytes),
                      .flops = Difference(many[p].flops, few[p].flops)};
    times.bound_s += times.costs[p].Seconds(ceilings);
  }
  double touched = 0;
  for (const int64_t experts : larger.work.touched_experts) touched += static_cast<double>(experts);
  times.touched_experts = touched / static_cast<double>(larger.work.touched_experts.size());
  return times;
}

int RunBenchLayer(const BenchLayerOptions& options) {
  std::vector<LayerSetup> setups;
  for (const int64_t batch : options.batch) {
    Result<LayerSetup> setup = ResolveLayer(options, batch);
    if (!setup.has_value()) return PrintError(setup.error());
    setups.push_back(std::move(*setup));
  }
  Result<std::optional<OutputFile>> file = CreateIfNamed(options.json);
  if (!file.has_value()) return PrintError(file.error());
  const Result<std::unique_ptr<Stream>> stream = OpenSliceDevice(options.device, options.threads);
  if (!stream.has_value()) return PrintError(stream.error());
  const Result<cuda::DeviceProperties> properties =
      cuda::GetDeviceProperties((*stream)->device().index);
  if (!properties.has_value()) return PrintError(properties.error());
  Status printed = Print(
      "{}: one plain layer at the released widths, all {} experts local, {} tokens each "
      "(the difference of slices of {} and {} layers, replayed graphs)\n",
      properties->name, setups.front().smaller.config.n_routed_experts,
      setups.front().smaller.shape.before + 1, kSmallerSliceLayers,
      kSmallerSliceLayers + kPlainLayers);
  const Ceilings ceilings;
  nlohmann::ordered_json cases = nlohmann::ordered_json::array();
  std::string scores;
  for (const LayerSetup& setup : setups) {
    const Result<LayerTimes> times = Measure(setup, ceilings, **stream);
    if (!times.has_value()) return PrintError(times.error());
    const Measured measured{.batch = setup.smaller.shape.sequences, .times = *times};
    if (printed.has_value()) printed = WriteStdout(TableOfParts(measured, ceilings));
    scores += ScoreLine(measured);
    cases.push_back(JsonCase(measured, ceilings));
  }
  if (printed.has_value()) printed = WriteStdout("\n" + scores);
  if (printed.has_value() && file->has_value()) {
    printed = (*file)->Write(nlohmann::ordered_json{{"bench", "layer"},
                                                    {"device", properties->name},
                                                    {"context", options.context},
                                                    {"cases", cases}}
                                 .dump(2) +
                             "\n");
  }
  return ExitStatus(printed);
}

}  // namespace deepinfer
