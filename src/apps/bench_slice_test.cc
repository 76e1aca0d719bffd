#include "apps/bench_slice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>

#include "model/random_checkpoint.h"

namespace deepinfer {
namespace {

using ::testing::HasSubstr;

std::string MessageFor(const BenchSliceOptions& options) {
  const Result<SliceSetup> setup = ResolveSlice(options);
  return setup.has_value() ? "" : setup.error().message;
}

TEST(BenchSliceTest, OptionsThatCannotBeAreRefusedInASentence) {
  EXPECT_EQ(MessageFor({}), "");
  EXPECT_EQ(MessageFor({.layers = 41}), "--layers is 41; allowed are 1 to 40.");
  EXPECT_EQ(MessageFor({.ep = 5}), "--ep is 5; it must divide the 384 experts of a layer.");
  EXPECT_EQ(MessageFor({.ep = 0}), "--ep is 0; allowed are 1 to 384.");
  EXPECT_EQ(MessageFor({.batch = 0}), "--batch is 0; allowed are 1 to 4096.");
  EXPECT_EQ(MessageFor({.context = 0}), "--context is 0; allowed are 1 to 1048576.");
  EXPECT_EQ(MessageFor({.context = 1048577}), "--context is 1048577; allowed are 1 to 1048576.");
  EXPECT_EQ(MessageFor({.layers = 3, .prefill = 4096}), "--layers is 3; allowed are 4 to 40.");
  EXPECT_EQ(MessageFor({.prefill = -1}), "--prefill is -1; allowed are 0 to 65536.");
  EXPECT_EQ(MessageFor({.prefill = 100}), "--replay is 140; allowed are 1 to 100.");
  EXPECT_EQ(MessageFor({.context = 1048000, .prefill = 4096}),
            "--context is 1048000; allowed are 0 to 1044480.");
  EXPECT_EQ(MessageFor({.runs = 2}), "--runs is 2; allowed are 3 to 1000.");
}

TEST(BenchSliceTest, ADecodeStepHasOneRowPerSequenceAndAPrefillStepOneSequence) {
  const Result<SliceSetup> decode = ResolveSlice({});
  ASSERT_TRUE(decode.has_value());
  EXPECT_EQ(decode->config.num_hidden_layers, 40);
  EXPECT_EQ(decode->shape.sequences, 256);
  EXPECT_EQ(decode->shape.before, 131071);
  EXPECT_EQ(decode->shape.rows, 1);
  const Result<SliceSetup> prefill = ResolveSlice({.ep = 4, .prefill = 4096});
  ASSERT_TRUE(prefill.has_value());
  EXPECT_EQ(prefill->shape.sequences, 1);
  EXPECT_EQ(prefill->shape.before, 0);
  EXPECT_EQ(prefill->shape.rows, 4096);
  EXPECT_EQ(prefill->shape.decoder_rows, 140);
}

TEST(BenchSliceTest, TheReleasedSlicesFitAnH200) {
  const Result<SliceSetup> decode = ResolveSlice({});
  ASSERT_TRUE(decode.has_value());
  const RankSliceBytes bytes = RankSliceMemory(decode->config, decode->shape);
  EXPECT_NEAR(static_cast<double>(bytes.weights), 17e9, 2e9);
  EXPECT_NEAR(static_cast<double>(bytes.caches), 31e9, 2e9);
  const Result<SliceSetup> prefill = ResolveSlice({.ep = 4, .prefill = 4096});
  ASSERT_TRUE(prefill.has_value());
  EXPECT_LT(RankSliceMemory(prefill->config, prefill->shape).total(), int64_t{120} << 30);
}

// The tiny model through the same code, on the CPU.
SliceSetup TinySetup(int64_t rows, int64_t decoder_rows) {
  const Result<std::string> json = TinyConfigJson();
  EXPECT_TRUE(json.has_value());
  return {.config = *ParseModelConfig(*json),
          .shape = {.ranks = 4,
                    .sequences = rows == 1 ? 5 : 1,
                    .before = rows == 1 ? 299 : 130,
                    .rows = rows,
                    .decoder_rows = decoder_rows,
                    .seed = 3},
          .runs = 3,
          .copy_bytes = 4096};
}

void ExpectPlausible(const SliceTimes& times, const SliceSetup& setup) {
  EXPECT_EQ(times.non_finite_logits, 0);
  EXPECT_GT(times.median_s, 0);
  EXPECT_LE(times.p10_s, times.median_s);
  EXPECT_LE(times.median_s, times.p90_s);
  const auto visits = [&](StepPart part) { return times.part_visits[static_cast<size_t>(part)]; };
  EXPECT_EQ(visits(StepPart::kAttention), setup.config.num_hidden_layers);
  EXPECT_EQ(visits(StepPart::kExperts), setup.config.num_hidden_layers);
  EXPECT_EQ(visits(StepPart::kIndexer), std::ssize(setup.config.index_source_layer_ids));
  EXPECT_EQ(visits(StepPart::kCompressor), std::ssize(setup.config.kv_source_layer_ids));
  EXPECT_EQ(visits(StepPart::kEngram), std::ssize(setup.config.engram_layer_ids));
  EXPECT_EQ(visits(StepPart::kHead), 1);
  EXPECT_EQ(visits(StepPart::kDraftContext), 0);
  for (size_t p = 0; p < kNumStepParts; ++p) {
    if (p == static_cast<size_t>(StepPart::kDraftContext)) continue;
    EXPECT_GT(times.part_s[p], 0) << p;
  }
}

TEST(BenchSliceTest, ATinyDecodeStepRunsOnTheCpu) {
  Stream stream(2);
  const SliceSetup setup = TinySetup(1, 1);
  const Result<SliceTimes> times = MeasureSlice(setup, stream);
  ASSERT_TRUE(times.has_value()) << times.error().message;
  ExpectPlausible(*times, setup);
  // Five rows on each of four ranks go to three experts each, a quarter of which are here.
  const auto& rows = times->work.expert_rows;
  EXPECT_NEAR(static_cast<double>(std::accumulate(rows.begin(), rows.end(), int64_t{0})), 150, 40);
  for (const int64_t touched : times->work.touched_experts) EXPECT_LE(touched, 4);
}

TEST(BenchSliceTest, ATinyPrefillStepRunsOnTheCpu) {
  Stream stream(2);
  const SliceSetup setup = TinySetup(40, 12);
  const Result<SliceTimes> times = MeasureSlice(setup, stream);
  ASSERT_TRUE(times.has_value()) << times.error().message;
  ExpectPlausible(*times, setup);
  EXPECT_GT(times->work.expert_rows.front(), times->work.expert_rows.back());
}

TEST(BenchSliceTest, TinyStepsRunOnACudaDevice) {
  const Result<std::unique_ptr<Stream>> stream = Stream::CreateCuda(0, 2);
  if (!stream.has_value()) GTEST_SKIP() << stream.error().message;
  for (const SliceSetup& setup : {TinySetup(1, 1), TinySetup(12, 9)}) {
    const Result<SliceTimes> times = MeasureSlice(setup, **stream);
    ASSERT_TRUE(times.has_value()) << times.error().message;
    ExpectPlausible(*times, setup);
    EXPECT_GT(times->copy_bytes_per_s, 0);
  }
}

}  // namespace
}  // namespace deepinfer
