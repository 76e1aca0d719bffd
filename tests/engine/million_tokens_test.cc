#include "engine/long_context.h"

namespace deepinfer {
namespace {

// 140 s and 186 MB of memory on two cores of an AVX2 machine that did other work besides.
TEST_F(LongContextTest, APromptOfAMillionTokensRunsWithinThePlan) {
  const Run run = Generate(kMillion, 256);
  EXPECT_EQ(run.steps, kMillion / 2048 + 3);
}

TEST_F(LongContextTest, APromptOf32768TokensRunsInFull) {
  Generate(32768, 0);
}

}  // namespace
}  // namespace deepinfer
