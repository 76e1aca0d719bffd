#include "ops/hyper_connection/hc_collapse.h"

#include "ops/op_test_util.h"
#include "ops/quantize/quantize.h"

namespace deepinfer {
namespace {

using testing::NormalTensor;
using testing::OwnedTensor;

TEST(HcCollapse, IsTheWeightedSumOfTheStreams) {
  for (const int64_t hidden : {int64_t{1}, int64_t{32}, int64_t{75}}) {
    const OwnedTensor streams = NormalTensor(DType::kBf16, {5, 4, hidden}, 1);
    const OwnedTensor pre = NormalTensor(DType::kF32, {5, 4}, 2);
    const OwnedTensor y(DType::kBf16, {5, hidden});
    Stream stream(2);
    ASSERT_TRUE(HcCollapse({.streams = streams.view(), .pre = pre.view(), .y = y.view()}, stream)
                    .has_value());
    for (int64_t t = 0; t < 5; ++t) {
      for (int64_t d = 0; d < hidden; ++d) {
        double sum = 0.0;
        for (int64_t s = 0; s < 4; ++s)
          sum += static_cast<double>(pre.Row<float>(t)[s]) *
                 Bf16ToF32(streams.Row<Bf16>(t)[s * hidden + d]);
        const float got = Bf16ToF32(y.Row<Bf16>(t)[d]);
        EXPECT_NEAR(got, sum, std::fabs(sum) * 0x1p-8 + 1e-6) << t << " " << d;
      }
    }
  }
}

TEST(HcCollapse, WithoutWeightsIsTheMeanBitForBit) {
  const OwnedTensor streams = NormalTensor(DType::kBf16, {7, 4, 64}, 3, 100.0f);
  const OwnedTensor quarters(DType::kF32, {7, 4});
  for (int64_t i = 0; i < 28; ++i) quarters.Row<float>(0)[i] = 0.25f;
  const OwnedTensor mean(DType::kBf16, {7, 64}), sum(DType::kBf16, {7, 64});
  Stream stream(1);
  ASSERT_TRUE(
      HcCollapse({.streams = streams.view(), .pre = {}, .y = mean.view()}, stream).has_value());
  ASSERT_TRUE(
      HcCollapse({.streams = streams.view(), .pre = quarters.view(), .y = sum.view()}, stream)
          .has_value());
  EXPECT_EQ(testing::Bytes(mean.view()), testing::Bytes(sum.view()));
}

TEST(HcCollapse, QuantisesIntoColumnsOfAWiderTensor) {
  const OwnedTensor streams = NormalTensor(DType::kBf16, {3, 4, 64}, 4);
  const OwnedTensor plain(DType::kBf16, {3, 64}), grid(DType::kBf16, {3, 64});
  const OwnedTensor wide(DType::kBf16, {3, 192});
  Stream stream(1);
  ASSERT_TRUE(
      HcCollapse({.streams = streams.view(), .pre = {}, .y = plain.view()}, stream).has_value());
  ASSERT_TRUE(QuantizeFp8({.x = plain.view(), .y = grid.view()}, stream).has_value());
  ASSERT_TRUE(HcCollapse({.streams = streams.view(),
                          .pre = {},
                          .y = wide.view().Columns(64, 128),
                          .quantize = true},
                         stream)
                  .has_value());
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t d = 0; d < 192; ++d) {
      const bool inside = d >= 64 && d < 128;
      EXPECT_EQ(wide.Row<Bf16>(t)[d].bits, inside ? grid.Row<Bf16>(t)[d - 64].bits : 0) << d;
    }
  }
  const auto refused = HcCollapse(
      {.streams = streams.view(), .pre = {}, .y = wide.view(), .quantize = true}, stream);
  EXPECT_FALSE(refused.has_value());
}

}  // namespace
}  // namespace deepinfer
