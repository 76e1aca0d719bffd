#include "engine/selfcheck.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <optional>
#include <random>
#include <utility>

#include "base/check.h"
#include "state/sequence_state.h"

namespace deepinfer {

std::string SelfcheckVariant::Name() const {
  std::string name;
  const auto add = [&name](std::string part) {
    if (!name.empty()) name += ", ";
    name += part;
  };
  if (batched) add("batched");
  if (chunk_tokens > 0) add(fmt::format("chunks of {}", chunk_tokens));
  if (prefix_cache) add("prefix cache");
  if (async_scheduling) add("asynchronous");
  if (preempt_every > 0) {
    add(fmt::format("preempted every {} steps{}", preempt_every,
                    preempt_by_saving ? " with saved state" : ""));
  }
  return name.empty() ? "plain" : name;
}

std::vector<Error> SelfcheckOptions::Validate() const {
  std::vector<Error> problems;
  const auto check = [&problems](const char* field, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return;
    problems.push_back(
        Error{Code::kInvalidArgument,
              fmt::format("{} is {}; allowed are {} ... {}.", field, value, low, high), field});
  };
  check("num_requests", num_requests, 2, 1024);
  check("max_prompt_tokens", max_prompt_tokens, 0, int64_t{1} << 20);
  check("max_output_tokens", max_output_tokens, 1, 4096);
  return problems;
}

namespace {

void Constrain(int64_t number, int64_t vocab_size, SamplingParams& params) {
  StructuredOutput& output = params.structured_output.emplace();
  switch (number % 4) {
    case 0:
      output.kind = StructuredOutput::Kind::kRegex;
      output.schema = "[a-z0-9 ]{3,60}";
      break;
    case 1:
      output.kind = StructuredOutput::Kind::kJsonSchema;
      output.schema =
          R"({"type": "object", "properties": {"name": {"type": "string", "maxLength": 9},)"
          R"( "count": {"type": "integer"}}, "required": ["name", "count"]})";
      break;
    case 2:
      output.kind = StructuredOutput::Kind::kChoice;
      output.choices = {"yes", "no", "neither of the two"};
      break;
    default:
      output.kind = StructuredOutput::Kind::kEbnf;
      output.schema = R"(root ::= ("a" | "b " | "-" [0-9]+)+)";
      break;
  }
  if (number % 3 != 2) return;
  // A trigger that comes about: its first token is likely, and binds.
  const int64_t first = vocab_size / 3;
  output.trigger_token_ids = {first, first + 1, first};
  output.bound_token_id = first;
  params.logit_bias = {{first, 5.0}};
}

}  // namespace

std::vector<EngineRequest> SelfcheckRequests(const SelfcheckOptions& options, int64_t vocab_size,
                                             int64_t window_tokens, int64_t max_model_len,
                                             bool structured) {
  std::mt19937_64 random(options.seed);
  const auto draw = [&random](int64_t limit) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(std::max<int64_t>(1, limit)));
  };
  int64_t longest =
      options.max_prompt_tokens > 0 ? options.max_prompt_tokens : 3 * kBlockTokens + 5;
  longest = std::max<int64_t>(1, std::min(longest, max_model_len - options.max_output_tokens));
  std::vector<int32_t> shared(static_cast<size_t>(longest));
  for (int32_t& id : shared) id = static_cast<int32_t>(draw(vocab_size));
  // Edges of what the state is cut into, then anything.
  const std::vector<int64_t> edges = {1,
                                      2,
                                      window_tokens - 1,
                                      window_tokens,
                                      window_tokens + 1,
                                      2 * window_tokens + 1,
                                      kBlockTokens - 1,
                                      kBlockTokens,
                                      kBlockTokens + 1,
                                      2 * kBlockTokens,
                                      2 * kBlockTokens + 1,
                                      longest};
  std::vector<EngineRequest> requests;
  for (int64_t i = 0; i < options.num_requests; ++i) {
    const auto e = static_cast<size_t>(i / 2);
    int64_t tokens = i % 2 == 0 && e < edges.size() ? edges[e] : 1 + draw(longest);
    tokens = std::clamp<int64_t>(tokens, 1, longest);
    EngineRequest request;
    request.id = std::to_string(i);
    // Half of them begin with the same tokens, each with a length of its own.
    const int64_t same = i % 2 == 0 ? tokens - draw(std::min<int64_t>(tokens, 4)) : draw(tokens);
    request.prompt.assign(shared.begin(), shared.begin() + same);
    while (std::ssize(request.prompt) < tokens)
      request.prompt.push_back(static_cast<int32_t>(draw(vocab_size)));
    request.seed = random();
    request.user_id = std::to_string(i % 3);
    SamplingParams& params = request.params;
    params.max_tokens = 1 + draw(options.max_output_tokens);
    params.temperature = i % 3 == 0 ? 0.0 : 0.5 + 0.25 * static_cast<double>(i % 4);
    if (i % 3 == 1) params.top_p = 0.9;
    if (i % 4 == 1) params.repetition_penalty = 1.2;
    if (i % 4 == 2) params.frequency_penalty = 0.5;
    params.logprobs = i % 4;
    params.ignore_eos = i % 5 != 0;
    if (i % 6 == 5) params.prompt_logprobs = 1;
    if (i % 7 == 3) params.n = 3;
    if (i % 8 == 7) params.min_tokens = 2;
    if (structured && i % 4 == 1) Constrain(i / 4, vocab_size, params);
    requests.push_back(std::move(request));
  }
  return requests;
}

std::vector<SelfcheckVariant> SelfcheckVariants(bool thorough) {
  std::vector<SelfcheckVariant> variants;
  if (!thorough) {
    variants = {{.chunk_tokens = 7},
                {.chunk_tokens = kBlockTokens},
                {.batched = true},
                {.prefix_cache = true},
                {.async_scheduling = true},
                {.preempt_every = 5},
                {.preempt_every = 5, .preempt_by_saving = true},
                {.batched = true, .chunk_tokens = 7, .async_scheduling = true},
                {.batched = true, .prefix_cache = true, .async_scheduling = true},
                {.batched = true, .async_scheduling = true, .preempt_every = 3},
                {.batched = true,
                 .chunk_tokens = 31,
                 .prefix_cache = true,
                 .async_scheduling = true,
                 .preempt_every = 4},
                {.batched = true,
                 .chunk_tokens = 31,
                 .prefix_cache = true,
                 .async_scheduling = true,
                 .preempt_every = 4,
                 .preempt_by_saving = true}};
    return variants;
  }
  for (const bool batched : {false, true}) {
    for (const int64_t chunk : {int64_t{0}, int64_t{1}, int64_t{7}, kBlockTokens}) {
      for (const bool cache : {false, true}) {
        for (const bool async : {false, true}) {
          for (const int preemption : {0, 1, 2}) {
            const SelfcheckVariant variant{.batched = batched,
                                           .chunk_tokens = chunk,
                                           .prefix_cache = cache,
                                           .async_scheduling = async,
                                           .preempt_every = preemption == 0 ? 0 : 5,
                                           .preempt_by_saving = preemption == 2};
            if (variant.Name() != "plain") variants.push_back(variant);
          }
        }
      }
    }
  }
  return variants;
}

VariantRun RunVariant(ModelBackend& backend, const Tokenizer& tokenizer, const EngineOptions& base,
                      const SelfcheckVariant& variant, std::span<const EngineRequest> requests,
                      const std::function<bool()>& go_on) {
  EngineOptions options = base;
  options.async_scheduling = variant.async_scheduling;
  SchedulerOptions& scheduler = options.scheduler;
  scheduler.max_chunk_tokens = variant.chunk_tokens;
  scheduler.prefix_caching = variant.prefix_cache;
  scheduler.preemption =
      variant.preempt_by_saving ? PreemptionMode::kSave : PreemptionMode::kRecompute;
  scheduler.forced_preemption_interval = variant.preempt_every;
  if (!variant.batched && variant.chunk_tokens == 0) {
    // Whole prompts.
    int64_t longest = 0;
    for (const EngineRequest& request : requests)
      longest = std::max<int64_t>(longest, std::ssize(request.prompt));
    scheduler.max_num_batched_tokens = std::max(scheduler.max_num_batched_tokens, longest);
    scheduler.max_prompt_logit_rows = std::max(scheduler.max_prompt_logit_rows, longest);
  }
  VariantRun run;
  run.outputs.resize(requests.size());
  std::vector<size_t> place;  // by the engine's request number; absent: a request that only warms
  EngineEvents events;
  events.on_finished = [&](int64_t number, RequestOutput output) {
    const size_t at = place[static_cast<size_t>(number)];
    if (at < requests.size()) run.outputs[at] = std::move(output);
  };
  const auto submit = [&](Engine& engine, size_t at, EngineRequest request) {
    const Result<int64_t> number = engine.Submit(std::move(request));
    if (number.has_value()) {
      place.push_back(at);
    } else if (at < requests.size()) {
      run.outputs[at].error = number.error();
    }
  };
  // Until nothing is left to do, or the caller stops it.
  const auto run_steps = [&](Engine& engine) {
    while (engine.Step()) {
      if (run.stopped || !go_on || go_on()) continue;
      run.stopped = true;
      engine.Abort();  // further steps only take in what is in flight
    }
  };
  const auto finish = [&](Engine& engine) {
    run_steps(engine);
    const EngineCounters counters = engine.counters();
    run.counters.steps += counters.steps;
    run.counters.cached_tokens += counters.cached_tokens;
    run.counters.completion_tokens += counters.completion_tokens;
    run.counters.preemptions += counters.preemptions;
    const std::string violation = engine.FindViolation();
    DI_CHECK(violation.empty());
  };
  // Without a prefix cache nothing must be left from one request to the next: a new engine each.
  if (variant.batched || variant.prefix_cache) {
    Engine engine(backend, tokenizer, options, events);
    if (variant.prefix_cache) {
      // Beginnings of all prompts, cut at different places.
      for (size_t i = 0; i < requests.size(); ++i) {
        EngineRequest warm;
        const std::vector<int32_t>& prompt = requests[i].prompt;
        const size_t tokens = prompt.size() - i % std::min<size_t>(prompt.size(), 5);
        warm.prompt.assign(prompt.begin(), prompt.begin() + static_cast<int64_t>(tokens));
        warm.params.max_tokens = 1 + static_cast<int64_t>(i % 3);
        warm.params.ignore_eos = true;
        submit(engine, requests.size(), std::move(warm));
        run_steps(engine);
        if (run.stopped) return run;
      }
    }
    for (size_t i = 0; i < requests.size(); ++i) {
      submit(engine, i, requests[i]);
      if (variant.batched) continue;
      run_steps(engine);
      if (run.stopped) return run;
    }
    finish(engine);
    return run;
  }
  for (size_t i = 0; i < requests.size() && !run.stopped; ++i) {
    place.clear();
    Engine engine(backend, tokenizer, options, events);
    submit(engine, i, requests[i]);
    finish(engine);
  }
  return run;
}

namespace {

bool SameBits(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

std::optional<std::string> DifferentEntry(const TokenLogprobs& expected, const TokenLogprobs& got) {
  if (!SameBits(expected.logprob, got.logprob)) {
    return fmt::format("the log-probability is {:.9g} and not {:.9g}", got.logprob,
                       expected.logprob);
  }
  if (expected.rank != got.rank)
    return fmt::format("the rank is {} and not {}", got.rank, expected.rank);
  if (expected.top.size() != got.top.size()) {
    return fmt::format("{} alternatives are reported and not {}", got.top.size(),
                       expected.top.size());
  }
  for (size_t i = 0; i < expected.top.size(); ++i) {
    if (expected.top[i].token_id == got.top[i].token_id &&
        SameBits(expected.top[i].logprob, got.top[i].logprob))
      continue;
    return fmt::format("alternative {} is token {} with {:.9g} and not token {} with {:.9g}", i,
                       got.top[i].token_id, got.top[i].logprob, expected.top[i].token_id,
                       expected.top[i].logprob);
  }
  return std::nullopt;
}

// Position and sentence of the first difference between two lists of entries.
std::optional<std::pair<int64_t, std::string>> DifferentEntries(
    const std::vector<TokenLogprobs>& expected, const std::vector<TokenLogprobs>& got) {
  for (size_t i = 0; i < std::min(expected.size(), got.size()); ++i) {
    std::optional<std::string> what = DifferentEntry(expected[i], got[i]);
    if (what.has_value()) return {{static_cast<int64_t>(i), std::move(*what)}};
  }
  if (expected.size() == got.size()) return std::nullopt;
  return {
      {static_cast<int64_t>(std::min(expected.size(), got.size())),
       fmt::format("{} log-probabilities are reported and not {}", got.size(), expected.size())}};
}

std::optional<std::pair<int64_t, std::string>> DifferentCompletion(const CompletionOutput& expected,
                                                                   const CompletionOutput& got) {
  for (size_t i = 0; i < std::min(expected.token_ids.size(), got.token_ids.size()); ++i) {
    if (expected.token_ids[i] == got.token_ids[i]) continue;
    return {{static_cast<int64_t>(i),
             fmt::format("the token is {} and not {}", got.token_ids[i], expected.token_ids[i])}};
  }
  if (expected.token_ids.size() != got.token_ids.size()) {
    return {{static_cast<int64_t>(std::min(expected.token_ids.size(), got.token_ids.size())),
             fmt::format("the output has {} tokens and not {}", got.token_ids.size(),
                         expected.token_ids.size())}};
  }
  if (auto entries = DifferentEntries(expected.logprobs, got.logprobs); entries.has_value())
    return entries;
  const auto end = static_cast<int64_t>(expected.token_ids.size());
  if (expected.finish_reason != got.finish_reason) {
    return {{end, fmt::format("the output ended with \"{}\" and not \"{}\"",
                              FinishReasonName(got.finish_reason),
                              FinishReasonName(expected.finish_reason))}};
  }
  if (expected.text != got.text) return {{end, "the texts of the same tokens differ"}};
  return std::nullopt;
}

// The variant without each of its features.
std::vector<std::pair<std::string, SelfcheckVariant>> WithoutEach(const SelfcheckVariant& variant) {
  std::vector<std::pair<std::string, SelfcheckVariant>> simpler;
  const auto add = [&](bool has, const char* feature, auto&& remove) {
    if (!has) return;
    SelfcheckVariant without = variant;
    remove(without);
    simpler.emplace_back(feature, without);
  };
  add(variant.batched, "batching", [](SelfcheckVariant& v) { v.batched = false; });
  add(variant.chunk_tokens > 0, "chunked prefill", [](SelfcheckVariant& v) { v.chunk_tokens = 0; });
  add(variant.prefix_cache, "prefix cache", [](SelfcheckVariant& v) { v.prefix_cache = false; });
  add(variant.async_scheduling, "asynchronous scheduling",
      [](SelfcheckVariant& v) { v.async_scheduling = false; });
  add(variant.preempt_every > 0, "preemption", [](SelfcheckVariant& v) {
    v.preempt_every = 0;
    v.preempt_by_saving = false;
  });
  return simpler;
}

}  // namespace

std::optional<SelfcheckDifference> FindDifference(std::span<const RequestOutput> expected,
                                                  std::span<const RequestOutput> got) {
  DI_CHECK_EQ(expected.size(), got.size());
  for (size_t r = 0; r < expected.size(); ++r) {
    SelfcheckDifference difference;
    difference.request = static_cast<int64_t>(r);
    const RequestOutput& a = expected[r];
    const RequestOutput& b = got[r];
    if (a.error.has_value() != b.error.has_value() || a.outputs.size() != b.outputs.size()) {
      difference.position = -1;
      difference.what = "one of the runs refused the request: " +
                        (b.error.has_value() ? b.error->message : a.error->message);
      return difference;
    }
    if (auto entry = DifferentEntries(a.prompt_logprobs, b.prompt_logprobs); entry.has_value()) {
      difference.position = -1;
      difference.what = fmt::format("prompt token {}: {}", entry->first + 1, entry->second);
      return difference;
    }
    for (size_t c = 0; c < a.outputs.size(); ++c) {
      auto entry = DifferentCompletion(a.outputs[c], b.outputs[c]);
      if (!entry.has_value()) continue;
      difference.completion = static_cast<int64_t>(c);
      difference.position = entry->first;
      difference.what = std::move(entry->second);
      return difference;
    }
  }
  return std::nullopt;
}

SelfcheckReport RunSelfcheck(ModelBackend& backend, const Tokenizer& tokenizer,
                             const EngineOptions& base, const SelfcheckOptions& options,
                             const SelfcheckCallback& progress) {
  const auto start = std::chrono::steady_clock::now();
  SelfcheckReport report;
  const StateCapacity capacity = backend.capacity();
  const std::vector<EngineRequest> requests =
      SelfcheckRequests(options, backend.vocab_size(), capacity.window_tokens,
                        std::min(base.max_model_len, capacity.num_blocks * kBlockTokens),
                        /*structured=*/base.compile_constraint != nullptr);
  report.requests = static_cast<int64_t>(requests.size());
  const std::vector<SelfcheckVariant> variants = SelfcheckVariants(options.thorough);
  SelfcheckProgress now;
  now.variants_total = static_cast<int64_t>(variants.size()) + 1;
  const auto go_on = [&] { return !progress || progress(now); };
  // Nothing if it was stopped.
  const auto run_variant = [&](const SelfcheckVariant& variant) -> std::optional<VariantRun> {
    VariantRun run = RunVariant(backend, tokenizer, base, variant, requests, [&] {
      ++now.variant_steps;
      return go_on();
    });
    if (run.stopped) return std::nullopt;
    return run;
  };
  const auto begin = [&](int64_t done, const SelfcheckVariant& variant) {
    now.variants_done = done;
    now.variant = variant.Name();
    now.variant_steps = 0;
    return go_on();
  };
  if (!begin(0, {})) return report;
  const std::optional<VariantRun> plain_run = run_variant({});
  if (!plain_run.has_value()) return report;
  const VariantRun& plain = *plain_run;
  for (size_t i = 0; i < requests.size(); ++i) {
    if (!plain.outputs[i].error.has_value()) continue;
    // What is refused proves nothing.
    SelfcheckDifference refused;
    refused.request = static_cast<int64_t>(i);
    refused.position = -1;
    refused.what = "the plain run refused the request: " + plain.outputs[i].error->message;
    report.difference = std::move(refused);
    report.complete = true;
    return report;
  }
  bool stopped = false;
  for (const SelfcheckVariant& variant : variants) {
    stopped = !begin(report.variants + 1, variant);
    if (stopped) break;
    const std::optional<VariantRun> run = run_variant(variant);
    stopped = !run.has_value();
    if (stopped) break;
    ++report.variants;
    report.tokens += run->counters.completion_tokens;
    report.cached_tokens += run->counters.cached_tokens;
    report.preemptions += run->counters.preemptions;
    report.difference = FindDifference(plain.outputs, run->outputs);
    if (!report.difference.has_value()) continue;
    report.difference->variant = variant;
    for (const auto& [feature, simpler] : WithoutEach(variant)) {
      const std::optional<VariantRun> rerun = run_variant(simpler);
      stopped = !rerun.has_value();
      if (stopped) break;
      if (!FindDifference(plain.outputs, rerun->outputs).has_value())
        report.difference->causes.push_back(feature);
    }
    break;
  }
  report.complete = !stopped;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace deepinfer
