// The table of all metrics, and everything that is generated from it: JSON, Prometheus' text and
// the page docs/metrics.md. The summary line is made of the same numbers.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>
#include <variant>
#include <vector>

#include "deepinfer/statistics.h"

namespace deepinfer {
namespace {

using Json = nlohmann::ordered_json;

struct Sample {
  std::vector<std::string> labels;  // values, in the order of Metric::labels
  std::variant<int64_t, const TimeHistogram*> value;
};

enum class Type { kCounter, kGauge, kHistogram };

struct Metric {
  const char* name;
  Type type;
  const char* unit;
  const char* help;                 // one sentence
  std::vector<const char*> labels;  // names
  std::vector<Sample> (*read)(const StatisticsSnapshot&);
};

std::vector<Sample> ByReason(const std::array<int64_t, kNumEndReasons>& counts, size_t num) {
  std::vector<Sample> samples;
  for (size_t i = 0; i < num; ++i) {
    samples.push_back({{std::string(EndReasonName(static_cast<EndReason>(i)))}, counts[i]});
  }
  return samples;
}

template <auto kMember>
std::vector<Sample> Read(const StatisticsSnapshot& s) {
  return {{{}, s.*kMember}};
}

template <auto kMember>
std::vector<Sample> ReadTime(const StatisticsSnapshot& s) {
  return {{{}, &(s.*kMember)}};
}

const std::vector<Metric>& Metrics() {
  using S = StatisticsSnapshot;
  static const std::vector<Metric> metrics = {
      {"deepinfer_info",
       Type::kGauge,
       "",
       "Always 1; the label names the checkpoint.",
       {"model"},
       [](const S& s) {
         return std::vector<Sample>{{{s.model}, 1}};
       }},
      {"deepinfer_requests_submitted_total",
       Type::kCounter,
       "requests",
       "Requests handed in, refused ones included. A line of a job that is no request counts as a "
       "refused one.",
       {},
       Read<&S::requests_submitted>},
      {"deepinfer_requests_ended_total",
       Type::kCounter,
       "requests",
       "Requests that ended, by reason; one whose completions differ counts under the first that "
       "applies of error, deadline, abort, length, stop.",
       {"reason"},
       [](const S& s) { return ByReason(s.requests_ended, kNumEndReasons); }},
      {"deepinfer_sequences_created_total",
       Type::kCounter,
       "sequences",
       "Completions begun; a request has one or more.",
       {},
       Read<&S::sequences_created>},
      {"deepinfer_sequences_ended_total",
       Type::kCounter,
       "sequences",
       "Completions that ended, by reason.",
       {"reason"},
       [](const S& s) { return ByReason(s.sequences_ended, kNumEndReasons - 1); }},
      {"deepinfer_sequences",
       Type::kGauge,
       "sequences",
       "Completions that live, by phase, after the last step: held (not ready), waiting (no state "
       "in memory), running.",
       {"phase"},
       [](const S& s) {
         return std::vector<Sample>{{{"held"}, s.sequences_held},
                                    {{"waiting"}, s.sequences_waiting},
                                    {{"running"}, s.sequences_running}};
       }},
      {"deepinfer_prompt_tokens_submitted_total",
       Type::kCounter,
       "tokens",
       "Tokens of the prompts of all completions begun.",
       {},
       Read<&S::prompt_tokens_submitted>},
      {"deepinfer_prompt_tokens_total",
       Type::kCounter,
       "tokens",
       "Prompt tokens by source: computed for the first time, or cached (taken from the prefix "
       "cache at the first admission).",
       {"source"},
       [](const S& s) {
         return std::vector<Sample>{{{"computed"}, s.prompt_tokens_computed},
                                    {{"cached"}, s.prompt_tokens_cached}};
       }},
      {"deepinfer_completion_tokens_total",
       Type::kCounter,
       "tokens",
       "Tokens that became part of completions.",
       {},
       Read<&S::completion_tokens>},
      {"deepinfer_steps_total",
       Type::kCounter,
       "steps",
       "Steps of the model with at least one row.",
       {},
       Read<&S::steps>},
      {"deepinfer_rows_total",
       Type::kCounter,
       "rows",
       "Rows of steps by kind: prompt and decode rows that run for the first time, and recomputed "
       "ones that run again after a preemption.",
       {"kind"},
       [](const S& s) {
         return std::vector<Sample>{{{"prompt"}, s.prompt_tokens_computed},
                                    {{"decode"}, s.decode_rows},
                                    {{"recomputed"}, s.recomputed_rows}};
       }},
      {"deepinfer_preemptions_total",
       Type::kCounter,
       "preemptions",
       "How often a running sequence gave its memory back to others.",
       {},
       Read<&S::preemptions>},
      {"deepinfer_grammars_total",
       Type::kCounter,
       "requests",
       "Structured outputs whose compilation ended, by result; those of requests that ended before "
       "it are left out.",
       {"result"},
       [](const S& s) {
         return std::vector<Sample>{{{"compiled"}, s.grammars_compiled},
                                    {{"failed"}, s.grammars_failed}};
       }},
      {"deepinfer_grammars_waiting",
       Type::kGauge,
       "requests",
       "Requests whose structured output was being compiled after the last step.",
       {},
       Read<&S::grammars_waiting>},
      {"deepinfer_masks_total",
       Type::kCounter,
       "masks",
       "Masks of constrained draws.",
       {},
       Read<&S::masks>},
      {"deepinfer_plan_time_seconds",
       Type::kHistogram,
       "seconds",
       "Host time per step to plan and launch it.",
       {},
       ReadTime<&S::plan_time>},
      {"deepinfer_step_time_seconds",
       Type::kHistogram,
       "seconds",
       "Time per step from its launch to its results.",
       {},
       ReadTime<&S::step_time>},
      {"deepinfer_commit_time_seconds",
       Type::kHistogram,
       "seconds",
       "Host time per step to take in its results.",
       {},
       ReadTime<&S::commit_time>},
      {"deepinfer_queue_time_seconds",
       Type::kHistogram,
       "seconds",
       "Time per sequence from submission to the step with its first row.",
       {},
       ReadTime<&S::queue_time>},
      {"deepinfer_first_token_time_seconds",
       Type::kHistogram,
       "seconds",
       "Time per sequence from submission to its first output token.",
       {},
       ReadTime<&S::first_token_time>},
      {"deepinfer_output_token_time_seconds",
       Type::kHistogram,
       "seconds",
       "Mean time per output token after the first, one entry per ended sequence with at least two "
       "tokens.",
       {},
       ReadTime<&S::output_token_time>},
      {"deepinfer_total_time_seconds",
       Type::kHistogram,
       "seconds",
       "Time per sequence from submission to its end.",
       {},
       ReadTime<&S::total_time>},
      {"deepinfer_mask_time_seconds",
       Type::kHistogram,
       "seconds",
       "Time per step with constrained draws to fill their masks, summed over threads.",
       {},
       ReadTime<&S::mask_time>},
      {"deepinfer_mask_wait_time_seconds",
       Type::kHistogram,
       "seconds",
       "Time per step with constrained draws between the end of its rows and the last mask.",
       {},
       ReadTime<&S::mask_wait_time>},
      {"deepinfer_cache_units",
       Type::kGauge,
       "units",
       "Units of the cache's pools, by state, after the last step: used by running sequences, "
       "reclaimable (kept by the prefix cache only), free.",
       {"pool", "state"},
       [](const S& s) {
         std::vector<Sample> samples;
         for (const auto& [name, pool] : {std::pair{"blocks", &s.blocks},
                                          {"window_pages", &s.window_pages},
                                          {"slots", &s.slots}}) {
           samples.push_back({{name, "used"}, pool->used});
           samples.push_back({{name, "reclaimable"}, pool->reclaimable});
           samples.push_back({{name, "free"}, pool->total - pool->used - pool->reclaimable});
         }
         return samples;
       }},
      {"deepinfer_cache_unit_bytes",
       Type::kGauge,
       "bytes",
       "Size of one unit of each of the cache's pools.",
       {"pool"},
       [](const S& s) {
         return std::vector<Sample>{{{"blocks"}, s.blocks.unit_bytes},
                                    {{"window_pages"}, s.window_pages.unit_bytes},
                                    {{"slots"}, s.slots.unit_bytes}};
       }},
  };
  return metrics;
}

const char* TypeName(Type type) {
  switch (type) {
    case Type::kCounter:
      return "counter";
    case Type::kGauge:
      return "gauge";
    case Type::kHistogram:
      return "histogram";
  }
  return "";
}

Json HistogramJson(const TimeHistogram& histogram) {
  Json ranges = Json::array();
  for (size_t i = 0; i < histogram.counts.size(); ++i) {
    if (histogram.counts[i] == 0) continue;
    Json le = nullptr;
    if (i < TimeHistogram::kBounds.size()) le = TimeHistogram::kBounds[i];
    ranges.push_back({{"le", std::move(le)}, {"count", histogram.counts[i]}});
  }
  return {{"count", histogram.count},
          {"sum", histogram.sum_seconds},
          {"max", histogram.max_seconds},
          {"ranges", std::move(ranges)}};
}

// Inside double quotes.
std::string EscapedLabelValue(std::string_view value) {
  std::string out;
  for (const char c : value) {
    if (c == '\\' || c == '"') out += '\\';
    if (c == '\n') {
      out += "\\n";
    } else {
      out += c;
    }
  }
  return out;
}

// {name="value",...}, or nothing. `le` is one more label unless empty.
std::string LabelText(const Metric& metric, const Sample& sample, const std::string& le = "") {
  std::string text;
  for (size_t i = 0; i < metric.labels.size(); ++i) {
    text += fmt::format("{}{}=\"{}\"", text.empty() ? "" : ",", metric.labels[i],
                        EscapedLabelValue(sample.labels[i]));
  }
  if (!le.empty()) text += fmt::format("{}le=\"{}\"", text.empty() ? "" : ",", le);
  return text.empty() ? "" : "{" + text + "}";
}

// Names of directories need not be UTF-8; both formats must be.
std::string ValidUtf8(const std::string& text) {
  const std::string quoted = Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
  return Json::parse(quoted).get<std::string>();
}

}  // namespace

std::string_view EndReasonName(EndReason reason) {
  switch (reason) {
    case EndReason::kStop:
      return "stop";
    case EndReason::kLength:
      return "length";
    case EndReason::kAbort:
      return "abort";
    case EndReason::kDeadline:
      return "deadline";
    case EndReason::kError:
      return "error";
    case EndReason::kRefused:
      return "refused";
  }
  return "";
}

void TimeHistogram::Add(double seconds) {
  // A clock that went backwards, or was never read, must not spoil the sum.
  const double value = std::isfinite(seconds) ? std::max(0.0, seconds) : 0.0;
  const auto range = std::lower_bound(kBounds.begin(), kBounds.end(), value);
  ++counts[static_cast<size_t>(range - kBounds.begin())];
  ++count;
  sum_seconds += value;
  max_seconds = std::max(max_seconds, value);
}

std::string StatisticsJson(const StatisticsSnapshot& statistics) {
  Json root = Json::object();
  for (const Metric& metric : Metrics()) {
    Json& place = root[metric.name];
    for (const Sample& sample : metric.read(statistics)) {
      Json* leaf = &place;
      for (const std::string& label : sample.labels) leaf = &(*leaf)[label];
      if (const auto* number = std::get_if<int64_t>(&sample.value)) {
        *leaf = *number;
      } else {
        *leaf = HistogramJson(*std::get<const TimeHistogram*>(sample.value));
      }
    }
  }
  return root.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string StatisticsPrometheus(const StatisticsSnapshot& statistics) {
  StatisticsSnapshot s = statistics;
  s.model = ValidUtf8(s.model);
  fmt::memory_buffer out;
  const auto write = std::back_inserter(out);
  for (const Metric& metric : Metrics()) {
    fmt::format_to(write, "# HELP {} {}\n# TYPE {} {}\n", metric.name, metric.help, metric.name,
                   TypeName(metric.type));
    for (const Sample& sample : metric.read(s)) {
      if (const auto* number = std::get_if<int64_t>(&sample.value)) {
        fmt::format_to(write, "{}{} {}\n", metric.name, LabelText(metric, sample), *number);
        continue;
      }
      const TimeHistogram& histogram = *std::get<const TimeHistogram*>(sample.value);
      int64_t below = 0;
      for (size_t i = 0; i < histogram.counts.size(); ++i) {
        below += histogram.counts[i];
        const std::string le = i < TimeHistogram::kBounds.size()
                                   ? fmt::format("{}", TimeHistogram::kBounds[i])
                                   : "+Inf";
        fmt::format_to(write, "{}_bucket{} {}\n", metric.name, LabelText(metric, sample, le),
                       below);
      }
      fmt::format_to(write, "{}_sum{} {}\n", metric.name, LabelText(metric, sample),
                     histogram.sum_seconds);
      fmt::format_to(write, "{}_count{} {}\n", metric.name, LabelText(metric, sample),
                     histogram.count);
    }
  }
  return fmt::to_string(out);
}

std::string SummaryLine(const StatisticsSnapshot& s, double elapsed_seconds) {
  std::string reasons;
  int64_t ended = 0;
  for (size_t i = 0; i < kNumEndReasons; ++i) {
    if (s.requests_ended[i] == 0) continue;
    ended += s.requests_ended[i];
    reasons += fmt::format("{}{} {}", reasons.empty() ? "" : ", ", s.requests_ended[i],
                           EndReasonName(static_cast<EndReason>(i)));
  }
  std::string line = fmt::format("{} of {} requests ended", ended, s.requests_submitted);
  if (!reasons.empty()) line += fmt::format(" ({})", reasons);
  line += fmt::format("; {} prompt tokens computed, {} cached; {} completion tokens",
                      s.prompt_tokens_computed, s.prompt_tokens_cached, s.completion_tokens);
  if (elapsed_seconds > 0) {
    line += fmt::format(
        " in {:.3g} s ({:.3g} + {:.3g} tokens/s)", elapsed_seconds,
        static_cast<double>(s.prompt_tokens_computed + s.prompt_tokens_cached) / elapsed_seconds,
        static_cast<double>(s.completion_tokens) / elapsed_seconds);
  }
  line +=
      fmt::format("; {} steps of {:.3g} rows, {:.3g} ms each and {:.3g} ms of host work", s.steps,
                  s.steps > 0 ? static_cast<double>(s.rows) / static_cast<double>(s.steps) : 0,
                  1e3 * s.step_time.mean_seconds(),
                  1e3 * (s.plan_time.mean_seconds() + s.commit_time.mean_seconds()));
  line += fmt::format("; {} preemptions, {} rows recomputed", s.preemptions, s.recomputed_rows);
  line += fmt::format(
      "; mean time in queue {:.3g} s, to first token {:.3g} s, per further token {:.3g} s",
      s.queue_time.mean_seconds(), s.first_token_time.mean_seconds(),
      s.output_token_time.mean_seconds());
  return line + ".";
}

std::string MetricsPage() {
  std::string page =
      "# Metrics\n\n"
      "Written by `deepinfer metrics`; the table in `src/engine/metrics.cc` is where to change it. "
      "The same names are used in\nPrometheus' text (`--metrics`) and in JSON (`--stats`), where "
      "label values are members of an object.\n\n"
      "| name | type | unit | labels | meaning |\n| --- | --- | --- | --- | --- |\n";
  for (const Metric& metric : Metrics()) {
    std::string labels;
    for (const char* label : metric.labels) {
      labels += fmt::format("{}`{}`", labels.empty() ? "" : ", ", label);
    }
    page += fmt::format("| `{}` | {} | {} | {} | {} |\n", metric.name, TypeName(metric.type),
                        metric.unit, labels, metric.help);
  }
  std::string bounds;
  for (const double bound : TimeHistogram::kBounds) {
    bounds += fmt::format("{}{}", bounds.empty() ? "" : ", ", bound);
  }
  page += fmt::format(
      "\nAll histograms have the same ranges. Their upper ends, in seconds: {}, and no end.\n\n"
      "## What adds up\n\n"
      "* Requests submitted = requests ended, over all reasons, + those that live. The same for "
      "sequences.\n"
      "* After `generate` over lines: requests submitted = lines that were read, blank ones and "
      "those finished by an earlier\n"
      "  run of the job left out.\n"
      "* Sequences held, waiting and running are all that live.\n"
      "* Rows = prompt tokens computed + decode rows + recomputed rows.\n"
      "* Prompt tokens computed + cached are at most those submitted. They are equal once every "
      "prompt has run, unless a\n"
      "  sequence was aborted before, or found more in the prefix cache after a preemption than at "
      "first.\n"
      "* Completion tokens are the sum over the outputs of all requests, living ones included.\n"
      "* Used, reclaimable and free units of a pool are the whole pool.\n",
      bounds);
  return page;
}

}  // namespace deepinfer
