#include "apps/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "apps/option_names.h"
#include "apps/output.h"
#include "apps/print.h"
#include "base/cpu_features.h"
#include "engine/llm_options.h"
#include "model/config.h"
#include "model/drafting.h"
#include "state/sequence_state.h"

namespace deepinfer {
namespace {

struct Gpu {
  const char* name;
  int64_t bytes;  // as the driver reports them
};
constexpr Gpu kGpus[] = {{"h100", int64_t{81559} << 20},
                         {"h200", int64_t{143771} << 20},
                         {"b200", int64_t{183359} << 20}};

// Lengths for the table: round ones below the longest sequence, and that.
std::vector<int64_t> Lengths(int64_t longest) {
  std::vector<int64_t> lengths;
  for (int64_t tokens = 1024; tokens < longest; tokens *= 4) lengths.push_back(tokens);
  lengths.push_back(longest);
  return lengths;
}

}  // namespace

std::vector<std::string> PlanDeviceNames() {
  std::vector<std::string> names = {"cpu"};
  for (const Gpu& gpu : kGpus) names.emplace_back(gpu.name);
  return names;
}

Result<PlanReport> MakePlan(const PlanOptions& options) {
  const LLMOptions& llm = options.llm;
  DI_RETURN_IF_ERROR(CheckOptions(llm));
  DI_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(llm.model_dir));
  DI_RETURN_IF_ERROR(CheckOptionsForModel(llm, config));
  DI_RETURN_IF_ERROR(CheckDrafting(config, options.draft_tokens, options.force_draft_tokens));
  PlanReport report;
  report.model_dir = llm.model_dir;
  report.device = options.device;
  if (options.device == "cpu") {
    if (options.ranks != 1) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("ranks is {}; a CPU run is one process.", options.ranks), "ranks");
    }
    report.device_bytes = UsableHostMemoryBytes();
  } else {
    const auto* gpu = std::find_if(std::begin(kGpus), std::end(kGpus),
                                   [&](const Gpu& g) { return options.device == g.name; });
    if (gpu == std::end(kGpus)) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("device is '{}'; allowed are {}.", options.device,
                              fmt::join(PlanDeviceNames(), ", ")),
                  "device");
    }
    report.ranks = options.ranks;
    report.device_bytes = gpu->bytes;
  }
  report.request = {.max_sequences = llm.max_num_seqs,
                    .cache_tokens = llm.cache_tokens,
                    .max_model_len = llm.max_model_len,
                    .max_batched_tokens = llm.max_num_batched_tokens,
                    .rollback_tokens = std::max(kRollbackTokens, options.draft_tokens + 1),
                    .draft_tokens = options.draft_tokens,
                    .cache_format = llm.bf16_cache ? CacheFormat::kBf16 : CacheFormat::kPacked,
                    .drops_rows = llm.decoder_replay == DecoderReplay::kCompact,
                    .num_threads = llm.num_threads > 0 ? llm.num_threads : UsableCores(),
                    .gpu_ranks = report.ranks,
                    .memory_bytes = options.memory_bytes > 0  ? options.memory_bytes
                                    : options.device == "cpu" ? report.device_bytes
                                                              : report.device_bytes / 10 * 9};
  report.plan = PlanMemory(config, report.request);
  const Status fits = CheckFits(report.plan, report.request);
  report.fits = fits.has_value();
  if (!report.fits) report.problem = WithOptionNames(fits.error()).message;
  for (const int64_t tokens : Lengths(report.plan.max_sequence_tokens)) {
    report.fit.push_back({tokens, report.plan.SequencesThatFit(tokens)});
  }
  return report;
}

std::string PlanText(const PlanReport& report) {
  const MemoryPlan& plan = report.plan;
  const std::string each = report.ranks > 1 ? " each" : "";
  std::string out =
      fmt::format("{}\n\nMemory on {}{}: {} bytes ({}){}, of which {} bytes ({}) may be used\n",
                  report.model_dir, report.ranks > 1 ? fmt::format("{} x ", report.ranks) : "",
                  report.device, report.device_bytes, HumanBytes(report.device_bytes), each,
                  plan.memory_bytes, HumanBytes(plan.memory_bytes));
  out += fmt::format("  {:<34}{:>10}{:>16}{:>18}{:>10}\n", "pool", "units", "bytes a unit", "bytes",
                     "");
  for (const MemoryItem& item : plan.Items()) {
    out += fmt::format("  {:<34}{:>10}{:>16}{:>18}{:>10}\n", item.name,
                       item.units > 0 ? fmt::format("{}", item.units) : "",
                       item.units > 0 ? fmt::format("{}", item.unit_bytes) : "", item.bytes,
                       HumanBytes(item.bytes));
  }
  out += fmt::format("  {:<34}{:>10}{:>16}{:>18}{:>10}\n", "all", "", "", plan.total_bytes(),
                     HumanBytes(plan.total_bytes()));
  if (plan.weights.mapped_bytes() > 0) {
    out += fmt::format(
        "  Besides, {} bytes ({}) are mapped from the files and kept in memory as far as there is "
        "room.\n",
        plan.weights.mapped_bytes(), HumanBytes(plan.weights.mapped_bytes()));
  }
  if (report.ranks > 0) {
    out +=
        "  Step buffers are those of the CPU's implementation of the same graph, an estimate for a "
        "GPU.\n";
  }
  out += fmt::format("\nLimits{}\n", report.ranks > 1 ? " of each rank" : "");
  const auto row = [&](std::string_view name, const std::string& value) {
    out += fmt::format("  {:<34}{}\n", name, value);
  };
  row("cache, all sequences", fmt::format("{} tokens", plan.num_blocks * kBlockTokens));
  row("longest request", fmt::format("{} tokens, prompt and output", plan.max_sequence_tokens));
  row("requests at a time", fmt::format("{}", plan.num_slots));
  row("rows of a step", fmt::format("{}", report.request.max_batched_tokens));
  for (const PlanReport::Fit& fit : report.fit) {
    row(fmt::format("requests of {} tokens", fit.tokens), fmt::format("{} fit", fit.sequences));
  }
  if (!report.fits) out += fmt::format("\nThis does not fit. {}\n", report.problem);
  return out;
}

std::string PlanJson(const PlanReport& report) {
  using Json = nlohmann::ordered_json;
  const MemoryPlan& plan = report.plan;
  Json pools = Json::array();
  for (const MemoryItem& item : plan.Items()) {
    Json pool = {{"name", item.name}, {"bytes", item.bytes}};
    if (item.units > 0) {
      pool["units"] = item.units;
      pool["unit_bytes"] = item.unit_bytes;
    }
    pools.push_back(std::move(pool));
  }
  Json fit = Json::array();
  for (const PlanReport::Fit& entry : report.fit) {
    fit.push_back({{"tokens", entry.tokens}, {"requests", entry.sequences}});
  }
  Json root = {{"directory", report.model_dir},
               {"device", report.device},
               {"ranks", std::max<int64_t>(1, report.ranks)},
               {"device_bytes", report.device_bytes},
               {"usable_bytes", plan.memory_bytes},
               {"planned_bytes", plan.total_bytes()},
               {"mapped_bytes", plan.weights.mapped_bytes()},
               {"fits", report.fits},
               {"pools", std::move(pools)},
               {"limits",
                {{"cache_tokens", plan.num_blocks * kBlockTokens},
                 {"longest_request", plan.max_sequence_tokens},
                 {"requests_at_a_time", plan.num_slots},
                 {"rows_of_a_step", report.request.max_batched_tokens}}},
               {"fit", std::move(fit)}};
  if (!report.fits) root["problem"] = report.problem;
  return root.dump(1, ' ', false, Json::error_handler_t::replace);
}

int RunPlan(const PlanOptions& options) {
  const Result<PlanReport> report = MakePlan(options);
  if (!report) return PrintError(WithOptionNames(report.error()));
  const int status =
      ExitStatus(Print("{}\n", options.json ? PlanJson(*report) : PlanText(*report)));
  return status == kExitOk && !report->fits ? kExitFailure : status;
}

}  // namespace deepinfer
