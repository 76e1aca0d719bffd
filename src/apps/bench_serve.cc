// Throughput of the whole engine by the number of requests that run at once: does batching pay?
#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "apps/bench.h"
#include "apps/bench_limits.h"
#include "apps/output.h"
#include "apps/print.h"
#include "deepinfer/llm.h"

namespace deepinfer {
namespace {

struct ServeResult {
  double seconds = 0;
  double output_tokens_per_s = 0;
  double total_tokens_per_s = 0;
  double first_token_s = 0;  // mean
};

Result<ServeResult> Measure(LLM& llm, const BenchServeOptions& options, int64_t concurrency) {
  // Prompts of their own, so that nothing is found in the cache.
  std::mt19937_64 random(static_cast<uint64_t>(concurrency));
  std::vector<Request> requests(static_cast<size_t>(concurrency));
  for (Request& request : requests) {
    std::vector<int64_t> ids(static_cast<size_t>(options.prompt));
    for (int64_t& id : ids)
      id = static_cast<int64_t>(random() % static_cast<uint64_t>(llm.vocab_size()));
    request.prompt = std::move(ids);
    request.sampling_params.max_tokens = options.tokens;
    request.sampling_params.ignore_eos = true;
    request.sampling_params.temperature = 0;
    request.sampling_params.logprobs.reset();
  }
  const auto start = std::chrono::steady_clock::now();
  const std::vector<RequestOutput> outputs = llm.Generate(requests);
  ServeResult result;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  int64_t output_tokens = 0;
  for (const RequestOutput& output : outputs) {
    if (output.error.has_value()) return tl::unexpected<Error>(*output.error);
    output_tokens += output.usage.completion_tokens;
    result.first_token_s += output.timings.first_token_seconds / static_cast<double>(concurrency);
  }
  result.output_tokens_per_s = static_cast<double>(output_tokens) / result.seconds;
  result.total_tokens_per_s =
      static_cast<double>(output_tokens + concurrency * options.prompt) / result.seconds;
  return result;
}

}  // namespace

int RunBenchServe(const BenchServeOptions& options) {
  Result<std::optional<OutputFile>> file = CreateIfNamed(options.json);
  if (!file.has_value()) return PrintError(file.error());
  const Result<ModelConfig> config = LoadConfigForContext(
      options.model_dir, options.prompt + options.tokens, "--prompt and --tokens");
  if (!config.has_value()) return PrintError(config.error());
  LLMOptions llm_options;
  llm_options.model_dir = options.model_dir;
  llm_options.device = options.device;
  llm_options.num_threads = options.threads;
  const int64_t most = *std::max_element(options.concurrency.begin(), options.concurrency.end());
  llm_options.max_num_seqs = most;
  llm_options.max_num_batched_tokens = std::max<int64_t>(512, most);
  llm_options.max_model_len = options.prompt + options.tokens;
  llm_options.cache_tokens = most * (options.prompt + options.tokens + 256);
  Result<std::unique_ptr<LLM>> llm = LLM::Load(llm_options);
  if (!llm.has_value()) return PrintError(llm.error());
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  double first = 0;
  for (const int64_t concurrency : options.concurrency) {
    const Result<ServeResult> result = Measure(**llm, options, concurrency);
    if (!result.has_value()) return PrintError(result.error());
    if (rows.empty()) first = result->output_tokens_per_s;
    const double ratio = result->output_tokens_per_s / first;
    const Status printed = Print(
        "{:5} at once: {:9.2f} output tok/s ({:.2f} x the first), {:.1f} tok/s with prompts, first "
        "token after {:.3f} s on average, {:.2f} s in all\n",
        concurrency, result->output_tokens_per_s, ratio, result->total_tokens_per_s,
        result->first_token_s, result->seconds);
    if (!printed.has_value()) return ExitStatus(printed);
    rows.push_back({{"concurrency", concurrency},
                    {"prompt", options.prompt},
                    {"tokens", options.tokens},
                    {"output_tokens_per_s", result->output_tokens_per_s},
                    {"ratio_to_first", ratio},
                    {"total_tokens_per_s", result->total_tokens_per_s},
                    {"mean_first_token_s", result->first_token_s},
                    {"seconds", result->seconds}});
  }
  if (!(*file).has_value()) return kExitOk;
  return ExitStatus(
      (*file)->Write(nlohmann::ordered_json{{"bench", "serve"}, {"cases", rows}}.dump(2) + "\n"));
}

}  // namespace deepinfer
