#include "ops/engram/engram.h"

#include "ops/cuda/device_layout_test_util.h"

namespace deepinfer {
namespace {

using testing::CountDifferentBits;
using testing::DeviceTensor;
using testing::NormalTensor;
using testing::OwnedTensor;
using testing::Random;

class EngramCuda : public testing::CudaTest {};

TEST_F(EngramCuda, HashesAreThoseOfTheCpu) {
  struct Case {
    int64_t rows, ngram, heads;
  };
  for (const Case& c : {Case{1, 4, 8}, {33, 4, 8}, {5, 4, 2}, {3, 2, 1}, {2, 8, 9}, {2, 8, 10}}) {
    Random random(static_cast<uint64_t>(c.rows));
    const int64_t lookups = (c.ngram - 1) * c.heads;
    std::vector<int64_t> multipliers, primes, offsets;
    for (int64_t n = 0; n < c.ngram; ++n)
      multipliers.push_back(static_cast<int64_t>(random.Next() >> 18) | 1);
    int64_t offset = 0;
    for (int64_t i = 0; i < lookups; ++i) {
      primes.push_back(15999000 + random.Below(1000));
      offsets.push_back(offset);
      offset += primes.back();
    }
    OwnedTensor lookback(DType::kI32, {c.rows, c.ngram});
    for (int64_t i = 0; i < c.rows * c.ngram; ++i)
      lookback.Row<int32_t>(0)[i] = static_cast<int32_t>(random.Below(99092));
    OwnedTensor expected(DType::kI64, {c.rows, lookups});
    EngramHashArgs args{.lookback = lookback.view(),
                        .multipliers = multipliers,
                        .primes = primes,
                        .offsets = offsets,
                        .table_rows = expected.view()};
    ASSERT_TRUE(EngramHash(args, cpu_stream()).has_value());
    const DeviceTensor lookback_device(lookback.view(), stream());
    const DeviceTensor table_rows(DType::kI64, {c.rows, lookups}, stream());
    args.lookback = lookback_device.view();
    args.table_rows = table_rows.view();
    const Status status = EngramHash(args, stream());
    if (lookups > 64) {
      ASSERT_FALSE(status.has_value());
      EXPECT_EQ(status.error().code, Code::kUnsupported);
      continue;
    }
    ASSERT_TRUE(status.has_value()) << status.error().message;
    EXPECT_EQ(CountDifferentBits(table_rows.Download(stream()).view(), expected.view()), 0);
  }
}

// From device memory and from page-locked memory of the host: codes of all kinds, NaN included, and
// every scale.
TEST_F(EngramCuda, GathersTheBitsOfTheCpuFromDeviceAndHostTables) {
  struct Case {
    int64_t rows, lookups, channels;
  };
  constexpr int64_t kTableRows = 1024;
  // Few look-ups are taken one by one, many in groups.
  for (const Case& c : {Case{1, 24, 256}, {3, 6, 64}, {2, 5, 32}, {400, 24, 256}, {1100, 24, 96}}) {
    Random random(7);
    auto weight = Buffer::AllocatePinned(kTableRows * c.channels).value();
    auto scale = Buffer::AllocatePinned(kTableRows * c.channels / 32).value();
    for (int64_t i = 0; i < kTableRows * c.channels; ++i)
      static_cast<uint8_t*>(weight.data())[i] = static_cast<uint8_t>(random.Next());
    for (int64_t i = 0; i < kTableRows * c.channels / 32; ++i)
      static_cast<uint8_t*>(scale.data())[i] = static_cast<uint8_t>(random.Next());
    const TensorView weight_host = weight.View(DType::kFp8E4M3, {kTableRows, c.channels});
    const TensorView scale_host = scale.View(DType::kE8M0, {kTableRows, c.channels / 32});
    OwnedTensor table_rows(DType::kI64, {c.rows, c.lookups});
    for (int64_t i = 0; i < c.rows * c.lookups; ++i)
      table_rows.Row<int64_t>(0)[i] = random.Below(kTableRows);
    OwnedTensor expected(DType::kBf16, {c.rows, c.lookups * c.channels});
    cpu_stream().set_use_reference(true);
    ASSERT_TRUE(
        EngramGather({table_rows.view(), weight_host, scale_host, expected.view()}, cpu_stream())
            .has_value());
    const DeviceTensor table_rows_device(table_rows.view(), stream());
    const DeviceTensor weight_device(weight_host, stream());
    const DeviceTensor scale_device(scale_host, stream());
    for (const bool on_host : {false, true}) {
      const DeviceTensor out(DType::kBf16, {c.rows, c.lookups * c.channels}, stream());
      ASSERT_TRUE(
          EngramGather({table_rows_device.view(), on_host ? weight_host : weight_device.view(),
                        on_host ? scale_host : scale_device.view(), out.view()},
                       stream())
              .has_value());
      EXPECT_EQ(CountDifferentBits(out.Download(stream()).view(), expected.view()), 0)
          << c.rows << " x " << c.lookups << " x " << c.channels
          << (on_host ? " from the host" : "");
    }
  }
}

// The CPU adds in double. Here the dot product is off by about 2^-22 of the sum of its terms'
// magnitudes, which is about sqrt(hidden) times a typical dot product of unrelated vectors; after
// the scales the gate is off by less than 1e-5, so the update by one step of bf16 in rare values.
TEST_F(EngramCuda, TheUpdateDiffersFromTheCpuInRareLastBits) {
  for (auto [rows, hidden] :
       {std::pair<int64_t, int64_t>{1, 5120}, {3, 256}, {5, 1024}, {2, 100}, {4, 24}}) {
    const OwnedTensor kv = NormalTensor(DType::kBf16, {rows, 5 * hidden}, 1);
    const OwnedTensor q_weight = NormalTensor(DType::kBf16, {4, hidden}, 2);
    const OwnedTensor k_weight = NormalTensor(DType::kBf16, {4, hidden}, 3);
    const OwnedTensor streams = NormalTensor(DType::kBf16, {rows, 4, hidden}, 4, 2.0f);
    const DeviceTensor kv_device(kv.view(), stream());
    const DeviceTensor q_weight_device(q_weight.view(), stream());
    const DeviceTensor k_weight_device(k_weight.view(), stream());
    const DeviceTensor streams_device(streams.view(), stream());
    const DeviceTensor alone(streams.view(), stream());
    EngramApplyArgs args{.kv = kv_device.view(),
                         .q_weight = q_weight_device.view(),
                         .k_weight = k_weight_device.view(),
                         .streams = streams_device.view()};
    ASSERT_TRUE(EngramApply(args, stream()).has_value());
    const int64_t last = rows - 1;
    args.kv = kv_device.view().Rows(last, rows);
    args.streams = alone.view().Rows(last, rows);
    ASSERT_TRUE(EngramApply(args, stream()).has_value());
    ASSERT_TRUE(EngramApply({.kv = kv.view(),
                             .q_weight = q_weight.view(),
                             .k_weight = k_weight.view(),
                             .streams = streams.view()},
                            cpu_stream())
                    .has_value());
    const OwnedTensor result = streams_device.Download(stream());
    // Terms may cancel: a step is one of values from 1/8 on.
    EXPECT_LE(testing::LargestSteps(result.view(), streams.view(), 0x1p-3), 1.0)
        << rows << " x " << hidden;
    EXPECT_LE(CountDifferentBits(result.view(), streams.view()), 4 + rows * hidden / 25)
        << rows << " x " << hidden;
    EXPECT_EQ(CountDifferentBits(alone.Download(stream()).view().Rows(last, rows),
                                 result.view().Rows(last, rows)),
              0);
  }
}

}  // namespace
}  // namespace deepinfer
