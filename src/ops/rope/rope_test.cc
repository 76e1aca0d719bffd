#include "ops/rope/rope.h"

#include <gtest/gtest.h>

#include <bit>

#include "ops/op_test_util.h"
#include "ops/quantize/group_quantize.h"

namespace deepinfer {
namespace {

using testing::NormalTensor;
using testing::OwnedTensor;

TEST(RopeTable, TheAngleIsRoundedToFp32BeforeTheCosine) {
  // Frequency 1 of the compressed layers at position 1,048,575: the product rounds to 721058.9375.
  OwnedTensor positions(DType::kI32, {2});
  positions.Row<int32_t>(0)[0] = 1048575;
  positions.Row<int32_t>(0)[1] = 0;
  OwnedTensor frequencies(DType::kF32, {1});
  frequencies.Row<float>(0)[0] = 6.87656045e-1f;
  OwnedTensor table(DType::kF32, {2, 1, 2});
  Stream stream(1);
  ASSERT_TRUE(
      RopeTable({positions.view(), 1, frequencies.view(), table.view()}, stream).has_value());
  EXPECT_FLOAT_EQ(1048575.0f * frequencies.Row<float>(0)[0], 721058.9375f);
  EXPECT_FLOAT_EQ(table.Row<float>(0)[0], 0.8300226f);
  EXPECT_FLOAT_EQ(table.Row<float>(0)[1], 0.5577297f);
  EXPECT_EQ(table.Row<float>(1)[0], 1.0f);
  EXPECT_EQ(table.Row<float>(1)[1], 0.0f);
}

TEST(RopeTable, EntriesAreAtTheirRatioTimesTheirNumber) {
  OwnedTensor entry(DType::kI32, {1});
  OwnedTensor token(DType::kI32, {1});
  entry.Row<int32_t>(0)[0] = 501;
  token.Row<int32_t>(0)[0] = 1002;
  const OwnedTensor frequencies = NormalTensor(DType::kF32, {32}, 3, 0.2f);
  OwnedTensor a(DType::kF32, {1, 32, 2});
  OwnedTensor b(DType::kF32, {1, 32, 2});
  Stream stream(1);
  ASSERT_TRUE(RopeTable({entry.view(), 2, frequencies.view(), a.view()}, stream).has_value());
  ASSERT_TRUE(RopeTable({token.view(), 1, frequencies.view(), b.view()}, stream).has_value());
  EXPECT_EQ(testing::CountDifferentBits(a.view(), b.view()), 0);
}

OwnedTensor Table(int64_t rows, int64_t pairs) {
  OwnedTensor table(DType::kF32, {rows, pairs, 2});
  testing::Random random(9);
  for (int64_t i = 0; i < rows * pairs; ++i) {
    const float angle = random.Uniform() * 6.28f;
    table.Row<float>(0)[2 * i] = std::cos(angle);
    table.Row<float>(0)[2 * i + 1] = std::sin(angle);
  }
  return table;
}

TEST(Rope, ARightAngleSwapsAdjacentChannelsOfTheTail) {
  for (bool reference : {false, true}) {
    OwnedTensor x(DType::kBf16, {1, 1, 64});
    OwnedTensor table(DType::kF32, {1, 8, 2});
    for (int64_t i = 0; i < 64; ++i) x.Row<Bf16>(0)[i] = F32ToBf16(static_cast<float>(i));
    for (int64_t i = 0; i < 8; ++i) table.Row<float>(0)[2 * i + 1] = 1.0f;
    Stream stream(1);
    stream.set_use_reference(reference);
    ASSERT_TRUE(Rope({x.view(), table.view()}, stream).has_value());
    for (int64_t i = 0; i < 64; ++i) {
      const int64_t expected = i < 48 ? i : (i % 2 == 0 ? -(i + 1) : i - 1);
      EXPECT_EQ(testing::Value(x.view(), i), static_cast<float>(expected)) << i;
    }
  }
}

TEST(Rope, TunedHasTheReferencesBits) {
  // Both evaluate the same fused operations, round to bf16, and quantise exactly.
  struct Case {
    int64_t rows, heads, channels, pairs;
  };
  for (const Case& c :
       {Case{3, 8, 64, 8}, {2, 64, 512, 32}, {5, 32, 128, 32}, {4, 5, 96, 16}, {2, 3, 64, 3}}) {
    for (bool q4p : {false, true}) {
      const OwnedTensor source = NormalTensor(DType::kBf16, {c.rows, c.heads, c.channels}, 8, 5.0f);
      source.Row<Bf16>(0)[1] = Bf16{0x7fc0};
      source.Row<Bf16>(0)[40] = Bf16{0x8000};
      source.Row<Bf16>(1)[2] = Bf16{0x7f80};
      const OwnedTensor table = Table(c.rows, c.pairs);
      OwnedTensor tuned = testing::CopyOf(source, {c.rows, c.heads, c.channels});
      OwnedTensor expected = testing::CopyOf(source, {c.rows, c.heads, c.channels});
      Stream stream(2);
      ASSERT_TRUE(Rope({tuned.view(), table.view(), q4p}, stream).has_value());
      stream.set_use_reference(true);
      ASSERT_TRUE(Rope({expected.view(), table.view(), q4p}, stream).has_value());
      EXPECT_EQ(testing::CountDifferentBits(tuned.view(), expected.view()), 0)
          << c.channels << " " << q4p;
    }
  }
}

TEST(Rope, QuantizedHeadsAreOnTheQ4PGrid) {
  OwnedTensor x = NormalTensor(DType::kBf16, {2, 32, 128}, 10);
  const OwnedTensor table = Table(2, 32);
  Stream stream(1);
  ASSERT_TRUE(Rope({x.view(), table.view(), true}, stream).has_value());
  for (int64_t h = 0; h < 64; ++h) {
    float head[128];
    float again[128];
    uint8_t record[68];
    for (int64_t i = 0; i < 128; ++i) head[i] = testing::Value(x.view(), h * 128 + i);
    EncodeQ4PRecord(head, 128, record);
    DecodeQ4PRecord(record, 128, again);
    EXPECT_TRUE(std::equal(head, head + 128, again));
  }
}

TEST(Rope, RowsAreIndependent) {
  const OwnedTensor source = NormalTensor(DType::kBf16, {5, 32, 128}, 12);
  const OwnedTensor table = Table(5, 32);
  testing::ExpectRowsIndependent(5, [&](Stream& stream, int64_t begin, int64_t end) {
    OwnedTensor x = testing::CopyOf(source, {5, 32, 128});
    EXPECT_TRUE(
        Rope({x.view().Rows(begin, end), table.view().Rows(begin, end), true}, stream).has_value());
    return testing::Bytes(x.view().Rows(begin, end));
  });
}

TEST(Rope, MorePairsThanChannelsAreRefused) {
  Stream stream(1);
  OwnedTensor x(DType::kBf16, {1, 2, 32});
  OwnedTensor table(DType::kF32, {1, 17, 2});
  EXPECT_EQ(Rope({x.view(), table.view()}, stream).error().field, "x");
}

}  // namespace
}  // namespace deepinfer
