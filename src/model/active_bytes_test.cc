#include "model/active_bytes.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

namespace deepinfer {
namespace {

// The model description's table of bytes per decoded token (section 19.2), from the released
// configuration.
TEST(ActiveBytes, ReleasedModelReadsThirteenGigabytesPerToken) {
  std::ifstream file(DI_TEST_DATA_DIR "/configs/released.json");
  const std::string json((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  auto config = ParseModelConfig(json);
  ASSERT_TRUE(config.has_value()) << config.error().message;
  const ActiveBytes bytes = ActiveBytesPerStep(*config, config->num_experts_per_tok);
  EXPECT_EQ(bytes.routed_experts, int64_t{6} * 40 * 18800640);
  EXPECT_EQ(bytes.shared_experts, int64_t{40} * 35424000);
  EXPECT_NEAR(static_cast<double>(bytes.attention), 5.15e9, 0.03e9);
  EXPECT_EQ(bytes.head, int64_t{129280} * 5120 * 2);
  EXPECT_NEAR(static_cast<double>(bytes.total()), 13.04e9, 0.05e9);
}

// What one pass for one sequence reads: 14 of 128 experts, which five rows of three choices touch
// on average, and 3.0 GB with the projection of the step's rows.
TEST(ActiveBytes, ADraftReadsThreeGigabytes) {
  std::ifstream file(DI_TEST_DATA_DIR "/configs/released.json");
  const std::string json((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  auto config = ParseModelConfig(json);
  ASSERT_TRUE(config.has_value()) << config.error().message;
  const ActiveBytes bytes = ActiveBytesPerDraft(*config, 14, 5);
  EXPECT_EQ(bytes.routed_experts, int64_t{14} * 3 * 18800640);
  EXPECT_EQ(bytes.head, int64_t{129280} * (5120 + 5 * 256) * 2);
  const ActiveBytes step = ActiveBytesPerStep(*config, 6, true);
  EXPECT_EQ(step.draft_context, int64_t{5120} * 15360 + 160 * 480 + 3 * (512 * 5120 + 16 * 160));
  EXPECT_EQ(step.total() - ActiveBytesPerStep(*config, 6).total(), step.draft_context);
  EXPECT_NEAR(static_cast<double>(bytes.total() + step.draft_context), 3.0e9, 0.05e9);
}

}  // namespace
}  // namespace deepinfer
