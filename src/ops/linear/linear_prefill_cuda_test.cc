// The kernels for many rows against the specification, and bit for bit against the kernel for few
// rows, whose results they must reproduce whatever the tiles.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "ops/cuda/cuda_test_util.h"
#include "ops/gated_linear/gated_linear.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_prefill.h"
#include "ops/moe/moe.h"
#include "ops/quantize/quantize.h"
#include "tensor/float_formats.h"

namespace deepinfer::testing {
namespace {

struct Stored {
  std::vector<uint8_t> weight;
  std::vector<uint8_t> scale;
  LinearSource source;
};

Stored RandomSource(WeightFormat format, int64_t n, int64_t k, uint32_t seed) {
  std::mt19937 random(seed);
  Stored stored;
  stored.source = {.format = format, .n = n, .k = k, .weight = {}, .scale = {}};
  if (format == WeightFormat::kBf16) {
    stored.weight.resize(static_cast<size_t>(2 * n * k));
    for (int64_t i = 0; i < n * k; ++i) {
      const auto value = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 8192.0f;
      const Bf16 rounded = F32ToBf16(value);
      std::memcpy(stored.weight.data() + 2 * i, &rounded, 2);
    }
    stored.source.weight = TensorView(stored.weight.data(), DType::kBf16, {n, k});
    return stored;
  }
  const bool fp8 = format == WeightFormat::kFp8Block;
  stored.weight.resize(static_cast<size_t>(fp8 ? n * k : n * k / 2));
  for (uint8_t& code : stored.weight) {
    code = static_cast<uint8_t>(random());
    if (fp8 && (code & 0x7f) == 0x7f) code = 0x38;  // not NaN
  }
  const int64_t scale_rows = fp8 ? (n + 31) / 32 : n;
  stored.scale.resize(static_cast<size_t>(scale_rows * (k / 32)));
  for (uint8_t& scale : stored.scale)
    scale = static_cast<uint8_t>((fp8 ? 112 : 118) + random() % 6);
  stored.source.weight = fp8 ? TensorView(stored.weight.data(), DType::kFp8E4M3, {n, k})
                             : TensorView(stored.weight.data(), DType::kFp4x2, {n, k / 2});
  stored.source.scale = TensorView(stored.scale.data(), DType::kE8M0, {scale_rows, k / 32});
  return stored;
}

OwnedTensor RandomRows(int64_t rows, int64_t k, uint32_t seed) {
  std::mt19937 random(seed);
  OwnedTensor x(DType::kBf16, {rows, k});
  auto* values = static_cast<Bf16*>(x.view().data());
  for (int64_t i = 0; i < rows * k; ++i)
    values[i] = F32ToBf16(static_cast<float>(static_cast<int>(random() % 4001) - 2000) / 1000.0f);
  return x;
}

struct Case {
  WeightFormat format;
  int64_t n;
  int64_t k;
};
// One and several segments of K, columns and outputs that do not fill a chunk or tile.
constexpr Case kCases[] = {
    {WeightFormat::kFp4Group, 256, 512}, {WeightFormat::kFp4Group, 150, 288},
    {WeightFormat::kFp8Block, 256, 576}, {WeightFormat::kFp8Block, 97, 1312},
    {WeightFormat::kBf16, 130, 264},     {WeightFormat::kBf16, 320, 768},
};
std::string NameOf(const Case& c) {
  return fmt::format("format {} n {} k {}", static_cast<int>(c.format), c.n, c.k);
}

bool SameBytes(const TensorView& a, int64_t a_row, const TensorView& b, int64_t b_row) {
  const int64_t bytes = a.row_size() * DTypeBytes(a.dtype());
  return std::memcmp(static_cast<const char*>(a.data()) + a_row * bytes,
                     static_cast<const char*>(b.data()) + b_row * bytes,
                     static_cast<size_t>(bytes)) == 0;
}

class LinearPrefillTest : public CudaTest {
 protected:
  std::vector<LinearWeight> Pack(std::span<const Stored> stored) {
    std::vector<LinearSource> sources;
    for (const Stored& one : stored) sources.push_back(one.source);
    auto packed = PackLinearStack(sources, stream());
    EXPECT_TRUE(packed.has_value()) << (packed.has_value() ? "" : packed.error().message);
    return packed.has_value() ? std::move(*packed) : std::vector<LinearWeight>(stored.size());
  }
  OwnedTensor Prefill(const DeviceTensor& x, int64_t rows, const LinearWeight& weight, DType dtype,
                      bool quantize = false, const cuda::PrefillChoice& choice = {}) {
    DeviceTensor y(dtype, {rows, weight.n()}, stream());
    const LinearArgs args{
        .x = x.view().Rows(0, rows), .weight = &weight, .y = y.view(), .quantize_y = quantize};
    const Status status = cuda::PrefillLinear({&args, 1}, stream(), choice);
    EXPECT_TRUE(status.has_value()) << (status.has_value() ? "" : status.error().message);
    return y.Download(stream());
  }
  // The kernel for few rows, a few at a time.
  OwnedTensor FewRows(const DeviceTensor& x, int64_t rows, const LinearWeight& weight,
                      DType dtype) {
    DeviceTensor y(dtype, {rows, weight.n()}, stream());
    for (int64_t begin = 0; begin < rows; begin += 3) {
      const int64_t end = std::min(begin + 3, rows);
      const Status status = Linear(
          {.x = x.view().Rows(begin, end), .weight = &weight, .y = y.view().Rows(begin, end)},
          stream());
      EXPECT_TRUE(status.has_value()) << (status.has_value() ? "" : status.error().message);
    }
    return y.Download(stream());
  }
};

TEST_F(LinearPrefillTest, ManyRowsMatchTheReference) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(NameOf(c));
    const Stored stored = RandomSource(c.format, c.n, c.k, 1);
    const std::vector<LinearWeight> weights = Pack({&stored, 1});
    const OwnedTensor x = RandomRows(100, c.k, 2);
    const DeviceTensor x_device(x.view(), stream());
    OwnedTensor expected(DType::kF32, {100, c.n});
    LinearReference(stored.source, x.view(), expected.view());
    const OwnedTensor floats = Prefill(x_device, 100, weights[0], DType::kF32);
    EXPECT_LT(RelativeError(floats.view(), expected.view()), 1e-6);
    const OwnedTensor halves = Prefill(x_device, 100, weights[0], DType::kBf16);
    EXPECT_LT(RelativeError(halves.view(), expected.view()), 3e-3);
  }
}

TEST_F(LinearPrefillTest, ARowHasTheBitsOfTheKernelForFewRows) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(NameOf(c));
    const Stored stored = RandomSource(c.format, c.n, c.k, 3);
    const std::vector<LinearWeight> weights = Pack({&stored, 1});
    const OwnedTensor x = RandomRows(70, c.k, 4);
    const DeviceTensor x_device(x.view(), stream());
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      const OwnedTensor many = Prefill(x_device, 70, weights[0], dtype);
      const OwnedTensor few = FewRows(x_device, 70, weights[0], dtype);
      for (int64_t row = 0; row < 70; ++row)
        EXPECT_TRUE(SameBytes(many.view(), row, few.view(), row)) << "row " << row;
    }
  }
}

TEST_F(LinearPrefillTest, TheNumberOfRowsDoesNotShow) {
  for (const Case& c : {kCases[0], kCases[3], kCases[5]}) {
    SCOPED_TRACE(NameOf(c));
    const Stored stored = RandomSource(c.format, c.n, c.k, 5);
    const std::vector<LinearWeight> weights = Pack({&stored, 1});
    const OwnedTensor x = RandomRows(300, c.k, 6);
    const DeviceTensor x_device(x.view(), stream());
    const OwnedTensor all = Prefill(x_device, 300, weights[0], DType::kF32);
    for (const int64_t rows : {1, 48, 64, 65, 96, 97, 128, 129, 200}) {
      const OwnedTensor some = Prefill(x_device, rows, weights[0], DType::kF32);
      for (int64_t row = 0; row < rows; ++row)
        ASSERT_TRUE(SameBytes(some.view(), row, all.view(), row)) << rows << " rows, row " << row;
    }
  }
}

// Every size of tile, segments of K in one block and on blocks of their own.
TEST_F(LinearPrefillTest, TilesAndSplitSegmentsDoNotShow) {
  using Segments = cuda::PrefillChoice::Segments;
  for (const Case& c : {kCases[0], kCases[3], kCases[5]}) {
    SCOPED_TRACE(NameOf(c));
    const Stored stored = RandomSource(c.format, c.n, c.k, 100);
    const std::vector<LinearWeight> weights = Pack({&stored, 1});
    const OwnedTensor x = RandomRows(270, c.k, 101);
    const DeviceTensor x_device(x.view(), stream());
    const OwnedTensor few = FewRows(x_device, 270, weights[0], DType::kBf16);
    for (const Segments segments : {Segments::kChained, Segments::kSplit}) {
      for (const int tile_tokens : {64, 128, 192, 256}) {
        if (tile_tokens == 256 && segments == Segments::kChained &&
            c.format != WeightFormat::kFp4Group)
          continue;
        SCOPED_TRACE(fmt::format("{} tokens, {}", tile_tokens,
                                 segments == Segments::kSplit ? "split" : "chained"));
        const OwnedTensor many = Prefill(x_device, 270, weights[0], DType::kBf16, false,
                                         {.tile_tokens = tile_tokens, .segments = segments});
        for (int64_t row = 0; row < 270; ++row)
          ASSERT_TRUE(SameBytes(many.view(), row, few.view(), row)) << "row " << row;
      }
    }
  }
}

TEST_F(LinearPrefillTest, QuantizedResultsAreThoseOfTheQuantizer) {
  const Stored stored = RandomSource(WeightFormat::kFp8Block, 160, 576, 7);
  const std::vector<LinearWeight> weights = Pack({&stored, 1});
  const OwnedTensor x = RandomRows(80, 576, 8);
  const DeviceTensor x_device(x.view(), stream());
  const OwnedTensor quantized = Prefill(x_device, 80, weights[0], DType::kBf16, true);
  const OwnedTensor plain = Prefill(x_device, 80, weights[0], DType::kBf16);
  const DeviceTensor expected(plain.view(), stream());
  ASSERT_TRUE(QuantizeFp8({.x = expected.view(), .y = expected.view()}, stream()).has_value());
  const OwnedTensor expected_host = expected.Download(stream());
  for (int64_t row = 0; row < 80; ++row)
    EXPECT_TRUE(SameBytes(quantized.view(), row, expected_host.view(), row)) << "row " << row;
}

TEST_F(LinearPrefillTest, ABatchTakesColumnsOfXAndWritesColumnsOfY) {
  constexpr int64_t kRows = 90;
  std::vector<Stored> stored;
  for (uint32_t i = 0; i < 3; ++i)
    stored.push_back(RandomSource(WeightFormat::kFp8Block, 128, 320, 10 + i));
  const std::vector<LinearWeight> weights = Pack(stored);
  const OwnedTensor x = RandomRows(kRows, 3 * 320, 13);
  const DeviceTensor x_device(x.view(), stream());
  const DeviceTensor y(DType::kBf16, {kRows, 3 * 128}, stream());
  std::vector<LinearArgs> batch;
  for (int64_t i = 0; i < 3; ++i) {
    batch.push_back({.x = x_device.view().Columns(320 * i, 320 * (i + 1)),
                     .weight = &weights[static_cast<size_t>(i)],
                     .y = y.view().Columns(128 * i, 128 * (i + 1))});
  }
  ASSERT_TRUE(cuda::PrefillLinear(batch, stream()).has_value());
  const OwnedTensor result = y.Download(stream());
  for (int64_t i = 0; i < 3; ++i) {
    OwnedTensor columns(DType::kBf16, {kRows, 320});
    OwnedTensor expected(DType::kF32, {kRows, 128});
    for (int64_t row = 0; row < kRows; ++row)
      std::memcpy(columns.view().Row<Bf16>(row), x.view().Row<Bf16>(row) + 320 * i, 640);
    LinearReference(stored[static_cast<size_t>(i)].source, columns.view(), expected.view());
    OwnedTensor actual(DType::kBf16, {kRows, 128});
    for (int64_t row = 0; row < kRows; ++row)
      std::memcpy(actual.view().Row<Bf16>(row), result.view().Row<Bf16>(row) + 128 * i, 256);
    EXPECT_LT(RelativeError(actual.view(), expected.view()), 3e-3) << i;
  }
}

// Rows in groups: none, few, more than a tile.
struct Groups {
  std::vector<int32_t> offsets = {0, 0, 70, 71, 71, 201};
  std::vector<int32_t> row_index;
  int64_t rows = 201;
  int64_t x_rows = 50;
  explicit Groups() {
    std::mt19937 random(20);
    for (int64_t i = 0; i < rows; ++i)
      row_index.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(x_rows)));
  }
  DeviceTensor OnDevice(const std::vector<int32_t>& values, Stream& stream) const {
    return DeviceTensor(TensorView(values.data(), DType::kI32, {std::ssize(values)}), stream);
  }
};

TEST_F(LinearPrefillTest, AGroupHasTheBitsOfItsRowsAlone) {
  for (const Case& c : {kCases[0], kCases[1], kCases[2]}) {
    SCOPED_TRACE(NameOf(c));
    const Groups groups;
    std::vector<Stored> stored;
    std::vector<const LinearWeight*> pointers;
    for (uint32_t i = 0; i < 5; ++i) stored.push_back(RandomSource(c.format, c.n, c.k, 30 + i));
    const std::vector<LinearWeight> weights = Pack(stored);
    for (const LinearWeight& weight : weights) pointers.push_back(&weight);
    pointers[0] = nullptr;  // has no rows
    const OwnedTensor x = RandomRows(groups.x_rows, c.k, 40);
    const DeviceTensor x_device(x.view(), stream());
    const DeviceTensor offsets = groups.OnDevice(groups.offsets, stream());
    const DeviceTensor index = groups.OnDevice(groups.row_index, stream());
    const DeviceTensor y(DType::kBf16, {groups.rows, c.n}, stream());
    ASSERT_TRUE(cuda::PrefillGroupedLinear({.x = x_device.view(),
                                            .row_index = index.view(),
                                            .group_offsets = offsets.view(),
                                            .weights = pointers,
                                            .y = y.view()},
                                           stream())
                    .has_value());
    const OwnedTensor result = y.Download(stream());
    for (size_t group = 0; group < 5; ++group) {
      const OwnedTensor alone = Prefill(x_device, groups.x_rows, weights[group], DType::kBf16);
      for (int64_t row = groups.offsets[group]; row < groups.offsets[group + 1]; ++row) {
        EXPECT_TRUE(
            SameBytes(result.view(), row, alone.view(), groups.row_index[static_cast<size_t>(row)]))
            << "group " << group << " row " << row;
      }
    }
  }
}

TEST_F(LinearPrefillTest, GatedIsTwoLinearsAndTheActivation) {
  for (const Case& c :
       {kCases[0], Case{WeightFormat::kFp4Group, 160, 288}, Case{WeightFormat::kFp8Block, 192, 576},
        Case{WeightFormat::kBf16, 96, 264}}) {
    for (const Numerics numerics : {Numerics::kProduction, Numerics::kReference}) {
      SCOPED_TRACE(NameOf(c));
      const Groups groups;
      std::vector<Stored> stored;
      std::vector<const LinearWeight*> gate;
      std::vector<const LinearWeight*> up;
      for (uint32_t i = 0; i < 10; ++i) stored.push_back(RandomSource(c.format, c.n, c.k, 50 + i));
      const std::vector<LinearWeight> weights = Pack(stored);
      for (size_t i = 0; i < 5; ++i) {
        gate.push_back(&weights[2 * i]);
        up.push_back(&weights[2 * i + 1]);
      }
      const OwnedTensor x = RandomRows(groups.x_rows, c.k, 60);
      OwnedTensor row_weight(DType::kF32, {groups.rows});
      for (int64_t i = 0; i < groups.rows; ++i)
        static_cast<float*>(row_weight.view().data())[i] = 0.25f + static_cast<float>(i) / 300.0f;
      const DeviceTensor x_device(x.view(), stream());
      const DeviceTensor weight_device(row_weight.view(), stream());
      const DeviceTensor offsets = groups.OnDevice(groups.offsets, stream());
      const DeviceTensor index = groups.OnDevice(groups.row_index, stream());
      const DeviceTensor out(DType::kBf16, {groups.rows, c.n}, stream());
      ASSERT_TRUE(cuda::PrefillGatedLinear({.x = x_device.view(),
                                            .row_index = index.view(),
                                            .group_offsets = offsets.view(),
                                            .gate_weights = gate,
                                            .up_weights = up,
                                            .row_weight = weight_device.view(),
                                            .limit = 2.0f,
                                            .out = out.view(),
                                            .numerics = numerics},
                                           stream())
                      .has_value());
      const DeviceTensor gate_y(DType::kBf16, {groups.rows, c.n}, stream());
      const DeviceTensor up_y(DType::kBf16, {groups.rows, c.n}, stream());
      GroupedLinearArgs grouped{.x = x_device.view(),
                                .row_index = index.view(),
                                .group_offsets = offsets.view(),
                                .weights = gate,
                                .y = gate_y.view()};
      ASSERT_TRUE(cuda::PrefillGroupedLinear(grouped, stream()).has_value());
      grouped.weights = up;
      grouped.y = up_y.view();
      ASSERT_TRUE(cuda::PrefillGroupedLinear(grouped, stream()).has_value());
      const DeviceTensor expected(DType::kBf16, {groups.rows, c.n}, stream());
      ASSERT_TRUE(Swiglu({.gate = gate_y.view(),
                          .up = up_y.view(),
                          .row_weight = weight_device.view(),
                          .limit = 2.0f,
                          .out = expected.view(),
                          .numerics = numerics},
                         stream())
                      .has_value());
      const OwnedTensor actual_host = out.Download(stream());
      const OwnedTensor expected_host = expected.Download(stream());
      for (int64_t row = 0; row < groups.rows; ++row)
        ASSERT_TRUE(SameBytes(actual_host.view(), row, expected_host.view(), row)) << row;
    }
  }
}

TEST_F(LinearPrefillTest, OneGatedPairOfAllRowsNeedsNoGroups) {
  constexpr int64_t kRows = 140;
  std::vector<Stored> stored;
  for (uint32_t i = 0; i < 2; ++i)
    stored.push_back(RandomSource(WeightFormat::kFp8Block, 128, 576, 70 + i));
  const std::vector<LinearWeight> weights = Pack(stored);
  const LinearWeight* gate = &weights[0];
  const LinearWeight* up = &weights[1];
  const OwnedTensor x = RandomRows(kRows, 576, 72);
  const DeviceTensor x_device(x.view(), stream());
  const DeviceTensor out(DType::kBf16, {kRows, 128}, stream());
  ASSERT_TRUE(cuda::PrefillGatedLinear({.x = x_device.view(),
                                        .row_index = {},
                                        .group_offsets = {},
                                        .gate_weights = {&gate, 1},
                                        .up_weights = {&up, 1},
                                        .row_weight = {},
                                        .out = out.view()},
                                       stream())
                  .has_value());
  const OwnedTensor gate_y = Prefill(x_device, kRows, *gate, DType::kBf16);
  const OwnedTensor up_y = Prefill(x_device, kRows, *up, DType::kBf16);
  const DeviceTensor gate_device(gate_y.view(), stream());
  const DeviceTensor up_device(up_y.view(), stream());
  ASSERT_TRUE(Swiglu({.gate = gate_device.view(),
                      .up = up_device.view(),
                      .row_weight = {},
                      .out = gate_device.view()},
                     stream())
                  .has_value());
  const OwnedTensor actual = out.Download(stream());
  const OwnedTensor expected = gate_device.Download(stream());
  for (int64_t row = 0; row < kRows; ++row)
    ASSERT_TRUE(SameBytes(actual.view(), row, expected.view(), row)) << row;
}

TEST_F(LinearPrefillTest, WeightsOfDifferentStacksAreRefused) {
  std::vector<Stored> stored;
  for (uint32_t i = 0; i < 3; ++i)
    stored.push_back(RandomSource(WeightFormat::kFp4Group, 64, 256, 80 + i));
  const std::vector<LinearWeight> weights = Pack(stored);
  const std::vector<const LinearWeight*> pointers = {&weights[0], &weights[2], &weights[1]};
  const OwnedTensor x = RandomRows(3, 256, 83);
  const DeviceTensor x_device(x.view(), stream());
  OwnedTensor offsets(DType::kI32, {4});
  for (int32_t i = 0; i < 4; ++i) static_cast<int32_t*>(offsets.view().data())[i] = i;
  const DeviceTensor offsets_device(offsets.view(), stream());
  const DeviceTensor y(DType::kBf16, {3, 64}, stream());
  const Status status = cuda::PrefillGroupedLinear({.x = x_device.view(),
                                                    .row_index = {},
                                                    .group_offsets = offsets_device.view(),
                                                    .weights = pointers,
                                                    .y = y.view()},
                                                   stream());
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, Code::kInvalidArgument);
}

TEST_F(LinearPrefillTest, LayersOfTheModelHaveTheBitsOfTheKernelForFewRows) {
  DI_DEVICE_ONLY();
  if (IsSkipped()) return;
  const Case cases[] = {
      {WeightFormat::kFp4Group, 2304, 5120}, {WeightFormat::kFp4Group, 5120, 2304},
      {WeightFormat::kFp8Block, 1792, 5120}, {WeightFormat::kFp8Block, 32768, 1280},
      {WeightFormat::kFp8Block, 5120, 8192}, {WeightFormat::kBf16, 384, 5120}};
  for (const Case& c : cases) {
    SCOPED_TRACE(NameOf(c));
    const Stored stored = RandomSource(c.format, c.n, c.k, 90);
    const std::vector<LinearWeight> weights = Pack({&stored, 1});
    const OwnedTensor x = RandomRows(1500, c.k, 91);
    const DeviceTensor x_device(x.view(), stream());
    const OwnedTensor many = Prefill(x_device, 1500, weights[0], DType::kF32);
    const OwnedTensor few = FewRows(x_device, 1500, weights[0], DType::kF32);
    int different = 0;
    for (int64_t row = 0; row < 1500; ++row)
      different += SameBytes(many.view(), row, few.view(), row) ? 0 : 1;
    EXPECT_EQ(different, 0) << "of 1500 rows";
    // Few enough for segments on blocks of their own, twice: counters are left at zero.
    for (const int64_t rows : {256, 200}) {
      const OwnedTensor split = Prefill(x_device, rows, weights[0], DType::kF32, false,
                                        {.segments = cuda::PrefillChoice::Segments::kSplit});
      different = 0;
      for (int64_t row = 0; row < rows; ++row)
        different += SameBytes(split.view(), row, few.view(), row) ? 0 : 1;
      EXPECT_EQ(different, 0) << "of " << rows << " rows";
    }
  }
}

TEST_F(LinearPrefillTest, AChoiceThatDoesNotFitIsRefused) {
  const Stored stored = RandomSource(WeightFormat::kFp8Block, 97, 1312, 95);
  const std::vector<LinearWeight> weights = Pack({&stored, 1});
  const DeviceTensor x(RandomRows(1, 1312, 96).view(), stream());
  const DeviceTensor y(DType::kF32, {1, 97}, stream());
  const LinearArgs args{.x = x.view(), .weight = &weights[0], .y = y.view()};
  // Totals leave room for 192 rows.
  const Status status = cuda::PrefillLinear(
      {&args, 1}, stream(),
      {.tile_tokens = 256, .segments = cuda::PrefillChoice::Segments::kChained});
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, Code::kInvalidArgument);
}

TEST(LinearPrefill, PaysForManyRowsOnly) {
  const auto pays = [](WeightFormat format, bool gated, const cuda::PrefillWork& work) {
    return cuda::PrefillPays(format, gated, {&work, 1}, 132);
  };
  EXPECT_FALSE(pays(WeightFormat::kFp4Group, true, {.rows = 1, .n = 2304, .k = 5120}));
  EXPECT_FALSE(pays(WeightFormat::kFp8Block, false, {.rows = 16, .n = 5120, .k = 8192}));
  EXPECT_TRUE(
      pays(WeightFormat::kFp4Group, true, {.rows = 128, .n = 2304, .k = 5120, .weights = 6}));
  EXPECT_TRUE(pays(WeightFormat::kFp8Block, false, {.rows = 256, .n = 5120, .k = 8192}));
  EXPECT_TRUE(pays(WeightFormat::kFp8Block, false, {.rows = 4096, .n = 1280, .k = 5120}));
}

TEST(LinearPrefill, TakesRowsOfWholePieces) {
  alignas(16) static uint16_t memory[64];
  EXPECT_TRUE(cuda::PrefillTakes(TensorView(memory, DType::kBf16, {2, 32})));
  EXPECT_FALSE(cuda::PrefillTakes(TensorView(memory, DType::kBf16, {2, 31})));
  EXPECT_FALSE(cuda::PrefillTakes(TensorView(memory + 1, DType::kBf16, {1, 32})));
  EXPECT_FALSE(cuda::PrefillTakes(TensorView(memory, DType::kBf16, {2, 12}).Columns(0, 8)));
}

}  // namespace
}  // namespace deepinfer::testing
