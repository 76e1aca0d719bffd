#include "ops/rms_norm/rms_norm.h"

#include <gtest/gtest.h>

#include "ops/op_test_util.h"

namespace deepinfer {
namespace {

using testing::NormalTensor;
using testing::OwnedTensor;

struct Case {
  int64_t rows;
  int64_t channels;
};
// Hidden, low-rank, head and index widths of both configurations; 40 is not whole vectors.
constexpr Case kCases[] = {{1, 64}, {3, 128}, {5, 256}, {2, 512}, {3, 1280}, {4, 5120}, {2, 40}};

TEST(RmsNorm, TunedMatchesReference) {
  // The statistic is summed in double in both; only its order differs (1e-16), which can move the
  // fp32 scale by one unit (6e-8) and then an element across a bf16 boundary: by one bf16 step
  // (2^-8), and hardly ever.
  for (auto [rows, channels] : kCases) {
    const OwnedTensor x = NormalTensor(DType::kBf16, {rows, channels}, 1, 3.0f);
    const OwnedTensor weight = NormalTensor(DType::kBf16, {channels}, 2);
    OwnedTensor tuned(DType::kBf16, {rows, channels});
    OwnedTensor expected(DType::kBf16, {rows, channels});
    Stream stream(2);
    ASSERT_TRUE(RmsNorm({x.view(), weight.view(), tuned.view(), {}}, stream).has_value());
    stream.set_use_reference(true);
    ASSERT_TRUE(RmsNorm({x.view(), weight.view(), expected.view(), {}}, stream).has_value());
    EXPECT_LE(testing::CountDifferentBits(tuned.view(), expected.view()), rows * channels / 1000)
        << channels;
    for (int64_t i = 0; i < rows * channels; ++i) {
      const float e = testing::Value(expected.view(), i);
      ASSERT_NEAR(testing::Value(tuned.view(), i), e, std::fabs(e) / 128) << channels;
    }
  }
}

TEST(RmsNorm, KnownValues) {
  // Mean square 4: every element is halved, then weighted.
  for (bool reference : {false, true}) {
    OwnedTensor x(DType::kBf16, {1, 32});
    OwnedTensor weight(DType::kBf16, {32});
    OwnedTensor y(DType::kBf16, {1, 32});
    for (int64_t i = 0; i < 32; ++i) {
      x.Row<Bf16>(0)[i] = F32ToBf16(i % 2 == 0 ? 2.0f : -2.0f);
      static_cast<Bf16*>(weight.view().data())[i] = F32ToBf16(static_cast<float>(i));
    }
    Stream stream(1);
    stream.set_use_reference(reference);
    ASSERT_TRUE(RmsNorm({x.view(), weight.view(), y.view(), {}}, stream).has_value());
    for (int64_t i = 0; i < 32; ++i)
      EXPECT_EQ(testing::Value(y.view(), i), static_cast<float>(i % 2 == 0 ? i : -i));
  }
}

TEST(RmsNorm, AZeroRowStaysZeroAndATinyRowIsScaledUp) {
  for (bool reference : {false, true}) {
    OwnedTensor x(DType::kBf16, {2, 64});
    OwnedTensor weight(DType::kBf16, {64});
    for (int64_t i = 0; i < 64; ++i) {
      x.Row<Bf16>(1)[i] = F32ToBf16(1e-6f);
      static_cast<Bf16*>(weight.view().data())[i] = F32ToBf16(1.0f);
    }
    OwnedTensor y(DType::kBf16, {2, 64});
    Stream stream(1);
    stream.set_use_reference(reference);
    ASSERT_TRUE(RmsNorm({x.view(), weight.view(), y.view(), {}}, stream).has_value());
    EXPECT_EQ(testing::Value(y.view(), 0), 0.0f);
    EXPECT_NEAR(testing::Value(y.view(), 64), 1.0f, 0.01f);
  }
}

TEST(RmsNorm, TheGridOutputIsTheQuantizedOutput) {
  for (bool reference : {false, true}) {
    const OwnedTensor x = NormalTensor(DType::kBf16, {3, 256}, 4);
    const OwnedTensor weight = NormalTensor(DType::kBf16, {256}, 5);
    OwnedTensor y(DType::kBf16, {3, 256});
    OwnedTensor grid(DType::kBf16, {3, 256});
    OwnedTensor only_grid(DType::kBf16, {3, 256});
    Stream stream(1);
    stream.set_use_reference(reference);
    ASSERT_TRUE(RmsNorm({x.view(), weight.view(), y.view(), grid.view()}, stream).has_value());
    ASSERT_TRUE(RmsNorm({x.view(), weight.view(), {}, only_grid.view()}, stream).has_value());
    EXPECT_EQ(testing::CountDifferentBits(grid.view(), only_grid.view()), 0);
    EXPECT_GT(testing::CountDifferentBits(grid.view(), y.view()), 0);
    for (int64_t i = 0; i < 3 * 256; ++i) {
      // Within half an E4M3 step: 2^-4 of the value or 2^-10 * 2^-8 of the group's maximum.
      ASSERT_NEAR(testing::Value(grid.view(), i), testing::Value(y.view(), i),
                  std::fabs(testing::Value(y.view(), i)) / 16 + 1e-4f);
    }
  }
}

TEST(RmsNorm, RowsAreIndependentAndMayAlias) {
  const OwnedTensor x = NormalTensor(DType::kBf16, {7, 1280}, 6);
  const OwnedTensor weight = NormalTensor(DType::kBf16, {1280}, 7);
  testing::ExpectRowsIndependent(7, [&](Stream& stream, int64_t begin, int64_t end) {
    OwnedTensor y = testing::CopyOf(x, {7, 1280});
    OwnedTensor grid(DType::kBf16, {7, 1280});
    const TensorView rows = y.view().Rows(begin, end);
    EXPECT_TRUE(
        RmsNorm({rows, weight.view(), rows, grid.view().Rows(begin, end)}, stream).has_value());
    return testing::Joined({rows, grid.view().Rows(begin, end)});
  });
}

TEST(RmsNorm, WrongShapesAreRefused) {
  Stream stream(1);
  OwnedTensor x(DType::kBf16, {2, 48});
  OwnedTensor weight(DType::kBf16, {48});
  EXPECT_EQ(RmsNorm({x.view(), x.view(), x.view(), {}}, stream).error().field, "weight");
  EXPECT_EQ(RmsNorm({x.view(), weight.view(), {}, x.view()}, stream).error().field, "x");
}

}  // namespace
}  // namespace deepinfer
