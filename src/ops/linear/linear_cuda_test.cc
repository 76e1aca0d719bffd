// The CUDA kernels of ops/linear against the specification in plain loops, and the packed layout.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "ops/cuda/cuda_test_util.h"
#include "ops/linear/cuda_pack.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_cases.h"
#include "ops/linear/linear_pack.h"
#include "ops/linear/linear_test_util.h"
#include "ops/quantize/quantize.h"

namespace deepinfer::testing {
namespace {

class LinearCudaTest : public CudaTest {
 protected:
  // y of a weight on the device and on the CPU are compared against the sum of the products'
  // magnitudes.
  void ExpectNear(const LinearSource& source, const TensorView& x, const TensorView& y,
                  const std::string& what) {
    std::vector<float> codes(static_cast<size_t>(source.k));
    std::vector<float> scales(static_cast<size_t>((source.k + 31) / 32));
    for (int64_t n = 0; n < source.n; ++n) {
      UnpackLinearOutput(source, n, codes, scales);
      for (int64_t row = 0; row < x.rows(); ++row) {
        double sum = 0;
        double magnitudes = 0;
        for (int64_t k = 0; k < source.k; ++k) {
          const double product = static_cast<double>(Bf16ToF32(x.Row<Bf16>(row)[k])) *
                                 codes[static_cast<size_t>(k)] *
                                 scales[static_cast<size_t>(k / 32)];
          sum += product;
          magnitudes += std::fabs(product);
        }
        // The matrix instruction aligns the products of a step to the largest one and drops bits
        // below 2^-24 of it, so the bound is a few times that of a chain of fp32 additions.
        const double tolerance = 4 * LinearTolerance(source.k, magnitudes);
        if (y.dtype() == DType::kF32) {
          ASSERT_NEAR(y.Row<float>(row)[n], sum, tolerance) << what << " row " << row << " n " << n;
        } else {
          ASSERT_NEAR(Bf16ToF32(y.Row<Bf16>(row)[n]), sum, tolerance + std::fabs(sum) / 256)
              << what << " row " << row << " n " << n;
        }
      }
    }
  }
};

std::string Name(const LinearCase& c) {
  return fmt::format("format {} n {} k {}", static_cast<int>(c.format), c.n, c.k);
}

TEST(CudaPack, AWeightPackedOnTheHostUnpacksToTheSource) {
  Stream stream(2);
  for (const LinearCase& c : kLinearCases) {
    const StoredWeight stored = RandomWeight(c.format, c.n, c.k, 1);
    const int exponent = CudaOutputExponent({&stored.source, 1}, stream.pool()).value();
    const std::vector<uint8_t> packed = PackCudaWeightOnHost(stored.source, exponent);
    ASSERT_EQ(static_cast<int64_t>(packed.size()),
              (c.n + 63) / 64 * 4 * CudaStripBytes(c.format, c.k));
    const auto k = static_cast<size_t>(c.k);
    std::vector<float> values(k), codes(k), scales((k + 31) / 32);
    for (int64_t output = 0; output < c.n; ++output) {
      UnpackCudaOutput(c.format, c.k, exponent, packed, output, values);
      UnpackLinearOutput(stored.source, output, codes, scales);
      for (size_t i = 0; i < k; ++i)
        ASSERT_EQ(values[i], codes[i] * scales[i / 32]) << Name(c) << " n " << output << " k " << i;
    }
  }
}

TEST(CudaPack, SegmentsCoverTheColumnsInMultiplesOf256) {
  for (const WeightFormat format : {WeightFormat::kBf16, WeightFormat::kFp8Block}) {
    for (int64_t n : {1, 64, 512, 1280, 2304, 5120, 32768, 129280}) {
      for (int64_t k : {1, 32, 256, 257, 1280, 2304, 5120, 8192}) {
        const LinearSegments segments = SegmentsOf(format, n, k);
        EXPECT_EQ(segments.columns % 256, 0);
        EXPECT_GE(segments.count, 1);
        EXPECT_LE(segments.count, 8);
        EXPECT_GE(segments.count * segments.columns, k);
        EXPECT_LT((segments.count - 1) * segments.columns, k);
      }
    }
  }
  EXPECT_EQ(SegmentsOf(WeightFormat::kFp4Group, 5120, 2304).count, 1);
}

TEST(CudaPack, ScalesFarFromOneMoveToTheOutputExponent) {
  Stream stream(1);
  StoredWeight stored = RandomWeight(WeightFormat::kFp4Group, 64, 64, 1, 240, 250);
  EXPECT_GT(CudaOutputExponent({&stored.source, 1}, stream.pool()).value(), 100);
  stored = RandomWeight(WeightFormat::kFp8Block, 64, 64, 1, 0, 5);
  EXPECT_LT(CudaOutputExponent({&stored.source, 1}, stream.pool()).value(), 0);
  stored = RandomWeight(WeightFormat::kFp8Block, 64, 64, 1, 110, 130);
  EXPECT_EQ(CudaOutputExponent({&stored.source, 1}, stream.pool()).value(), 0);
}

TEST(CudaPack, ScalesThatDoNotFitAreRefused) {
  Stream stream(1);
  StoredWeight stored = RandomWeight(WeightFormat::kFp4Group, 64, 64, 1, 110, 130);
  stored.scale[3] = 255;
  EXPECT_EQ(CudaOutputExponent({&stored.source, 1}, stream.pool()).error().code,
            Code::kUnsupported);
  stored.scale[3] = 1;
  EXPECT_EQ(CudaOutputExponent({&stored.source, 1}, stream.pool()).error().code,
            Code::kUnsupported);
}

TEST_F(LinearCudaTest, TheDevicePacksTheBytesOfTheHost) {
  for (const LinearCase& c : kLinearCases) {
    const StoredWeight first = RandomWeight(c.format, c.n, c.k, 1);
    const StoredWeight second = RandomWeight(c.format, c.n, c.k, 2);
    const LinearSource sources[] = {first.source, second.source};
    const auto weights = PackLinearStack(sources, stream());
    ASSERT_TRUE(weights.has_value()) << weights.error().message;
    for (size_t i = 0; i < 2; ++i) {
      const CudaLinearWeight& packed = *(*weights)[i].packed()->cuda;
      const std::vector<uint8_t> want = PackCudaWeightOnHost(sources[i], packed.output_exponent);
      ASSERT_EQ(packed.bytes, static_cast<int64_t>(want.size()));
      const OwnedTensor host(DType::kU8, {packed.bytes});
      ASSERT_TRUE(CopyToHost(TensorView(packed.data, DType::kU8, {packed.bytes}, stream().device()),
                             host.view().data(), stream())
                      .has_value());
      EXPECT_EQ(Bytes(host.view()), want) << Name(c) << " weight " << i;
    }
  }
}

TEST_F(LinearCudaTest, AWeightOfManyPiecesIsPackedWhole) {
  DI_DEVICE_ONLY();
  if (IsSkipped()) return;
  const StoredWeight stored = RandomWeight(WeightFormat::kFp8Block, 8200, 5120, 1);
  const auto weight = PackLinearWeight(stored.source, stream());
  ASSERT_TRUE(weight.has_value()) << weight.error().message;
  const CudaLinearWeight& packed = *weight->packed()->cuda;
  const OwnedTensor host(DType::kU8, {packed.bytes});
  ASSERT_TRUE(CopyToHost(TensorView(packed.data, DType::kU8, {packed.bytes}, stream().device()),
                         host.view().data(), stream())
                  .has_value());
  EXPECT_TRUE(Bytes(host.view()) == PackCudaWeightOnHost(stored.source, packed.output_exponent));
}

TEST_F(LinearCudaTest, NanCodesAreRefused) {
  StoredWeight stored = RandomWeight(WeightFormat::kFp8Block, 40, 64, 1);
  stored.weight[1234] = 0xff;
  const auto weight = PackLinearWeight(stored.source, stream());
  ASSERT_FALSE(weight.has_value());
  EXPECT_EQ(weight.error().code, Code::kUnsupported);
}

TEST_F(LinearCudaTest, OutputsAreTheExactSumsWithinTheTolerance) {
  for (const LinearCase& c : kLinearCases) {
    const StoredWeight stored = RandomWeight(c.format, c.n, c.k, 2);
    const LinearWeight weight = PackLinearWeight(stored.source, stream()).value();
    for (int64_t rows : {1, 3, 9}) {
      const OwnedTensor x = NormalTensor(DType::kBf16, {rows, c.k}, 3);
      const DeviceTensor device_x(x.view(), stream());
      for (const DType dtype : {DType::kF32, DType::kBf16}) {
        const DeviceTensor y(dtype, {rows, c.n}, stream());
        const Status status =
            Linear({.x = device_x.view(), .weight = &weight, .y = y.view()}, stream());
        ASSERT_TRUE(status.has_value()) << status.error().message;
        const OwnedTensor host_y = y.Download(stream());
        ExpectNear(stored.source, x.view(), host_y.view(), Name(c));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(LinearCudaTest, TheReferenceKernelGivesTheBitsOfTheSpecification) {
  stream().set_use_reference(true);
  for (const LinearCase& c : kLinearCases) {
    const StoredWeight stored = RandomWeight(c.format, c.n, c.k, 2);
    const LinearWeight weight = PackLinearWeight(stored.source, stream()).value();
    const OwnedTensor x = NormalTensor(DType::kBf16, {3, c.k}, 3);
    const DeviceTensor device_x(x.view(), stream());
    const DeviceTensor y(DType::kF32, {3, c.n}, stream());
    ASSERT_TRUE(
        Linear({.x = device_x.view(), .weight = &weight, .y = y.view()}, stream()).has_value());
    const OwnedTensor want(DType::kF32, {3, c.n});
    LinearReference(stored.source, x.view(), want.view());
    EXPECT_EQ(CountDifferentBits(y.Download(stream()).view(), want.view()), 0) << Name(c);
  }
}

TEST_F(LinearCudaTest, ScalesFarFromOneGiveTheSameProducts) {
  for (const WeightFormat format : {WeightFormat::kFp8Block, WeightFormat::kFp4Group}) {
    for (const auto& [low, high] : {std::pair(0, 20), std::pair(60, 180), std::pair(200, 206)}) {
      const StoredWeight stored = RandomWeight(format, 48, 288, 5, low, high);
      const auto weight = PackLinearWeight(stored.source, stream());
      ASSERT_TRUE(weight.has_value()) << weight.error().message;
      // Small inputs keep the sums of large weights finite.
      const OwnedTensor x = NormalTensor(DType::kBf16, {2, 288}, 6, low == 0 ? 1e15f : 1e-3f);
      const DeviceTensor device_x(x.view(), stream());
      const DeviceTensor y(DType::kF32, {2, 48}, stream());
      ASSERT_TRUE(
          Linear({.x = device_x.view(), .weight = &*weight, .y = y.view()}, stream()).has_value());
      ExpectNear(stored.source, x.view(), y.Download(stream()).view(),
                 fmt::format("scales {} to {}", low, high));
    }
  }
}

// Rows of y that are computed alone must have the bits that they have among others.
TEST_F(LinearCudaTest, ARowHasTheSameBitsForEveryNumberOfRows) {
  const LinearCase cases[] = {{WeightFormat::kBf16, 100, 600},
                              {WeightFormat::kFp8Block, 130, 1056},
                              {WeightFormat::kFp4Group, 150, 544}};
  for (const LinearCase& c : cases) {
    constexpr int64_t kRows = 70;
    const StoredWeight stored = RandomWeight(c.format, c.n, c.k, 4);
    const LinearWeight weight = PackLinearWeight(stored.source, stream()).value();
    const OwnedTensor x = NormalTensor(DType::kBf16, {kRows, c.k}, 5);
    const DeviceTensor device_x(x.view(), stream());
    const auto run = [&](int64_t begin, int64_t end) {
      const DeviceTensor y(DType::kF32, {end - begin, c.n}, stream());
      EXPECT_TRUE(Linear({.x = device_x.view().Rows(begin, end), .weight = &weight, .y = y.view()},
                         stream())
                      .has_value());
      return Bytes(y.Download(stream()).view());
    };
    const std::vector<uint8_t> all = run(0, kRows);
    const auto rows_of_all = [&](int64_t begin, int64_t end) {
      return std::vector<uint8_t>(all.begin() + begin * c.n * 4, all.begin() + end * c.n * 4);
    };
    for (int64_t count = 1; count < kRows; count += count < 18 ? 1 : 7) {
      EXPECT_EQ(run(0, count), rows_of_all(0, count)) << Name(c) << " first " << count << " rows";
    }
    for (int64_t row : {0, 1, 8, 33, 69})
      EXPECT_EQ(run(row, row + 1), rows_of_all(row, row + 1)) << Name(c) << " row " << row;
    EXPECT_EQ(run(37, 61), rows_of_all(37, 61)) << Name(c);
  }
}

TEST_F(LinearCudaTest, ABatchGivesTheBitsOfItsLinearsAloneWithStridedRows) {
  // More problems than a launch takes, of all formats, with views of wide tensors.
  constexpr int64_t kRows = 5;
  constexpr int64_t kWide = 1200;
  const OwnedTensor x = NormalTensor(DType::kBf16, {kRows, kWide}, 7);
  const DeviceTensor device_x(x.view(), stream());
  const DeviceTensor together(DType::kBf16, {kRows, 20 * 64}, stream());
  std::vector<LinearWeight> weights;
  std::vector<LinearArgs> batch;
  weights.reserve(20);
  for (int64_t i = 0; i < 20; ++i) {
    const WeightFormat format = i % 5 == 0   ? WeightFormat::kBf16
                                : i % 5 == 1 ? WeightFormat::kFp4Group
                                             : WeightFormat::kFp8Block;
    const StoredWeight stored = RandomWeight(format, 64 - i, 320, static_cast<uint32_t>(i));
    weights.push_back(PackLinearWeight(stored.source, stream()).value());
    // Also columns that begin at odd places, which rows cannot be copied from in large pieces.
    const int64_t first = i * 40 + (i % 3 == 0 ? 3 : 0);
    batch.push_back({.x = device_x.view().Columns(first, first + 320),
                     .weight = &weights.back(),
                     .y = together.view().Columns(64 * i, 64 * i + 64 - i),
                     .quantize_y = false});
  }
  const Status status = LinearBatch(batch, stream());
  ASSERT_TRUE(status.has_value()) << status.error().message;
  const OwnedTensor got = together.Download(stream());
  for (int64_t i = 0; i < 20; ++i) {
    const LinearArgs& args = batch[static_cast<size_t>(i)];
    const DeviceTensor alone(DType::kBf16, {kRows, 64 - i}, stream());
    ASSERT_TRUE(
        Linear({.x = args.x, .weight = args.weight, .y = alone.view()}, stream()).has_value());
    const OwnedTensor want = alone.Download(stream());
    for (int64_t row = 0; row < kRows; ++row) {
      EXPECT_EQ(std::memcmp(got.Row<Bf16>(row) + 64 * i, want.Row<Bf16>(row),
                            static_cast<size_t>(2 * (64 - i))),
                0)
          << "problem " << i << " row " << row;
      // Nothing beyond the view was written.
      for (int64_t n = 64 - i; n < 64; ++n)
        EXPECT_EQ(got.Row<Bf16>(row)[64 * i + n].bits, 0xffff) << "problem " << i;
    }
  }
}

TEST_F(LinearCudaTest, QuantizedOutputsAreThePlainOutputsQuantized) {
  const LinearCase cases[] = {{WeightFormat::kBf16, 96, 512},
                              {WeightFormat::kFp8Block, 160, 2048},
                              {WeightFormat::kFp4Group, 32, 256}};
  for (const LinearCase& c : cases) {
    const StoredWeight stored = RandomWeight(c.format, c.n, c.k, 8);
    const LinearWeight weight = PackLinearWeight(stored.source, stream()).value();
    for (int64_t rows : {1, 20}) {
      const OwnedTensor x = NormalTensor(DType::kBf16, {rows, c.k}, 9);
      const DeviceTensor device_x(x.view(), stream());
      const DeviceTensor plain(DType::kBf16, {rows, c.n}, stream());
      const DeviceTensor quantized(DType::kBf16, {rows, c.n}, stream());
      ASSERT_TRUE(Linear({.x = device_x.view(), .weight = &weight, .y = plain.view()}, stream())
                      .has_value());
      ASSERT_TRUE(
          Linear(
              {.x = device_x.view(), .weight = &weight, .y = quantized.view(), .quantize_y = true},
              stream())
              .has_value());
      const OwnedTensor want = plain.Download(stream());
      ASSERT_TRUE(QuantizeFp8({.x = want.view(), .y = want.view()}, cpu_stream()).has_value());
      EXPECT_EQ(CountDifferentBits(quantized.Download(stream()).view(), want.view()), 0)
          << Name(c) << " rows " << rows;
    }
  }
}

TEST_F(LinearCudaTest, GroupsOfAnySizeGiveTheBitsOfTheirRowsAlone) {
  struct Case {
    WeightFormat format;
    int64_t n, k;
    bool gathered;
    std::vector<int32_t> offsets;
  };
  const Case cases[] = {
      {WeightFormat::kFp4Group, 130, 288, true, {0, 0, 1, 1, 4, 13, 13, 50, 50}},
      {WeightFormat::kFp4Group, 64, 64, false, {0, 70}},
      {WeightFormat::kFp4Group, 33, 32, true, {0, 0, 0, 2}},
      {WeightFormat::kFp8Block, 96, 544, true, {0, 3, 3, 5}},
      {WeightFormat::kBf16, 20, 40, false, {0, 1, 2}},
  };
  for (const Case& c : cases) {
    const auto groups = static_cast<int64_t>(c.offsets.size()) - 1;
    const int64_t rows = c.offsets.back();
    std::vector<StoredWeight> stored;
    std::vector<LinearSource> sources;
    for (int64_t g = 0; g < groups; ++g) {
      stored.push_back(RandomWeight(c.format, c.n, c.k, static_cast<uint32_t>(100 + g)));
      sources.push_back(stored.back().source);
    }
    const std::vector<LinearWeight> weights = PackLinearStack(sources, stream()).value();
    std::vector<const LinearWeight*> pointers;
    for (const LinearWeight& weight : weights) pointers.push_back(&weight);
    const int64_t x_rows = rows + 3;
    const OwnedTensor x = NormalTensor(DType::kBf16, {x_rows, c.k}, 10);
    const DeviceTensor device_x(x.view(), stream());
    const OwnedTensor offsets(DType::kI32, {groups + 1});
    std::copy(c.offsets.begin(), c.offsets.end(), offsets.Row<int32_t>(0));
    const OwnedTensor index(DType::kI32, {rows});
    Random random(11);
    for (int64_t r = 0; r < rows; ++r) {
      index.Row<int32_t>(0)[r] = static_cast<int32_t>(c.gathered ? random.Below(x_rows) : r);
    }
    const DeviceTensor device_offsets(offsets.view(), stream());
    const DeviceTensor device_index(index.view(), stream());
    const DeviceTensor y(DType::kF32, {rows, c.n}, stream());
    const Status status =
        GroupedLinear({.x = device_x.view(),
                       .row_index = c.gathered ? device_index.view() : TensorView(),
                       .group_offsets = device_offsets.view(),
                       .weights = pointers,
                       .y = y.view()},
                      stream());
    ASSERT_TRUE(status.has_value()) << status.error().message;
    const OwnedTensor got = y.Download(stream());
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = c.offsets[static_cast<size_t>(g)];
      for (int64_t r = first; r < c.offsets[static_cast<size_t>(g) + 1]; ++r) {
        const int64_t x_row = index.Row<int32_t>(0)[r];
        const DeviceTensor alone(DType::kF32, {1, c.n}, stream());
        ASSERT_TRUE(Linear({.x = device_x.view().Rows(x_row, x_row + 1),
                            .weight = pointers[static_cast<size_t>(g)],
                            .y = alone.view()},
                           stream())
                        .has_value());
        const OwnedTensor want = alone.Download(stream());
        EXPECT_EQ(CountDifferentBits(got.view().Rows(r, r + 1), want.view()), 0)
            << "group " << g << " row " << r << " k " << c.k;
        if (r == first) {
          ExpectNear(sources[static_cast<size_t>(g)], x.view().Rows(x_row, x_row + 1), want.view(),
                     "group");
        }
      }
    }
  }
}

TEST_F(LinearCudaTest, WeightsThatWereNotPackedTogetherAreRefused) {
  const StoredWeight stored = RandomWeight(WeightFormat::kFp4Group, 64, 64, 1);
  const LinearWeight first = PackLinearWeight(stored.source, stream()).value();
  const LinearWeight second = PackLinearWeight(stored.source, stream()).value();
  const LinearWeight* weights[] = {&first, &second};
  const DeviceTensor x(NormalTensor(DType::kBf16, {1, 64}, 1).view(), stream());
  const DeviceTensor y(DType::kF32, {1, 64}, stream());
  OwnedTensor offsets(DType::kI32, {3});
  offsets.Row<int32_t>(0)[2] = 1;
  const DeviceTensor device_offsets(offsets.view(), stream());
  const Status status = GroupedLinear({.x = x.view(),
                                       .row_index = {},
                                       .group_offsets = device_offsets.view(),
                                       .weights = weights,
                                       .y = y.view()},
                                      stream());
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, Code::kInvalidArgument);
}

TEST_F(LinearCudaTest, TheModelsShapesAreRightAtFullSize) {
  DI_DEVICE_ONLY();
  if (IsSkipped()) return;
  const LinearCase cases[] = {
      {WeightFormat::kFp8Block, 1280, 5120},  {WeightFormat::kFp8Block, 1024, 4096},
      {WeightFormat::kFp8Block, 5120, 8192},  {WeightFormat::kFp8Block, 4096, 1280},
      {WeightFormat::kFp8Block, 16896, 4352}, {WeightFormat::kFp8Block, 2304, 5120},
      {WeightFormat::kBf16, 384, 5120},       {WeightFormat::kFp4Group, 5120, 2304}};
  for (const LinearCase& c : cases) {
    const StoredWeight stored = RandomWeight(c.format, c.n, c.k, 12);
    const LinearWeight weight = PackLinearWeight(stored.source, stream()).value();
    const OwnedTensor x = NormalTensor(DType::kBf16, {64, c.k}, 13);
    const DeviceTensor device_x(x.view(), stream());
    std::vector<uint8_t> first_row;
    for (int64_t rows : {1, 8, 16, 32, 64}) {
      const DeviceTensor y(DType::kF32, {rows, c.n}, stream());
      ASSERT_TRUE(
          Linear({.x = device_x.view().Rows(0, rows), .weight = &weight, .y = y.view()}, stream())
              .has_value());
      const OwnedTensor got = y.Download(stream());
      if (rows == 1) {
        ExpectNear(stored.source, x.view().Rows(0, 1), got.view(), Name(c));
        first_row = Bytes(got.view());
      }
      EXPECT_EQ(Bytes(got.view().Rows(0, 1)), first_row) << Name(c) << " rows " << rows;
      if (rows == 64)
        ExpectNear(stored.source, x.view().Rows(63, 64), got.view().Rows(63, 64), Name(c));
    }
  }
}

}  // namespace
}  // namespace deepinfer::testing
