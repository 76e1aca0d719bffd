#include "engine/selfcheck.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "engine/fake_backend.h"

namespace deepinfer {
namespace {

class SelfcheckTest : public ::testing::Test {
 protected:
  SelfcheckTest()
      : tokenizer_(*Tokenizer::Load(DI_TEST_DATA_DIR "/model/two/checkpoint/tokenizer.json")),
        backend_(512, 64, 64, 8) {
    base_.max_model_len = 400;
    base_.scheduler.max_num_seqs = 8;
    base_.scheduler.max_num_batched_tokens = 64;
    base_.end_ids = {1};
    check_.num_requests = 4;
    check_.max_prompt_tokens = 150;
  }
  SelfcheckReport Run(const SelfcheckCallback& progress) {
    return RunSelfcheck(backend_, tokenizer_, base_, check_, progress);
  }

  Tokenizer tokenizer_;
  FakeBackend backend_;
  EngineOptions base_;
  SelfcheckOptions check_;
};

TEST_F(SelfcheckTest, ProgressIsToldBeforeEachVariantAndAfterEachStep) {
  int64_t variants = 0;
  int64_t steps = 0;
  const SelfcheckReport report = Run([&](const SelfcheckProgress& progress) {
    if (progress.variant_steps == 0) {
      EXPECT_EQ(progress.variants_done, variants++);
    } else {
      EXPECT_EQ(progress.variant_steps, steps + 1);
    }
    steps = progress.variant_steps;
    EXPECT_EQ(progress.variants_total, 13);
    return true;
  });
  EXPECT_TRUE(report.passed()) << report.difference->what;
  EXPECT_EQ(variants, 13);
  EXPECT_EQ(report.variants, 12);
}

TEST_F(SelfcheckTest, ItStopsAfterAStepOfAnyVariant) {
  for (int64_t variant = 0; variant < 13; ++variant) {
    for (const int64_t step : {0, 1, 4}) {
      bool stopped = false;
      const SelfcheckReport report = Run([&](const SelfcheckProgress& progress) {
        EXPECT_FALSE(stopped);
        stopped = progress.variants_done == variant && progress.variant_steps == step;
        return !stopped;
      });
      EXPECT_TRUE(stopped) << variant << " " << step;
      EXPECT_FALSE(report.complete);
      EXPECT_FALSE(report.passed());
      EXPECT_FALSE(report.difference.has_value());
      EXPECT_EQ(report.variants, std::max<int64_t>(0, variant - 1));
    }
  }
  EXPECT_TRUE(Run({}).passed());
}

}  // namespace
}  // namespace deepinfer
