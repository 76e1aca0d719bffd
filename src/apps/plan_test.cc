#include "apps/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "state/sequence_state.h"

namespace deepinfer {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

// A directory with nothing but the released config.json.
class PlanTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::temp_directory_path() / ("deepinfer-plan-" + std::to_string(getpid()));
    fs::create_directories(dir_);
    fs::copy_file(DI_TEST_DATA_DIR "/configs/released.json", dir_ / "config.json",
                  fs::copy_options::overwrite_existing);
    options_.llm.model_dir = dir_.string();
    options_.llm.num_threads = 8;
  }
  void TearDown() override {
    fs::remove_all(dir_);
  }

  fs::path dir_;
  PlanOptions options_;
};

TEST_F(PlanTest, EightGpusHoldTheReleasedModelAndOneDoesNot) {
  options_.device = "h200";
  options_.ranks = 8;
  const Result<PlanReport> report = MakePlan(options_);
  ASSERT_TRUE(report.has_value()) << report.error().message;
  EXPECT_TRUE(report->fits) << report->problem;
  EXPECT_LE(report->plan.total_bytes(), report->plan.memory_bytes);
  EXPECT_EQ(report->plan.max_sequence_tokens, 1048576);
  options_.ranks = 1;
  const Result<PlanReport> one = MakePlan(options_);
  ASSERT_TRUE(one.has_value());
  EXPECT_FALSE(one->fits);
  EXPECT_THAT(PlanText(*one), HasSubstr("This does not fit. The memory plan needs"));
  EXPECT_THAT(PlanText(*one), HasSubstr("lower the need: --cache-tokens (now "));
}

TEST_F(PlanTest, TextAndJsonShowEveryPoolAndTheirSum) {
  options_.memory_bytes = int64_t{1} << 41;
  options_.llm.cache_tokens = 1 << 21;
  const Result<PlanReport> report = MakePlan(options_);
  ASSERT_TRUE(report.has_value());
  const std::string text = PlanText(*report);
  const Json json = Json::parse(PlanJson(*report));
  int64_t sum = 0;
  for (const Json& pool : json.at("pools")) {
    const auto bytes = pool.at("bytes").get<int64_t>();
    sum += bytes;
    EXPECT_THAT(text, HasSubstr(pool.at("name").get<std::string>()));
    EXPECT_THAT(text, HasSubstr(std::to_string(bytes)));
    if (pool.contains("units")) {
      EXPECT_EQ(pool.at("units").get<int64_t>() * pool.at("unit_bytes").get<int64_t>(), bytes);
    }
  }
  EXPECT_EQ(json.at("planned_bytes"), sum);
  EXPECT_EQ(json.at("limits").at("cache_tokens"), 1 << 21);
  EXPECT_EQ(json.at("fit").back().at("tokens"), 1048576);
  EXPECT_EQ(json.at("fit").back().at("requests"), 2);
  EXPECT_THAT(text, HasSubstr("requests of 1048576 tokens        2 fit"));
}

// 890 bytes a token packed; bf16 records are about three times as large.
TEST_F(PlanTest, TheFormatOfTheCacheCounts) {
  options_.llm.cache_tokens = 128;
  options_.memory_bytes = int64_t{1} << 41;
  EXPECT_EQ(MakePlan(options_)->plan.block_pool_bytes, 890 * kBlockTokens);
  options_.llm.bf16_cache = true;
  EXPECT_EQ(MakePlan(options_)->plan.block_pool_bytes, 5 * (1024 + 256) * kBlockTokens / 2);
}

// Rows that leave the model half-way are copied beside those that go on.
TEST_F(PlanTest, CompactReplayTakesMoreStepBuffers) {
  options_.llm.cache_tokens = 128;
  const int64_t off = MakePlan(options_)->plan.scratch_bytes;
  options_.llm.decoder_replay = DecoderReplay::kMask;
  EXPECT_EQ(MakePlan(options_)->plan.scratch_bytes, off);
  options_.llm.decoder_replay = DecoderReplay::kCompact;
  EXPECT_GT(MakePlan(options_)->plan.scratch_bytes, off);
}

TEST_F(PlanTest, DraftingIsInThePlanWhereItIsAskedFor) {
  options_.device = "h200";
  options_.ranks = 8;
  const Result<PlanReport> off = MakePlan(options_);
  ASSERT_TRUE(off.has_value()) << off.error().message;
  EXPECT_THAT(PlanText(*off), Not(HasSubstr("draft")));
  options_.draft_tokens = 5;
  const Result<PlanReport> on = MakePlan(options_);
  ASSERT_TRUE(on.has_value()) << on.error().message;
  EXPECT_THAT(PlanText(*on), HasSubstr("weights: draft"));
  EXPECT_GT(on->plan.weights.resident_bytes(), off->plan.weights.resident_bytes());
  EXPECT_GT(on->plan.window_pool_bytes, off->plan.window_pool_bytes);
  options_.draft_tokens = 7;
  const Result<PlanReport> refused = MakePlan(options_);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().field, "draft_tokens");
  options_.force_draft_tokens = true;
  EXPECT_TRUE(MakePlan(options_).has_value());
}

TEST_F(PlanTest, WrongOptionsAreRefusedWithTheirNames) {
  options_.llm.max_model_len = 1048577;
  EXPECT_EQ(MakePlan(options_).error().field, "max_model_len");
  options_.llm.max_model_len = 0;
  options_.llm.max_num_seqs = 600;
  EXPECT_EQ(MakePlan(options_).error().field, "max_num_batched_tokens");
  options_.llm.max_num_batched_tokens = 600;
  EXPECT_TRUE(MakePlan(options_).has_value());
  options_.llm.replay_keep_tokens = 200;
  EXPECT_EQ(MakePlan(options_).error().field, "replay_keep_tokens");
  options_.llm.decoder_replay = DecoderReplay::kMask;
  EXPECT_TRUE(MakePlan(options_).has_value());
  options_.llm.replay_keep_tokens = 133;  // the window and what may be set back are 134
  EXPECT_EQ(MakePlan(options_).error().field, "replay_keep_tokens");
  options_.llm.replay_keep_tokens = 0;
  options_.ranks = 2;
  EXPECT_EQ(MakePlan(options_).error().field, "ranks");
  options_.device = "abacus";
  EXPECT_THAT(MakePlan(options_).error().message, HasSubstr("allowed are cpu, h100, h200, b200"));
}

}  // namespace
}  // namespace deepinfer
