#include "ops/engram/engram.h"

#include <gtest/gtest.h>

#include <bit>
#include <numeric>

#include "ops/op_test_util.h"

namespace deepinfer {
namespace {

using testing::NormalTensor;
using testing::OwnedTensor;

// ---- Hash: the model description's known answers, section 23
// ---------------------------------------------------------------------

constexpr int32_t kDead = -1;  // a position inside an image span

// Look-back of position t with the sticky pad rule.
std::vector<int32_t> LookBack(const std::vector<int32_t>& ids, int64_t t, int32_t pad) {
  std::vector<int32_t> window;
  bool blocked = false;
  for (int64_t s = 0; s < 4; ++s) {
    blocked = blocked || t - s < 0 || ids[static_cast<size_t>(t - s)] == kDead;
    window.push_back(blocked ? pad : ids[static_cast<size_t>(t - s)]);
  }
  return window;
}

std::vector<int64_t> Hash(const std::vector<int32_t>& ids, int64_t t,
                          const std::vector<int64_t>& multipliers,
                          const std::vector<int64_t>& primes) {
  std::vector<int64_t> offsets(primes.size());
  std::exclusive_scan(primes.begin(), primes.end(), offsets.begin(), int64_t{0});
  OwnedTensor lookback(DType::kI32, {1, 4});
  const std::vector<int32_t> window = LookBack(ids, t, 2);
  std::copy(window.begin(), window.end(), lookback.Row<int32_t>(0));
  OwnedTensor rows(DType::kI64, {1, static_cast<int64_t>(primes.size())});
  Stream stream(1);
  EXPECT_TRUE(
      EngramHash({lookback.view(), multipliers, primes, offsets, rows.view()}, stream).has_value());
  return {rows.Row<int64_t>(0), rows.Row<int64_t>(0) + primes.size()};
}

const std::vector<int32_t> kIds = {0, 2, 7, 51234, 99091, kDead, 300, 301, 302, 303};
const std::vector<int64_t> kMultipliers1 = {76632096046245, 4839876093313, 35959672319349,
                                            73987337458391};
const std::vector<int64_t> kMultipliers14 = {67716810739261, 51510806800915, 30921347202721,
                                             82619226485591};
const std::vector<int64_t> kPrimes1 = {16000057, 16000079, 16000081, 16000097, 16000121, 16000129,
                                       16000133, 16000183, 16000189, 16000207, 16000211, 16000253,
                                       16000277, 16000289, 16000307, 16000321, 16000339, 16000381,
                                       16000393, 16000399, 16000403, 16000409, 16000447, 16000463};
const std::vector<int64_t> kPrimes14 = {16000477, 16000487, 16000499, 16000507, 16000511, 16000573,
                                        16000609, 16000627, 16000667, 16000669, 16000693, 16000697,
                                        16000711, 16000729, 16000759, 16000769, 16000781, 16000799,
                                        16000813, 16000819, 16000841, 16000877, 16000879, 16000889};

TEST(EngramHash, KnownRowsOfLayer1) {
  EXPECT_EQ(
      Hash(kIds, 4, kMultipliers1, kPrimes1),
      (std::vector<int64_t>{15644379,  17939917,  32672620,  63132030,  73481557,  89907637,
                            99553713,  124736100, 137434112, 155220387, 174244742, 183676849,
                            202070424, 216164325, 229426263, 247782540, 256618609, 281916393,
                            294775027, 304428552, 322725320, 351961706, 363035076, 375806347}));
  EXPECT_EQ(
      Hash(kIds, 0, kMultipliers1, kPrimes1),
      (std::vector<int64_t>{5702652,   24393184,  39183301,  61503783,  78984481,  90144770,
                            103724983, 121476532, 131476717, 152385926, 164143652, 191599181,
                            198145581, 217419202, 238329687, 247482304, 257520185, 283540304,
                            288689443, 315264704, 322314652, 348890037, 367865216, 380066193}));
  EXPECT_EQ(
      Hash(kIds, 7, kMultipliers1, kPrimes1),
      (std::vector<int64_t>{3572258,   27669860,  34228689,  54726039,  69561559,  95864123,
                            109019889, 113717534, 137653923, 146894446, 161400689, 177894207,
                            201180961, 212864538, 238440304, 249485199, 267713653, 279175096,
                            298510115, 316187817, 333310122, 350998934, 361846813, 382494708}));
}

TEST(EngramHash, KnownRowsOfLayer14) {
  EXPECT_EQ(
      Hash(kIds, 4, kMultipliers14, kPrimes14),
      (std::vector<int64_t>{5405626,   28003460,  41748475,  61717006,  65342522,  85469871,
                            111996122, 118497767, 141506765, 158997771, 166219045, 176586151,
                            205487815, 218913672, 237196847, 246302516, 271129098, 287348668,
                            295727333, 317136734, 320697847, 347014928, 362632083, 380817872}));
}

TEST(EngramHash, KnownRowsOfTheTinyConfiguration) {
  const std::vector<int32_t> ids = {0, 2, 7, 399, 123, kDead, 300, 301, 302, 303};
  const std::vector<int64_t> m1 = {18984069153536581, 1198982504596559, 8908289623672409,
                                   18328883108567563};
  const std::vector<int64_t> m4 = {20378323963399201, 1248012217874625, 18246170261325197,
                                   4695688200551669};
  const std::vector<int64_t> p1 = {1009, 1013, 1019, 1021, 1031, 1033};
  const std::vector<int64_t> p4 = {1039, 1049, 1051, 1061, 1063, 1069};
  EXPECT_EQ(Hash(ids, 4, m1, p1), (std::vector<int64_t>{660, 1353, 2546, 3053, 4613, 5761}));
  EXPECT_EQ(Hash(ids, 7, m1, p1), (std::vector<int64_t>{0, 1738, 2531, 3528, 4645, 5870}));
  EXPECT_EQ(Hash(ids, 4, m4, p4), (std::vector<int64_t>{95, 1194, 2507, 3659, 4868, 5343}));
  EXPECT_EQ(Hash(ids, 9, m4, p4), (std::vector<int64_t>{526, 1504, 2667, 3183, 5137, 5351}));
}

TEST(EngramHash, ThePrimesSumToTheTableSizesAndRowsStayInside) {
  testing::Random random(1);
  for (int i = 0; i < 200; ++i) {
    std::vector<int32_t> ids(4);
    for (int32_t& id : ids) id = static_cast<int32_t>(random.Below(99092));
    const std::vector<int64_t> rows = Hash(ids, 3, kMultipliers1, kPrimes1);
    int64_t offset = 0;
    for (size_t j = 0; j < rows.size(); ++j) {
      ASSERT_GE(rows[j], offset);
      offset += kPrimes1[j];
      ASSERT_LT(rows[j], offset);
    }
  }
}

TEST(EngramHash, CountsThatDoNotFitAreRefused) {
  OwnedTensor lookback(DType::kI32, {1, 4});
  OwnedTensor rows(DType::kI64, {1, 5});
  const std::vector<int64_t> five(5, 1009);
  Stream stream(1);
  EXPECT_FALSE(
      EngramHash({lookback.view(), kMultipliers1, five, five, rows.view()}, stream).has_value());
}

// ---- Gather
// ------------------------------------------------------------------------------------------------------------------------

TEST(EngramGather, TunedHasTheReferencesBitsAndRowsAreIndependent) {
  // Every code, NaN included, with scales of all sizes.
  for (int64_t channels : {64, 256}) {
    constexpr int64_t kTableRows = 301;
    OwnedTensor weight(DType::kFp8E4M3, {kTableRows, channels});
    OwnedTensor scale(DType::kE8M0, {kTableRows, channels / 32});
    for (int64_t i = 0; i < kTableRows * channels; ++i)
      weight.Row<uint8_t>(0)[i] = static_cast<uint8_t>(i * 7 + i / 256);
    for (int64_t i = 0; i < kTableRows * channels / 32; ++i)
      scale.Row<uint8_t>(0)[i] = static_cast<uint8_t>(60 + i % 120);
    OwnedTensor rows(DType::kI64, {5, 24});
    testing::Random random(2);
    for (int64_t i = 0; i < 5 * 24; ++i) rows.Row<int64_t>(0)[i] = random.Below(kTableRows);
    const auto run = [&](Stream& stream, int64_t begin, int64_t end) {
      OwnedTensor out(DType::kBf16, {end - begin, 24 * channels});
      EXPECT_TRUE(
          EngramGather({rows.view().Rows(begin, end), weight.view(), scale.view(), out.view()},
                       stream)
              .has_value());
      return testing::Bytes(out.view());
    };
    testing::ExpectRowsIndependent(5, run);
    Stream tuned(1);
    Stream reference(1);
    reference.set_use_reference(true);
    EXPECT_EQ(run(tuned, 0, 5), run(reference, 0, 5));
  }
}

TEST(EngramGather, DequantizesWithTheScaleOfTheGroup) {
  OwnedTensor weight(DType::kFp8E4M3, {2, 64});
  OwnedTensor scale(DType::kE8M0, {2, 2});
  weight.Row<uint8_t>(1)[0] = 0x38;   // 1.0
  weight.Row<uint8_t>(1)[63] = 0xb9;  // -1.125
  scale.Row<uint8_t>(1)[0] = 128;
  scale.Row<uint8_t>(1)[1] = 126;
  OwnedTensor rows(DType::kI64, {1, 1});
  rows.Row<int64_t>(0)[0] = 1;
  OwnedTensor out(DType::kBf16, {1, 64});
  Stream stream(1);
  ASSERT_TRUE(
      EngramGather({rows.view(), weight.view(), scale.view(), out.view()}, stream).has_value());
  EXPECT_EQ(testing::Value(out.view(), 0), 2.0f);
  EXPECT_EQ(testing::Value(out.view(), 63), -0.5625f);
}

// ---- Gate
// --------------------------------------------------------------------------------------------------------------------------

TEST(EngramGate, KnownValues) {
  EXPECT_NEAR(EngramGate(0.0f), 0.50025f, 1e-6f);
  EXPECT_NEAR(EngramGate(-0.0f), 0.49975f, 1e-6f);
  EXPECT_NEAR(EngramGate(0.25f), 0.62245933f, 1e-7f);
  EXPECT_NEAR(EngramGate(-0.25f), 0.37754067f, 1e-7f);
  EXPECT_NEAR(EngramGate(4.0f), 0.88079708f, 1e-7f);
}

struct ApplyCase {
  OwnedTensor kv, q_weight, k_weight, streams;
  int64_t rows;
  int64_t hidden;
  ApplyCase(int64_t row_count, int64_t width)
      : kv(NormalTensor(DType::kBf16, {row_count, 5 * width}, 1, 2.0f)),
        q_weight(NormalTensor(DType::kBf16, {4, width}, 2)),
        k_weight(NormalTensor(DType::kBf16, {4, width}, 3)),
        streams(NormalTensor(DType::kBf16, {row_count, 4, width}, 4)),
        rows(row_count),
        hidden(width) {}
  std::vector<uint8_t> Run(Stream& stream, int64_t begin, int64_t end) const {
    OwnedTensor updated = testing::CopyOf(streams, {rows, 4, hidden});
    EngramApplyArgs args;
    args.kv = kv.view().Rows(begin, end);
    args.q_weight = q_weight.view();
    args.k_weight = k_weight.view();
    args.streams = updated.view().Rows(begin, end);
    EXPECT_TRUE(EngramApply(args, stream).has_value());
    return testing::Bytes(args.streams);
  }
};

TEST(EngramApply, TunedMatchesReferenceAndRowsAreIndependent) {
  // The three sums are in double in both; a different order (1e-16) may move the gate by one fp32
  // unit, an element by one bf16 step, and hardly ever does.
  for (auto [rows, hidden] : {std::pair<int64_t, int64_t>{3, 256}, {2, 5120}, {2, 40}}) {
    const ApplyCase test(rows, hidden);
    testing::ExpectRowsIndependent(rows, [&](Stream& stream, int64_t begin, int64_t end) {
      return test.Run(stream, begin, end);
    });
    Stream stream(1);
    const std::vector<uint8_t> tuned = test.Run(stream, 0, rows);
    stream.set_use_reference(true);
    const std::vector<uint8_t> expected = test.Run(stream, 0, rows);
    int64_t different = 0;
    for (size_t i = 0; i < tuned.size(); i += 2) {
      uint16_t a;
      uint16_t b;
      std::memcpy(&a, &tuned[i], 2);
      std::memcpy(&b, &expected[i], 2);
      different += a != b;
      const float value = Bf16ToF32(Bf16{b});
      ASSERT_NEAR(Bf16ToF32(Bf16{a}), value, std::fabs(value) / 128 + 1e-6f);
    }
    EXPECT_LE(different, rows * hidden / 250);
  }
}

TEST(EngramApply, AMatchingKeyOpensTheGate) {
  // Stream 0 equals its key with unit weights: dot = sqrt(hidden), gate = sigmoid(hidden^(1/4));
  // stream 1 is its negative.
  for (bool reference : {false, true}) {
    constexpr int64_t kHidden = 256;
    OwnedTensor kv(DType::kBf16, {1, 5 * kHidden});
    OwnedTensor ones(DType::kBf16, {4, kHidden});
    OwnedTensor streams(DType::kBf16, {1, 4, kHidden});
    for (int64_t i = 0; i < kHidden; ++i) {
      kv.Row<Bf16>(0)[i] = F32ToBf16(2.0f);
      kv.Row<Bf16>(0)[kHidden + i] = F32ToBf16(-2.0f);
      kv.Row<Bf16>(0)[4 * kHidden + i] = F32ToBf16(8.0f);
      streams.Row<Bf16>(0)[i] = F32ToBf16(1.0f);
      streams.Row<Bf16>(0)[kHidden + i] = F32ToBf16(1.0f);
      for (int s = 0; s < 4; ++s) ones.Row<Bf16>(s)[i] = F32ToBf16(1.0f);
    }
    Stream stream(1);
    stream.set_use_reference(reference);
    ASSERT_TRUE(
        EngramApply({kv.view(), ones.view(), ones.view(), streams.view()}, stream).has_value());
    // sqrt(sqrt(256)) = 4.
    EXPECT_NEAR(testing::Value(streams.view(), 5), 1.0f + 8.0f * 0.98201379f, 0.04f);
    EXPECT_NEAR(testing::Value(streams.view(), kHidden + 5), 1.0f + 8.0f * 0.01798621f, 0.005f);
    // A zero stream has dot 0: the gate is half open.
    EXPECT_NEAR(testing::Value(streams.view(), 2 * kHidden + 5), 8.0f * 0.50025f, 0.02f);
  }
}

}  // namespace
}  // namespace deepinfer
