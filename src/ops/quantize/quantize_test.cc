#include "ops/quantize/quantize.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <limits>

#include "ops/op_test_util.h"
#include "ops/quantize/group_quantize.h"

namespace deepinfer {
namespace {

using testing::OwnedTensor;

// The model description's example, section 23.
constexpr float kExample[32] = {0.91796875f, 5.625f,     -4.9375f,          -9.5625f, 11.3125f,
                                1.8125f,     -5.46875f,  -3.328125f,        12.0625f, 1.671875f,
                                -3.09375f,   0.9296875f, 8.9375f,           -4.9375f, -13.3125f,
                                1.921875f,   4.34375f,   -7.4375f,          -6.125f,  14.375f,
                                0.7890625f,  -6.15625f,  0.00823974609375f, 12.3125f, -3.96875f,
                                -2.875f,     3.0625f,    7.40625f,          -8.6875f, -9.5625f,
                                2.671875f,   2.453125f};

std::array<uint8_t, 32> Nibbles(const uint8_t* packed) {
  std::array<uint8_t, 32> codes;
  for (size_t i = 0; i < 32; ++i) codes[i] = (i % 2 == 0 ? packed[i / 2] & 15 : packed[i / 2] >> 4);
  return codes;
}

TEST(GroupQuantizers, KnownCodesAndScales) {
  uint8_t q8[33];
  EncodeQ8Record(kExample, 32, q8);
  EXPECT_EQ(q8[32], 123);
  const std::array<uint8_t, 32> expected_q8 = {0x57, 0x6b, 0xea, 0xf2, 0x73, 0x5e, 0xeb, 0xe5,
                                               0x74, 0x5d, 0xe4, 0x57, 0x71, 0xea, 0xf5, 0x5f,
                                               0x69, 0xef, 0xec, 0x76, 0x55, 0xec, 0x20, 0x74,
                                               0xe8, 0xe4, 0x64, 0x6f, 0xf1, 0xf2, 0x63, 0x62};
  EXPECT_TRUE(std::equal(expected_q8.begin(), expected_q8.end(), q8));

  uint8_t q4p[17];
  EncodeQ4PRecord(kExample, 32, q4p);
  EXPECT_EQ(q4p[16], 129);
  EXPECT_EQ(Nibbles(q4p), (std::array<uint8_t, 32>{0, 3, 0xa, 0xc, 5, 1, 0xb, 0xa, 5, 1, 0xa,
                                                   0, 4, 0xa, 0xd, 1, 2, 0xc, 0xb, 6, 0, 0xb,
                                                   0, 5, 0xa, 9,   2, 4, 0xc, 0xc, 1, 1}));

  for (Numerics numerics : {Numerics::kProduction, Numerics::kReference}) {
    uint8_t q4e[18];
    EncodeQ4ERecord(kExample, 32, numerics, q4e);
    EXPECT_EQ(q4e[16], 0x41);
    EXPECT_EQ(q4e[17], 0x42);
    EXPECT_EQ(Nibbles(q4e), (std::array<uint8_t, 32>{1, 4, 0xc, 0xe, 7, 2, 0xc, 0xb, 7, 1, 0xb,
                                                     1, 6, 0xc, 0xf, 2, 3, 0xd, 0xc, 7, 1, 0xc,
                                                     0, 6, 0xb, 0xa, 2, 5, 0xd, 0xe, 2, 2}));
  }
}

TEST(GroupQuantizers, ScalesStepAtExponentBoundaries) {
  EXPECT_EQ(Q8ScaleByte(448.0f), 127);
  EXPECT_EQ(Q8ScaleByte(449.0f), 128);
  EXPECT_EQ(Q8ScaleByte(224.0f), 126);
  // The next fp32 number above 448; bf16 would have rounded it back.
  EXPECT_EQ(Q8ScaleByte(448.0f + 0x1p-15f), 128);
  EXPECT_EQ(Q8ScaleByte(RoundToBf16(448.0f + 0x1p-15f)), 127);
  EXPECT_EQ(Q4PScaleByte(6.0f), 127);
  EXPECT_EQ(Q4PScaleByte(6.03125f), 128);
  EXPECT_EQ(Q4PScaleByte(3.0f), 126);
}

TEST(GroupQuantizers, Q8ScaleByteEqualsItsIntegerForm) {
  // ((bits + 0x1fffff) >> 23) - 8 for finite fp32 magnitudes from 1e-4 on; every exponent with
  // mantissas around 1.75 and the ends.
  for (uint32_t exponent = 114; exponent <= 254; ++exponent) {
    for (uint32_t mantissa : {0u, 1u, 0x400000u, 0x5fffffu, 0x600000u, 0x600001u, 0x7fffffu}) {
      const uint32_t bits = (exponent << 23) | mantissa;
      const uint32_t expected = ((bits + 0x1fffffu) >> 23) - 8;
      ASSERT_EQ(Q8ScaleByte(std::bit_cast<float>(bits)), expected) << std::hex << bits;
    }
  }
}

TEST(GroupQuantizers, ZeroGroupsGetTheSmallestScale) {
  const float zeros[32] = {};
  uint8_t record[48];
  EncodeQ8Record(zeros, 32, record);
  EXPECT_EQ(record[32], 105);  // 2^-22
  EXPECT_EQ(record[0], 0);
  EncodeQ4PRecord(zeros, 32, record);
  EXPECT_EQ(record[16], 1);  // 2^-126
  EncodeQ4ERecord(zeros, 32, Numerics::kProduction, record);
  EXPECT_EQ(record[16], 0x01);  // 2^-9
  EXPECT_EQ(record[17], 0x01);
}

TEST(GroupQuantizers, TheProfilesDifferInOneTieOfQ4E) {
  const auto code = [](float amax, float x, Numerics numerics) {
    float group[16] = {amax, x};
    uint8_t record[9];
    EncodeQ4ERecord(group, 16, numerics, record);
    return record[0] >> 4;
  };
  EXPECT_EQ(code(11.25f, 2.34375f, Numerics::kProduction), 3);
  EXPECT_EQ(code(11.25f, 2.34375f, Numerics::kReference), 2);
  EXPECT_EQ(code(10.5f, 2.1875f, Numerics::kProduction), 2);
  EXPECT_EQ(code(10.5f, 2.1875f, Numerics::kReference), 2);
}

TEST(GroupQuantizers, Q4EScalesAreCapped) {
  float group[16] = {1e6f};
  uint8_t record[9];
  for (Numerics numerics : {Numerics::kProduction, Numerics::kReference}) {
    EncodeQ4ERecord(group, 16, numerics, record);
    EXPECT_EQ(record[8], 0x7e);  // 448
    EXPECT_EQ(record[0] & 15, 7);
  }
}

TEST(GroupQuantizers, AreIdempotentOnTheirOwnOutput) {
  testing::Random random(3);
  for (int round = 0; round < 200; ++round) {
    float x[64];
    const float gain = std::exp2(static_cast<float>(random.Below(40)) - 20.0f);
    for (float& value : x) value = RoundToBf16(random.Normal() * gain);
    uint8_t first[66];
    uint8_t second[66];
    EncodeQ8Record(x, 64, first);
    DecodeQ8Record(first, 64, x);
    EncodeQ8Record(x, 64, second);
    float y[64];
    DecodeQ8Record(second, 64, y);
    ASSERT_TRUE(std::equal(x, x + 64, y));
    EncodeQ4PRecord(x, 64, first);
    DecodeQ4PRecord(first, 64, x);
    EncodeQ4PRecord(x, 64, second);
    DecodeQ4PRecord(second, 64, y);
    ASSERT_TRUE(std::equal(x, x + 64, y));
    EncodeQ4ERecord(x, 64, Numerics::kProduction, first);
    DecodeQ4ERecord(first, 64, x);
    EncodeQ4ERecord(x, 64, Numerics::kProduction, second);
    DecodeQ4ERecord(second, 64, y);
    ASSERT_TRUE(std::equal(x, x + 64, y));
    for (float value : x) ASSERT_EQ(RoundToBf16(value), value);
  }
}

// Rows that visit every binade and the awkward values.
OwnedTensor HardInput(DType dtype, int64_t rows, int64_t channels) {
  OwnedTensor x(dtype, {rows, channels});
  testing::Random random(11);
  const float special[] = {0.0f,
                           -0.0f,
                           448.0f,
                           -449.0f,
                           1e-5f,
                           0x1p-126f,
                           -0x1p-133f,
                           3e38f,
                           std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::quiet_NaN()};
  for (int64_t i = 0; i < rows * channels; ++i) {
    const float gain = std::exp2(static_cast<float>((i / 32) % 60) - 30.0f);
    float value = random.Normal() * gain;
    if (i % 97 == 5) value = special[random.Below(10)];
    if (dtype == DType::kBf16) {
      static_cast<Bf16*>(x.view().data())[i] = F32ToBf16(value);
    } else {
      static_cast<float*>(x.view().data())[i] = value;
    }
  }
  return x;
}

TEST(QuantizeFp8, TunedHasTheReferencesBits) {
  // Every step is exact or correctly rounded in both, so no tolerance.
  for (DType dtype : {DType::kBf16, DType::kF32}) {
    for (auto [rows, channels] :
         {std::pair<int64_t, int64_t>{1, 32}, {3, 256}, {7, 1280}, {5, 5120}}) {
      const OwnedTensor x = HardInput(dtype, rows, channels);
      OwnedTensor tuned(DType::kBf16, {rows, channels});
      OwnedTensor expected(DType::kBf16, {rows, channels});
      Stream stream(2);
      ASSERT_TRUE(QuantizeFp8({x.view(), tuned.view()}, stream).has_value());
      stream.set_use_reference(true);
      ASSERT_TRUE(QuantizeFp8({x.view(), expected.view()}, stream).has_value());
      EXPECT_EQ(testing::CountDifferentBits(tuned.view(), expected.view()), 0) << channels;
    }
  }
}

TEST(QuantizeFp8, Fp32InputIsNotRoundedToBf16First) {
  OwnedTensor x(DType::kF32, {1, 32});
  x.Row<float>(0)[0] = 448.0f + 0x1p-15f;
  x.Row<float>(0)[3] = 0x1p-9f;
  OwnedTensor y(DType::kBf16, {1, 32});
  for (bool reference : {false, true}) {
    Stream stream(1);
    stream.set_use_reference(reference);
    ASSERT_TRUE(QuantizeFp8({x.view(), y.view()}, stream).has_value());
    EXPECT_EQ(testing::Value(y.view(), 0), 448.0f);
    // At scale 1, which rounding first would give, 2^-9 is the smallest code; at scale 2 it is a
    // tie and goes to zero.
    EXPECT_EQ(testing::Value(y.view(), 3), 0.0f);
  }
}

TEST(QuantizeFp8, RowsAreIndependentAndMayBeQuantizedInPlace) {
  const OwnedTensor x = HardInput(DType::kBf16, 5, 2304);
  testing::ExpectRowsIndependent(5, [&](Stream& stream, int64_t begin, int64_t end) {
    OwnedTensor y = testing::CopyOf(x, {5, 2304});
    EXPECT_TRUE(
        QuantizeFp8({y.view().Rows(begin, end), y.view().Rows(begin, end)}, stream).has_value());
    return testing::Bytes(y.view().Rows(begin, end));
  });
}

TEST(QuantizeFp8, WrongWidthsAreRefused) {
  Stream stream(1);
  OwnedTensor x(DType::kBf16, {2, 48});
  EXPECT_EQ(QuantizeFp8({x.view(), x.view()}, stream).error().field, "x");
}

}  // namespace
}  // namespace deepinfer
