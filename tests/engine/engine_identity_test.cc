// The identity table of the engine: requests alone, cold, synchronous and unchunked against every
// combination of what makes serving fast, on real forward passes. Tokens, texts and
// log-probabilities must agree bit for bit.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>

#include "engine/engine.h"
#include "engine/executor_backend.h"
#include "engine/selfcheck.h"
#include "engine/table_compiler_for_test.h"
#include "runtime/executor.h"
#include "support/test_device.h"
#include "text/tokenizer.h"

namespace deepinfer {
namespace {

struct LoadedModel {
  Tokenizer tokenizer;
  std::unique_ptr<Executor> executor;

  static LoadedModel Load(const std::string& folder, int64_t cache_tokens = 16384,
                          std::optional<bool> draw_on_device = std::nullopt,
                          bool use_graphs = true) {
    const std::string dir = std::string(DI_TEST_DATA_DIR) + "/model/" + folder + "/checkpoint";
    ExecutorOptions options;
    options.model_dir = dir;
    options.device = testing_support::TestDevice();
    options.max_sequences = 64;
    options.num_threads = 1;  // other tests run beside it; threads are identity_test's matter
    options.cache_tokens = cache_tokens;
    options.replay = ReplayMode::kCompact;
    options.draw_on_device = draw_on_device;
    options.use_graphs = use_graphs;
    auto executor = Executor::Create(options);
    EXPECT_TRUE(executor.has_value()) << executor.error().message;
    return {*Tokenizer::Load(dir + "/tokenizer.json"), std::move(*executor)};
  }
};

constexpr int64_t kVocab = 512;

EngineOptions BaseOptions() {
  EngineOptions options;
  options.max_model_len = 1024;
  options.scheduler.max_num_seqs = 64;
  options.scheduler.max_num_batched_tokens = 192;
  options.end_ids = {1};
  options.compile_constraint = TableCompiler(kVocab, 1);
  return options;
}

// {alone, batch} x {whole, chunks of 1, 7, 128} x {cold, prefix cache} x {sync, async} x {no
// preemption, forced recomputation, forced saving}.
void EveryCombination(const std::string& folder, int64_t num_requests, bool draw_on_device) {
  LoadedModel model = LoadedModel::Load(folder, 16384, draw_on_device);
  ExecutorBackend backend(*model.executor);
  SelfcheckOptions options;
  options.num_requests = num_requests;
  options.max_prompt_tokens = 2 * kBlockTokens + 3;
  options.max_output_tokens = 8;
  options.thorough = true;
  const SelfcheckReport report = RunSelfcheck(backend, model.tokenizer, BaseOptions(), options, {});
  EXPECT_TRUE(report.passed()) << report.difference->variant.Name() << ", request "
                               << report.difference->request << ", position "
                               << report.difference->position << ": " << report.difference->what;
  EXPECT_EQ(report.variants, 95);
  EXPECT_GT(report.cached_tokens, 0);
  EXPECT_GT(report.preemptions, 0);
}

TEST(EngineIdentity, EveryCombinationGivesThePlainTokensModelTwo) {
  EveryCombination("two", 6, /*draw_on_device=*/false);
}

TEST(EngineIdentity, EveryCombinationGivesThePlainTokensModelThree) {
  EveryCombination("three", 6, /*draw_on_device=*/true);
}

// Where tokens are drawn, and how decoding steps are launched, changes no bit: the requests
// together, in every way, against the host drawing from eager steps.
TEST(EngineIdentity, DrawingOnTheDeviceAndGraphsGiveThePlainTokens) {
  SelfcheckOptions mixed;
  mixed.num_requests = 48;
  mixed.max_prompt_tokens = kBlockTokens + 9;
  mixed.max_output_tokens = 12;
  std::vector<EngineRequest> requests;
  std::vector<RequestOutput> plain;
  for (const bool draw_on_device : {false, true}) {
    for (const bool use_graphs : {false, true}) {
      LoadedModel model = LoadedModel::Load("two", 16384, draw_on_device, use_graphs);
      ExecutorBackend backend(*model.executor);
      ASSERT_EQ(backend.draws_tokens(), draw_on_device);
      if (requests.empty()) {
        requests = SelfcheckRequests(mixed, backend.vocab_size(), backend.capacity().window_tokens,
                                     BaseOptions().max_model_len, /*structured=*/true);
        // Everything that changes a draw.
        for (size_t i = 0; i < requests.size(); ++i) {
          SamplingParams& params = requests[i].params;
          if (i % 3 == 1) params.repetition_penalty = 1.2;
          if (i % 5 == 1) params.frequency_penalty = 0.4;
          if (i % 5 == 2) params.logit_bias = {{7, 3.0}, {300, -100.0}};
          if (i % 7 == 3) params.top_k = 9;
          if (i % 4 == 3) params.top_p = 0.7;
          if (i % 6 == 5) params.min_p = 0.05;
          if (i % 8 == 4) params.logprobs_mode = LogprobsMode::kProcessed;
          if (i % 9 == 4) params.min_tokens = 3;
          if (i % 9 == 5) params.logprobs = 5;
          if (i % 11 == 6) params.prompt_logprobs = i % 2;
        }
        plain = RunVariant(backend, model.tokenizer, BaseOptions(), {}, requests).outputs;
      }
      for (const bool async : {false, true}) {
        for (const int64_t preempt_every : {0, 5}) {
          const SelfcheckVariant variant{.batched = true,
                                         .chunk_tokens = 31,
                                         .prefix_cache = preempt_every > 0,
                                         .async_scheduling = async,
                                         .preempt_every = preempt_every};
          const VariantRun run =
              RunVariant(backend, model.tokenizer, BaseOptions(), variant, requests);
          const auto difference = FindDifference(plain, run.outputs);
          ASSERT_FALSE(difference.has_value())
              << variant.Name() << ", drawn on the " << (draw_on_device ? "device" : "host") << ", "
              << (use_graphs ? "graphs" : "eager") << ", request " << difference->request
              << ", position " << difference->position << ": " << difference->what;
        }
      }
    }
  }
}

// The half of the table in which requests share steps, with 64 of them.
TEST(EngineIdentity, SixtyFourMixedRequestsInEveryCombination) {
  LoadedModel model = LoadedModel::Load("two");
  ExecutorBackend backend(*model.executor);
  SelfcheckOptions mixed;
  mixed.num_requests = 64;
  mixed.max_prompt_tokens = kBlockTokens + 9;
  mixed.max_output_tokens = 6;
  const std::vector<EngineRequest> requests = SelfcheckRequests(
      mixed, backend.vocab_size(), backend.capacity().window_tokens, BaseOptions().max_model_len,
      /*structured=*/true);
  const VariantRun plain = RunVariant(backend, model.tokenizer, BaseOptions(), {}, requests);
  int64_t variants = 0;
  for (const SelfcheckVariant& variant : SelfcheckVariants(/*thorough=*/true)) {
    if (!variant.batched) continue;
    ++variants;
    const VariantRun run = RunVariant(backend, model.tokenizer, BaseOptions(), variant, requests);
    const auto difference = FindDifference(plain.outputs, run.outputs);
    ASSERT_FALSE(difference.has_value()) << variant.Name() << ": " << difference->what;
  }
  EXPECT_EQ(variants, 48);
}

// Everything at once under memory pressure, 64 mixed requests.
TEST(EngineIdentity, SixtyFourMixedRequestsInATightCache) {
  LoadedModel roomy = LoadedModel::Load("two");
  ExecutorBackend roomy_backend(*roomy.executor);
  SelfcheckOptions mixed;
  mixed.num_requests = 64;
  mixed.max_prompt_tokens = 2 * kBlockTokens + 3;
  mixed.max_output_tokens = 12;
  const std::vector<EngineRequest> requests =
      SelfcheckRequests(mixed, roomy_backend.vocab_size(), roomy_backend.capacity().window_tokens,
                        BaseOptions().max_model_len, /*structured=*/true);
  const VariantRun plain = RunVariant(roomy_backend, roomy.tokenizer, BaseOptions(), {}, requests);
  for (const RequestOutput& output : plain.outputs) ASSERT_FALSE(output.error.has_value());

  LoadedModel tight = LoadedModel::Load("two", 12 * kBlockTokens);
  ExecutorBackend tight_backend(*tight.executor);
  for (const bool saving : {false, true}) {
    for (const bool async : {false, true}) {
      const SelfcheckVariant variant{.batched = true,
                                     .chunk_tokens = 31,
                                     .prefix_cache = true,
                                     .async_scheduling = async,
                                     .preempt_every = 7,
                                     .preempt_by_saving = saving};
      const VariantRun run =
          RunVariant(tight_backend, tight.tokenizer, BaseOptions(), variant, requests);
      const auto difference = FindDifference(plain.outputs, run.outputs);
      EXPECT_FALSE(difference.has_value()) << variant.Name() << ": " << difference->what;
      EXPECT_GT(run.counters.preemptions, 0);
      EXPECT_GT(run.counters.cached_tokens, 0);
    }
  }
}

// A prompt that shares exactly p tokens with a cached sequence, for every p: the cold tokens and
// log-probabilities, and a hit of all shared tokens but at most the odd one.
TEST(EngineIdentity, APrefixHitAtEveryPositionEqualsTheColdRun) {
  constexpr int64_t kTokens = 2 * kBlockTokens + 20;
  LoadedModel model = LoadedModel::Load("three");
  ExecutorBackend backend(*model.executor);
  EngineOptions options = BaseOptions();
  options.scheduler.max_num_batched_tokens = 512;
  SelfcheckOptions one;
  one.num_requests = 2;
  EngineRequest base = SelfcheckRequests(one, backend.vocab_size(), 8, 1024)[0];
  base.prompt.clear();
  for (int64_t i = 0; i < kTokens; ++i)
    base.prompt.push_back(static_cast<int32_t>((i * 37 + i * i) % backend.vocab_size()));
  base.params = {};
  base.params.max_tokens = 3;
  base.params.ignore_eos = true;
  base.params.logprobs = 2;

  std::vector<EngineRequest> requests;
  for (int64_t shared = 0; shared < kTokens; ++shared) {
    EngineRequest request = base;
    request.prompt.resize(static_cast<size_t>(shared));
    // Differs at once from the cached sequence.
    const int32_t next = base.prompt[static_cast<size_t>(shared)];
    request.prompt.push_back(static_cast<int32_t>((next + 1) % backend.vocab_size()));
    request.prompt.push_back(3);
    requests.push_back(std::move(request));
  }
  const VariantRun cold = RunVariant(backend, model.tokenizer, options, {}, requests);

  options.scheduler.prefix_caching = true;
  std::vector<RequestOutput> outputs(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    // A cache with the base sequence alone, so that no other request can help.
    std::vector<RequestOutput> got;
    EngineEvents events;
    events.on_finished = [&got](int64_t, RequestOutput output) {
      got.push_back(std::move(output));
    };
    Engine engine(backend, model.tokenizer, options, events);
    for (const EngineRequest* request : {&base, &requests[i]}) {
      ASSERT_TRUE(engine.Submit(*request).has_value());
      while (engine.Step()) {
      }
    }
    outputs[i] = std::move(got.at(1));
    EXPECT_EQ(outputs[i].usage.cached_tokens, static_cast<int64_t>(i) / 2 * 2);
  }
  const auto difference = FindDifference(cold.outputs, outputs);
  EXPECT_FALSE(difference.has_value())
      << "request " << difference->request << ": " << difference->what;
}

// With decoder replay the answers are those of the truncated function: the same in every
// combination, and those of full computation where the prompt is no longer than the kept tail.
TEST(EngineIdentity, ReplayedPromptsGiveOneAnswerInEveryCombination) {
  LoadedModel model = LoadedModel::Load("three");
  ExecutorBackend backend(*model.executor);
  EngineOptions options = BaseOptions();
  options.scheduler.replay_keep_tokens =
      backend.capacity().window_tokens + backend.capacity().rollback_tokens;
  SelfcheckOptions check;
  check.num_requests = 12;
  check.max_prompt_tokens = 2 * kBlockTokens + 3;
  const SelfcheckReport report = RunSelfcheck(backend, model.tokenizer, options, check, {});
  EXPECT_TRUE(report.passed()) << report.difference->variant.Name() << ": "
                               << report.difference->what;
  EXPECT_GT(report.cached_tokens, 0);

  const std::vector<EngineRequest> requests = SelfcheckRequests(
      check, backend.vocab_size(), backend.capacity().window_tokens, options.max_model_len,
      /*structured=*/true);
  const VariantRun replayed = RunVariant(backend, model.tokenizer, options, {}, requests);
  const VariantRun full = RunVariant(backend, model.tokenizer, BaseOptions(), {}, requests);
  for (size_t i = 0; i < requests.size(); ++i) {
    if (std::ssize(requests[i].prompt) > options.scheduler.replay_keep_tokens) continue;
    EXPECT_FALSE(FindDifference({&full.outputs[i], 1}, {&replayed.outputs[i], 1}).has_value());
  }
}

// The requests without a structured output are those of the unconstrained set, and get its answers;
// the others' constraints have a say.
TEST(EngineIdentity, ConstrainedNeighboursChangeNothingForOthers) {
  LoadedModel model = LoadedModel::Load("three");
  ExecutorBackend backend(*model.executor);
  ASSERT_EQ(backend.vocab_size(), kVocab);
  SelfcheckOptions mixed;
  mixed.num_requests = 32;
  mixed.max_output_tokens = 16;
  const auto requests = [&](bool structured) {
    return SelfcheckRequests(mixed, backend.vocab_size(), backend.capacity().window_tokens,
                             BaseOptions().max_model_len, structured);
  };
  const SelfcheckVariant everything{.batched = true,
                                    .chunk_tokens = 31,
                                    .prefix_cache = true,
                                    .async_scheduling = true,
                                    .preempt_every = 4};
  const VariantRun free =
      RunVariant(backend, model.tokenizer, BaseOptions(), everything, requests(false));
  const VariantRun constrained =
      RunVariant(backend, model.tokenizer, BaseOptions(), everything, requests(true));
  int64_t num_constrained = 0;
  int64_t num_changed = 0;
  for (size_t i = 0; i < free.outputs.size(); ++i) {
    const bool same =
        !FindDifference({&free.outputs[i], 1}, {&constrained.outputs[i], 1}).has_value();
    if (requests(true)[i].params.structured_output.has_value()) {
      ++num_constrained;
      num_changed += same ? 0 : 1;
    } else {
      EXPECT_TRUE(same) << "request " << i;
    }
  }
  EXPECT_EQ(num_constrained, 8);
  EXPECT_GE(num_changed, 6);
}

// A check that cannot fail proves nothing: outputs of other requests are told apart.
TEST(EngineIdentity, DifferencesAreFound) {
  LoadedModel model = LoadedModel::Load("two");
  ExecutorBackend backend(*model.executor);
  SelfcheckOptions options;
  options.num_requests = 8;
  std::vector<EngineRequest> requests = SelfcheckRequests(options, backend.vocab_size(), 8, 1024);
  const VariantRun plain = RunVariant(backend, model.tokenizer, BaseOptions(), {}, requests);
  for (EngineRequest& request : requests)
    request.prompt.front() = (request.prompt.front() + 1) % 400;
  const VariantRun other = RunVariant(backend, model.tokenizer, BaseOptions(), {}, requests);
  EXPECT_TRUE(FindDifference(plain.outputs, other.outputs).has_value());
}

}  // namespace
}  // namespace deepinfer
