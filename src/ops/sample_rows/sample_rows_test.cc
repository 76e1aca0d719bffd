#include "ops/sample_rows/sample_rows.h"

#include <gtest/gtest.h>

#include "ops/sample_rows/sample_rows_test_util.h"

namespace deepinfer {
namespace {

using testing::DifferenceOf;
using testing::MakeSampleBatch;
using testing::OwnedTensor;
using testing::ReferenceSampleRow;
using testing::SampleBatch;
using testing::SampleTensors;

TEST(SampleRows, EveryKindOfDrawFollowsTheLaw) {
  Stream stream(2);
  for (const int64_t vocab : {1, 2, 31, 33, 1000}) {
    const SampleBatch batch = MakeSampleBatch(vocab, 9, 1);
    SampleTensors t(batch);
    ASSERT_TRUE(SampleRows({t.logits.view(), t.draws.view(), t.edits.view(), t.tokens.view(),
                            t.masks.view(), t.sampled.view(), t.out.view()},
                           stream)
                    .has_value());
    const auto* rows = reinterpret_cast<const SampledRow*>(t.out.view().data());
    for (size_t i = 0; i < batch.draws.size(); ++i) {
      const RowDraw& draw = batch.draws[i];
      const SampledRow expected = ReferenceSampleRow(
          batch.logits[static_cast<size_t>(draw.logit_row)], draw, batch.ListsOf(draw));
      ASSERT_EQ(DifferenceOf(rows[i], expected), "") << batch.names[i];
      if (draw.slot >= 0) {
        ASSERT_EQ(t.sampled.Row<int32_t>(0)[draw.slot],
                  expected.status == RowStatus::kDrawn ? expected.token : 0)
            << batch.names[i];
      }
    }
  }
}

TEST(SampleRows, SumsGiveLogProbabilities) {
  SampleBatch batch = MakeSampleBatch(5000, 1, 2);
  for (const std::vector<float>& row : {batch.logits[0], batch.logits[1], batch.logits[2]}) {
    double sum = 0;
    for (const float x : row) sum += std::exp(double{x});
    RowDraw draw;
    draw.given_token = 17;
    draw.report = RowReport::kRaw;
    RowScratch scratch;
    const SampledRow result = SampleRow(row, draw, {}, scratch);
    const double logprob =
        double{result.logit} -
        (double{result.largest} + std::log(static_cast<double>(result.sum) / kUnitSoftmaxMass));
    EXPECT_NEAR(logprob, double{row[17]} - std::log(sum), 1e-10);
  }
}

TEST(SampleRows, BestTokensAreInOrder) {
  const SampleBatch batch = MakeSampleBatch(1000, 1, 3);
  RowScratch scratch;
  for (const std::vector<float>& row : {batch.logits[0], batch.logits[2], batch.logits[4]}) {
    std::vector<uint32_t> order(row.size());
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return row[a] > row[b]; });
    for (const int64_t count : {0, 1, 63, 64, 65, 1000, 2000}) {
      const std::span<const uint64_t> keys = BestKeys(row, count, scratch);
      ASSERT_EQ(std::ssize(keys), std::min<int64_t>(count, 1000));
      for (size_t i = 0; i < keys.size(); ++i)
        ASSERT_EQ(static_cast<uint32_t>(keys[i]), order[i]) << count << " " << i;
    }
  }
}

TEST(SampleRows, SampledTokensAreInputsOfTheNextStep) {
  Stream stream(1);
  OwnedTensor slots(DType::kI32, {4}), sampled(DType::kI32, {3}), map(DType::kI32, {50}),
      ids(DType::kI32, {4}), lookback(DType::kI32, {4, 3});
  for (int32_t i = 0; i < 50; ++i) map.Row<int32_t>(0)[i] = 100 + i;
  for (int32_t i = 0; i < 4; ++i) {
    slots.Row<int32_t>(0)[i] = std::array{2, -1, 0, -1}[static_cast<size_t>(i)];
    ids.Row<int32_t>(0)[i] = -1 - i;
    std::fill_n(lookback.Row<int32_t>(i), 3, 7);
  }
  for (int32_t i = 0; i < 3; ++i) sampled.Row<int32_t>(0)[i] = 10 * i + 5;
  ASSERT_TRUE(PlaceSampledTokens(
                  {slots.view(), sampled.view(), map.view(), ids.view(), lookback.view()}, stream)
                  .has_value());
  EXPECT_EQ((std::vector<int32_t>(ids.Row<int32_t>(0), ids.Row<int32_t>(0) + 4)),
            (std::vector<int32_t>{25, -2, 5, -4}));
  EXPECT_EQ((std::vector<int32_t>(lookback.Row<int32_t>(0), lookback.Row<int32_t>(0) + 12)),
            (std::vector<int32_t>{125, 7, 7, 7, 7, 7, 105, 7, 7, 7, 7, 7}));
}

TEST(SampleRows, WrongShapesAreRefused) {
  Stream stream(1);
  const SampleBatch batch = MakeSampleBatch(40, 1, 1);
  SampleTensors t(batch);
  SampleRowsArgs args{t.logits.view(), t.draws.view(),   t.edits.view(), t.tokens.view(),
                      t.masks.view(),  t.sampled.view(), t.out.view()};
  OwnedTensor narrow(DType::kU8, {std::ssize(batch.draws), 8});
  SampleRowsArgs wrong = args;
  wrong.draws = narrow.view();
  EXPECT_EQ(SampleRows(wrong, stream).error().field, "draws");
  wrong = args;
  wrong.out = narrow.view();
  EXPECT_EQ(SampleRows(wrong, stream).error().field, "out");
  OwnedTensor masks(DType::kI32, {1, 1});
  wrong = args;
  wrong.masks = masks.view();
  EXPECT_EQ(SampleRows(wrong, stream).error().field, "masks");
  OwnedTensor ids(DType::kI32, {2});
  EXPECT_EQ(
      PlaceSampledTokens({ids.view(), ids.view(), ids.view(), ids.view(), masks.view()}, stream)
          .error()
          .field,
      "lookback");
}

}  // namespace
}  // namespace deepinfer
