#include "ops/hyper_connection/hyper_connection.h"

#include <gtest/gtest.h>

#include "ops/op_test_util.h"

namespace deepinfer {
namespace {

using testing::NormalTensor;
using testing::OwnedTensor;

TEST(HcCoefficients, KnownValues) {
  float m[24];
  float base[24];
  for (int k = 0; k < 24; ++k) {
    m[k] = std::sin(0.9f * static_cast<float>(k) + 0.2f);
    base[k] = 0.1f * static_cast<float>((7 * k) % 11 - 5);
  }
  const float scale[3] = {0.5f, 0.25f, 2.0f};
  float pre[4];
  float post[4];
  float comb[16];
  HcCoefficients(m, base, scale, 20, 1e-6f, pre, post, comb);
  const float expected_pre[4] = {0.4011535f, 0.6560201f, 0.5633214f, 0.6501342f};
  const float expected_post[4] = {0.9735240f, 0.7317377f, 1.1205033f, 1.0268835f};
  const float expected_comb[16] = {0.3016964f, 0.5570518f, 0.1325107f, 0.0087486f,
                                   0.0200565f, 0.0262733f, 0.3995627f, 0.5540953f,
                                   0.6427697f, 0.2975113f, 0.0508503f, 0.0088789f,
                                   0.0354764f, 0.1191626f, 0.4170753f, 0.4282762f};
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(pre[i], expected_pre[i], 2e-7f);
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(post[i], expected_post[i], 2e-7f);
  for (int i = 0; i < 16; ++i) EXPECT_NEAR(comb[i], expected_comb[i], 2e-6f) << i;
  // The iteration ends on columns: they sum to one, rows only nearly.
  for (int j = 0; j < 4; ++j)
    EXPECT_NEAR(comb[j] + comb[4 + j] + comb[8 + j] + comb[12 + j], 1.0f, 2e-6f);
}

struct MixCase {
  OwnedTensor streams, fn, base, scale, pre, post, comb;
  MixCase(int64_t rows, int64_t hidden)
      : streams(NormalTensor(DType::kBf16, {rows, 4, hidden}, 1, 2.0f)),
        fn(NormalTensor(DType::kF32, {24, 4 * hidden}, 2,
                        0.6f / std::sqrt(4.0f * static_cast<float>(hidden)))),
        base(NormalTensor(DType::kF32, {24}, 3, 1.2f)),
        scale(DType::kF32, {3}),
        pre(DType::kF32, {rows, 4}),
        post(DType::kF32, {rows, 4}),
        comb(DType::kF32, {rows, 16}) {
    for (int i = 0; i < 3; ++i) scale.Row<float>(0)[i] = 1.0f;
  }
  HcMixArgs Args(int64_t begin, int64_t end) const {
    HcMixArgs args;
    args.streams = streams.view().Rows(begin, end);
    args.fn = fn.view();
    args.base = base.view();
    args.scale = scale.view();
    args.pre = pre.view().Rows(begin, end);
    args.post = post.view().Rows(begin, end);
    args.comb = comb.view().Rows(begin, end);
    return args;
  }
};

TEST(HcMix, TunedMatchesReference) {
  // Sums of 4 * hidden products in fp32 lanes and double chunks: error below 128 roundings of a
  // lane sum, 1e-6 of a value of order one; Sinkhorn contracts. The reference sums in double.
  for (auto [rows, hidden] : {std::pair<int64_t, int64_t>{1, 256}, {5, 256}, {3, 400}, {6, 5120}}) {
    MixCase test(rows, hidden);
    Stream stream(1);
    ASSERT_TRUE(HcMix(test.Args(0, rows), stream).has_value());
    const OwnedTensor pre = testing::CopyOf(test.pre, {rows, 4});
    const OwnedTensor post = testing::CopyOf(test.post, {rows, 4});
    const OwnedTensor comb = testing::CopyOf(test.comb, {rows, 16});
    stream.set_use_reference(true);
    ASSERT_TRUE(HcMix(test.Args(0, rows), stream).has_value());
    for (int64_t i = 0; i < rows * 4; ++i) {
      EXPECT_NEAR(testing::Value(pre.view(), i), testing::Value(test.pre.view(), i), 2e-6f);
      EXPECT_NEAR(testing::Value(post.view(), i), testing::Value(test.post.view(), i), 4e-6f);
    }
    for (int64_t i = 0; i < rows * 16; ++i)
      EXPECT_NEAR(testing::Value(comb.view(), i), testing::Value(test.comb.view(), i), 1e-5f);
  }
}

TEST(HcMix, ARowHasTheSameBitsHoweverManyRowsShareThePass) {
  for (auto [rows, hidden] : {std::pair<int64_t, int64_t>{11, 256}, {9, 1280}}) {
    MixCase test(rows, hidden);
    testing::ExpectRowsIndependent(rows, [&](Stream& stream, int64_t begin, int64_t end) {
      const HcMixArgs args = test.Args(begin, end);
      EXPECT_TRUE(HcMix(args, stream).has_value());
      return testing::Joined({args.pre, args.post, args.comb});
    });
  }
}

TEST(HcCollapseNorm, TunedMatchesReferenceWithAndWithoutRowIndex) {
  // The collapse is the same fused operations; the norm's statistic is summed in double in both
  // (see the RMSNorm test).
  for (bool indexed : {false, true}) {
    for (int64_t hidden : {256, 5120}) {
      const OwnedTensor streams = NormalTensor(DType::kBf16, {6, 4, hidden}, 4);
      const OwnedTensor pre = NormalTensor(DType::kF32, {6, 4}, 5);
      const OwnedTensor weight = NormalTensor(DType::kBf16, {hidden}, 6);
      OwnedTensor index(DType::kI32, {3});
      const int32_t rows_wanted[3] = {5, 0, 2};
      std::copy_n(rows_wanted, 3, index.Row<int32_t>(0));
      const int64_t rows = indexed ? 3 : 6;
      OwnedTensor y[2] = {OwnedTensor(DType::kBf16, {rows, hidden}),
                          OwnedTensor(DType::kBf16, {rows, hidden})};
      OwnedTensor grid[2] = {OwnedTensor(DType::kBf16, {rows, hidden}),
                             OwnedTensor(DType::kBf16, {rows, hidden})};
      for (int i = 0; i < 2; ++i) {
        Stream stream(2);
        stream.set_use_reference(i == 1);
        HcCollapseNormArgs args;
        args.streams = streams.view();
        args.pre = pre.view();
        if (indexed) args.row_index = index.view();
        args.weight = weight.view();
        args.y = y[i].view();
        args.y_grid = grid[i].view();
        ASSERT_TRUE(HcCollapseNorm(args, stream).has_value());
      }
      EXPECT_LE(testing::CountDifferentBits(y[0].view(), y[1].view()), rows * hidden / 1000);
      EXPECT_LE(testing::CountDifferentBits(grid[0].view(), grid[1].view()), rows * hidden / 1000);
      for (int64_t i = 0; i < rows * hidden; ++i) {
        const float e = testing::Value(y[1].view(), i);
        ASSERT_NEAR(testing::Value(y[0].view(), i), e, std::fabs(e) / 128);
      }
    }
  }
}

TEST(HcCollapseNorm, UnitWeightsOnOneStreamGiveItsNorm) {
  for (bool reference : {false, true}) {
    OwnedTensor streams(DType::kBf16, {1, 4, 32});
    OwnedTensor pre(DType::kF32, {1, 4});
    OwnedTensor weight(DType::kBf16, {32});
    OwnedTensor y(DType::kBf16, {1, 32});
    for (int64_t i = 0; i < 128; ++i)
      streams.Row<Bf16>(0)[i] = F32ToBf16(i / 32 == 2 ? (i % 2 == 0 ? 4.0f : -4.0f) : 100.0f);
    for (int64_t i = 0; i < 32; ++i) static_cast<Bf16*>(weight.view().data())[i] = F32ToBf16(3.0f);
    pre.Row<float>(0)[2] = 0.5f;
    HcCollapseNormArgs args;
    args.streams = streams.view();
    args.pre = pre.view();
    args.weight = weight.view();
    args.y = y.view();
    Stream stream(1);
    stream.set_use_reference(reference);
    ASSERT_TRUE(HcCollapseNorm(args, stream).has_value());
    for (int64_t i = 0; i < 32; ++i)
      EXPECT_EQ(testing::Value(y.view(), i), i % 2 == 0 ? 3.0f : -3.0f);
  }
}

TEST(HcCollapseNorm, RowsAreIndependent) {
  const OwnedTensor streams = NormalTensor(DType::kBf16, {5, 4, 1280}, 7);
  const OwnedTensor pre = NormalTensor(DType::kF32, {5, 4}, 8);
  const OwnedTensor weight = NormalTensor(DType::kBf16, {1280}, 9);
  testing::ExpectRowsIndependent(5, [&](Stream& stream, int64_t begin, int64_t end) {
    OwnedTensor y(DType::kBf16, {end - begin, 1280});
    OwnedTensor grid(DType::kBf16, {end - begin, 1280});
    HcCollapseNormArgs args;
    args.streams = streams.view().Rows(begin, end);
    args.pre = pre.view().Rows(begin, end);
    args.weight = weight.view();
    args.y = y.view();
    args.y_grid = grid.view();
    EXPECT_TRUE(HcCollapseNorm(args, stream).has_value());
    return testing::Joined({y.view(), grid.view()});
  });
}

TEST(HcExpand, TheSumRunsOverTheFirstIndexOfComb) {
  // comb[1][3] = 1 alone moves stream 1 to stream 3; post[0] writes x to stream 0.
  for (bool reference : {false, true}) {
    OwnedTensor x = NormalTensor(DType::kBf16, {1, 64}, 1);
    OwnedTensor post(DType::kF32, {1, 4});
    OwnedTensor comb(DType::kF32, {1, 16});
    OwnedTensor streams = NormalTensor(DType::kBf16, {1, 4, 64}, 2);
    const OwnedTensor before = testing::CopyOf(streams, {1, 4, 64});
    post.Row<float>(0)[0] = 1.0f;
    comb.Row<float>(0)[4 * 1 + 3] = 1.0f;
    Stream stream(1);
    stream.set_use_reference(reference);
    ASSERT_TRUE(HcExpand({x.view(), post.view(), comb.view(), streams.view()}, stream).has_value());
    for (int64_t d = 0; d < 64; ++d) {
      EXPECT_EQ(testing::Value(streams.view(), d), testing::Value(x.view(), d));
      EXPECT_EQ(testing::Value(streams.view(), 64 + d), 0.0f);
      EXPECT_EQ(testing::Value(streams.view(), 3 * 64 + d), testing::Value(before.view(), 64 + d));
    }
  }
}

TEST(HcExpand, TunedHasTheReferencesBitsAndRowsAreIndependent) {
  for (auto [rows, hidden] : {std::pair<int64_t, int64_t>{5, 256}, {3, 5120}, {2, 40}}) {
    const OwnedTensor x = NormalTensor(DType::kBf16, {rows, hidden}, 1);
    const OwnedTensor post = NormalTensor(DType::kF32, {rows, 4}, 2);
    const OwnedTensor comb = NormalTensor(DType::kF32, {rows, 16}, 3);
    const OwnedTensor before = NormalTensor(DType::kBf16, {rows, 4, hidden}, 4);
    const auto run = [&, hidden = hidden, rows = rows](Stream& stream, int64_t begin, int64_t end) {
      OwnedTensor streams = testing::CopyOf(before, {rows, 4, hidden});
      HcExpandArgs args;
      args.x = x.view().Rows(begin, end);
      args.post = post.view().Rows(begin, end);
      args.comb = comb.view().Rows(begin, end);
      args.streams = streams.view().Rows(begin, end);
      EXPECT_TRUE(HcExpand(args, stream).has_value());
      return testing::Bytes(args.streams);
    };
    testing::ExpectRowsIndependent(rows, run);
    Stream stream(1);
    Stream reference(1);
    reference.set_use_reference(true);
    EXPECT_EQ(run(stream, 0, rows), run(reference, 0, rows));
  }
}

TEST(HyperConnection, WrongShapesAreRefused) {
  Stream stream(1);
  MixCase test(1, 64);
  HcMixArgs args = test.Args(0, 1);
  args.fn = test.comb.view();
  EXPECT_EQ(HcMix(args, stream).error().field, "fn");
}

}  // namespace
}  // namespace deepinfer
