#include "ops/draft_block/draft_block.h"

#include <limits>

#include "ops/cuda/cuda_test_util.h"

namespace deepinfer {
namespace {

using testing::Bytes;
using testing::DeviceTensor;
using testing::NormalTensor;
using testing::OwnedTensor;
using testing::Random;

class DraftBlockCuda : public testing::CudaTest {};

TEST_F(DraftBlockCuda, RowsAreThoseOfTheCpu) {
  for (const int64_t sequences : {int64_t{1}, int64_t{3}, int64_t{64}}) {
    for (const int64_t slots : {int64_t{1}, int64_t{2}, int64_t{5}}) {
      const int64_t rows = sequences * slots;
      const OwnedTensor anchors(DType::kI32, {sequences}), lengths(DType::kI32, {sequences});
      for (int64_t r = 0; r < sequences; ++r) {
        anchors.Row<int32_t>(0)[r] = static_cast<int32_t>(1000 + r);
        lengths.Row<int32_t>(0)[r] = static_cast<int32_t>(r * r);
      }
      const OwnedTensor ids(DType::kI32, {rows}), positions(DType::kI32, {rows});
      const OwnedTensor sequence(DType::kI32, {rows}), start(DType::kI32, {sequences + 1});
      ASSERT_TRUE(BlockRows({.anchors = anchors.view(),
                             .lengths = lengths.view(),
                             .filler = 77,
                             .token_ids = ids.view(),
                             .positions = positions.view(),
                             .row_sequence = sequence.view(),
                             .sequence_start = start.view()},
                            cpu_stream())
                      .has_value());
      const DeviceTensor device_anchors(anchors.view(), stream());
      const DeviceTensor device_lengths(lengths.view(), stream());
      const DeviceTensor device_ids(DType::kI32, {rows}, stream());
      const DeviceTensor device_positions(DType::kI32, {rows}, stream());
      const DeviceTensor device_sequence(DType::kI32, {rows}, stream());
      const DeviceTensor device_start(DType::kI32, {sequences + 1}, stream());
      ASSERT_TRUE(BlockRows({.anchors = device_anchors.view(),
                             .lengths = device_lengths.view(),
                             .filler = 77,
                             .token_ids = device_ids.view(),
                             .positions = device_positions.view(),
                             .row_sequence = device_sequence.view(),
                             .sequence_start = device_start.view()},
                            stream())
                      .has_value());
      EXPECT_EQ(Bytes(device_ids.Download(stream()).view()), Bytes(ids.view()));
      EXPECT_EQ(Bytes(device_positions.Download(stream()).view()), Bytes(positions.view()));
      EXPECT_EQ(Bytes(device_sequence.Download(stream()).view()), Bytes(sequence.view()));
      EXPECT_EQ(Bytes(device_start.Download(stream()).view()), Bytes(start.view()));
    }
  }
}

// Few distinct values, so that there are ties in every block of threads and between them.
TEST_F(DraftBlockCuda, ArgmaxIsThatOfTheCpu) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const int64_t vocab :
       {int64_t{1}, int64_t{7}, int64_t{512}, int64_t{9000}, int64_t{20001}}) {
    constexpr int64_t kRows = 6;
    const OwnedTensor wide(DType::kF32, {kRows, 2 * vocab}), bias(DType::kF32, {kRows, vocab});
    Random random(static_cast<uint64_t>(vocab));
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t i = 0; i < vocab; ++i) {
        float x = static_cast<float>(random.Below(40)) - 30.0f;
        if (r == 1 && random.Below(3) == 0) x = kNan;
        if (r == 2) x = kNan;
        if (r == 3) x = -0.0f + static_cast<float>(random.Below(2)) * 0.0f;
        if (r == 4) x = -std::numeric_limits<float>::infinity();
        wide.Row<float>(r)[vocab + i] = x;
        bias.Row<float>(r)[i] = static_cast<float>(random.Below(8));
      }
    }
    const DeviceTensor device_wide(wide.view(), stream()), device_bias(bias.view(), stream());
    const DeviceTensor device_tokens(DType::kI32, {kRows}, stream());
    const OwnedTensor tokens(DType::kI32, {kRows});
    ASSERT_TRUE(BiasedArgmax({.logits = wide.view().Columns(vocab, 2 * vocab),
                              .bias = bias.view(),
                              .tokens = tokens.view()},
                             cpu_stream())
                    .has_value());
    const TensorView logits = device_wide.view().Columns(vocab, 2 * vocab);
    ASSERT_TRUE(
        BiasedArgmax({.logits = logits, .bias = device_bias.view(), .tokens = device_tokens.view()},
                     stream())
            .has_value());
    EXPECT_EQ(Bytes(device_tokens.Download(stream()).view()), Bytes(tokens.view())) << vocab;
    const OwnedTensor sums = device_wide.Download(stream());
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t i = 0; i < 2 * vocab; ++i) {
        const float a = sums.Row<float>(r)[i];
        const float b = wide.Row<float>(r)[i];
        ASSERT_TRUE(a == b || (std::isnan(a) && std::isnan(b))) << vocab << " " << r << " " << i;
      }
    }
    // The sum alone.
    const DeviceTensor none(wide.view(), stream());
    ASSERT_TRUE(BiasedArgmax({.logits = none.view().Columns(vocab, 2 * vocab),
                              .bias = device_bias.view(),
                              .tokens = {}},
                             stream())
                    .has_value());
    EXPECT_EQ(none.Download(stream()).Row<float>(0)[vocab],
              wide.Row<float>(0)[vocab] + bias.Row<float>(0)[0]);
  }
}

TEST_F(DraftBlockCuda, ConfidenceIsCloseToTheCpuAndTheSameAlone) {
  for (const int64_t width : {int64_t{9}, int64_t{288}, int64_t{5376}}) {
    constexpr int64_t kSlots = 5, kSequences = 3;
    const OwnedTensor x = NormalTensor(DType::kBf16, {kSlots * kSequences, width}, 1);
    const OwnedTensor weight = NormalTensor(DType::kBf16, {1, width}, 2, 0.1f);
    const OwnedTensor temperatures(DType::kF32, {kSlots});
    for (int64_t k = 0; k < kSlots; ++k)
      temperatures.Row<float>(0)[k] = 0.5f + static_cast<float>(k);
    const OwnedTensor score(DType::kF32, {kSlots, kSequences});
    const OwnedTensor probability(DType::kF32, {kSlots, kSequences});
    ASSERT_TRUE(BlockConfidence({.x = x.view(),
                                 .weight = weight.view(),
                                 .temperatures = temperatures.view(),
                                 .score = score.view(),
                                 .probability = probability.view()},
                                cpu_stream())
                    .has_value());
    const DeviceTensor device_x(x.view(), stream()), device_weight(weight.view(), stream());
    const DeviceTensor device_temperatures(temperatures.view(), stream());
    const DeviceTensor device_score(DType::kF32, {kSlots, kSequences}, stream());
    const DeviceTensor device_probability(DType::kF32, {kSlots, kSequences}, stream());
    const BlockConfidenceArgs args{.x = device_x.view(),
                                   .weight = device_weight.view(),
                                   .temperatures = device_temperatures.view(),
                                   .score = device_score.view(),
                                   .probability = device_probability.view()};
    ASSERT_TRUE(BlockConfidence(args, stream()).has_value());
    const OwnedTensor together = device_score.Download(stream());
    const OwnedTensor probabilities = device_probability.Download(stream());
    const double size = std::sqrt(static_cast<double>(width)) * 0.1;
    for (int64_t i = 0; i < kSlots * kSequences; ++i) {
      EXPECT_NEAR(together.Row<float>(0)[i], score.Row<float>(0)[i], 1e-5 * size);
      EXPECT_NEAR(probabilities.Row<float>(0)[i], probability.Row<float>(0)[i], 1e-5);
    }
    // The second sequence's block alone.
    const DeviceTensor alone(DType::kF32, {kSlots, 1}, stream());
    const DeviceTensor other(DType::kF32, {kSlots, 1}, stream());
    BlockConfidenceArgs one = args;
    one.x = args.x.Rows(kSlots, 2 * kSlots);
    one.score = alone.view();
    one.probability = other.view();
    ASSERT_TRUE(BlockConfidence(one, stream()).has_value());
    const OwnedTensor block = alone.Download(stream());
    for (int64_t k = 0; k < kSlots; ++k)
      EXPECT_EQ(block.Row<float>(k)[0], together.Row<float>(k)[1]);
  }
}

}  // namespace
}  // namespace deepinfer
