#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "apps/bench.h"
#include "apps/bench_limits.h"
#include "apps/output.h"
#include "apps/print.h"
#include "base/cpu_features.h"
#include "base/quoted.h"
#include "engine/llm_options.h"
#include "runtime/device_choice.h"
#include "runtime/session.h"

namespace deepinfer {
namespace {

using Clock = std::chrono::steady_clock;

struct PrefillResult {
  std::vector<double> seconds;  // per run, ascending
  int64_t decoder_rows = 0;     // of each run
  int64_t decoder_layers = 0;
  int64_t layers = 0;
  int64_t keep = 0;
  int threads = 0;

  double median_s() const {
    return seconds[seconds.size() / 2];
  }
};

Result<ReplayMode> ParseReplay(const std::string& name) {
  if (name == "off") return ReplayMode::kOff;
  if (name == "mask") return ReplayMode::kMask;
  if (name == "compact") return ReplayMode::kCompact;
  return Fail(Code::kInvalidArgument,
              fmt::format("--replay is {}; allowed are off, mask and compact.", Quoted(name)),
              "replay");
}

Result<PrefillResult> Measure(const BenchPrefillOptions& options) {
  DI_ASSIGN_OR_RETURN(const ModelConfig checked,
                      LoadConfigForContext(options.model_dir, options.tokens, "--tokens"));
  // What a run would refuse is not worth measuring.
  DI_RETURN_IF_ERROR(CheckTailTokens(checked, "--keep", options.keep));
  ExecutorOptions executor_options;
  DI_ASSIGN_OR_RETURN(executor_options.device, ChooseDevice(options.device));
  executor_options.model_dir = options.model_dir;
  executor_options.num_threads = options.threads;
  executor_options.max_sequences = 1;
  executor_options.cache_tokens = options.tokens;
  executor_options.max_batched_tokens = std::min(options.chunk, options.tokens);
  executor_options.window_cache_pages = 0;
  DI_ASSIGN_OR_RETURN(executor_options.replay, ParseReplay(options.replay));
  DI_ASSIGN_OR_RETURN(executor_options.cache_format, ParseCacheFormat(options.cache_format));
  DI_ASSIGN_OR_RETURN(const std::unique_ptr<Executor> executor, Executor::Create(executor_options));
  const ModelConfig& config = executor->config();
  PrefillResult result;
  result.keep = options.keep > 0 ? options.keep : DefaultTailTokens(config);
  result.threads = executor->num_threads();
  result.layers = config.num_hidden_layers;
  result.decoder_layers = config.num_hidden_layers - config.decoder_start();
  const int64_t decoder_begin = executor_options.replay == ReplayMode::kOff
                                    ? 0
                                    : std::max<int64_t>(0, options.tokens - result.keep);
  result.decoder_rows = executor_options.replay == ReplayMode::kCompact
                            ? options.tokens - decoder_begin
                            : options.tokens;
  std::vector<int32_t> ids;
  uint32_t state = 12345;  // any ids do; a fixed generator makes runs comparable
  for (int64_t i = 0; i < options.tokens; ++i) {
    state = state * 1664525u + 1013904223u;
    ids.push_back(static_cast<int32_t>((state >> 8) % static_cast<uint32_t>(config.vocab_size)));
  }
  StatePools pools = MakeStatePools(*executor);
  // The first run touches weights and caches for the first time and is not counted.
  for (int64_t run = 0; run <= options.runs; ++run) {
    DI_ASSIGN_OR_RETURN(Session session, Session::Create(*executor, pools));
    session.set_decoder_begin(decoder_begin);
    const int64_t tokens = run == 0 ? std::min(options.tokens, options.chunk) : options.tokens;
    const Clock::time_point start = Clock::now();
    for (int64_t begin = 0; begin < tokens; begin += options.chunk) {
      const int64_t rows = std::min(options.chunk, tokens - begin);
      const std::span<const int32_t> part(ids.data() + begin, static_cast<size_t>(rows));
      DI_RETURN_IF_ERROR(session.Append(part, begin + rows == options.tokens ? 1 : 0));
    }
    if (run > 0)
      result.seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  std::sort(result.seconds.begin(), result.seconds.end());
  return result;
}

}  // namespace

int RunBenchPrefill(const BenchPrefillOptions& options) {
  if (options.tokens < 1 || options.chunk < 1 || options.keep < 0 || options.runs < 1) {
    return PrintError({Code::kInvalidArgument,
                       "--tokens, --chunk and --runs must be at least 1, --keep at least 0.", ""});
  }
  Result<std::optional<OutputFile>> file = CreateIfNamed(options.json);
  if (!file.has_value()) return PrintError(file.error());
  const Result<PrefillResult> measured = Measure(options);
  if (!measured.has_value()) return PrintError(measured.error());
  const PrefillResult& r = *measured;
  const double rate = static_cast<double>(options.tokens) / r.median_s();
  const Status printed = Print(
      "prefill            {:.1f} tokens/s, median {:.2f} s, best {:.2f} s ({}, {})\n"
      "rows               {} in {} encoder layers, {} in {} decoder layers (replay {})\n",
      rate, r.median_s(), r.seconds.front(), Counted(options.tokens, "token"),
      Counted(r.threads, "thread"), options.tokens, r.layers - r.decoder_layers, r.decoder_rows,
      r.decoder_layers, options.replay);
  if (!(*file).has_value()) return ExitStatus(printed);
  const nlohmann::json json = {{"bench", "prefill"},
                               {"cpu", HostCpuFeatures().brand},
                               {"kernels", CpuLevelName(HostCpuFeatures().best_level())},
                               {"threads", r.threads},
                               {"tokens", options.tokens},
                               {"chunk", options.chunk},
                               {"replay", options.replay},
                               {"keep", r.keep},
                               {"cache_format", options.cache_format},
                               {"layers", r.layers},
                               {"decoder_layers", r.decoder_layers},
                               {"decoder_rows", r.decoder_rows},
                               {"runs", options.runs},
                               {"tokens_per_s", rate},
                               {"median_s", r.median_s()},
                               {"best_s", r.seconds.front()}};
  const Status saved = (*file)->Write(json.dump(2) + "\n");
  return ExitStatus(saved.has_value() ? printed : saved);
}

}  // namespace deepinfer
