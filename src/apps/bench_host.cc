// What a decode step costs on the host beside the model: planning, stop rules, text, callbacks.
#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <vector>

#include "apps/bench.h"
#include "apps/output.h"
#include "apps/print.h"
#include "engine/engine.h"
#include "engine/null_backend.h"
#include "text/tokenizer.h"

namespace deepinfer {
namespace {

// The scoreboard's targets, in microseconds.
struct HostCase {
  int64_t sequences = 0;
  double target_us = 0;
};
constexpr HostCase kCases[] = {{1, 30}, {256, 150}, {1024, 400}};

struct HostResult {
  double plan_us = 0;  // medians
  double collect_us = 0;
  double total_us = 0;
  double p99_us = 0;
};

double Percentile(std::vector<double> values, double share) {
  const auto at = static_cast<size_t>(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(at), values.end());
  return values[at];
}

Result<HostResult> Measure(const Tokenizer& tokenizer, const BenchHostOptions& options,
                           int64_t sequences) {
  const int64_t blocks = (options.context + options.steps + 256) / kBlockTokens + 1;
  NullBackend backend(tokenizer.vocab_size(), sequences,
                      {.num_blocks = sequences * blocks,
                       .num_window_pages = sequences * (blocks + 2),
                       .num_slots = sequences,
                       .window_tokens = 128,
                       .rollback_tokens = 6});
  EngineOptions engine_options;
  engine_options.max_model_len = blocks * kBlockTokens;
  engine_options.scheduler.max_num_seqs = sequences;
  // All prompts in one step, so that no output ends before the last one has begun.
  engine_options.scheduler.max_num_batched_tokens = sequences * options.context;
  // The model's time is nothing: only what the engine's own thread does is measured.
  engine_options.async_scheduling = false;
  EngineEvents events;
  int64_t tokens = 0;
  events.on_delta = [&tokens](const EngineDelta& delta) {
    tokens += static_cast<int64_t>(delta.token_ids.size());
  };
  Engine engine(backend, tokenizer, engine_options, std::move(events));
  for (int64_t i = 0; i < sequences; ++i) {
    EngineRequest request;
    request.prompt.resize(static_cast<size_t>(options.context));
    for (size_t t = 0; t < request.prompt.size(); ++t) {
      request.prompt[t] =
          static_cast<int32_t>((static_cast<int64_t>(t) * 31 + i * 7) % tokenizer.vocab_size());
    }
    request.params.max_tokens = options.steps + 128;
    request.params.ignore_eos = true;
    request.params.temperature = 0;
    request.params.logprobs.reset();
    DI_ASSIGN_OR_RETURN(const int64_t number, engine.Submit(std::move(request)));
    static_cast<void>(number);
  }
  while (tokens == 0 || engine.num_waiting() > 0) engine.Step();
  for (int i = 0; i < 16; ++i) engine.Step();
  if (engine.num_running() != sequences) {
    return Fail(Code::kInternal,
                fmt::format("{} of {} sequences are running.", engine.num_running(), sequences));
  }
  std::vector<double> plan, collect, total;
  for (int64_t i = 0; i < options.steps; ++i) {
    engine.Step();
    plan.push_back(engine.last_plan_seconds() * 1e6);
    collect.push_back(engine.last_collect_seconds() * 1e6);
    total.push_back(plan.back() + collect.back());
  }
  return HostResult{Percentile(plan, 0.5), Percentile(collect, 0.5), Percentile(total, 0.5),
                    Percentile(total, 0.99)};
}

}  // namespace

int RunBenchHost(const BenchHostOptions& options) {
  Result<std::optional<OutputFile>> file = CreateIfNamed(options.json);
  if (!file.has_value()) return PrintError(file.error());
  const Result<Tokenizer> tokenizer = Tokenizer::Load(options.model_dir + "/tokenizer.json");
  if (!tokenizer.has_value()) return PrintError(tokenizer.error());
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const HostCase& host_case : kCases) {
    const Result<HostResult> result = Measure(*tokenizer, options, host_case.sequences);
    if (!result.has_value()) return PrintError(result.error());
    const Status printed = Print(
        "{:5} running: {:7.1f} us a step (median; 99 % below {:.1f}), planning {:.1f}, results "
        "{:.1f}; target {:.0f}\n",
        host_case.sequences, result->total_us, result->p99_us, result->plan_us, result->collect_us,
        host_case.target_us);
    if (!printed.has_value()) return ExitStatus(printed);
    rows.push_back({{"sequences", host_case.sequences},
                    {"context", options.context},
                    {"median_us", result->total_us},
                    {"p99_us", result->p99_us},
                    {"plan_us", result->plan_us},
                    {"collect_us", result->collect_us},
                    {"target_us", host_case.target_us}});
  }
  if (!(*file).has_value()) return kExitOk;
  return ExitStatus(
      (*file)->Write(nlohmann::ordered_json{{"bench", "host"}, {"cases", rows}}.dump(2) + "\n"));
}

}  // namespace deepinfer
