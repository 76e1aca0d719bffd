#include "apps/roofline.h"

#include <gtest/gtest.h>

#include <cmath>

#include "model/random_checkpoint.h"

namespace deepinfer {
namespace {

const ModelConfig& ReleasedConfig() {
  static const ModelConfig config = [] {
    SliceOptions options;
    options.layers = 40;
    options.experts = 384;
    const Result<std::string> json = SliceConfigJson(options);
    EXPECT_TRUE(json.has_value());
    return *ParseModelConfig(*json);
  }();
  return config;
}

double DecodeTokensPerSecond(int64_t batch, int64_t context, int64_t ranks, double flops) {
  const SpeedOfLight t =
      DecodeSpeedOfLight(ReleasedConfig(), batch, context, ranks, {.flops_per_s = flops});
  return static_cast<double>(batch) / t.total();
}

double PrefillTokensPerSecond(int64_t tokens, double flops) {
  return static_cast<double>(tokens) /
         PrefillSpeedOfLight(ReleasedConfig(), 0, tokens, {.flops_per_s = flops}).total();
}

TEST(RooflineTest, DecodeOfManyRowsIsBoundByProductsOfBf16Numbers) {
  EXPECT_NEAR(DecodeTokensPerSecond(4096, 131072, 64, 790e12), 18900, 100);
  EXPECT_NEAR(DecodeTokensPerSecond(4096, 8192, 64, 790e12), 21000, 100);
}

// These points are of 1,422 TFLOP/s for everything but attention.
TEST(RooflineTest, DecodeAgreesWithThePublishedPointsOfAFasterPath) {
  const ModelConfig& config = ReleasedConfig();
  const auto tokens_per_second = [&](int64_t batch, int64_t ranks) {
    SpeedOfLight t = DecodeSpeedOfLight(config, batch, 131072, ranks, {.flops_per_s = 1422e12});
    t.attention = DecodeSpeedOfLight(config, batch, 131072, ranks, {}).attention;
    return static_cast<double>(batch) / t.total();
  };
  EXPECT_NEAR(tokens_per_second(32, 4), 1891, 10);
  EXPECT_NEAR(tokens_per_second(256, 4), 11300, 60);
  EXPECT_NEAR(tokens_per_second(64, 64), 16790, 80);
  EXPECT_NEAR(tokens_per_second(256, 64), 28688, 140);
}

TEST(RooflineTest, PrefillAgreesWithThePublishedPoints) {
  EXPECT_NEAR(PrefillTokensPerSecond(8192, 790e12), 43600, 100);
  EXPECT_NEAR(PrefillTokensPerSecond(32768, 790e12), 43200, 100);
  EXPECT_NEAR(PrefillTokensPerSecond(131072, 790e12), 41800, 100);
  EXPECT_NEAR(PrefillTokensPerSecond(1048576, 790e12), 32200, 100);
}

TEST(RooflineTest, ChunksOfAPromptTakeTogetherWhatThePromptTakes) {
  const ModelConfig& config = ReleasedConfig();
  double chunks = 0;
  for (int64_t before = 0; before < 32768; before += 4096)
    chunks += PrefillSpeedOfLight(config, before, 4096, {}).total();
  EXPECT_NEAR(chunks / PrefillSpeedOfLight(config, 0, 32768, {}).total(), 1.0, 1e-9);
}

// The parts of a decode step cover the same weights, keys and products as the five terms.
TEST(RooflineTest, PartsOfADecodeStepAddUpToItsTerms) {
  const ModelConfig& config = ReleasedConfig();
  StepWork work{.sequences = 256,
                .before = 131071,
                .rows = 1,
                .decoder_rows = 1,
                .expert_rows = {},
                .touched_experts = {}};
  work.expert_rows.assign(40, 256 * 6);
  work.touched_experts.assign(40, 6);
  const auto costs = StepCosts(config, work);
  const SpeedOfLight terms = DecodeSpeedOfLight(config, 256, 131072, 64, {});
  const auto seconds = [&](StepPart part) { return costs[static_cast<size_t>(part)].Seconds({}); };
  EXPECT_NEAR(seconds(StepPart::kExperts) / terms.experts, 1.0, 0.001);
  EXPECT_NEAR(seconds(StepPart::kIndexer) / terms.indexer, 1.0, 0.02);
  EXPECT_NEAR(seconds(StepPart::kHyperConnection) / terms.hyper_connections, 1.0, 0.1);
  double total = 0;
  for (const Cost& cost : costs) total += cost.Seconds({});
  EXPECT_NEAR(total / terms.total(), 1.0, 0.15);
}

TEST(RooflineTest, TheSlowerOfBytesAndProductsBoundsAPart) {
  const Cost cost{.bytes = 4.3e9, .flops = 790e9};
  EXPECT_DOUBLE_EQ(cost.Seconds({}), 1e-3);
  EXPECT_DOUBLE_EQ(cost.Seconds({.bytes_per_s = 2.15e12}), 2e-3);
  EXPECT_DOUBLE_EQ(cost.Seconds({.flops_per_s = 395e12}), 2e-3);
}

}  // namespace
}  // namespace deepinfer
