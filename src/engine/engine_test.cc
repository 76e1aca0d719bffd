#include "engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <random>
#include <set>

#include "engine/fake_backend.h"
#include "sample/philox.h"

namespace deepinfer {
namespace {

using ::testing::HasSubstr;
constexpr int64_t kVocab = 512;
constexpr float kInf = std::numeric_limits<float>::infinity();

const Tokenizer& TestTokenizer() {
  static const Tokenizer tokenizer =
      *Tokenizer::Load(DI_TEST_DATA_DIR "/model/two/checkpoint/tokenizer.json");
  return tokenizer;
}

EngineOptions SmallOptions() {
  EngineOptions options;
  options.max_model_len = 600;
  options.scheduler.max_num_seqs = 8;
  options.scheduler.max_num_batched_tokens = 96;
  options.scheduler.max_prompt_logit_rows = 24;
  options.end_ids = {1, 0};
  return options;
}

struct Outcome {
  std::map<int64_t, RequestOutput> outputs;
  std::map<std::pair<int64_t, int64_t>, std::string> streamed;
  std::map<std::pair<int64_t, int64_t>, int> final_events;
  EngineCounters counters;
};

class EngineRun {
 public:
  EngineRun(FakeBackend& backend, EngineOptions options) {
    EngineEvents events;
    events.on_delta = [this](const EngineDelta& delta) {
      const std::pair key(delta.request, delta.completion);
      outcome_.streamed[key] += delta.text;
      ids_[key].insert(ids_[key].end(), delta.token_ids.begin(), delta.token_ids.end());
      if (delta.finish_reason != FinishReason::kNone) ++outcome_.final_events[key];
    };
    events.on_finished = [this](int64_t request, RequestOutput output) {
      EXPECT_EQ(outcome_.outputs.count(request), 0u) << "a request finished twice";
      outcome_.outputs[request] = std::move(output);
    };
    engine =
        std::make_unique<Engine>(backend, TestTokenizer(), std::move(options), std::move(events));
  }

  Outcome Finish() {
    int64_t steps = 0;
    while (engine->Step()) {
      if (++steps == 20'000) {
        ADD_FAILURE() << "no progress";
        break;
      }
    }
    outcome_.counters = engine->counters();
    for (const auto& [request, output] : outcome_.outputs) {
      int64_t tokens = 0;
      for (const CompletionOutput& completion : output.outputs) {
        const std::pair<int64_t, int64_t> key = {request, completion.index};
        EXPECT_EQ(outcome_.streamed[key], completion.text);
        EXPECT_EQ(ids_[key], completion.token_ids);
        EXPECT_EQ(outcome_.final_events[key], 1);
        tokens += static_cast<int64_t>(completion.token_ids.size());
      }
      EXPECT_EQ(output.usage.completion_tokens, tokens);
    }
    return outcome_;
  }

  std::unique_ptr<Engine> engine;

 private:
  Outcome outcome_;
  std::map<std::pair<int64_t, int64_t>, std::vector<int32_t>> ids_;
};

// How steps follow each other. In the last two, the device draws tokens itself.
enum class Pace { kSynchronous, kAsynchronous, kDrawnOnDevice, kDrawnOnDeviceSynchronous };
constexpr Pace kPaces[] = {Pace::kSynchronous, Pace::kAsynchronous, Pace::kDrawnOnDevice,
                           Pace::kDrawnOnDeviceSynchronous};

void SetPace(Pace pace, FakeBackend& backend, EngineOptions& options) {
  options.async_scheduling = pace == Pace::kAsynchronous || pace == Pace::kDrawnOnDevice;
  backend.set_draws_tokens(pace == Pace::kDrawnOnDevice || pace == Pace::kDrawnOnDeviceSynchronous);
}

EngineRequest Ask(std::vector<int32_t> prompt, int64_t max_tokens, uint64_t seed = 1) {
  EngineRequest request;
  request.id = "r";
  request.prompt = std::move(prompt);
  request.params.max_tokens = max_tokens;
  request.params.ignore_eos = true;
  request.seed = seed;
  return request;
}

std::vector<EngineRequest> MixedRequests(int count) {
  std::mt19937 rng(17);
  std::vector<EngineRequest> requests;
  for (int i = 0; i < count; ++i) {
    std::vector<int32_t> prompt(1 + rng() % 250);
    for (int32_t& id : prompt) id = static_cast<int32_t>(rng() % kVocab);
    EngineRequest request = Ask(prompt, 1 + static_cast<int64_t>(rng() % 60), rng());
    if (i % 3 == 0) request.params.temperature = 0;
    if (i % 4 == 0) request.params.repetition_penalty = 1.3;
    if (i % 5 == 0) request.params.prompt_logprobs = 2;
    if (i % 6 == 0) request.params.ignore_eos = false;
    if (i % 7 == 0) request.params.n = 3;
    requests.push_back(request);
  }
  return requests;
}

RequestOutput Alone(EngineRequest request) {
  FakeBackend backend(kVocab, 30, 30, 8);
  EngineOptions options = SmallOptions();
  options.async_scheduling = false;
  options.scheduler.prefix_caching = false;
  EngineRun run(backend, options);
  EXPECT_TRUE(run.engine->Submit(std::move(request)).has_value());
  return run.Finish().outputs.at(0);
}

void ExpectSame(const RequestOutput& a, const RequestOutput& b) {
  ASSERT_EQ(a.outputs.size(), b.outputs.size());
  const auto same = [](const std::vector<TokenLogprobs>& x, const std::vector<TokenLogprobs>& y) {
    if (x.size() != y.size()) return false;
    for (size_t i = 0; i < x.size(); ++i) {
      if (x[i].logprob != y[i].logprob || x[i].rank != y[i].rank ||
          x[i].top.size() != y[i].top.size())
        return false;
    }
    return true;
  };
  for (size_t i = 0; i < a.outputs.size(); ++i) {
    EXPECT_EQ(a.outputs[i].token_ids, b.outputs[i].token_ids);
    EXPECT_EQ(a.outputs[i].text, b.outputs[i].text);
    EXPECT_EQ(a.outputs[i].finish_reason, b.outputs[i].finish_reason);
    EXPECT_TRUE(same(a.outputs[i].logprobs, b.outputs[i].logprobs));
  }
  EXPECT_TRUE(same(a.prompt_logprobs, b.prompt_logprobs));
}

TEST(Engine, ARequestsOutputDoesNotDependOnItsNeighbours) {
  const std::vector<EngineRequest> requests = MixedRequests(40);
  for (const Pace pace : kPaces) {
    FakeBackend backend(kVocab, 60, 60, 8);
    EngineOptions options = SmallOptions();
    SetPace(pace, backend, options);
    EngineRun run(backend, options);
    for (const EngineRequest& request : requests)
      ASSERT_TRUE(run.engine->Submit(request).has_value());
    const Outcome outcome = run.Finish();
    ASSERT_EQ(outcome.outputs.size(), requests.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      ExpectSame(outcome.outputs.at(static_cast<int64_t>(i)), Alone(requests[i]));
    }
    EXPECT_LE(backend.max_rows_seen(), 96);
    EXPECT_EQ(backend.max_sequences_seen(), 8);
    EXPECT_LE(backend.max_logit_rows_seen(), 24 + 8);
  }
}

TEST(Engine, PreemptedSequencesResumeWithTheSameTokens) {
  std::vector<EngineRequest> requests = MixedRequests(12);
  // Outputs that outgrow what their admission has reserved.
  for (size_t i = 0; i < requests.size(); i += 2) requests[i].params.max_tokens = 260;
  for (const Pace pace : kPaces) {
    for (const PreemptionMode mode : {PreemptionMode::kRecompute, PreemptionMode::kSave}) {
      FakeBackend backend(kVocab, 5, 8, 8);  // exactly one sequence of full length
      EngineOptions options = SmallOptions();
      SetPace(pace, backend, options);
      options.scheduler.preemption = mode;
      options.scheduler.prefix_caching = false;
      EngineRun run(backend, options);
      for (const EngineRequest& request : requests)
        ASSERT_TRUE(run.engine->Submit(request).has_value());
      const Outcome outcome = run.Finish();
      EXPECT_GT(outcome.counters.preemptions, 0);
      if (mode == PreemptionMode::kRecompute) {
        EXPECT_GT(outcome.counters.recomputed_tokens, 0);
      } else {
        EXPECT_EQ(outcome.counters.recomputed_tokens, 0);
      }
      int64_t prompt_tokens = 0;
      for (size_t i = 0; i < requests.size(); ++i) {
        ExpectSame(outcome.outputs.at(static_cast<int64_t>(i)), Alone(requests[i]));
        prompt_tokens += static_cast<int64_t>(requests[i].prompt.size()) * requests[i].params.n;
      }
      EXPECT_EQ(outcome.counters.prompt_tokens, prompt_tokens);
    }
  }
}

TEST(Engine, EverySplitOfThePromptGivesTheSameOutput) {
  std::vector<int32_t> prompt(200);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(i * 7 % kVocab);
  EngineRequest request = Ask(prompt, 10);
  request.params.prompt_logprobs = 3;
  const RequestOutput expected = Alone(request);
  EXPECT_EQ(expected.prompt_logprobs.size(), 199u);
  for (int64_t rows = 1; rows <= 64; rows += 3) {
    EngineOptions options = SmallOptions();
    options.scheduler.max_num_seqs = 1;
    options.scheduler.max_num_batched_tokens = rows;
    options.scheduler.max_prompt_logit_rows = 1 + rows % 5;
    FakeBackend backend(kVocab, 30, 30, 1);
    SetPace(kPaces[rows % 4], backend, options);
    EngineRun run(backend, options);
    ASSERT_TRUE(run.engine->Submit(request).has_value());
    ExpectSame(run.Finish().outputs.at(0), expected);
  }
}

TEST(Engine, CompletionsOfOneRequestDifferAndRepeat) {
  EngineRequest request = Ask({5, 6}, 12, 77);
  request.params.n = 6;
  const RequestOutput output = Alone(request);
  std::set<std::vector<int32_t>> distinct;
  for (const CompletionOutput& completion : output.outputs) {
    distinct.insert(completion.token_ids);
    EXPECT_EQ(completion.seq_seed, CompletionSeed(77, completion.index));
    // The reported seed alone reproduces the completion.
    EXPECT_EQ(Alone(Ask({5, 6}, 12, completion.seq_seed)).outputs[0].token_ids,
              completion.token_ids);
  }
  EXPECT_EQ(distinct.size(), 6u);
  ExpectSame(Alone(request), output);
}

TEST(Engine, ManyCompletionsRunInWaves) {
  EngineRequest request = Ask({5, 6}, 8);
  request.params.n = 512;
  FakeBackend backend(kVocab, 8, 10, 4);
  EngineRun run(backend, SmallOptions());
  ASSERT_TRUE(run.engine->Submit(request).has_value());
  const Outcome outcome = run.Finish();
  EXPECT_EQ(outcome.outputs.at(0).usage.completion_tokens, 512 * 8);
}

// Makes the model continue with `script` whatever the prompt was.
void Script(FakeBackend& backend, int64_t prompt_tokens, std::vector<int32_t> script) {
  backend.set_shape([prompt_tokens, script](std::span<const int32_t> tokens, std::span<float> row) {
    const int64_t place = static_cast<int64_t>(tokens.size()) - prompt_tokens;
    if (place >= 0 && place < static_cast<int64_t>(script.size()))
      row[static_cast<size_t>(script[static_cast<size_t>(place)])] = 50;
  });
}

RequestOutput RunScript(const std::vector<int32_t>& script, EngineRequest request) {
  FakeBackend backend(kVocab, 30, 30, 8);
  Script(backend, static_cast<int64_t>(request.prompt.size()), script);
  EngineRun run(backend, SmallOptions());
  EXPECT_TRUE(run.engine->Submit(std::move(request)).has_value());
  return run.Finish().outputs.at(0);
}

std::vector<int32_t> TextIds(const std::string& text) {
  return *TestTokenizer().Encode(text);
}

TEST(Engine, EndTokensEndTheOutputAndLeaveNoText) {
  EngineRequest request = Ask({9}, 50);
  request.params.ignore_eos = false;
  std::vector<int32_t> script = TextIds("the end");
  script.push_back(0);  // the second of the end ids
  const CompletionOutput output = RunScript(script, request).outputs[0];
  EXPECT_EQ(output.finish_reason, FinishReason::kStop);
  EXPECT_EQ(std::get<int64_t>(output.stop_reason), 0);
  EXPECT_EQ(output.text, "the end");
  EXPECT_EQ(output.token_ids, script);
  EXPECT_EQ(output.logprobs.size(), script.size());
}

TEST(Engine, IgnoreEosIgnoresEveryEndTokenButNotTheUsersOwn) {
  EngineRequest request = Ask({9}, 6);
  const std::vector<int32_t> script = {1, 0, 300, 1, 301, 302};
  EXPECT_EQ(RunScript(script, request).outputs[0].token_ids, script);
  EXPECT_EQ(RunScript(script, request).outputs[0].finish_reason, FinishReason::kLength);
  request.params.stop_token_ids = {301};
  const CompletionOutput output = RunScript(script, request).outputs[0];
  EXPECT_EQ(output.token_ids.size(), 5u);
  EXPECT_EQ(std::get<int64_t>(output.stop_reason), 301);
}

TEST(Engine, MinTokensSuppressesEveryEndToken) {
  EngineRequest request = Ask({9}, 50);
  request.params.ignore_eos = false;
  request.params.stop_token_ids = {300};
  request.params.min_tokens = 4;
  request.params.temperature = 0;
  const CompletionOutput output = RunScript({1, 0, 300, 1, 1}, request).outputs[0];
  EXPECT_EQ(output.token_ids.size(), 5u);
  EXPECT_EQ(output.token_ids.back(), 1);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(output.token_ids[i] != 1 && output.token_ids[i] != 0 && output.token_ids[i] != 300);
  }
}

TEST(Engine, StopStringsAcrossTokensEndTheText) {
  EngineRequest request = Ask({9}, 50);
  request.params.stop = {"quick br", "zzz"};
  const std::vector<int32_t> script = TextIds("The quick brown fox");
  const CompletionOutput output = RunScript(script, request).outputs[0];
  EXPECT_EQ(output.text, "The ");
  EXPECT_EQ(output.finish_reason, FinishReason::kStop);
  EXPECT_EQ(std::get<std::string>(output.stop_reason), "quick br");
  EXPECT_LT(output.token_ids.size(), script.size());
}

TEST(Engine, OutputHasExactlyMaxTokensTokens) {
  for (const int64_t max_tokens : {1, 5, 20}) {
    const RequestOutput output = Alone(Ask({3, 4, 5}, max_tokens));
    EXPECT_EQ(static_cast<int64_t>(output.outputs[0].token_ids.size()), max_tokens);
    EXPECT_EQ(output.outputs[0].finish_reason, FinishReason::kLength);
    EXPECT_EQ(output.usage.prompt_tokens, 3);
  }
}

TEST(Engine, TheContextLimitIsUsedToTheLastToken) {
  for (const int64_t prompt_tokens : {1, 450, 598, 599}) {
    EngineRequest request = Ask(std::vector<int32_t>(static_cast<size_t>(prompt_tokens), 7), 0);
    request.params.max_tokens.reset();
    const RequestOutput output = Alone(request);
    EXPECT_EQ(output.usage.completion_tokens, 600 - prompt_tokens);
    EXPECT_EQ(output.outputs[0].finish_reason, FinishReason::kLength);
  }
}

TEST(Engine, ZeroMaxTokensScoresThePrompt) {
  EngineRequest request = Ask(std::vector<int32_t>(600, 7), 0);
  request.params.prompt_logprobs = 0;
  request.params.n = 2;
  const RequestOutput output = Alone(request);
  EXPECT_EQ(output.prompt_logprobs.size(), 599u);
  EXPECT_EQ(output.usage.completion_tokens, 0);
  EXPECT_EQ(output.outputs[1].finish_reason, FinishReason::kLength);
}

TEST(Engine, ImpossibleRequestsAreRefusedWithASentenceAndNothingIsQueued) {
  FakeBackend backend(kVocab, 1, 3, 8);
  EngineRun run(backend, SmallOptions());
  const auto message = [&](EngineRequest request) {
    const Result<int64_t> number = run.engine->Submit(std::move(request));
    return number.has_value() ? std::string("accepted")
                              : number.error().field + ": " + number.error().message;
  };
  EXPECT_THAT(message(Ask({}, 1)), HasSubstr("the prompt has no tokens"));
  EXPECT_THAT(
      message(Ask({3, -1}, 1)),
      HasSubstr(
          "prompt_token_ids[1]: prompt token 1 is -1; token ids of this model are 0 ... 511."));
  EXPECT_THAT(message(Ask({512}, 1)), HasSubstr("512"));
  EXPECT_THAT(message(Ask(std::vector<int32_t>(128, 3), 1)),
              HasSubstr("has 128 tokens, but the cache memory holds 128 tokens"));
  EngineRequest bad = Ask({3}, 1);
  bad.params.temperature = std::numeric_limits<double>::quiet_NaN();
  bad.params.stop_token_ids = {512};
  EXPECT_THAT(message(bad), HasSubstr("temperature: temperature is nan"));
  EXPECT_THAT(message(bad), HasSubstr("stop_token_ids[0] is 512"));
  EXPECT_FALSE(run.engine->Step());
}

TEST(Engine, ARowThatCannotBeSampledEndsItsCompletionOnly) {
  FakeBackend backend(kVocab, 30, 30, 8);
  backend.set_shape([](std::span<const int32_t> tokens, std::span<float> row) {
    if (tokens[0] == 11 && tokens.size() == 3) row[5] = std::numeric_limits<float>::quiet_NaN();
    if (tokens[0] == 12 && tokens.size() == 2) std::fill(row.begin(), row.end(), -kInf);
  });
  EngineRun run(backend, SmallOptions());
  for (const int32_t first : {10, 11, 12, 13})
    ASSERT_TRUE(run.engine->Submit(Ask({first}, 6)).has_value());
  const Outcome outcome = run.Finish();
  ExpectSame(outcome.outputs.at(0), Alone(Ask({10}, 6)));
  ExpectSame(outcome.outputs.at(3), Alone(Ask({13}, 6)));
  const CompletionOutput& nan = outcome.outputs.at(1).outputs[0];
  EXPECT_EQ(nan.finish_reason, FinishReason::kError);
  EXPECT_EQ(nan.token_ids.size(), 2u);
  EXPECT_THAT(nan.error->message, HasSubstr("logit of token 5 is nan"));
  EXPECT_THAT(outcome.outputs.at(2).outputs[0].error->message,
              HasSubstr("no token can be sampled"));
}

TEST(Engine, AFailedStepEndsTheRequestsInItAndTheOthersGoOn) {
  for (const Pace pace : kPaces) {
    for (const int64_t step : {1, 2}) {
      FakeBackend backend(kVocab, 30, 30, 2);
      backend.set_failing_step(step);
      EngineOptions options = SmallOptions();
      SetPace(pace, backend, options);
      EngineRun run(backend, options);
      for (int i = 0; i < 4; ++i) ASSERT_TRUE(run.engine->Submit(Ask({10 + i}, 6)).has_value());
      const Outcome outcome = run.Finish();
      EXPECT_THAT(outcome.outputs.at(0).outputs[0].error->message, HasSubstr("failed as told"));
      EXPECT_EQ(outcome.outputs.at(1).outputs[0].finish_reason, FinishReason::kError);
      EXPECT_EQ(outcome.outputs.at(2).outputs[0].finish_reason, FinishReason::kLength);
      EXPECT_EQ(outcome.outputs.at(3).outputs[0].token_ids.size(), 6u);
    }
  }
}

TEST(Engine, ALostDeviceEndsWhatRunsOrWaitsAndRefusesWhatComesWithTheSameSentence) {
  for (const Pace pace : kPaces) {
    for (const int64_t step : {1, 2}) {
      FakeBackend backend(kVocab, 30, 30, 2);
      backend.set_failing_step(step);
      backend.set_loses_device();
      EngineOptions options = SmallOptions();
      SetPace(pace, backend, options);
      EngineRun run(backend, options);
      for (int i = 0; i < 5; ++i) ASSERT_TRUE(run.engine->Submit(Ask({10 + i}, 6)).has_value());
      const Outcome outcome = run.Finish();
      for (int i = 0; i < 5; ++i) {
        const CompletionOutput& output = outcome.outputs.at(i).outputs[0];
        EXPECT_EQ(output.finish_reason, FinishReason::kError) << i;
        ASSERT_TRUE(output.error.has_value()) << i;
        EXPECT_EQ(output.error->message, "the fake model failed as told") << i;
      }
      EXPECT_EQ(run.engine->FindViolation(), "");
      const int64_t steps = backend.steps();
      const Result<int64_t> late = run.engine->Submit(Ask({20}, 6));
      ASSERT_FALSE(late.has_value());
      EXPECT_EQ(late.error().message, "the fake model failed as told");
      EXPECT_FALSE(run.engine->Step());
      EXPECT_EQ(backend.steps(), steps);
    }
  }
}

TEST(Engine, AbortReportsTheOutputSoFar) {
  FakeBackend backend(kVocab, 30, 30, 1);
  EngineOptions options = SmallOptions();
  options.async_scheduling = false;
  EngineRun run(backend, options);
  ASSERT_TRUE(run.engine->Submit(Ask({10}, 50)).has_value());
  ASSERT_TRUE(run.engine->Submit(Ask({11}, 50)).has_value());
  for (int i = 0; i < 5; ++i) run.engine->Step();
  run.engine->Abort();
  const Outcome outcome = run.Finish();
  EXPECT_EQ(outcome.outputs.at(0).outputs[0].finish_reason, FinishReason::kAbort);
  EXPECT_EQ(outcome.outputs.at(0).outputs[0].token_ids.size(), 5u);
  EXPECT_EQ(outcome.outputs.at(1).outputs[0].token_ids.size(), 0u);
  EXPECT_EQ(run.engine->FindViolation(), "");
  EXPECT_FALSE(run.engine->Step());
}

TEST(Engine, TimingsComeFromTheClock) {
  FakeBackend backend(kVocab, 30, 30, 8);
  double now = 100;
  EngineOptions options = SmallOptions();
  options.clock = [&now] { return now; };
  options.async_scheduling = false;
  EngineRun run(backend, options);
  ASSERT_TRUE(run.engine->Submit(Ask(std::vector<int32_t>(100, 5), 3)).has_value());
  now = 102;
  do {
    now += 0.5;
  } while (run.engine->Step());
  const Timings timings = run.Finish().outputs.at(0).timings;
  EXPECT_EQ(timings.queue_seconds, 2.5);
  EXPECT_EQ(timings.first_token_seconds, 3.0);  // two steps of at most 96 rows
  EXPECT_EQ(timings.total_seconds, 4.0);
}

TEST(Engine, ALongPromptDoesNotHoldUpRunningOutputs) {
  FakeBackend backend(kVocab, 30, 30, 8);
  EngineOptions options = SmallOptions();
  options.async_scheduling = false;
  EngineRun run(backend, options);
  ASSERT_TRUE(run.engine->Submit(Ask({10}, 20)).has_value());
  run.engine->Step();
  ASSERT_TRUE(run.engine->Submit(Ask(std::vector<int32_t>(560, 5), 1)).has_value());
  const int64_t before = run.engine->counters().completion_tokens;
  for (int i = 0; i < 5; ++i) run.engine->Step();
  EXPECT_EQ(run.engine->counters().completion_tokens - before, 5);
  EXPECT_EQ(backend.max_rows_seen(), 96);
  run.Finish();
}

// ---- Prefix cache
// ----------------------------------------------------------------------------------

TEST(Engine, ARepeatedPromptIsTakenFromTheCacheUpToItsLastTokens) {
  std::vector<int32_t> prompt(300);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(i * 11 % kVocab);
  FakeBackend backend(kVocab, 30, 30, 8);
  EngineRun run(backend, SmallOptions());
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(run.engine->Submit(Ask(prompt, 5, 3)).has_value());
    while (run.engine->Step()) {
    }
    ASSERT_TRUE(run.engine->Submit(Ask({static_cast<int32_t>(i), 1, 2}, 5)).has_value());
    while (run.engine->Step()) {
    }
  }
  const Outcome outcome = run.Finish();
  const RequestOutput alone = Alone(Ask(prompt, 5, 3));
  for (int64_t i = 0; i < 20; i += 2) {
    ExpectSame(outcome.outputs.at(i), alone);
    EXPECT_EQ(outcome.outputs.at(i).usage.cached_tokens, i == 0 ? 0 : 298);
  }
}

TEST(Engine, PromptLogprobsOfACachedPromptAreThoseOfAColdOne) {
  const std::vector<int32_t> prompt(300, 9);
  EngineRequest scored = Ask(prompt, 4);
  scored.params.prompt_logprobs = 2;
  FakeBackend backend(kVocab, 30, 30, 8);
  EngineRun run(backend, SmallOptions());
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(run.engine->Submit(Ask(prompt, 4)).has_value());
    ASSERT_TRUE(run.engine->Submit(scored).has_value());
    while (run.engine->Step()) {
    }
  }
  const Outcome outcome = run.Finish();
  for (const int64_t request : {1, 3}) {
    ExpectSame(outcome.outputs.at(request), Alone(scored));
    EXPECT_EQ(outcome.outputs.at(request).usage.cached_tokens, 0);
  }
}

TEST(Engine, SaltsKeepPrefixesApart) {
  const std::vector<int32_t> prompt(300, 9);
  FakeBackend backend(kVocab, 30, 30, 8);
  EngineRun run(backend, SmallOptions());
  for (const char* salt : {"a", "b", "a"}) {
    EngineRequest request = Ask(prompt, 2);
    request.cache_salt = salt;
    ASSERT_TRUE(run.engine->Submit(request).has_value());
    while (run.engine->Step()) {
    }
  }
  const Outcome outcome = run.Finish();
  EXPECT_EQ(outcome.outputs.at(0).usage.cached_tokens, 0);
  EXPECT_EQ(outcome.outputs.at(1).usage.cached_tokens, 0);
  EXPECT_EQ(outcome.outputs.at(2).usage.cached_tokens, 298);
}

TEST(Engine, FurtherCompletionsRunOnlyTheEndOfThePrompt) {
  EngineRequest request = Ask(std::vector<int32_t>(400, 3), 3);
  request.params.n = 8;
  FakeBackend backend(kVocab, 40, 40, 8);
  EngineRun run(backend, SmallOptions());
  ASSERT_TRUE(run.engine->Submit(request).has_value());
  const Outcome outcome = run.Finish();
  ExpectSame(outcome.outputs.at(0), Alone(request));
  EXPECT_LE(backend.rows(), 400 + 7 * 2 + 8 * 3);
}

// ---- Running ahead
// ---------------------------------------------------------------------------------

TEST(Engine, TheNextStepIsLaunchedBeforeTheLastOnesTokensAreKnown) {
  FakeBackend backend(kVocab, 30, 30, 8);
  EngineRun run(backend, SmallOptions());
  ASSERT_TRUE(run.engine->Submit(Ask({10}, 8)).has_value());
  run.engine->Step();
  EXPECT_EQ(run.engine->counters().steps, 1);
  EXPECT_EQ(run.engine->counters().completion_tokens, 0);
  run.engine->Step();
  EXPECT_EQ(run.engine->counters().steps, 2);
  EXPECT_EQ(run.engine->counters().completion_tokens, 1);
  const Outcome outcome = run.Finish();
  ExpectSame(outcome.outputs.at(0), Alone(Ask({10}, 8)));
  EXPECT_EQ(backend.rows(), 8);  // the length was known: no row too many
}

TEST(Engine, AnEndTokenSeenLateCostsOneRowAndChangesNothing) {
  EngineRequest request = Ask({9}, 50);
  request.params.ignore_eos = false;
  FakeBackend backend(kVocab, 30, 30, 8);
  Script(backend, 1, {300, 301, 1});
  EngineRun run(backend, SmallOptions());
  ASSERT_TRUE(run.engine->Submit(request).has_value());
  const Outcome outcome = run.Finish();
  EXPECT_EQ(outcome.outputs.at(0).outputs[0].token_ids, (std::vector<int32_t>{300, 301, 1}));
  EXPECT_EQ(backend.rows(), 3 + 1);
}

TEST(Engine, AbortsAtAnyTimeLeaveTheOthersAlone) {
  const std::vector<EngineRequest> requests = MixedRequests(24);
  std::vector<RequestOutput> alone;
  for (const EngineRequest& request : requests) alone.push_back(Alone(request));
  for (uint32_t seed = 0; seed < 12; ++seed) {
    std::mt19937 rng(seed);
    FakeBackend backend(kVocab, 12, 16, 6);
    EngineOptions options = SmallOptions();
    options.scheduler.preemption =
        seed % 2 == 0 ? PreemptionMode::kRecompute : PreemptionMode::kSave;
    EngineRun run(backend, options);
    for (const EngineRequest& request : requests)
      ASSERT_TRUE(run.engine->Submit(request).has_value());
    std::set<int64_t> aborted;
    for (int i = 0; i < 40 && run.engine->Step(); ++i) {
      if (rng() % 4 != 0) continue;
      const auto victim = static_cast<int64_t>(rng() % requests.size());
      if (run.engine->Abort(victim)) aborted.insert(victim);
      ASSERT_EQ(run.engine->FindViolation(), "");
    }
    const Outcome outcome = run.Finish();
    EXPECT_EQ(run.engine->FindViolation(), "");
    ASSERT_EQ(outcome.outputs.size(), requests.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      const RequestOutput& output = outcome.outputs.at(static_cast<int64_t>(i));
      if (aborted.count(static_cast<int64_t>(i)) == 0) {
        ExpectSame(output, alone[i]);
        continue;
      }
      for (size_t c = 0; c < output.outputs.size(); ++c) {
        const std::vector<int32_t>& got = output.outputs[c].token_ids;
        const std::vector<int32_t>& all = alone[i].outputs[c].token_ids;
        ASSERT_LE(got.size(), all.size());
        EXPECT_TRUE(std::equal(got.begin(), got.end(), all.begin()));
      }
    }
  }
}

TEST(Engine, RequestsPastTheirDeadlineEndWithWhatTheyHave) {
  double now = 0;
  EngineOptions options = SmallOptions();
  options.clock = [&now] { return now; };
  options.scheduler.max_num_seqs = 1;
  FakeBackend backend(kVocab, 30, 30, 8);
  EngineRun run(backend, options);
  EngineRequest running = Ask({10}, 100);
  running.timeout_seconds = 10;
  EngineRequest waiting = Ask({11}, 5);
  waiting.timeout_seconds = 4;
  ASSERT_TRUE(run.engine->Submit(running).has_value());
  ASSERT_TRUE(run.engine->Submit(waiting).has_value());
  ASSERT_TRUE(run.engine->Submit(Ask({12}, 5)).has_value());
  while (run.engine->Step()) now += 1;
  const Outcome outcome = run.Finish();
  EXPECT_EQ(outcome.outputs.at(0).outputs[0].finish_reason, FinishReason::kDeadline);
  EXPECT_GE(outcome.outputs.at(0).outputs[0].token_ids.size(), 8u);
  EXPECT_LE(outcome.outputs.at(0).outputs[0].token_ids.size(), 11u);
  EXPECT_EQ(outcome.outputs.at(1).outputs[0].finish_reason, FinishReason::kDeadline);
  EXPECT_TRUE(outcome.outputs.at(1).outputs[0].token_ids.empty());
  EXPECT_EQ(outcome.outputs.at(2).outputs[0].finish_reason, FinishReason::kLength);
}

TEST(Engine, CallbacksMayAbortAndSubmit) {
  FakeBackend backend(kVocab, 30, 30, 8);
  EngineOptions options = SmallOptions();
  std::unique_ptr<Engine> engine;
  std::map<int64_t, FinishReason> ended;
  EngineEvents events;
  events.on_delta = [&](const EngineDelta& delta) {
    if (delta.request == 0 && delta.finish_reason == FinishReason::kNone) {
      engine->Abort(1);
      engine->Abort(0);
      EXPECT_TRUE(engine->Submit(Ask({20}, 3)).has_value());
    }
  };
  events.on_finished = [&](int64_t request, RequestOutput output) {
    ended[request] = output.outputs[0].finish_reason;
  };
  engine = std::make_unique<Engine>(backend, TestTokenizer(), options, events);
  ASSERT_TRUE(engine->Submit(Ask({10}, 9)).has_value());
  ASSERT_TRUE(engine->Submit(Ask({11}, 9)).has_value());
  while (engine->Step()) {
  }
  EXPECT_EQ(ended[0], FinishReason::kAbort);
  EXPECT_EQ(ended[1], FinishReason::kAbort);
  EXPECT_EQ(ended[2], FinishReason::kLength);
  EXPECT_EQ(engine->FindViolation(), "");
}

TEST(Engine, StatisticsReconcileWhateverHappens) {
  const std::vector<EngineRequest> requests = MixedRequests(30);
  for (uint32_t seed = 0; seed < 16; ++seed) {
    std::mt19937 rng(seed);
    FakeBackend backend(kVocab, 8, 12, 6);
    if (seed % 3 == 2) backend.set_failing_step(9 + seed % 2);
    EngineStatistics statistics("model");
    TraceRecorder trace;
    EngineOptions options = SmallOptions();
    SetPace(kPaces[seed % 4], backend, options);
    options.statistics = &statistics;
    options.trace = &trace;
    EngineRun run(backend, options);
    for (const EngineRequest& request : requests) {
      ASSERT_TRUE(run.engine->Submit(request).has_value());
      ASSERT_FALSE(run.engine->Submit(Ask({}, 1)).has_value());
    }
    for (int i = 0; i < 60 && run.engine->Step(); ++i) {
      if (rng() % 8 == 0) run.engine->Abort(static_cast<int64_t>(rng() % requests.size()));
      ASSERT_EQ(run.engine->FindViolation(), "") << "seed " << seed << ", step " << i;
    }
    const Outcome outcome = run.Finish();
    EXPECT_EQ(run.engine->FindViolation(), "");
    const StatisticsSnapshot snapshot = statistics.Snapshot();
    EXPECT_EQ(snapshot.requests_submitted, 60);
    EXPECT_EQ(snapshot.requests_ended[static_cast<size_t>(EndReason::kRefused)], 30);
    int64_t tokens = 0;
    for (const auto& [number, output] : outcome.outputs) tokens += output.usage.completion_tokens;
    EXPECT_EQ(snapshot.completion_tokens, tokens);
    EXPECT_GT(trace.num_events(), 0);
  }
}

TEST(Engine, ARecordedRunReplaysWithoutAModel) {
  FakeBackend backend(kVocab, 6, 9, 6);
  EngineOptions options = SmallOptions();
  options.record_schedule = true;
  EngineRun run(backend, options);
  for (const EngineRequest& request : MixedRequests(24))
    ASSERT_TRUE(run.engine->Submit(request).has_value());
  for (int i = 0; i < 12; ++i) run.engine->Step();
  run.engine->Abort(3);
  const Outcome outcome = run.Finish();
  const std::string recording = run.engine->TakeSchedule();
  const Result<ScheduleReplay> replay = ReplaySchedule(recording);
  ASSERT_TRUE(replay.has_value()) << replay.error().message;
  EXPECT_FALSE(replay->first_divergence.has_value()) << replay->first_divergence->description;
  EXPECT_EQ(replay->counters.steps, outcome.counters.steps);
  EXPECT_EQ(replay->counters.prompt_tokens, outcome.counters.prompt_tokens);
  EXPECT_EQ(replay->counters.preemptions, outcome.counters.preemptions);
}

TEST(Engine, AStateThatAFailedStepShouldHaveSavedIsComputedAgain) {
  std::vector<EngineRequest> requests = MixedRequests(10);
  for (EngineRequest& request : requests) request.params.max_tokens = 200;
  std::vector<RequestOutput> alone;
  for (const EngineRequest& request : requests) alone.push_back(Alone(request));
  int64_t failed = 0;
  // Some of these steps have a state to save.
  for (int64_t step = 3; step < 100; step += 3) {
    FakeBackend backend(kVocab, 6, 9, 8);
    backend.set_failing_step(step / 2);
    EngineOptions options = SmallOptions();
    backend.set_draws_tokens(step % 2 == 0);
    options.scheduler.preemption = PreemptionMode::kSave;
    options.scheduler.forced_preemption_interval = 3;
    options.scheduler.prefix_caching = false;
    EngineRun run(backend, options);
    for (const EngineRequest& request : requests)
      ASSERT_TRUE(run.engine->Submit(request).has_value());
    const Outcome outcome = run.Finish();
    EXPECT_EQ(run.engine->FindViolation(), "");
    for (size_t i = 0; i < requests.size(); ++i) {
      const RequestOutput& output = outcome.outputs.at(static_cast<int64_t>(i));
      bool fine = true;
      for (const CompletionOutput& completion : output.outputs) {
        if (completion.finish_reason != FinishReason::kError) continue;
        fine = false;
        EXPECT_THAT(completion.error->message, HasSubstr("failed as told"));
      }
      failed += fine ? 0 : 1;
      if (fine) ExpectSame(output, alone[i]);
    }
  }
  EXPECT_GT(failed, 0);
}

}  // namespace
}  // namespace deepinfer
