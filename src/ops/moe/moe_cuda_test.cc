#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "ops/cuda/cuda_test_util.h"
#include "ops/linear/linear_test_util.h"
#include "ops/moe/moe.h"
#include "ops/moe/moe_impl.h"

namespace deepinfer {
namespace {

using testing::CudaTest;
using testing::DeviceTensor;
using testing::NormalTensor;
using testing::OwnedTensor;
using testing::Value;

// What routing makes of `rows` rows.
struct Routing {
  OwnedTensor experts, weights, row_index, grouped_weight, group_offsets, slot_position;

  std::vector<const OwnedTensor*> All() const {
    return {&experts, &weights, &row_index, &grouped_weight, &group_offsets, &slot_position};
  }
};

class MoeCuda : public CudaTest {
 protected:
  enum class Launches { kOne, kTwo };

  Routing Route(const TensorView& logits, const TensorView& bias, int64_t k, int64_t num_experts,
                Launches launches) {
    const int64_t rows = logits.rows();
    const DeviceTensor d_logits(logits, stream());
    const DeviceTensor d_bias(bias, stream());
    const DeviceTensor experts(DType::kI32, {rows, k}, stream());
    const DeviceTensor weights(DType::kF32, {rows, k}, stream());
    const DeviceTensor row_index(DType::kI32, {rows * k}, stream());
    const DeviceTensor grouped_weight(DType::kF32, {rows * k}, stream());
    const DeviceTensor group_offsets(DType::kI32, {num_experts + 1}, stream());
    const DeviceTensor slot_position(DType::kI32, {rows, k}, stream());
    const RouterSelectArgs select = {d_logits.view(), d_bias.view(), 1.25f, 1.5f,
                                     experts.view(),  weights.view()};
    const GroupByExpertArgs group = {
        experts.view(),        weights.view(),       num_experts,         row_index.view(),
        grouped_weight.view(), group_offsets.view(), slot_position.view()};
    if (launches == Launches::kOne) {
      const Status status = RouteExperts(select, group, stream());
      EXPECT_TRUE(status.has_value()) << status.error().message;
    } else {
      EXPECT_TRUE(RouterSelect(select, stream()).has_value());
      EXPECT_TRUE(GroupByExpert(group, stream()).has_value());
    }
    return {experts.Download(stream()),       weights.Download(stream()),
            row_index.Download(stream()),     grouped_weight.Download(stream()),
            group_offsets.Download(stream()), slot_position.Download(stream())};
  }

  // Selection against the CPU: the same experts in the same order, unless two biased scores are
  // closer than the exponentials' errors (2 ulp each); weights within a few ulp. Grouping of these
  // experts: the CPU's integers.
  void ExpectRoutingOfTheCpu(int64_t rows, int64_t logit_experts, int64_t k, int64_t num_experts) {
    SCOPED_TRACE(::testing::Message() << rows << " rows, " << k << " of " << logit_experts);
    const OwnedTensor logits = NormalTensor(DType::kF32, {rows, logit_experts}, 1, 2.0f);
    const OwnedTensor bias = NormalTensor(DType::kF32, {logit_experts}, 2, 0.3f);
    const Routing one = Route(logits.view(), bias.view(), k, num_experts, Launches::kOne);
    const Routing two = Route(logits.view(), bias.view(), k, num_experts, Launches::kTwo);
    for (size_t i = 0; i < one.All().size(); ++i) {
      if (one.All()[i]->bytes() == 0) continue;
      EXPECT_EQ(std::memcmp(one.All()[i]->view().data(), two.All()[i]->view().data(),
                            static_cast<size_t>(one.All()[i]->bytes())),
                0)
          << "result " << i << " differs between one launch and two";
    }

    OwnedTensor experts(DType::kI32, {rows, k});
    OwnedTensor weights(DType::kF32, {rows, k});
    ASSERT_TRUE(
        RouterSelect({logits.view(), bias.view(), 1.25f, 1.5f, experts.view(), weights.view()},
                     cpu_stream())
            .has_value());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t slot = 0; slot < k; ++slot) {
        const int32_t expected = experts.Row<int32_t>(r)[slot];
        const int32_t chosen = one.experts.Row<int32_t>(r)[slot];
        ASSERT_GE(chosen, 0);
        ASSERT_LT(chosen, logit_experts);
        const auto biased = [&](int32_t e) {
          return reference::SqrtSoftplus(logits.Row<float>(r)[e] / 1.25f) + bias.Row<float>(0)[e];
        };
        if (chosen != expected) {
          ASSERT_NEAR(biased(chosen), biased(expected), 1e-6f) << r;
        }
        ASSERT_NEAR(one.weights.Row<float>(r)[slot], weights.Row<float>(r)[slot], 1e-6f);
      }
    }

    OwnedTensor row_index(DType::kI32, {rows * k});
    OwnedTensor grouped_weight(DType::kF32, {rows * k});
    OwnedTensor group_offsets(DType::kI32, {num_experts + 1});
    OwnedTensor slot_position(DType::kI32, {rows, k});
    ASSERT_TRUE(
        GroupByExpert({one.experts.view(), one.weights.view(), num_experts, row_index.view(),
                       grouped_weight.view(), group_offsets.view(), slot_position.view()},
                      cpu_stream())
            .has_value());
    const OwnedTensor* expected[4] = {&row_index, &grouped_weight, &group_offsets, &slot_position};
    for (size_t i = 0; i < 4; ++i) {
      if (expected[i]->bytes() == 0) continue;
      EXPECT_EQ(std::memcmp(one.All()[2 + i]->view().data(), expected[i]->view().data(),
                            static_cast<size_t>(expected[i]->bytes())),
                0)
          << "grouping, result " << i;
    }
  }
};

TEST_F(MoeCuda, RoutingIsTheCpusWithOneLaunchAndWithTwo) {
  for (int64_t rows : {0, 1, 2, 7, 17, 65}) {
    ExpectRoutingOfTheCpu(rows, 16, 3, 16);
    ExpectRoutingOfTheCpu(rows, 384, 6, 384);
  }
  ExpectRoutingOfTheCpu(5, 8, 2, 12);  // groups that no expert of the router fills
  ExpectRoutingOfTheCpu(3, 1000, 7, 1000);
  ExpectRoutingOfTheCpu(2, 4, 4, 4);
}

TEST_F(MoeCuda, RoutingOfManyRowsIsTheCpus) {
  for (int64_t rows : {256, 257, 300, 1024, 1025, 5000}) ExpectRoutingOfTheCpu(rows, 384, 6, 384);
  ExpectRoutingOfTheCpu(2000, 128, 3, 128);
}

TEST_F(MoeCuda, TiesGoToTheSmallerExpertAndNanIsChosenLast) {
  OwnedTensor logits(DType::kF32, {1, 40});
  OwnedTensor bias(DType::kF32, {40});
  for (int64_t e = 0; e < 40; ++e) logits.Row<float>(0)[e] = e == 35 ? 2.0f : 1.0f;
  logits.Row<float>(0)[0] = std::numeric_limits<float>::quiet_NaN();
  const Routing routing = Route(logits.view(), bias.view(), 4, 40, Launches::kOne);
  const int32_t* chosen = routing.experts.Row<int32_t>(0);
  EXPECT_EQ(std::vector<int32_t>(chosen, chosen + 4), (std::vector<int32_t>{35, 1, 2, 3}));
  // All of them, NaN last.
  OwnedTensor few(DType::kF32, {1, 4});
  OwnedTensor zero(DType::kF32, {4});
  few.Row<float>(0)[1] = std::numeric_limits<float>::quiet_NaN();
  const Routing all = Route(few.view(), zero.view(), 4, 4, Launches::kOne);
  const int32_t* order = all.experts.Row<int32_t>(0);
  EXPECT_EQ(std::vector<int32_t>(order, order + 4), (std::vector<int32_t>{0, 2, 3, 1}));
}

TEST_F(MoeCuda, ARowIsRoutedTheSameInEveryBatch) {
  constexpr int64_t kRows = 65;
  const OwnedTensor logits = NormalTensor(DType::kF32, {kRows, 384}, 3, 2.0f);
  const OwnedTensor bias = NormalTensor(DType::kF32, {384}, 4, 0.3f);
  const Routing all = Route(logits.view(), bias.view(), 6, 384, Launches::kOne);
  for (int64_t count : {1, 2, 7, 9}) {
    const Routing some =
        Route(logits.view().Rows(30, 30 + count), bias.view(), 6, 384, Launches::kOne);
    EXPECT_EQ(testing::Joined({some.experts.view(), some.weights.view()}),
              testing::Joined({all.experts.view().Rows(30, 30 + count),
                               all.weights.view().Rows(30, 30 + count)}));
  }
}

// Route() against Linear() and RouteExperts(), which are two other kernels: every bit.
TEST_F(MoeCuda, RouteIsTheLinearAndItsRouting) {
  struct Shape {
    int64_t experts, k, columns;
  };
  // Segments of K: one, two of which one is short, seven; columns that the packing pads.
  for (const Shape& shape : {Shape{12, 3, 64}, {40, 2, 328}, {384, 6, 512}, {128, 3, 5120}}) {
    const testing::StoredWeight stored =
        testing::RandomWeight(WeightFormat::kBf16, shape.experts, shape.columns, 7);
    const auto weight = PackLinearWeight(stored.source, stream());
    ASSERT_TRUE(weight.has_value()) << weight.error().message;
    const OwnedTensor bias = NormalTensor(DType::kF32, {shape.experts}, 2, 0.3f);
    const DeviceTensor d_bias(bias.view(), stream());
    for (int64_t rows : {0, 1, 8, 9, 17, 33, 70, 140}) {
      if (shape.columns > 1000 && rows > 33 && !testing::OnRealDevice()) continue;
      SCOPED_TRACE(::testing::Message() << rows << " rows, " << shape.experts << " experts of "
                                        << shape.columns << " columns");
      const OwnedTensor x = NormalTensor(DType::kBf16, {rows, shape.columns}, 3);
      const DeviceTensor d_x(x.view(), stream());
      std::vector<std::vector<uint8_t>> results[2];
      for (int i = 0; i < 2; ++i) {
        const DeviceTensor experts(DType::kI32, {rows, shape.k}, stream());
        const DeviceTensor weights(DType::kF32, {rows, shape.k}, stream());
        const DeviceTensor row_index(DType::kI32, {rows * shape.k}, stream());
        const DeviceTensor grouped_weight(DType::kF32, {rows * shape.k}, stream());
        const DeviceTensor group_offsets(DType::kI32, {shape.experts + 1}, stream());
        const DeviceTensor slot_position(DType::kI32, {rows, shape.k}, stream());
        RouterSelectArgs select = {{}, d_bias.view(), 1.25f, 1.5f, experts.view(), weights.view()};
        const GroupByExpertArgs group = {
            experts.view(),        weights.view(),       shape.experts,       row_index.view(),
            grouped_weight.view(), group_offsets.view(), slot_position.view()};
        if (i == 0) {
          const Status status = deepinfer::Route({d_x.view(), &*weight, select, group}, stream());
          ASSERT_TRUE(status.has_value()) << status.error().message;
        } else {
          const DeviceTensor logits(DType::kF32, {rows, shape.experts}, stream());
          ASSERT_TRUE(Linear({.x = d_x.view(), .weight = &*weight, .y = logits.view()}, stream())
                          .has_value());
          select.logits = logits.view();
          ASSERT_TRUE(RouteExperts(select, group, stream()).has_value());
        }
        for (const DeviceTensor* result :
             {&experts, &weights, &row_index, &grouped_weight, &group_offsets, &slot_position})
          results[i].push_back(testing::Bytes(result->Download(stream()).view()));
      }
      for (size_t i = 0; i < results[0].size(); ++i) EXPECT_EQ(results[0][i], results[1][i]) << i;
    }
  }
}

TEST_F(MoeCuda, RouteChecksWhatItIsGiven) {
  const DeviceTensor x(DType::kBf16, {2, 64}, stream());
  const Status without = deepinfer::Route({x.view(), nullptr, {}, {}}, stream());
  ASSERT_FALSE(without.has_value());
  EXPECT_EQ(without.error().field, "weight");
  const testing::StoredWeight stored = testing::RandomWeight(WeightFormat::kBf16, 16, 64, 7);
  const auto weight = PackLinearWeight(stored.source, stream());
  ASSERT_TRUE(weight.has_value());
  const DeviceTensor logits(DType::kF32, {2, 16}, stream());
  RouteArgs args = {x.view(), &*weight, {}, {}};
  args.select.logits = logits.view();
  const Status with = deepinfer::Route(args, stream());
  ASSERT_FALSE(with.has_value());
  EXPECT_EQ(with.error().field, "logits");
}

TEST_F(MoeCuda, GroupingTakesAnExpertTwiceInARow) {
  OwnedTensor experts(DType::kI32, {50, 3});
  const OwnedTensor weights = NormalTensor(DType::kF32, {50, 3}, 5);
  testing::Random random(6);
  for (int64_t i = 0; i < 150; ++i)
    experts.Row<int32_t>(0)[i] = static_cast<int32_t>(random.Below(5));
  const DeviceTensor d_experts(experts.view(), stream());
  const DeviceTensor d_weights(weights.view(), stream());
  const DeviceTensor row_index(DType::kI32, {150}, stream());
  const DeviceTensor grouped(DType::kF32, {150}, stream());
  const DeviceTensor offsets(DType::kI32, {6}, stream());
  const DeviceTensor position(DType::kI32, {50, 3}, stream());
  ASSERT_TRUE(GroupByExpert({d_experts.view(), d_weights.view(), 5, row_index.view(),
                             grouped.view(), offsets.view(), position.view()},
                            stream())
                  .has_value());
  OwnedTensor c_row_index(DType::kI32, {150});
  OwnedTensor c_grouped(DType::kF32, {150});
  OwnedTensor c_offsets(DType::kI32, {6});
  OwnedTensor c_position(DType::kI32, {50, 3});
  ASSERT_TRUE(GroupByExpert({experts.view(), weights.view(), 5, c_row_index.view(),
                             c_grouped.view(), c_offsets.view(), c_position.view()},
                            cpu_stream())
                  .has_value());
  EXPECT_EQ(testing::Bytes(row_index.Download(stream()).view()),
            testing::Bytes(c_row_index.view()));
  EXPECT_EQ(testing::Bytes(grouped.Download(stream()).view()), testing::Bytes(c_grouped.view()));
  EXPECT_EQ(testing::Bytes(offsets.Download(stream()).view()), testing::Bytes(c_offsets.view()));
  EXPECT_EQ(testing::Bytes(position.Download(stream()).view()), testing::Bytes(c_position.view()));
}

TEST_F(MoeCuda, SwigluAgreesWithTheReference) {
  // The exponentials differ by 2 ulp, so before Q8 values agree to 1e-6: afterwards an element may
  // be on the neighbouring E4M3 point (2^-3 of itself, or 2^-15 of the group's maximum near zero),
  // with probability about 1e-6 / 2^-4 per element.
  cpu_stream().set_use_reference(true);
  for (Numerics numerics : {Numerics::kProduction, Numerics::kReference}) {
    for (auto [rows, channels] : {std::pair<int64_t, int64_t>{1, 64}, {7, 96}, {5, 2304}}) {
      const OwnedTensor gate = NormalTensor(DType::kBf16, {rows, channels}, 1, 4.0f);
      const OwnedTensor up = NormalTensor(DType::kBf16, {rows, channels}, 2, 4.0f);
      const OwnedTensor weight = NormalTensor(DType::kF32, {rows}, 3);
      OwnedTensor expected(DType::kBf16, {rows, channels});
      const DeviceTensor d_gate(gate.view(), stream());
      const DeviceTensor d_up(up.view(), stream());
      const DeviceTensor d_weight(weight.view(), stream());
      const DeviceTensor out(DType::kBf16, {rows, channels}, stream());
      ASSERT_TRUE(Swiglu({d_gate.view(), d_up.view(), d_weight.view(), 10.0f, out.view(), numerics},
                         stream())
                      .has_value());
      ASSERT_TRUE(Swiglu({gate.view(), up.view(), weight.view(), 10.0f, expected.view(), numerics},
                         cpu_stream())
                      .has_value());
      const OwnedTensor tuned = out.Download(stream());
      EXPECT_LE(testing::CountDifferentBits(tuned.view(), expected.view()),
                1 + rows * channels / 1000);
      for (int64_t i = 0; i < rows * channels; ++i) {
        const float e = Value(expected.view(), i);
        ASSERT_NEAR(Value(tuned.view(), i), e, std::fabs(e) / 8 + 100 * 0x1p-15f);
      }
    }
  }
}

TEST_F(MoeCuda, SwigluOfExtremeAndNanInputsBehavesLikeTheReference) {
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
  OwnedTensor expected(DType::kBf16, {1, 32});
  cpu_stream().set_use_reference(true);
  ASSERT_TRUE(
      Swiglu({gate.view(), up.view(), {}, 10.0f, expected.view()}, cpu_stream()).has_value());
  const DeviceTensor d_gate(gate.view(), stream());
  const DeviceTensor d_up(up.view(), stream());
  const DeviceTensor d_out(DType::kBf16, {1, 32}, stream());
  ASSERT_TRUE(Swiglu({d_gate.view(), d_up.view(), {}, 10.0f, d_out.view()}, stream()).has_value());
  const OwnedTensor out = d_out.Download(stream());
  for (int64_t i = 0; i < 32; ++i) {
    const float a = Value(out.view(), i);
    const float b = Value(expected.view(), i);
    EXPECT_EQ(std::isnan(a), std::isnan(b)) << i;
    if (!std::isnan(a)) {
      EXPECT_EQ(a, b) << i;
    }
  }
}

TEST_F(MoeCuda, CombineHasTheCpusBitsInBothProfiles) {
  for (Numerics numerics : {Numerics::kProduction, Numerics::kReference}) {
    for (auto [rows, hidden, k] :
         {std::array<int64_t, 3>{1, 256, 3}, {9, 256, 3}, {3, 5120, 6}, {2, 40, 2}, {4, 64, 8}}) {
      const OwnedTensor routed = NormalTensor(DType::kBf16, {rows * k, hidden}, 1);
      const OwnedTensor shared = NormalTensor(DType::kBf16, {rows, hidden}, 2);
      OwnedTensor position(DType::kI32, {rows, k});
      OwnedTensor experts(DType::kI32, {rows, k});
      for (int64_t i = 0; i < rows * k; ++i) {
        position.Row<int32_t>(0)[i] = static_cast<int32_t>(rows * k - 1 - i);
        experts.Row<int32_t>(0)[i] = static_cast<int32_t>((i * 5 + 3) % 16);
      }
      const DeviceTensor d_routed(routed.view(), stream());
      const DeviceTensor d_shared(shared.view(), stream());
      const DeviceTensor d_position(position.view(), stream());
      const DeviceTensor d_experts(experts.view(), stream());
      const DeviceTensor d_y(DType::kBf16, {rows, hidden}, stream());
      OwnedTensor y(DType::kBf16, {rows, hidden});
      ASSERT_TRUE(MoeCombine({d_routed.view(), d_position.view(), d_experts.view(), d_shared.view(),
                              d_y.view(), numerics},
                             stream())
                      .has_value());
      ASSERT_TRUE(MoeCombine({routed.view(), position.view(), experts.view(), shared.view(),
                              y.view(), numerics},
                             cpu_stream())
                      .has_value());
      EXPECT_EQ(testing::CountDifferentBits(d_y.Download(stream()).view(), y.view()), 0)
          << rows << " rows of " << hidden;
    }
  }
}

}  // namespace
}  // namespace deepinfer
