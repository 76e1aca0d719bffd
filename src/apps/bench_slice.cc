#include "apps/bench_slice.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "apps/output.h"
#include "apps/print.h"
#include "apps/slice_timing.h"
#include "base/cpu_features.h"
#include "base/log.h"
#include "base/thread_pool.h"
#include "model/random_checkpoint.h"
#include "runtime/device_choice.h"
#include "tensor/copy.h"
#include "tensor/cuda_device.h"

namespace deepinfer {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kExperts = 384;
constexpr int64_t kMaxRows = 1 << 16;
constexpr int64_t kDecodeContext = 131072;
constexpr int kWarmUps = 5;
constexpr int kPartRuns = 3;
// Copies in front of a step that is launched kernel by kernel: about 10 ms, in which the host gets
// ahead of the device. Otherwise short kernels would be timed as long as their launches take.
constexpr int kCopiesAhead = 20;

constexpr const char* kPartNames[kNumStepParts] = {
    "inputs",        "engram",  "hyper-connections", "compressor", "q/kv down",
    "latent inputs", "q up",    "indexer",           "attention",  "output projections",
    "router",        "experts", "shared expert",     "combine",    "draft context",
    "head"};

Status CheckRange(const char* option, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return {};
  return Fail(Code::kInvalidArgument,
              fmt::format("{} is {}; allowed are {} to {}.", option, value, least, most));
}

Status CheckMemory(const SliceSetup& setup, Stream& stream) {
  if (stream.device().kind == DeviceKind::kCpu) return {};
  const RankSliceBytes need = RankSliceMemory(setup.config, setup.shape);
  const int64_t total = need.total() + 2 * setup.copy_bytes;
  DI_ASSIGN_OR_RETURN(const int64_t have, cuda::FreeMemoryBytes(stream.device().index));
  if (total <= have) return {};
  return Fail(Code::kResourceExhausted,
              fmt::format("The slice needs {} of device memory ({} weights, {} caches, {} for the "
                          "step, {} for copies); {} has {} free. Fewer layers or sequences, a "
                          "shorter context or more ranks need less.",
                          HumanBytes(total), HumanBytes(need.weights), HumanBytes(need.caches),
                          HumanBytes(need.scratch + need.step), HumanBytes(2 * setup.copy_bytes),
                          DeviceName(stream.device()), HumanBytes(have)));
}

Result<int64_t> CountNonFinite(const TensorView& logits, Stream& stream) {
  std::vector<float> values(static_cast<size_t>(logits.num_elements()));
  DI_RETURN_IF_ERROR(CopyToHost(logits, values.data(), stream));
  return std::count_if(values.begin(), values.end(), [](float v) { return !std::isfinite(v); });
}

}  // namespace

Result<SliceSetup> ResolveSlice(const BenchSliceOptions& options) {
  const bool prefill = options.prefill != 0;
  DI_RETURN_IF_ERROR(CheckRange("--layers", options.layers, prefill ? 4 : 1, 40));
  DI_RETURN_IF_ERROR(CheckRange("--ep", options.ep, 1, kExperts));
  if (kExperts % options.ep != 0) {
    return Fail(
        Code::kInvalidArgument,
        fmt::format("--ep is {}; it must divide the {} experts of a layer.", options.ep, kExperts));
  }
  DI_RETURN_IF_ERROR(CheckRange("--prefill", options.prefill, 0, kMaxRows));
  DI_RETURN_IF_ERROR(CheckRange("--batch", options.batch, 1, 4096));
  DI_RETURN_IF_ERROR(CheckRange("--runs", options.runs, 3, 1000));
  DI_RETURN_IF_ERROR(CheckRange("--engram-rows", options.engram_rows, 1000, 384006168));
  DI_ASSIGN_OR_RETURN(
      const std::string json,
      SliceConfigJson(
          {.layers = options.layers, .experts = kExperts, .engram_rows = options.engram_rows}));
  DI_ASSIGN_OR_RETURN(ModelConfig config, ParseModelConfig(json));
  const int64_t most = config.max_position_embeddings;
  RankSliceShape shape{.ranks = options.ep, .seed = options.seed};
  if (prefill) {
    DI_RETURN_IF_ERROR(CheckRange("--replay", options.replay, 1, options.prefill));
    shape.before = options.context < 0 ? 0 : options.context;
    DI_RETURN_IF_ERROR(CheckRange("--context", shape.before, 0, most - options.prefill));
    shape.rows = options.prefill;
    shape.decoder_rows = options.replay;
  } else {
    const int64_t context = options.context < 0 ? kDecodeContext : options.context;
    DI_RETURN_IF_ERROR(CheckRange("--context", context, 1, most));
    shape.sequences = options.batch;
    shape.before = context - 1;
  }
  return SliceSetup{.config = std::move(config), .shape = shape, .runs = options.runs};
}

Result<std::unique_ptr<Stream>> OpenSliceDevice(std::string_view name, int threads) {
  DI_ASSIGN_OR_RETURN(const Device device, ChooseDevice(name));
  if (device.kind == DeviceKind::kCpu) {
    const Result<int> count = cuda::DeviceCount();
    return Fail(Code::kUnsupported,
                fmt::format("The slice has the released widths and runs on a CUDA device only{}",
                            count.has_value() ? "; choose cuda:0." : ". " + count.error().message));
  }
  return Stream::CreateCuda(device.index, threads > 0 ? threads : UsableCores());
}

const char* StepPartName(StepPart part) {
  return kPartNames[static_cast<size_t>(part)];
}

Result<SliceTimes> MeasureSlice(const SliceSetup& setup, Stream& stream) {
  DI_RETURN_IF_ERROR(CheckMemory(setup, stream));
  SliceTimes times;
  const bool gpu = stream.device().kind == DeviceKind::kCuda;
  times.graph = gpu && cuda::RecordsGraphs();
  std::optional<DeviceCopies> copies;
  if (gpu) {
    DI_ASSIGN_OR_RETURN(copies, DeviceCopies::Create(setup.copy_bytes, stream));
    DI_ASSIGN_OR_RETURN(times.copy_bytes_per_s, copies->Measure(stream));
  }
  const RankSliceBytes need = RankSliceMemory(setup.config, setup.shape);
  Log(LogLevel::kInfo, "loading random weights_bytes={} caches_bytes={} step_bytes={}",
      need.weights, need.caches, need.scratch + need.step);
  const Clock::time_point start = Clock::now();
  DI_RETURN_IF_ERROR(stream.ReserveScratch(need.scratch));
  DI_ASSIGN_OR_RETURN(const std::unique_ptr<RankSlice> slice,
                      RankSlice::Create(setup.config, setup.shape, stream));
  times.load_s = std::chrono::duration<double>(Clock::now() - start).count();
  times.work = slice->work();
  PartTimer probe(stream);
  // Also loads the kernels, and shows how much scratch memory they take: what was added to the
  // reserve on the way would come in other pieces next time, but a recording cannot allocate.
  DI_RETURN_IF_ERROR(slice->RunStep(probe));
  DI_RETURN_IF_ERROR(stream.Synchronize());
  times.peak_scratch_bytes = stream.peak_scratch_bytes();
  if (times.peak_scratch_bytes > need.scratch)
    DI_RETURN_IF_ERROR(stream.ReserveScratch(times.peak_scratch_bytes));
  DI_ASSIGN_OR_RETURN(times.non_finite_logits, CountNonFinite(slice->logits(), stream));

  StepGraph graph;
  if (times.graph) {
    DI_RETURN_IF_ERROR(graph.Record([&] { return slice->RunStep(probe); }, stream));
  }
  const auto step = [&] { return times.graph ? graph.Replay(stream) : slice->RunStep(probe); };
  for (int i = 0; times.graph && i < kWarmUps; ++i) DI_RETURN_IF_ERROR(step());
  StreamMarks marks(stream);
  DI_RETURN_IF_ERROR(marks.Add());
  for (int i = 0; i < setup.runs; ++i) {
    DI_RETURN_IF_ERROR(step());
    DI_RETURN_IF_ERROR(marks.Add());
  }
  DI_ASSIGN_OR_RETURN(std::vector<double> seconds, marks.Seconds());
  std::sort(seconds.begin(), seconds.end());
  times.median_s = Quantile(seconds, 0.5);
  times.p10_s = Quantile(seconds, 0.1);
  times.p90_s = Quantile(seconds, 0.9);

  std::array<std::vector<double>, kNumStepParts> parts;
  for (int i = 0; i < kPartRuns; ++i) {
    if (copies.has_value()) DI_RETURN_IF_ERROR(copies->Enqueue(kCopiesAhead, stream));
    probe.Start();
    DI_RETURN_IF_ERROR(slice->RunStep(probe));
    DI_RETURN_IF_ERROR(probe.Stop());
    DI_ASSIGN_OR_RETURN(const auto part_seconds, probe.PartSeconds());
    for (size_t p = 0; p < kNumStepParts; ++p) parts[p].push_back(part_seconds[p]);
  }
  for (size_t p = 0; p < kNumStepParts; ++p) {
    std::sort(parts[p].begin(), parts[p].end());
    times.part_s[p] = Quantile(parts[p], 0.5);
  }
  times.part_visits = probe.PartVisits();
  return times;
}

namespace {

// What the step is held against, and how it comes out.
struct Verdict {
  int64_t tokens = 0;  // per step
  SpeedOfLight bound;
  double tokens_per_s = 0;
  double bound_tokens_per_s = 0;
  double share = 0;
};

Verdict Judge(const SliceSetup& setup, const SliceTimes& times, const Ceilings& ceilings) {
  const RankSliceShape& shape = setup.shape;
  Verdict v;
  v.tokens = shape.sequences * shape.rows;
  v.bound = shape.rows == 1 ? DecodeSpeedOfLight(setup.config, shape.sequences, shape.before + 1,
                                                 shape.ranks, ceilings)
                            : PrefillSpeedOfLight(setup.config, shape.before, shape.rows, ceilings);
  v.tokens_per_s = static_cast<double>(v.tokens) / times.median_s;
  v.bound_tokens_per_s = static_cast<double>(v.tokens) / v.bound.total();
  v.share = v.bound.total() / times.median_s;
  return v;
}

double Total(const std::array<double, kNumStepParts>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

double Mean(const std::vector<int64_t>& values) {
  return static_cast<double>(std::accumulate(values.begin(), values.end(), int64_t{0})) /
         static_cast<double>(values.size());
}

std::string Report(const SliceSetup& setup, const std::string& device, const SliceTimes& times,
                   const Ceilings& ceilings) {
  const RankSliceShape& shape = setup.shape;
  const Verdict v = Judge(setup, times, ceilings);
  const bool decode = shape.rows == 1;
  const auto costs = StepCosts(setup.config, times.work);
  std::string text = fmt::format(
      "device             {}\n"
      "slice              {} layers, one of {} ranks: {} of {} experts per layer\n"
      "step               {}\n"
      "experts            {:.1f} rows from all ranks and {:.1f} experts with rows, per layer\n"
      "made in            {:.1f} s; scratch {}\n"
      "ceilings           {:.2f} TB/s and {:.0f} TFLOP/s; copies in this run {:.2f} TB/s\n"
      "time               {:.3f} ms median, {:.3f} p10, {:.3f} p90 of {} {}\n",
      device, setup.config.num_hidden_layers, shape.ranks, kExperts / shape.ranks, kExperts,
      decode ? fmt::format("decode, {} with {} tokens", Counted(shape.sequences, "sequence"),
                           shape.before + 1)
             : fmt::format("prefill, {} new tokens after {}; the last {} run the decoder half",
                           shape.rows, shape.before, shape.decoder_rows),
      Mean(times.work.expert_rows), Mean(times.work.touched_experts), times.load_s,
      HumanBytes(times.peak_scratch_bytes), ceilings.bytes_per_s * 1e-12,
      ceilings.flops_per_s * 1e-12, times.copy_bytes_per_s * 1e-12, times.median_s * 1e3,
      times.p10_s * 1e3, times.p90_s * 1e3, setup.runs,
      times.graph ? "replays of one graph" : "steps");
  text += fmt::format("\n{:<20}{:>7}{:>11}{:>9}{:>10}{:>10}{:>12}{:>8}{:>8}\n", "part", "visits",
                      "us/step", "of time", "MB", "GFLOP", "bound, us", "by", "share");
  const double total = Total(times.part_s);
  double bound_total = 0;
  for (size_t p = 0; p < kNumStepParts; ++p) {
    if (times.part_visits[p] == 0) continue;
    const double bound = costs[p].Seconds(ceilings);
    bound_total += bound;
    text +=
        fmt::format("{:<20}{:>7}{:>11.1f}{:>8.1f}%{:>10.1f}{:>10.1f}{:>12.1f}{:>8}{:>7.1f}%\n",
                    kPartNames[p], times.part_visits[p], times.part_s[p] * 1e6,
                    100 * times.part_s[p] / total, costs[p].bytes * 1e-6, costs[p].flops * 1e-9,
                    bound * 1e6, costs[p].bytes / ceilings.bytes_per_s >= bound ? "bytes" : "flops",
                    100 * bound / times.part_s[p]);
  }
  text += fmt::format("{:<20}{:>7}{:>11.1f}{:>9}{:>10}{:>10}{:>12.1f}{:>8}{:>7.1f}%\n",
                      "launched one by one", "", total * 1e6, "", "", "", bound_total * 1e6, "",
                      100 * bound_total / total);
  text += fmt::format(
      "\nspeed of light     {:.3f} ms: experts {:.3f}, dense {:.3f}, attention {:.3f}, indexer "
      "{:.3f}, hyper-connections {:.3f}{}\n"
      "tokens per second  {:.0f} of {:.0f}: {:.1f} %\n",
      v.bound.total() * 1e3, v.bound.experts * 1e3, v.bound.dense * 1e3, v.bound.attention * 1e3,
      v.bound.indexer * 1e3, v.bound.hyper_connections * 1e3, decode ? "" : " (encoder half only)",
      v.tokens_per_s, v.bound_tokens_per_s, 100 * v.share);
  return text;
}

nlohmann::json JsonReport(const SliceSetup& setup, const std::string& device,
                          const SliceTimes& times, const Ceilings& ceilings) {
  const RankSliceShape& shape = setup.shape;
  const Verdict v = Judge(setup, times, ceilings);
  const auto costs = StepCosts(setup.config, times.work);
  nlohmann::json parts = nlohmann::json::array();
  for (size_t p = 0; p < kNumStepParts; ++p) {
    parts.push_back({{"part", kPartNames[p]},
                     {"visits", times.part_visits[p]},
                     {"us", times.part_s[p] * 1e6},
                     {"bytes", costs[p].bytes},
                     {"flops", costs[p].flops},
                     {"bound_us", costs[p].Seconds(ceilings) * 1e6}});
  }
  return {{"bench", "slice"},
          {"device", device},
          {"layers", setup.config.num_hidden_layers},
          {"ep", shape.ranks},
          {"sequences", shape.sequences},
          {"before", shape.before},
          {"rows", shape.rows},
          {"decoder_rows", shape.decoder_rows},
          {"seed", shape.seed},
          {"expert_rows_per_layer", Mean(times.work.expert_rows)},
          {"touched_experts_per_layer", Mean(times.work.touched_experts)},
          {"graph", times.graph},
          {"runs", setup.runs},
          {"median_ms", times.median_s * 1e3},
          {"p10_ms", times.p10_s * 1e3},
          {"p90_ms", times.p90_s * 1e3},
          {"tokens_per_s", v.tokens_per_s},
          {"ceiling_bytes_per_s", ceilings.bytes_per_s},
          {"ceiling_flops_per_s", ceilings.flops_per_s},
          {"copy_bytes_per_s", times.copy_bytes_per_s},
          {"bound_ms",
           {{"experts", v.bound.experts * 1e3},
            {"dense", v.bound.dense * 1e3},
            {"attention", v.bound.attention * 1e3},
            {"indexer", v.bound.indexer * 1e3},
            {"hyper_connections", v.bound.hyper_connections * 1e3},
            {"total", v.bound.total() * 1e3}}},
          {"bound_tokens_per_s", v.bound_tokens_per_s},
          {"share_of_bound", v.share},
          {"parts", parts},
          {"non_finite_logits", times.non_finite_logits}};
}

}  // namespace

int RunBenchSlice(const BenchSliceOptions& options) {
  const Result<SliceSetup> setup = ResolveSlice(options);
  if (!setup.has_value()) return PrintError(setup.error());
  Result<std::optional<OutputFile>> file = CreateIfNamed(options.json);
  if (!file.has_value()) return PrintError(file.error());
  const Result<std::unique_ptr<Stream>> stream = OpenSliceDevice(options.device, options.threads);
  if (!stream.has_value()) return PrintError(stream.error());
  const Result<cuda::DeviceProperties> properties =
      cuda::GetDeviceProperties((*stream)->device().index);
  if (!properties.has_value()) return PrintError(properties.error());
  const Result<SliceTimes> times = MeasureSlice(*setup, **stream);
  if (!times.has_value()) return PrintError(times.error());
  const Ceilings ceilings;
  Status printed = WriteStdout(Report(*setup, properties->name, *times, ceilings));
  if (file->has_value()) {
    const Status saved =
        (*file)->Write(JsonReport(*setup, properties->name, *times, ceilings).dump(2) + "\n");
    if (!saved.has_value()) printed = saved;
  }
  if (printed.has_value() && times->non_finite_logits > 0) {
    return PrintError({Code::kInternal,
                       fmt::format("{} logits are not finite: times of such values say nothing.",
                                   times->non_finite_logits),
                       ""});
  }
  return ExitStatus(printed);
}

}  // namespace deepinfer
