#include "ops/moe/moe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "ops/moe/moe_impl.h"
#include "ops/op_test_util.h"

namespace deepinfer {
namespace {

using testing::NormalTensor;
using testing::OwnedTensor;

TEST(SqrtSoftplus, KnownValues) {
  const std::pair<float, float> cases[] = {{-30.0f, 3.0590232e-7f}, {-17.0f, 2.0346837e-4f},
                                           {-5.0f, 0.0819472f},     {0.0f, 0.8325546f},
                                           {5.0f, 2.2375691f},      {25.0f, 5.0f}};
  for (auto [z, expected] : cases)
    EXPECT_NEAR(reference::SqrtSoftplus(z), expected, std::fabs(expected) * 5e-7f) << z;
}

TEST(RouterSelect, PicksTheBestBiasedScoresAndWeighsByTheUnbiasedOnes) {
  constexpr int64_t kExperts = 384;
  constexpr int64_t kChosen = 6;
  const OwnedTensor logits = NormalTensor(DType::kF32, {9, kExperts}, 1, 2.0f);
  const OwnedTensor bias = NormalTensor(DType::kF32, {kExperts}, 2, 0.3f);
  OwnedTensor experts(DType::kI32, {9, kChosen});
  OwnedTensor weights(DType::kF32, {9, kChosen});
  Stream stream(2);
  ASSERT_TRUE(
      RouterSelect({logits.view(), bias.view(), 1.0f, 1.5f, experts.view(), weights.view()}, stream)
          .has_value());
  for (int64_t t = 0; t < 9; ++t) {
    std::vector<int32_t> order(kExperts);
    std::iota(order.begin(), order.end(), 0);
    const auto score = [&](int32_t e) {
      return std::sqrt(std::log1p(std::exp(static_cast<double>(logits.Row<float>(t)[e]))));
    };
    const auto biased = [&](int32_t e) {
      return score(e) + static_cast<double>(bias.Row<float>(0)[e]);
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return biased(a) > biased(b); });
    double sum = 0.0;
    for (int64_t i = 0; i < kChosen; ++i) sum += score(order[static_cast<size_t>(i)]);
    for (int64_t i = 0; i < kChosen; ++i) {
      const int32_t e = order[static_cast<size_t>(i)];
      EXPECT_EQ(experts.Row<int32_t>(t)[i], e);
      EXPECT_NEAR(weights.Row<float>(t)[i], score(e) / sum * 1.5, 1e-6);
    }
  }
}

TEST(RouterSelect, TiesGoToTheSmallerExpertAndNanIsChosenLast) {
  OwnedTensor logits(DType::kF32, {1, 8});
  OwnedTensor bias(DType::kF32, {8});
  for (int64_t e = 0; e < 8; ++e) logits.Row<float>(0)[e] = e == 3 ? 2.0f : 1.0f;
  logits.Row<float>(0)[0] = std::numeric_limits<float>::quiet_NaN();
  OwnedTensor experts(DType::kI32, {1, 4});
  OwnedTensor weights(DType::kF32, {1, 4});
  Stream stream(1);
  ASSERT_TRUE(
      RouterSelect({logits.view(), bias.view(), 1.0f, 1.0f, experts.view(), weights.view()}, stream)
          .has_value());
  const int32_t* chosen = experts.Row<int32_t>(0);
  EXPECT_EQ(std::vector<int32_t>(chosen, chosen + 4), (std::vector<int32_t>{3, 1, 2, 4}));
}

TEST(RouterSelect, RowsAreIndependent) {
  const OwnedTensor logits = NormalTensor(DType::kF32, {9, 16}, 3, 2.0f);
  const OwnedTensor bias = NormalTensor(DType::kF32, {16}, 4, 0.3f);
  testing::ExpectRowsIndependent(9, [&](Stream& stream, int64_t begin, int64_t end) {
    OwnedTensor experts(DType::kI32, {end - begin, 3});
    OwnedTensor weights(DType::kF32, {end - begin, 3});
    const RouterSelectArgs args = {
        logits.view().Rows(begin, end), bias.view(), 1.0f, 1.5f, experts.view(), weights.view()};
    EXPECT_TRUE(RouterSelect(args, stream).has_value());
    return testing::Joined({experts.view(), weights.view()});
  });
}

TEST(GroupByExpert, SortsRowsStablyAndKeepsTheirWeights) {
  constexpr int64_t kRows = 37;
  constexpr int64_t kChosen = 3;
  OwnedTensor experts(DType::kI32, {kRows, kChosen});
  const OwnedTensor weights = NormalTensor(DType::kF32, {kRows, kChosen}, 5);
  testing::Random random(6);
  for (int64_t i = 0; i < kRows * kChosen; ++i)
    experts.Row<int32_t>(0)[i] = static_cast<int32_t>(random.Below(7) + (i % kChosen) * 7);
  OwnedTensor row_index(DType::kI32, {kRows * kChosen});
  OwnedTensor grouped(DType::kF32, {kRows * kChosen});
  OwnedTensor offsets(DType::kI32, {25});
  OwnedTensor position(DType::kI32, {kRows, kChosen});
  Stream stream(1);
  ASSERT_TRUE(GroupByExpert({experts.view(), weights.view(), 24, row_index.view(), grouped.view(),
                             offsets.view(), position.view()},
                            stream)
                  .has_value());
  EXPECT_EQ(offsets.Row<int32_t>(0)[0], 0);
  EXPECT_EQ(offsets.Row<int32_t>(0)[24], kRows * kChosen);
  for (int64_t i = 0; i < kRows * kChosen; ++i) {
    const int32_t e = experts.Row<int32_t>(0)[i];
    const int32_t p = position.Row<int32_t>(0)[i];
    EXPECT_GE(p, offsets.Row<int32_t>(0)[e]);
    EXPECT_LT(p, offsets.Row<int32_t>(0)[e + 1]);
    EXPECT_EQ(row_index.Row<int32_t>(0)[p], i / kChosen);
    EXPECT_EQ(grouped.Row<float>(0)[p], weights.Row<float>(0)[i]);
  }
  for (int64_t e = 0; e < 24; ++e) {
    const int32_t* rows = row_index.Row<int32_t>(0);
    EXPECT_TRUE(
        std::is_sorted(rows + offsets.Row<int32_t>(0)[e], rows + offsets.Row<int32_t>(0)[e + 1]));
  }
}

TEST(Swiglu, ClampsBothInputsOnTheirSides) {
  // limit 1: gate -8 passes, gate 8 counts as 1; up is cut to +-1.
  for (bool reference : {false, true}) {
    OwnedTensor gate(DType::kBf16, {1, 32});
    OwnedTensor up(DType::kBf16, {1, 32});
    OwnedTensor weight(DType::kF32, {1});
    OwnedTensor out(DType::kBf16, {1, 32});
    weight.Row<float>(0)[0] = 2.0f;
    const float gates[4] = {8.0f, 8.0f, 1.0f, -8.0f};
    const float ups[4] = {5.0f, -5.0f, 0.5f, 5.0f};
    for (int i = 0; i < 4; ++i) {
      gate.Row<Bf16>(0)[i] = F32ToBf16(gates[i]);
      up.Row<Bf16>(0)[i] = F32ToBf16(ups[i]);
    }
    Stream stream(1);
    stream.set_use_reference(reference);
    ASSERT_TRUE(
        Swiglu({gate.view(), up.view(), weight.view(), 1.0f, out.view()}, stream).has_value());
    const float silu_1 = 0.7310586f;
    const float silu_minus_8 = -0.00268280f;
    const float expected[4] = {2 * silu_1, -2 * silu_1, silu_1, 2 * silu_minus_8};
    for (int i = 0; i < 4; ++i)
      EXPECT_NEAR(testing::Value(out.view(), i), expected[i], std::fabs(expected[i]) / 15) << i;
  }
}

TEST(Swiglu, TunedMatchesReference) {
  // The exponentials differ by 3e-7, so before Q8 values agree to 1e-6: afterwards an element may
  // be on the neighbouring E4M3 point (2^-3 of itself, or 2^-15 of the group's maximum near zero),
  // with probability about 1e-6 / 2^-4 per element.
  for (Numerics numerics : {Numerics::kProduction, Numerics::kReference}) {
    for (auto [rows, channels] : {std::pair<int64_t, int64_t>{1, 64}, {7, 64}, {5, 2304}}) {
      const OwnedTensor gate = NormalTensor(DType::kBf16, {rows, channels}, 1, 4.0f);
      const OwnedTensor up = NormalTensor(DType::kBf16, {rows, channels}, 2, 4.0f);
      const OwnedTensor weight = NormalTensor(DType::kF32, {rows}, 3);
      OwnedTensor tuned(DType::kBf16, {rows, channels});
      OwnedTensor expected(DType::kBf16, {rows, channels});
      Stream stream(2);
      ASSERT_TRUE(
          Swiglu({gate.view(), up.view(), weight.view(), 10.0f, tuned.view(), numerics}, stream)
              .has_value());
      stream.set_use_reference(true);
      ASSERT_TRUE(
          Swiglu({gate.view(), up.view(), weight.view(), 10.0f, expected.view(), numerics}, stream)
              .has_value());
      EXPECT_LE(testing::CountDifferentBits(tuned.view(), expected.view()),
                1 + rows * channels / 1000);
      for (int64_t i = 0; i < rows * channels; ++i) {
        const float e = testing::Value(expected.view(), i);
        ASSERT_NEAR(testing::Value(tuned.view(), i), e, std::fabs(e) / 8 + 100 * 0x1p-15f);
      }
    }
  }
}

TEST(Swiglu, ExtremeAndNanInputsBehaveLikeTheReference) {
  OwnedTensor gate(DType::kBf16, {1, 32});
  OwnedTensor up(DType::kBf16, {1, 32});
  const float values[] = {
      -3e38f, -100.0f, -88.5f, -87.0f, 0.0f, 3e38f, std::numeric_limits<float>::quiet_NaN()};
  for (int i = 0; i < 7; ++i) {
    gate.Row<Bf16>(0)[i] = F32ToBf16(values[i]);
    up.Row<Bf16>(0)[i] = F32ToBf16(1.0f);
    gate.Row<Bf16>(0)[8 + i] = F32ToBf16(1.0f);
    up.Row<Bf16>(0)[8 + i] = F32ToBf16(values[i]);
  }
  OwnedTensor out[2] = {OwnedTensor(DType::kBf16, {1, 32}), OwnedTensor(DType::kBf16, {1, 32})};
  for (int i = 0; i < 2; ++i) {
    Stream stream(1);
    stream.set_use_reference(i == 1);
    ASSERT_TRUE(Swiglu({gate.view(), up.view(), {}, 10.0f, out[i].view()}, stream).has_value());
  }
  for (int64_t i = 0; i < 32; ++i) {
    const float a = testing::Value(out[0].view(), i);
    const float b = testing::Value(out[1].view(), i);
    EXPECT_EQ(std::isnan(a), std::isnan(b)) << i;
    if (!std::isnan(a)) {
      EXPECT_EQ(a, b) << i;
    }
  }
}

TEST(Swiglu, RowsAreIndependent) {
  const OwnedTensor gate = NormalTensor(DType::kBf16, {5, 2304}, 1, 4.0f);
  const OwnedTensor up = NormalTensor(DType::kBf16, {5, 2304}, 2, 4.0f);
  testing::ExpectRowsIndependent(5, [&](Stream& stream, int64_t begin, int64_t end) {
    OwnedTensor out(DType::kBf16, {end - begin, 2304});
    EXPECT_TRUE(
        Swiglu({gate.view().Rows(begin, end), up.view().Rows(begin, end), {}, 10.0f, out.view()},
               stream)
            .has_value());
    return testing::Bytes(out.view());
  });
}

// Rows with their experts in slots; grouped rows in expert order.
struct CombineCase {
  static constexpr int64_t kRows = 9;
  static constexpr int64_t kChosen = 3;
  int64_t hidden;
  OwnedTensor routed, position, experts, shared;
  explicit CombineCase(int64_t width)
      : hidden(width),
        routed(NormalTensor(DType::kBf16, {kRows * kChosen, width}, 1)),
        position(DType::kI32, {kRows, kChosen}),
        experts(DType::kI32, {kRows, kChosen}),
        shared(NormalTensor(DType::kBf16, {kRows, width}, 2)) {
    for (int64_t i = 0; i < kRows * kChosen; ++i) {
      position.Row<int32_t>(0)[i] = static_cast<int32_t>(
          (i * 10) % (kRows * kChosen));  // 10 and 27 share no factor: a permutation
      experts.Row<int32_t>(0)[i] = static_cast<int32_t>((i * 5 + 3) % 16);
    }
  }
  std::vector<uint8_t> Run(Stream& stream, int64_t begin, int64_t end, Numerics numerics) const {
    OwnedTensor y(DType::kBf16, {end - begin, hidden});
    // Every row may address all grouped rows; the contract wants rows * k of them, so a lone row
    // gets its own compact set.
    OwnedTensor local(DType::kBf16, {(end - begin) * kChosen, hidden});
    OwnedTensor local_position(DType::kI32, {end - begin, kChosen});
    for (int64_t i = 0; i < (end - begin) * kChosen; ++i) {
      const int32_t source = position.Row<int32_t>(0)[begin * kChosen + i];
      const auto target = static_cast<int64_t>(
          (i * 2 + 1) % ((end - begin) * kChosen));  // odd count: a permutation
      std::memcpy(local.Row<Bf16>(target), routed.Row<Bf16>(source),
                  static_cast<size_t>(hidden) * 2);
      local_position.Row<int32_t>(0)[i] = static_cast<int32_t>(target);
    }
    MoeCombineArgs args;
    args.routed = local.view();
    args.slot_position = local_position.view();
    args.experts = experts.view().Rows(begin, end);
    args.shared = shared.view().Rows(begin, end);
    args.y = y.view();
    args.numerics = numerics;
    EXPECT_TRUE(MoeCombine(args, stream).has_value());
    return testing::Bytes(y.view());
  }
};

TEST(MoeCombine, TunedHasTheReferencesBitsAndRowsAreIndependent) {
  for (Numerics numerics : {Numerics::kProduction, Numerics::kReference}) {
    for (int64_t hidden : {256, 5120, 40}) {
      const CombineCase test(hidden);
      const auto run = [&](Stream& stream, int64_t begin, int64_t end) {
        return test.Run(stream, begin, end, numerics);
      };
      testing::ExpectRowsIndependent(CombineCase::kRows, run);
      Stream tuned(1);
      Stream reference(1);
      reference.set_use_reference(true);
      EXPECT_EQ(run(tuned, 0, CombineCase::kRows), run(reference, 0, CombineCase::kRows));
    }
  }
}

TEST(MoeCombine, TheOrderOfTheSumFollowsTheProfile) {
  // 2^24 + 1 - 2^24 in fp32 is 0 or 1 depending on the order. Production: shared, slot 0, slot 1.
  // Reference: expert 2, expert 5, shared.
  for (bool plain : {false, true}) {
    OwnedTensor routed(DType::kBf16, {2, 16});
    OwnedTensor position(DType::kI32, {1, 2});
    OwnedTensor experts(DType::kI32, {1, 2});
    OwnedTensor shared(DType::kBf16, {1, 16});
    OwnedTensor y(DType::kBf16, {1, 16});
    position.Row<int32_t>(0)[1] = 1;
    experts.Row<int32_t>(0)[0] = 5;
    experts.Row<int32_t>(0)[1] = 2;
    for (int64_t i = 0; i < 16; ++i) {
      shared.Row<Bf16>(0)[i] = F32ToBf16(1.0f);
      routed.Row<Bf16>(0)[i] = F32ToBf16(0x1p24f);
      routed.Row<Bf16>(1)[i] = F32ToBf16(-0x1p24f);
    }
    MoeCombineArgs args = {routed.view(), position.view(), experts.view(),
                           shared.view(), y.view(),        Numerics::kProduction};
    Stream stream(1);
    stream.set_use_reference(plain);
    ASSERT_TRUE(MoeCombine(args, stream).has_value());
    EXPECT_EQ(testing::Value(y.view(), 7), 0.0f);
    args.numerics = Numerics::kReference;
    ASSERT_TRUE(MoeCombine(args, stream).has_value());
    EXPECT_EQ(testing::Value(y.view(), 7), 1.0f);
  }
}

TEST(Moe, WrongShapesAreRefused) {
  Stream stream(1);
  OwnedTensor narrow(DType::kBf16, {1, 48});
  EXPECT_EQ(Swiglu({narrow.view(), narrow.view(), {}, 1.0f, narrow.view()}, stream).error().field,
            "gate");
  OwnedTensor logits(DType::kF32, {1, 4});
  OwnedTensor bias(DType::kF32, {4});
  OwnedTensor experts(DType::kI32, {1, 5});
  OwnedTensor weights(DType::kF32, {1, 5});
  EXPECT_EQ(
      RouterSelect({logits.view(), bias.view(), 1.0f, 1.0f, experts.view(), weights.view()}, stream)
          .error()
          .field,
      "experts");
}

}  // namespace
}  // namespace deepinfer
