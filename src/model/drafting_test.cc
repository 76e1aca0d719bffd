#include "model/drafting.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace deepinfer {
namespace {

using ::testing::HasSubstr;

ModelConfig Config(int64_t draft_layers) {
  ModelConfig config;
  config.num_nextn_predict_layers = draft_layers;
  config.dspark_block_size = 5;
  return config;
}

TEST(CheckDrafting, TheTrainedBlockAndNoneArePossible) {
  EXPECT_TRUE(CheckDrafting(Config(3), 5, false).has_value());
  EXPECT_TRUE(CheckDrafting(Config(3), 0, false).has_value());
  EXPECT_TRUE(CheckDrafting(Config(0), 0, false).has_value());
}

TEST(CheckDrafting, AnotherBlockHasToBeForced) {
  for (const int64_t tokens : {1, 4, 6, 64}) {
    const Status refused = CheckDrafting(Config(3), tokens, false);
    ASSERT_FALSE(refused.has_value());
    EXPECT_EQ(refused.error().field, "draft_tokens");
    EXPECT_THAT(refused.error().message, HasSubstr("trained on blocks of 5"));
    EXPECT_THAT(refused.error().message, HasSubstr("force_draft_tokens"));
    EXPECT_TRUE(CheckDrafting(Config(3), tokens, true).has_value());
  }
  for (const int64_t tokens : {-1, 65}) {
    const Status refused = CheckDrafting(Config(3), tokens, true);
    ASSERT_FALSE(refused.has_value());
    EXPECT_THAT(refused.error().message, HasSubstr("allowed are 0 (no drafting) to 64"));
  }
}

TEST(CheckDrafting, ACheckpointWithoutDraftLayersSaysSo) {
  for (const bool force : {false, true}) {
    const Status refused = CheckDrafting(Config(0), 5, force);
    ASSERT_FALSE(refused.has_value());
    EXPECT_THAT(refused.error().message, HasSubstr("has no draft layers"));
  }
}

}  // namespace
}  // namespace deepinfer
