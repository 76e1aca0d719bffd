#include "ops/draft_block/draft_block.h"

#include <cmath>
#include <limits>

#include "ops/op_test_util.h"

namespace deepinfer {
namespace {

using testing::NormalTensor;
using testing::OwnedTensor;

OwnedTensor Ints(const std::vector<int32_t>& values) {
  OwnedTensor tensor(DType::kI32, {std::ssize(values)});
  std::copy(values.begin(), values.end(), tensor.Row<int32_t>(0));
  return tensor;
}

std::vector<int32_t> Values(const OwnedTensor& tensor) {
  const int32_t* begin = tensor.Row<int32_t>(0);
  return {begin, begin + tensor.view().num_elements()};
}

TEST(BlockRows, AnchorsAreFollowedByFillers) {
  const OwnedTensor anchors = Ints({7, 9}), lengths = Ints({100, 3});
  const OwnedTensor ids(DType::kI32, {6}), positions(DType::kI32, {6}), sequence(DType::kI32, {6});
  const OwnedTensor start(DType::kI32, {3});
  Stream stream(1);
  BlockRowsArgs args{.anchors = anchors.view(),
                     .lengths = lengths.view(),
                     .filler = 42,
                     .token_ids = ids.view(),
                     .positions = positions.view(),
                     .row_sequence = sequence.view(),
                     .sequence_start = start.view()};
  ASSERT_TRUE(BlockRows(args, stream).has_value());
  EXPECT_EQ(Values(ids), (std::vector<int32_t>{7, 42, 42, 9, 42, 42}));
  EXPECT_EQ(Values(positions), (std::vector<int32_t>{100, 101, 102, 3, 4, 5}));
  EXPECT_EQ(Values(sequence), (std::vector<int32_t>{0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(Values(start), (std::vector<int32_t>{0, 3, 6}));
  args.token_ids = ids.view().Rows(0, 5);
  EXPECT_FALSE(BlockRows(args, stream).has_value());
}

TEST(BiasedArgmax, AddsInPlaceAndTakesTheFirstOfTheLargest) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<std::vector<float>> rows = {{1, 5, 2, 5, 0},
                                                {-0.0f, 0, -1, -0.0f, 0},
                                                {kNan, -kInf, 3, kNan, 3},
                                                {kNan, kNan, kNan, kNan, kNan},
                                                {-kInf, -kInf, -kInf, -kInf, -kInf}};
  // Columns of a wider tensor.
  const OwnedTensor wide(DType::kF32, {5, 10}), bias(DType::kF32, {5, 5}), tokens(DType::kI32, {5});
  for (int64_t r = 0; r < 5; ++r) {
    for (int64_t i = 0; i < 5; ++i) {
      wide.Row<float>(r)[5 + i] = rows[static_cast<size_t>(r)][static_cast<size_t>(i)];
      bias.Row<float>(r)[i] = r == 0 && i == 4 ? 10.0f : 0.0f;
    }
  }
  Stream stream(2);
  BiasedArgmaxArgs args{
      .logits = wide.view().Columns(5, 10), .bias = bias.view(), .tokens = tokens.view()};
  ASSERT_TRUE(BiasedArgmax(args, stream).has_value());
  EXPECT_EQ(Values(tokens), (std::vector<int32_t>{4, 0, 2, 0, 0}));
  EXPECT_EQ(wide.Row<float>(0)[9], 10.0f);
  EXPECT_EQ(wide.Row<float>(0)[4], 0.0f);
  // The sum alone.
  args.tokens = {};
  ASSERT_TRUE(BiasedArgmax(args, stream).has_value());
  EXPECT_EQ(wide.Row<float>(0)[9], 20.0f);
  args.bias = bias.view().Columns(0, 4);
  EXPECT_FALSE(BiasedArgmax(args, stream).has_value());
}

TEST(BlockConfidence, IsASigmoidPerSlotWithItsTemperature) {
  constexpr int64_t kSlots = 3, kSequences = 2, kWidth = 50;
  const OwnedTensor x = NormalTensor(DType::kBf16, {kSlots * kSequences, kWidth}, 1);
  const OwnedTensor weight = NormalTensor(DType::kBf16, {1, kWidth}, 2);
  const OwnedTensor temperatures(DType::kF32, {kSlots});
  const float values[] = {1.0f, 0.5f, 1e-9f};  // the last is clamped
  std::copy(values, values + 3, temperatures.Row<float>(0));
  const OwnedTensor score(DType::kF32, {kSlots, kSequences});
  const OwnedTensor probability(DType::kF32, {kSlots, kSequences});
  Stream stream(2);
  ASSERT_TRUE(BlockConfidence({.x = x.view(),
                               .weight = weight.view(),
                               .temperatures = temperatures.view(),
                               .score = score.view(),
                               .probability = probability.view()},
                              stream)
                  .has_value());
  for (int64_t k = 0; k < kSlots; ++k) {
    for (int64_t r = 0; r < kSequences; ++r) {
      double sum = 0.0;
      for (int64_t i = 0; i < kWidth; ++i)
        sum += static_cast<double>(Bf16ToF32(weight.Row<Bf16>(0)[i])) *
               Bf16ToF32(x.Row<Bf16>(r * kSlots + k)[i]);
      EXPECT_NEAR(score.Row<float>(k)[r], sum, 1e-4);
      const double z = std::min(60.0, std::max(-60.0, sum / values[k]));
      EXPECT_NEAR(probability.Row<float>(k)[r], 1.0 / (1.0 + std::exp(-z)), 1e-5);
      EXPECT_GT(probability.Row<float>(k)[r], 0.0f);
    }
  }
  EXPECT_FALSE(BlockConfidence({.x = x.view().Rows(0, 5),
                                .weight = weight.view(),
                                .temperatures = temperatures.view(),
                                .score = score.view(),
                                .probability = probability.view()},
                               stream)
                   .has_value());
}

}  // namespace
}  // namespace deepinfer
