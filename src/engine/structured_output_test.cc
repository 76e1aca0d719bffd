// Requests with structured outputs in the engine: their way through compilation, masks beside the
// rows, and the same tokens whatever happens. The constraints are small automata over token ids.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "engine/engine.h"
#include "engine/fake_backend.h"
#include "engine/table_compiler_for_test.h"

namespace deepinfer {
namespace {

using ::testing::HasSubstr;
constexpr int64_t kVocab = 512;
constexpr int32_t kEnd = 1;

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
  options.end_ids = {kEnd, 0};
  options.compile_constraint = TableCompiler(kVocab, kEnd);
  return options;
}

// A door that compilations or steps wait at.
class Gate {
 public:
  void Open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  // False after 20 seconds.
  bool Wait() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20), [this] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

// Descriptions that begin with "wait" are compiled when the gate is open.
ConstraintCompiler Gated(Gate& gate) {
  return [&gate](const StructuredOutput& output) {
    if (output.schema.rfind("wait", 0) == 0) {
      EXPECT_TRUE(gate.Wait());
    }
    return TableCompiler(kVocab, kEnd)(output);
  };
}

EngineRequest Ask(std::vector<int32_t> prompt, int64_t max_tokens, const std::string& schema = "") {
  EngineRequest request;
  request.id = "r";
  request.prompt = std::move(prompt);
  request.params.max_tokens = max_tokens;
  request.seed = 5;
  if (!schema.empty()) {
    request.params.structured_output.emplace();
    request.params.structured_output->kind = StructuredOutput::Kind::kRegex;
    request.params.structured_output->schema = schema;
  }
  return request;
}

class EngineRun {
 public:
  EngineRun(ModelBackend& backend, EngineOptions options) {
    EngineEvents events;
    events.on_delta = [this](const EngineDelta& delta) { ++deltas[delta.request]; };
    events.on_finished = [this](int64_t request, RequestOutput output) {
      EXPECT_EQ(outputs.count(request), 0u) << "a request finished twice";
      outputs[request] = std::move(output);
    };
    engine = std::make_unique<Engine>(backend, TestTokenizer(), std::move(options), events);
  }

  int64_t Submit(EngineRequest request) {
    const Result<int64_t> number = engine->Submit(std::move(request));
    EXPECT_TRUE(number.has_value()) << number.error().message;
    return number.value_or(-1);
  }
  std::map<int64_t, RequestOutput>& Finish() {
    const auto start = std::chrono::steady_clock::now();
    while (engine->Step()) {
      if (std::chrono::steady_clock::now() - start > std::chrono::seconds(60)) {
        ADD_FAILURE() << "no progress";
        break;
      }
    }
    EXPECT_EQ(engine->FindViolation(), "");
    return outputs;
  }

  std::unique_ptr<Engine> engine;
  std::map<int64_t, RequestOutput> outputs;
  std::map<int64_t, int> deltas;
};

RequestOutput Alone(EngineRequest request) {
  FakeBackend backend(kVocab, 30, 30, 8);
  EngineOptions options = SmallOptions();
  options.async_scheduling = false;
  options.scheduler.prefix_caching = false;
  options.mask_threads = 0;
  EngineRun run(backend, options);
  const int64_t number = run.Submit(std::move(request));
  return run.Finish()[number];
}

TEST(StructuredOutput, DecidesEveryTokenAndEndsTheOutput) {
  for (const auto& [async, on_device] :
       {std::pair(false, false), {true, false}, {false, true}, {true, true}}) {
    FakeBackend backend(kVocab, 30, 30, 8);
    backend.set_draws_tokens(on_device);
    EngineOptions options = SmallOptions();
    options.async_scheduling = async;
    EngineRun run(backend, options);
    EngineRequest request = Ask({9, 8}, 300, "some 310 311 312");
    request.params.n = 4;
    request.params.logprobs = 1;
    const int64_t number = run.Submit(request);
    const RequestOutput output = run.Finish()[number];
    ASSERT_EQ(output.outputs.size(), 4u);
    std::set<std::vector<int32_t>> distinct;
    for (const CompletionOutput& completion : output.outputs) {
      EXPECT_EQ(completion.finish_reason, FinishReason::kStop);
      ASSERT_GE(completion.token_ids.size(), 2u);
      EXPECT_EQ(completion.token_ids.back(), kEnd);
      for (size_t i = 0; i + 1 < completion.token_ids.size(); ++i)
        EXPECT_THAT(completion.token_ids[i],
                    ::testing::AllOf(::testing::Ge(310), ::testing::Le(312)));
      // Raw log-probabilities are the model's own: most of its mass was on other tokens.
      EXPECT_LT(completion.cumulative_logprob,
                -3.0 * static_cast<double>(completion.token_ids.size()));
      distinct.insert(completion.token_ids);
    }
    EXPECT_GT(distinct.size(), 1u);
    EXPECT_EQ(run.engine->counters().grammars_compiled, 1);
  }
}

TEST(StructuredOutput, ProcessedLogprobsAreThoseOfTheMaskedDistribution) {
  EngineRequest request = Ask({9, 8}, 3, "ids 310 311 1");
  request.params.logprobs = 5;
  request.params.logprobs_mode = LogprobsMode::kProcessed;
  for (const double temperature : {0.0, 1.0}) {
    request.params.temperature = temperature;
    const CompletionOutput output = Alone(request).outputs[0];
    ASSERT_EQ(output.logprobs.size(), 3u);
    for (const TokenLogprobs& entry : output.logprobs) {
      EXPECT_EQ(entry.logprob, 0.0f);
      EXPECT_EQ(entry.rank, 1);
      EXPECT_EQ(entry.top.size(), 1u);
    }
  }
}

TEST(StructuredOutput, OthersRunWhileADescriptionIsCompiledAndNothingSpins) {
  Gate gate;
  FakeBackend backend(kVocab, 30, 30, 8);
  EngineOptions options = SmallOptions();
  options.compile_constraint = Gated(gate);
  EngineRun run(backend, options);
  const int64_t slow = run.Submit(Ask({9}, 20, "wait"));
  const int64_t quick = run.Submit(Ask({9}, 20, "quick"));
  const int64_t plain = run.Submit(Ask({9}, 20));
  while (run.outputs.count(plain) == 0 || run.outputs.count(quick) == 0)
    ASSERT_TRUE(run.engine->Step());
  EXPECT_EQ(run.engine->num_waiting(), 1);
  EXPECT_EQ(run.engine->FindViolation(), "");
  const auto start = std::chrono::steady_clock::now();
  int64_t steps = 0;
  while (std::chrono::steady_clock::now() - start < std::chrono::milliseconds(100)) {
    ASSERT_TRUE(run.engine->Step());
    ++steps;
  }
  EXPECT_LE(steps, 60);
  EXPECT_EQ(run.outputs.count(slow), 0u);
  gate.Open();
  EXPECT_FALSE(run.Finish()[slow].error.has_value());
  EXPECT_EQ(run.outputs[slow].outputs[0].token_ids,
            Alone(Ask({9}, 20, "wait")).outputs[0].token_ids);
}

TEST(StructuredOutput, AFailedCompilationEndsItsRequestOnly) {
  FakeBackend backend(kVocab, 30, 30, 8);
  EngineStatistics statistics("model");
  EngineOptions options = SmallOptions();
  options.statistics = &statistics;
  EngineRun run(backend, options);
  EngineRequest bad = Ask({9}, 20, "bad");
  bad.params.n = 3;
  bad.id = "the bad one";
  const int64_t plain = run.Submit(Ask({10}, 20));
  const int64_t number = run.Submit(bad);
  const int64_t good = run.Submit(Ask({11}, 20, "good"));
  run.Finish();
  const RequestOutput& output = run.outputs[number];
  ASSERT_TRUE(output.error.has_value());
  EXPECT_EQ(output.error->message, "the description is bad.");
  EXPECT_EQ(output.error->code, Code::kInvalidArgument);
  EXPECT_EQ(output.id, "the bad one");
  EXPECT_TRUE(output.outputs.empty());
  EXPECT_EQ(run.deltas.count(number), 0u);
  EXPECT_EQ(run.outputs[plain].outputs[0].token_ids, Alone(Ask({10}, 20)).outputs[0].token_ids);
  EXPECT_EQ(run.outputs[good].outputs[0].token_ids,
            Alone(Ask({11}, 20, "good")).outputs[0].token_ids);
  const StatisticsSnapshot snapshot = statistics.Snapshot();
  EXPECT_EQ(snapshot.grammars_compiled, 1);
  EXPECT_EQ(snapshot.grammars_failed, 1);
  EXPECT_EQ(snapshot.requests_ended[static_cast<size_t>(EndReason::kError)], 1);
  EXPECT_EQ(snapshot.sequences_ended[static_cast<size_t>(EndReason::kError)], 3);
  EXPECT_GT(snapshot.masks, 0);
  EXPECT_GT(snapshot.mask_time.count, 0);
}

TEST(StructuredOutput, ACompilationThatTakesTooLongEndsItsRequest) {
  Gate gate;
  FakeBackend backend(kVocab, 30, 30, 8);
  EngineOptions options = SmallOptions();
  options.compile_constraint = Gated(gate);
  options.grammars.max_seconds = 0.02;
  EngineRun run(backend, options);
  const int64_t slow = run.Submit(Ask({9}, 20, "wait"));
  const RequestOutput output = run.Finish()[slow];
  ASSERT_TRUE(output.error.has_value());
  EXPECT_EQ(output.error->code, Code::kDeadline);
  EXPECT_EQ(output.error->field, "structured_output");
  gate.Open();
}

TEST(StructuredOutput, AbortAndDeadlineWorkWhileADescriptionIsCompiled) {
  Gate gate;
  double now = 0;
  FakeBackend backend(kVocab, 30, 30, 8);
  EngineOptions options = SmallOptions();
  options.compile_constraint = Gated(gate);
  options.clock = [&now] { return now; };
  EngineRun run(backend, options);
  EngineRequest late = Ask({9}, 20, "wait a");
  late.timeout_seconds = 4;
  late.params.n = 2;
  const int64_t first = run.Submit(late);
  const int64_t second = run.Submit(Ask({9}, 20, "wait b"));
  const int64_t third = run.Submit(Ask({9}, 20, "wait c"));
  ASSERT_TRUE(run.engine->Step());
  EXPECT_TRUE(run.engine->Abort(second));
  EXPECT_FALSE(run.engine->Abort(second));
  now = 5;
  ASSERT_TRUE(run.engine->Step());
  EXPECT_EQ(run.outputs[first].outputs[1].finish_reason, FinishReason::kDeadline);
  EXPECT_EQ(run.outputs[second].outputs[0].finish_reason, FinishReason::kAbort);
  gate.Open();
  run.Finish();
  EXPECT_EQ(run.outputs[third].outputs[0].token_ids,
            Alone(Ask({9}, 20, "wait c")).outputs[0].token_ids);
  EXPECT_EQ(run.outputs.size(), 3u);
}

TEST(StructuredOutput, AnEngineCanEndWhileADescriptionIsCompiled) {
  Gate gate;
  FakeBackend backend(kVocab, 30, 30, 8);
  EngineOptions options = SmallOptions();
  options.compile_constraint = Gated(gate);
  EngineRun run(backend, options);
  run.Submit(Ask({9}, 20, "wait"));
  run.Submit(Ask({9}, 20, "wait"));
  ASSERT_TRUE(run.engine->Step());
  std::thread opener([&gate] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    gate.Open();
  });
  run.engine.reset();
  opener.join();
}

TEST(StructuredOutput, ADeadEndEndsItsCompletionWithANamedError) {
  FakeBackend backend(kVocab, 30, 30, 8);
  EngineRun run(backend, SmallOptions());
  const int64_t dead = run.Submit(Ask({9}, 20, "ids 310 311 312"));
  EngineRequest narrow = Ask({9}, 20, "ids 310 311 1");
  narrow.params.allowed_token_ids = {{310, 320}};
  const int64_t both = run.Submit(narrow);
  EngineRequest more = Ask({9}, 20, "ids 310 1");
  more.params.min_tokens = 5;
  const int64_t early = run.Submit(more);
  const int64_t plain = run.Submit(Ask({10}, 20));
  run.Finish();
  const auto ended = [&](int64_t request, std::vector<int32_t> ids, const char* sentence) {
    const CompletionOutput& output = run.outputs[request].outputs[0];
    EXPECT_EQ(output.finish_reason, FinishReason::kError);
    EXPECT_EQ(output.token_ids, ids);
    ASSERT_TRUE(output.error.has_value());
    EXPECT_EQ(output.error->field, "structured_output");
    EXPECT_THAT(output.error->message, HasSubstr(sentence));
  };
  ended(dead, {310, 311, 312}, "after the first 3 tokens of the output: a dead end");
  ended(both, {310}, "all 1 that structured_output allows there are excluded");
  ended(early, {310}, "min_tokens");
  EXPECT_EQ(run.outputs[plain].outputs[0].token_ids, Alone(Ask({10}, 20)).outputs[0].token_ids);
}

TEST(StructuredOutput, BehindItsEndEverythingIsFreeWithIgnoreEos) {
  EngineRequest request = Ask({9}, 30, "ids 310 1");
  request.params.ignore_eos = true;
  const CompletionOutput output = Alone(request).outputs[0];
  ASSERT_EQ(output.token_ids.size(), 30u);
  EXPECT_EQ(output.token_ids[0], 310);
  EXPECT_EQ(output.token_ids[1], kEnd);
  EXPECT_EQ(output.finish_reason, FinishReason::kLength);
  EXPECT_GT(std::set<int32_t>(output.token_ids.begin(), output.token_ids.end()).size(), 10u);
}

TEST(StructuredOutput, BeginsExactlyBehindItsTrigger) {
  // The model says 400 401 402 403 404 ... whatever is before.
  const auto script = [](std::span<const int32_t> tokens, std::span<float> row) {
    row[399 + tokens.size()] = 50;
  };
  for (const auto& [async, on_device] :
       {std::pair(false, false), {true, false}, {false, true}, {true, true}}) {
    FakeBackend backend(kVocab, 30, 30, 8);
    backend.set_draws_tokens(on_device);
    backend.set_shape(script);
    EngineOptions options = SmallOptions();
    options.async_scheduling = async;
    EngineRun run(backend, options);
    EngineRequest request = Ask({9}, 10, "ids 310 311 1");
    request.params.structured_output->trigger_token_ids = {402, 403};
    const int64_t free = run.Submit(request);
    // From 401 on the rest of the trigger is forced: here all of it.
    request.params.structured_output->trigger_token_ids = {420, 421};
    request.params.structured_output->bound_token_id = 401;
    const int64_t bound = run.Submit(request);
    request.params.structured_output->bound_token_id.reset();
    const int64_t never = run.Submit(request);
    run.Finish();
    const auto ids = [&](int64_t number) { return run.outputs[number].outputs[0].token_ids; };
    EXPECT_EQ(ids(free), (std::vector<int32_t>{400, 401, 402, 403, 310, 311, 1}));
    EXPECT_EQ(ids(bound), (std::vector<int32_t>{400, 401, 420, 421, 310, 311, 1}));
    EXPECT_EQ(ids(never), (std::vector<int32_t>{400, 401, 402, 403, 404, 405, 406, 407, 408, 409}));
  }
}

TEST(StructuredOutput, WithoutACompilerItIsRefused) {
  FakeBackend backend(kVocab, 30, 30, 8);
  EngineOptions options = SmallOptions();
  options.compile_constraint = nullptr;
  EngineRun run(backend, options);
  const Result<int64_t> refused = run.engine->Submit(Ask({9}, 20, "x"));
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Code::kUnsupported);
  EXPECT_EQ(refused.error().field, "structured_output");
}

TEST(StructuredOutput, WhereNothingIsDrawnNothingIsCompiled) {
  FakeBackend backend(kVocab, 30, 30, 8);
  EngineRun run(backend, SmallOptions());
  EngineRequest request = Ask({9, 8, 7}, 0, "bad");
  const int64_t scored = run.Submit(request);
  request.params.prompt_logprobs = 0;
  const int64_t with_logprobs = run.Submit(request);
  run.Finish();
  EXPECT_FALSE(run.outputs[scored].error.has_value());
  EXPECT_EQ(run.outputs[with_logprobs].prompt_logprobs.size(), 2u);
}

// Says that it can be used, and then does not keep step.
class WrongConstraint : public TokenConstraint {
 public:
  explicit WrongConstraint(bool refuses) : refuses_(refuses) {}
  Verdict FillMask(std::span<uint32_t>) override {
    return Verdict::kFree;
  }
  Status Accept(int32_t) override {
    ++calls_;
    if (refuses_ && calls_ == 3) return Fail(Code::kInternal, "the matcher refuses.");
    return {};
  }
  void Rollback(int64_t) override {}
  int64_t max_rollback() const override {
    return 0;
  }
  int64_t num_accepted() const override {
    return refuses_ ? calls_ : std::min<int64_t>(calls_, 2);
  }

 private:
  bool refuses_;
  int64_t calls_ = 0;
};

TEST(StructuredOutput, AConstraintThatLosesStepIsAnError) {
  for (const bool refuses : {false, true}) {
    FakeBackend backend(kVocab, 30, 30, 8);
    EngineOptions options = SmallOptions();
    options.compile_constraint = [refuses](const StructuredOutput&) -> Result<ConstraintFactory> {
      return ConstraintFactory([refuses] { return std::make_unique<WrongConstraint>(refuses); });
    };
    EngineRun run(backend, options);
    EngineRequest request = Ask({9}, 20, "x");
    request.params.ignore_eos = true;
    const int64_t number = run.Submit(request);
    const CompletionOutput output = run.Finish()[number].outputs[0];
    ASSERT_EQ(output.finish_reason, FinishReason::kError);
    EXPECT_EQ(output.error->code, Code::kInternal);
    EXPECT_THAT(output.error->message, HasSubstr(refuses ? "the matcher refuses"
                                                         : "has followed 2 tokens, but the output "
                                                           "has 3"));
  }
}

// Tells when it is asked for a mask.
class TellingConstraint : public TableConstraint {
 public:
  TellingConstraint(std::shared_ptr<const TokenTable> table, std::function<void()> on_mask)
      : TableConstraint(std::move(table)), on_mask_(std::move(on_mask)) {}
  Verdict FillMask(std::span<uint32_t> mask) override {
    on_mask_();
    return TableConstraint::FillMask(mask);
  }

 private:
  std::function<void()> on_mask_;
};

TEST(StructuredOutput, MasksAreFilledWhileTheRowsRun) {
  std::mutex mutex;
  std::condition_variable changed;
  int masks = 0;
  FakeBackend backend(kVocab, 30, 30, 8);
  // Step s has the draws of four sequences: it goes on when their masks have been asked for.
  backend.set_before_step([&](int64_t step) {
    std::unique_lock lock(mutex);
    EXPECT_TRUE(
        changed.wait_for(lock, std::chrono::seconds(20), [&] { return masks >= 4 * (step + 1); }));
  });
  EngineOptions options = SmallOptions();
  options.compile_constraint = [&](const StructuredOutput&) -> Result<ConstraintFactory> {
    return ConstraintFactory([&] {
      return std::make_unique<TellingConstraint>(RandomTable(kVocab, 4, kEnd), [&] {
        const std::lock_guard lock(mutex);
        ++masks;
        changed.notify_all();
      });
    });
  };
  options.scheduler.prefix_caching = false;  // all four prompts in the first step
  options.mask_threads = 2;
  EngineRun run(backend, options);
  EngineRequest request = Ask({9}, 12, "x");
  request.params.n = 4;
  request.params.min_tokens = 12;
  run.Submit(request);
  run.Finish();
  EXPECT_GE(backend.steps(), 12);
}

TEST(StructuredOutput, OnlyConstrainedDrawsHaveMasks) {
  std::atomic<int> masks = 0;
  FakeBackend backend(kVocab, 30, 30, 8);
  EngineStatistics statistics("model");
  EngineOptions options = SmallOptions();
  options.statistics = &statistics;
  options.async_scheduling = false;
  options.compile_constraint = [&](const StructuredOutput&) -> Result<ConstraintFactory> {
    return ConstraintFactory([&] {
      return std::make_unique<TellingConstraint>(FixedTokens(kVocab, {310, 311, kEnd}),
                                                 [&] { ++masks; });
    });
  };
  EngineRun run(backend, options);
  // A prompt of two chunks: the first draws nothing.
  const int64_t number = run.Submit(Ask(std::vector<int32_t>(150, 9), 12, "x"));
  for (int32_t i = 0; i < 5; ++i) run.Submit(Ask({20 + i}, 30));
  run.Finish();
  EXPECT_EQ(run.outputs[number].outputs[0].token_ids.size(), 3u);
  EXPECT_EQ(masks, 3);
  EXPECT_EQ(statistics.Snapshot().masks, 3);
  EXPECT_EQ(statistics.Snapshot().mask_time.count, 3);
}

std::vector<EngineRequest> MixedRequests(int count) {
  std::mt19937 rng(23);
  std::vector<EngineRequest> requests;
  for (int i = 0; i < count; ++i) {
    std::vector<int32_t> prompt(1 + rng() % 200);
    for (int32_t& id : prompt) id = static_cast<int32_t>(rng() % kVocab);
    EngineRequest request =
        Ask(prompt, 1 + static_cast<int64_t>(rng() % 60), i % 3 == 2 ? "" : std::to_string(i));
    request.seed = rng();
    if (i % 3 == 0) request.params.temperature = 0;
    if (i % 4 == 0) request.params.repetition_penalty = 1.3;
    if (i % 5 == 0) request.params.prompt_logprobs = 2;
    request.params.ignore_eos = i % 6 < 3;
    if (i % 7 == 0) request.params.n = 3;
    if (request.params.structured_output.has_value() && i % 4 == 3) {
      request.params.structured_output->trigger_token_ids = {300, 301, 300};
      request.params.structured_output->bound_token_id = 300;
      request.params.logit_bias = {{300, 4}};
    }
    requests.push_back(request);
  }
  return requests;
}

void ExpectSame(const RequestOutput& a, const RequestOutput& b) {
  ASSERT_EQ(a.outputs.size(), b.outputs.size());
  for (size_t i = 0; i < a.outputs.size(); ++i) {
    EXPECT_EQ(a.outputs[i].token_ids, b.outputs[i].token_ids);
    EXPECT_EQ(a.outputs[i].text, b.outputs[i].text);
    EXPECT_EQ(a.outputs[i].finish_reason, b.outputs[i].finish_reason);
    EXPECT_EQ(a.outputs[i].cumulative_logprob, b.outputs[i].cumulative_logprob);
  }
}

TEST(StructuredOutput, NeitherNeighboursNorPreemptionNorChunksChangeAToken) {
  const std::vector<EngineRequest> requests = MixedRequests(24);
  std::vector<RequestOutput> alone;
  int64_t drawn = 0;
  for (const EngineRequest& request : requests) {
    alone.push_back(Alone(request));
    drawn += alone.back().usage.completion_tokens;
  }
  EXPECT_GT(drawn, 300);
  for (const bool async : {false, true}) {
    for (const auto& [cache, on_device] : {std::pair(false, false), {true, false}, {true, true}}) {
      for (const PreemptionMode mode : {PreemptionMode::kRecompute, PreemptionMode::kSave}) {
        FakeBackend backend(kVocab, 8, 12, 8);
        backend.set_draws_tokens(on_device);
        EngineStatistics statistics("model");
        EngineOptions options = SmallOptions();
        options.statistics = &statistics;
        options.async_scheduling = async;
        options.scheduler.prefix_caching = cache;
        options.scheduler.preemption = mode;
        options.scheduler.forced_preemption_interval = 3;
        options.scheduler.max_chunk_tokens = 31;
        EngineRun run(backend, options);
        for (const EngineRequest& request : requests) run.Submit(request);
        run.Finish();
        for (size_t i = 0; i < requests.size(); ++i)
          ExpectSame(run.outputs[static_cast<int64_t>(i)], alone[i]);
        EXPECT_GT(run.engine->counters().preemptions, 0);
      }
    }
  }
}

TEST(StructuredOutput, AbortsAtAnyTimeLeaveTheOthersAlone) {
  const std::vector<EngineRequest> requests = MixedRequests(12);
  std::vector<RequestOutput> alone;
  for (const EngineRequest& request : requests) alone.push_back(Alone(request));
  for (uint32_t seed = 0; seed < 12; ++seed) {
    std::mt19937 rng(seed);
    FakeBackend backend(kVocab, 12, 16, 8);
    backend.set_draws_tokens(seed % 2 == 1);
    EngineStatistics statistics("model");
    EngineOptions options = SmallOptions();
    options.statistics = &statistics;
    EngineRun run(backend, options);
    for (const EngineRequest& request : requests) run.Submit(request);
    std::set<int64_t> aborted;
    for (int i = 0; i < 40 && run.engine->Step(); ++i) {
      if (rng() % 6 == 0) {
        const auto victim = static_cast<int64_t>(rng() % requests.size());
        if (run.engine->Abort(victim)) aborted.insert(victim);
      }
      ASSERT_EQ(run.engine->FindViolation(), "");
    }
    run.Finish();
    ASSERT_EQ(run.outputs.size(), requests.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      if (aborted.count(static_cast<int64_t>(i)) == 0)
        ExpectSame(run.outputs[static_cast<int64_t>(i)], alone[i]);
    }
  }
}

TEST(StructuredOutput, ARecordedRunReplaysWithItsWaits) {
  Gate gate;
  FakeBackend backend(kVocab, 8, 12, 6);
  EngineOptions options = SmallOptions();
  options.compile_constraint = Gated(gate);
  options.record_schedule = true;
  EngineRun run(backend, options);
  EngineRequest several = Ask({9, 8, 7}, 15, "wait");
  several.params.n = 3;
  run.Submit(several);
  run.Submit(Ask({9, 8}, 15, "bad"));
  for (const EngineRequest& request : MixedRequests(10)) run.Submit(request);
  for (int i = 0; i < 12; ++i) run.engine->Step();
  gate.Open();
  run.Finish();
  const Result<ScheduleReplay> replay = ReplaySchedule(run.engine->TakeSchedule());
  ASSERT_TRUE(replay.has_value()) << replay.error().message;
  EXPECT_FALSE(replay->first_divergence.has_value()) << replay->first_divergence->description;
  EXPECT_EQ(replay->counters.steps, run.engine->counters().steps);
}

TEST(StructuredOutput, ACallbackOfAFailedRequestMaySubmitAndAbort) {
  FakeBackend backend(kVocab, 30, 30, 8);
  std::unique_ptr<Engine> engine;
  int ended = 0;
  EngineEvents events;
  events.on_finished = [&](int64_t request, RequestOutput output) {
    ++ended;
    if (request != 0) return;
    EXPECT_TRUE(output.error.has_value());
    engine->Abort(1);
    EXPECT_TRUE(engine->Submit(Ask({20}, 3, "good")).has_value());
  };
  engine = std::make_unique<Engine>(backend, TestTokenizer(), SmallOptions(), events);
  ASSERT_TRUE(engine->Submit(Ask({10}, 9, "bad")).has_value());
  ASSERT_TRUE(engine->Submit(Ask({11}, 9, "bad")).has_value());
  while (engine->Step()) {
  }
  EXPECT_EQ(ended, 3);
  EXPECT_EQ(engine->FindViolation(), "");
}

}  // namespace
}  // namespace deepinfer
