// Fixture: contexts of up to a million tokens on a small model: planned, admitted, run, and within
// the plan. Selecting among all earlier entries makes a prompt's work grow with the square of its
// length, so the whole length is run with decoder bounded replay, where rows that are not kept skip
// it.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/sanitizer_for_test.h"
#include "engine/engine.h"
#include "engine/executor_backend.h"
#include "model/random_checkpoint.h"
#include "runtime/executor.h"
#include "text/tokenizer.h"

namespace deepinfer {

inline constexpr int64_t kMillion = 1048576;

// The tiny model, cut to what a long prompt needs: two layers with their window and two that select
// among a full layer's entries.
inline std::string LongConfigJson() {
  using Json = nlohmann::json;
  Json config = Json::parse(*TinyConfigJson());
  config["text_config"].update(Json{{"num_hidden_layers", 4},
                                    {"hidden_size", 128},
                                    {"n_routed_experts", 8},
                                    {"compress_ratios", {0, 0, 1, 1}},
                                    {"kv_source_layer_ids", {2}},
                                    {"index_source_layer_ids", {2}},
                                    {"index_n_heads", 1},
                                    {"index_head_dim", 64},
                                    {"candidate_source_layer_id", 2},
                                    {"engram_layer_ids", {1}},
                                    {"num_nextn_predict_layers", 0},
                                    {"dspark_target_layer_ids", Json::array()},
                                    {"max_position_embeddings", kMillion}});
  config["text_config"]["engram_num_embeddings"] =
      Json::array({config["text_config"]["engram_num_embeddings"][0]});
  return config.dump();
}

class LongContextTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = std::filesystem::temp_directory_path() / ("deepinfer-long-" + std::to_string(getpid()));
    const Status written = WriteRandomCheckpoint({.dir = dir_.string(),
                                                  .config_json = LongConfigJson(),
                                                  .seed = 5,
                                                  .num_threads = 2,
                                                  .progress = {}});
    ASSERT_TRUE(written.has_value()) << written.error().message;
  }
  void TearDown() override {
    std::filesystem::remove_all(dir_);
  }

  struct Run {
    std::vector<int32_t> output;
    double seconds = 0;
    int64_t steps = 0;
    MemoryUse use;
    MemoryPlan plan;
  };
  // A prompt that leaves room for a few tokens of output in a context of `tokens`.
  Run Generate(int64_t tokens, int64_t keep_tokens) {
    constexpr int64_t kOutput = 4;
    ExecutorOptions options;
    options.model_dir = dir_.string();
    options.num_threads = 2;
    options.max_sequences = 2;
    options.max_model_len = tokens;
    options.cache_tokens = tokens;
    options.max_batched_tokens = 2048;
    options.replay = keep_tokens > 0 ? ReplayMode::kCompact : ReplayMode::kOff;
    Result<std::unique_ptr<Executor>> executor = Executor::Create(options);
    if (!executor.has_value()) {
      ADD_FAILURE() << executor.error().message;
      return {};
    }
    Run run;
    run.plan = (*executor)->memory_plan();
    EXPECT_EQ(run.plan.max_sequence_tokens, tokens);
    EXPECT_EQ(run.plan.SequencesThatFit(tokens), 1);
    ExecutorBackend backend(**executor);
    const Tokenizer tokenizer = *Tokenizer::Load(dir_.string() + "/tokenizer.json");
    EngineOptions engine_options;
    engine_options.max_model_len = tokens;
    engine_options.scheduler.max_num_seqs = 2;
    engine_options.scheduler.max_num_batched_tokens = options.max_batched_tokens;
    engine_options.scheduler.replay_keep_tokens = keep_tokens;
    std::optional<RequestOutput> output;
    EngineEvents events;
    events.on_finished = [&](int64_t, RequestOutput finished) { output = std::move(finished); };
    Engine engine(backend, tokenizer, engine_options, events);
    EngineRequest request;
    uint32_t random = 1;
    for (int64_t i = 0; i < tokens - kOutput; ++i) {
      random = random * 1664525 + 1013904223;
      request.prompt.push_back(static_cast<int32_t>(random >> 23));
    }
    request.params.temperature = 0;
    request.params.ignore_eos = true;
    const auto start = std::chrono::steady_clock::now();
    const Result<int64_t> submitted = engine.Submit(std::move(request));
    EXPECT_TRUE(submitted.has_value()) << submitted.error().message;
    while (engine.Step()) {
    }
    run.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    EXPECT_EQ(engine.FindViolation(), "");
    run.steps = engine.counters().steps;
    run.use = (*executor)->memory_use();
    if (!output.has_value() || output->outputs.empty()) {
      ADD_FAILURE() << "the request did not end";
      return run;
    }
    EXPECT_EQ(output->outputs[0].finish_reason, FinishReason::kLength);
    run.output = output->outputs[0].token_ids;
    EXPECT_EQ(std::ssize(run.output), kOutput);
    EXPECT_LE(run.use.peak_scratch_bytes, run.plan.scratch_bytes);
    EXPECT_LE(run.use.held_scratch_bytes, RoundUpScratch(run.plan.scratch_bytes));
    if (!kHasSanitizer) {
      EXPECT_LE(run.use.process.resident_bytes, run.plan.total_bytes());
    }
    printf(
        "%ld tokens, keep %ld: %.1f s, %ld steps; planned %.1f MB (cache %.1f, step buffers %.1f), "
        "resident %.1f MB\n",
        static_cast<long>(tokens), static_cast<long>(keep_tokens), run.seconds,
        static_cast<long>(run.steps), static_cast<double>(run.plan.total_bytes()) / 1e6,
        static_cast<double>(run.plan.block_pool_bytes) / 1e6,
        static_cast<double>(run.plan.scratch_bytes) / 1e6,
        static_cast<double>(run.use.process.resident_bytes) / 1e6);
    return run;
  }

  std::filesystem::path dir_;
};

}  // namespace deepinfer
