#include "engine/long_context.h"

namespace deepinfer {
namespace {

TEST_F(LongContextTest, APromptOf131072TokensRunsWithinThePlan) {
  const Run run = Generate(131072, 256);
  EXPECT_EQ(run.steps, 131072 / 2048 + 3);
}

TEST_F(LongContextTest, APromptOf8192TokensRunsInFull) {
  Generate(8192, 0);
}

}  // namespace
}  // namespace deepinfer
