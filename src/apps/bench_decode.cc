#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <vector>

#include "apps/bench.h"
#include "apps/bench_limits.h"
#include "apps/output.h"
#include "apps/print.h"
#include "base/cpu_features.h"
#include "model/active_bytes.h"
#include "ops/bench/ops_bench.h"
#include "runtime/device_choice.h"
#include "runtime/session.h"

namespace deepinfer {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct DecodeResult {
  double prefill_tokens_per_s = 0;
  double median_step_s = 0;
  double best_step_s = 0;
  Device device;
  double read_gbps = 0;          // best of the measured pieces; 0: not measured
  double read_median_gbps = 0;   // of whole passes
  double experts_per_layer = 0;  // distinct, averaged over layers
  int64_t bytes_per_step = 0;
  int threads = 0;
};

Result<DecodeResult> Measure(const BenchDecodeOptions& options) {
  // One step more than is timed warms up.
  DI_RETURN_IF_ERROR(LoadConfigForContext(options.model_dir, options.prompt + 1 + options.tokens,
                                          "--prompt and --tokens"));
  ExecutorOptions executor_options;
  DI_ASSIGN_OR_RETURN(executor_options.device, ChooseDevice(options.device));
  executor_options.model_dir = options.model_dir;
  executor_options.num_threads = options.threads;
  executor_options.max_sequences = options.batch;
  executor_options.cache_tokens =
      options.batch * (options.prompt + options.tokens + 2 * kBlockTokens);
  executor_options.max_batched_tokens = options.batch * options.prompt;
  executor_options.window_cache_pages = 0;
  DI_ASSIGN_OR_RETURN(executor_options.cache_format, ParseCacheFormat(options.cache_format));
  DI_ASSIGN_OR_RETURN(const std::unique_ptr<Executor> executor, Executor::Create(executor_options));
  const ModelConfig& config = executor->config();
  DecodeResult result;
  result.threads = executor->num_threads();
  result.device = executor_options.device;

  StatePools pools = MakeStatePools(*executor);
  std::vector<Session> sessions;
  std::vector<std::vector<int32_t>> next(static_cast<size_t>(options.batch));
  uint32_t state = 12345;  // any ids do; a fixed generator makes runs comparable
  for (auto& ids : next) {
    DI_ASSIGN_OR_RETURN(Session session, Session::Create(*executor, pools));
    sessions.push_back(std::move(session));
    for (int64_t i = 0; i < options.prompt; ++i) {
      state = state * 1664525u + 1013904223u;
      ids.push_back(static_cast<int32_t>((state >> 8) % static_cast<uint32_t>(config.vocab_size)));
    }
  }
  // Runs one step over all sequences and leaves the greedy continuation in `next`. Result: seconds
  // of the step, logits in host memory included, the choice of tokens not.
  const auto step = [&](LayerTrace* trace) -> Result<double> {
    std::vector<Session::Part> parts;
    for (size_t s = 0; s < sessions.size(); ++s)
      parts.push_back({.session = &sessions[s], .ids = next[s], .num_logit_rows = 1});
    const Clock::time_point begin = Clock::now();
    DI_ASSIGN_OR_RETURN(const TensorView logits, Session::Step(parts, trace));
    const double seconds = SecondsSince(begin);
    for (size_t s = 0; s < sessions.size(); ++s) {
      const float* row = logits.Row<float>(static_cast<int64_t>(s));
      next[s] = {static_cast<int32_t>(std::max_element(row, row + config.vocab_size) - row)};
    }
    return seconds;
  };
  DI_ASSIGN_OR_RETURN(const double prefill_seconds, step(nullptr));
  result.prefill_tokens_per_s =
      static_cast<double>(options.batch * options.prompt) / prefill_seconds;

  LayerTrace trace;
  DI_RETURN_IF_ERROR(step(&trace));  // also the warm-up
  for (const std::vector<int32_t>& experts : trace.experts) {
    result.experts_per_layer +=
        static_cast<double>(std::set<int32_t>(experts.begin(), experts.end()).size()) /
        static_cast<double>(config.num_hidden_layers);
  }
  result.bytes_per_step =
      ActiveBytesPerStep(config, static_cast<int64_t>(result.experts_per_layer + 0.5)).total();

  std::vector<double> seconds;
  for (int64_t i = 0; i < options.tokens; ++i) {
    DI_ASSIGN_OR_RETURN(const double step_seconds, step(nullptr));
    seconds.push_back(step_seconds);
  }
  std::sort(seconds.begin(), seconds.end());
  result.median_step_s = seconds[seconds.size() / 2];
  result.best_step_s = seconds.front();
  // The bound of a GPU is measured by the benchmarks of its kernels.
  if (executor_options.device.kind != DeviceKind::kCpu) return result;
  DI_ASSIGN_OR_RETURN(const ReadBandwidth bandwidth, MeasureReadBandwidth(result.threads));
  result.read_gbps = bandwidth.best_gbps;
  result.read_median_gbps = bandwidth.median_gbps;
  return result;
}

}  // namespace

int RunBenchDecode(const BenchDecodeOptions& options) {
  if (options.batch < 1 || options.batch > 4096 || options.prompt < 1 || options.tokens < 1) {
    return PrintError({Code::kInvalidArgument,
                       "--batch must be 1 to 4096, --prompt and --tokens at least 1.", ""});
  }
  Result<std::optional<OutputFile>> file = CreateIfNamed(options.json);
  if (!file.has_value()) return PrintError(file.error());
  const Result<DecodeResult> measured = Measure(options);
  if (!measured.has_value()) return PrintError(measured.error());
  const DecodeResult& r = *measured;
  const auto bytes = static_cast<double>(r.bytes_per_step);
  const double gbps = bytes / r.median_step_s * 1e-9;
  const bool has_bound = r.read_gbps > 0;
  Status printed = Print(
      "prefill            {:.1f} tokens/s ({} of {} in one step)\n"
      "decode             {:.2f} tokens/s, median step {:.3f} ms, best {:.3f} ms (batch {}, {})\n"
      "weights per step   {} ({:.1f} distinct experts per layer), {:.1f} GB/s\n",
      r.prefill_tokens_per_s, Counted(options.batch, "sequence"), Counted(options.prompt, "token"),
      static_cast<double>(options.batch) / r.median_step_s, r.median_step_s * 1e3,
      r.best_step_s * 1e3, options.batch,
      has_bound ? Counted(r.threads, "thread") : DeviceName(r.device), HumanBytes(r.bytes_per_step),
      r.experts_per_layer, gbps);
  if (printed.has_value() && has_bound) {
    printed = Print(
        "read bandwidth     {:.1f} GB/s median, {:.1f} GB/s best, measured in this run\n"
        "share of the bound {:.1f} % (median against median), {:.1f} % (best against best)\n",
        r.read_median_gbps, r.read_gbps, 100.0 * gbps / r.read_median_gbps,
        100.0 * bytes / r.best_step_s * 1e-9 / r.read_gbps);
  }
  if (!(*file).has_value()) return ExitStatus(printed);
  nlohmann::json json = {
      {"bench", "decode"},
      {"device", DeviceName(r.device)},
      {"cpu", HostCpuFeatures().brand},
      {"kernels", CpuLevelName(HostCpuFeatures().best_level())},
      {"threads", r.threads},
      {"batch", options.batch},
      {"prompt", options.prompt},
      {"steps", options.tokens},
      {"cache_format", options.cache_format},
      {"prefill_tokens_per_s", r.prefill_tokens_per_s},
      {"decode_tokens_per_s", static_cast<double>(options.batch) / r.median_step_s},
      {"median_step_ms", r.median_step_s * 1e3},
      {"best_step_ms", r.best_step_s * 1e3},
      {"weight_bytes_per_step", r.bytes_per_step},
      {"distinct_experts_per_layer", r.experts_per_layer}};
  if (has_bound) {
    json["read_gbps_median"] = r.read_median_gbps;
    json["read_gbps_best"] = r.read_gbps;
    json["share_of_bound_median"] = gbps / r.read_median_gbps;
    json["share_of_bound_best"] = bytes / r.best_step_s * 1e-9 / r.read_gbps;
  }
  const Status saved = (*file)->Write(json.dump(2) + "\n");
  return ExitStatus(saved.has_value() ? printed : saved);
}

}  // namespace deepinfer
