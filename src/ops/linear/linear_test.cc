#include "ops/linear/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ops/linear/linear_cases.h"
#include "ops/linear/linear_kernels.h"
#include "ops/linear/linear_pack.h"
#include "ops/linear/linear_test_util.h"
#include "tensor/float_formats.h"

namespace deepinfer {
namespace {

constexpr CpuLevel kAllLevels[] = {CpuLevel::kScalar, CpuLevel::kAvx2, CpuLevel::kAvx512,
                                   CpuLevel::kAvx512Bf16, CpuLevel::kAmx};

using Stored = testing::StoredWeight;
using testing::RandomWeight;

std::vector<Bf16> RandomRows(int64_t rows, int64_t k, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<Bf16> x(static_cast<size_t>(rows * k));
  for (Bf16& value : x) value = F32ToBf16(normal(random));
  return x;
}

TensorView View(std::vector<Bf16>& data, int64_t rows, int64_t columns) {
  return TensorView(data.data(), DType::kBf16, {rows, columns});
}

TensorView View(std::vector<float>& data, int64_t rows, int64_t columns) {
  return TensorView(data.data(), DType::kF32, {rows, columns});
}

TensorView View(std::vector<int32_t>& data) {
  return TensorView(data.data(), DType::kI32, {static_cast<int64_t>(data.size())});
}

// Outputs start as a pattern that no product leaves, so that elements nobody wrote are seen.
std::vector<float> Unwritten(int64_t count) {
  return std::vector<float>(static_cast<size_t>(count), -12345.0f);
}

LinearWeight Pack(const Stored& stored, Stream& stream) {
  Result<LinearWeight> weight = PackLinearWeight(stored.source, stream);
  EXPECT_TRUE(weight.has_value()) << weight.error().message;
  return std::move(*weight);
}

std::vector<float> Multiply(const LinearWeight& weight, TensorView x, Stream& stream) {
  std::vector<float> y = Unwritten(x.rows() * weight.n());
  const Status status =
      Linear({.x = x, .weight = &weight, .y = View(y, x.rows(), weight.n())}, stream);
  EXPECT_TRUE(status.has_value()) << status.error().message;
  return y;
}

bool SameBits(const float* a, const float* b, int64_t count) {
  return std::memcmp(a, b, static_cast<size_t>(4 * count)) == 0;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && SameBits(a.data(), b.data(), static_cast<int64_t>(a.size()));
}

std::string Name(const LinearCase& c) {
  return fmt::format("format {} n {} k {}", static_cast<int>(c.format), c.n, c.k);
}

// One instance per level; levels that the host lacks are skipped visibly.
class LinearLevel : public ::testing::TestWithParam<CpuLevel> {
 protected:
  void SetUp() override {
    if (GetParam() > HostCpuFeatures().best_level())
      GTEST_SKIP() << "The host lacks " << CpuLevelName(GetParam()) << ".";
  }
  // Also a lower number of rows for the slow scalar loops.
  int64_t max_rows() const {
    return GetParam() == CpuLevel::kScalar ? 9 : 70;
  }
  bool accumulates_in_fp32() const {
    return GetParam() <= CpuLevel::kAvx512;
  }
};

INSTANTIATE_TEST_SUITE_P(Levels, LinearLevel, ::testing::ValuesIn(kAllLevels),
                         [](const auto& level) { return std::string(CpuLevelName(level.param)); });

TEST_P(LinearLevel, PackedCodesAndScalesUnpackToTheSource) {
  Stream stream(2);
  stream.set_cpu_level(GetParam());
  for (const LinearCase& c : kLinearCases) {
    const Stored stored = RandomWeight(c.format, c.n, c.k, 1);
    const LinearWeight weight = Pack(stored, stream);
    EXPECT_EQ(weight.n(), c.n);
    EXPECT_EQ(weight.k(), c.k);
    const size_t k = static_cast<size_t>(c.k);
    const size_t blocks = (k + 31) / 32;
    std::vector<float> codes(k), want_codes(k), scales(blocks), want_scales(blocks);
    for (int64_t output = 0; output < c.n; ++output) {
      UnpackLinearOutput(stored.source, output, want_codes, want_scales);
      UnpackLinearOutput(weight, output, codes, scales);
      ASSERT_TRUE(SameBits(codes, want_codes)) << Name(c) << " output " << output;
      ASSERT_TRUE(SameBits(scales, want_scales)) << Name(c) << " output " << output;
    }
  }
}

TEST_P(LinearLevel, OutputsAreTheExactSumsWithinTheTolerance) {
  Stream stream(2);
  stream.set_cpu_level(GetParam());
  for (const LinearCase& c : kLinearCases) {
    const Stored stored = RandomWeight(c.format, c.n, c.k, 2);
    const LinearWeight weight = Pack(stored, stream);
    for (int64_t rows : {int64_t{1}, int64_t{2}, int64_t{7}}) {
      std::vector<Bf16> x = RandomRows(rows, c.k, 3);
      const std::vector<float> y = Multiply(weight, View(x, rows, c.k), stream);
      std::vector<Bf16> y16(y.size());
      ASSERT_TRUE(
          Linear({.x = View(x, rows, c.k), .weight = &weight, .y = View(y16, rows, c.n)}, stream)
              .has_value());
      std::vector<float> codes(static_cast<size_t>(c.k)),
          scales(static_cast<size_t>((c.k + 31) / 32));
      for (int64_t n = 0; n < c.n; ++n) {
        UnpackLinearOutput(stored.source, n, codes, scales);
        for (int64_t row = 0; row < rows; ++row) {
          double sum = 0, magnitudes = 0;
          for (int64_t k = 0; k < c.k; ++k) {
            const double product =
                static_cast<double>(Bf16ToF32(x[static_cast<size_t>(row * c.k + k)])) *
                codes[static_cast<size_t>(k)] * scales[static_cast<size_t>(k / 32)];
            sum += product;
            magnitudes += std::fabs(product);
          }
          const size_t at = static_cast<size_t>(row * c.n + n);
          ASSERT_NEAR(y[at], sum, LinearTolerance(c.k, magnitudes))
              << Name(c) << " row " << row << " n " << n;
          ASSERT_EQ(y16[at].bits, F32ToBf16(y[at]).bits) << Name(c);
        }
      }
    }
  }
}

TEST_P(LinearLevel, Fp32LevelsReturnTheBitsOfTheReference) {
  if (!accumulates_in_fp32()) GTEST_SKIP() << "This level adds in another order.";
  Stream stream(2);
  stream.set_cpu_level(GetParam());
  for (const LinearCase& c : kLinearCases) {
    const Stored stored = RandomWeight(c.format, c.n, c.k, 4);
    const LinearWeight weight = Pack(stored, stream);
    std::vector<Bf16> x = RandomRows(max_rows(), c.k, 5);
    for (int64_t rows : {int64_t{1}, int64_t{5}, max_rows()}) {
      std::vector<float> want = Unwritten(rows * c.n);
      LinearReference(stored.source, View(x, rows, c.k), View(want, rows, c.n));
      EXPECT_TRUE(SameBits(Multiply(weight, View(x, rows, c.k), stream), want))
          << Name(c) << " rows " << rows;
    }
  }
}

TEST_P(LinearLevel, EveryRowIsTheSameAloneAndAmongAnyNumberOfRows) {
  Stream stream(2);
  stream.set_cpu_level(GetParam());
  for (const LinearCase& c : kLinearCases) {
    const LinearWeight weight = Pack(RandomWeight(c.format, c.n, c.k, 6), stream);
    std::vector<Bf16> x = RandomRows(max_rows(), c.k, 7);
    const TensorView all = View(x, max_rows(), c.k);
    std::vector<float> alone;
    for (int64_t row = 0; row < max_rows(); ++row) {
      const std::vector<float> y = Multiply(weight, all.Rows(row, row + 1), stream);
      alone.insert(alone.end(), y.begin(), y.end());
    }
    for (int64_t rows = 1; rows <= max_rows(); ++rows) {
      // The last rows of x, so that a row's place within the register blocks changes with `rows`.
      const std::vector<float> y =
          Multiply(weight, all.Rows(max_rows() - rows, max_rows()), stream);
      ASSERT_TRUE(SameBits(y.data(), alone.data() + (max_rows() - rows) * c.n, rows * c.n))
          << Name(c) << " rows " << rows;
    }
  }
}

// Rows of one kind each: ordinary values, widely varying exponents, values whose products are
// subnormal, any finite bits, any bits at all, and small values beside a single large one, which
// outputs with a zero there do not see: about as far apart as kernels that scale x can bear.
std::vector<Bf16> RowsOfAllMagnitudes(int64_t rows, int64_t k, uint32_t seed) {
  std::mt19937 random(seed);
  const auto in = [&](uint32_t low, uint32_t high) { return low + random() % (high - low + 1); };
  std::vector<Bf16> x(static_cast<size_t>(rows * k));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < k; ++i) {
      uint32_t exponent = 0;
      switch (row % 7) {
        case 0:
          exponent = in(120, 128);
          break;
        case 1:
          exponent = in(90, 150);
          break;
        case 2:
          exponent = in(0, 40);
          break;
        case 3:
          exponent = in(1, 2);
          break;
        case 4:
          exponent = in(0, 254);
          break;
        case 5:
          exponent = in(0, 255);
          break;
        default:
          exponent = 20 + (i == 5 ? static_cast<uint32_t>(120 + row) : in(0, 1));
          break;
      }
      const uint32_t bits = (random() & 0x807f) | exponent << 7;
      x[static_cast<size_t>(row * k + i)] = Bf16{static_cast<uint16_t>(bits)};
    }
  }
  return x;
}

TEST_P(LinearLevel, RowsOfAnyMagnitudeAreTheSameAloneAndAmongOthers) {
  Stream stream(1);
  stream.set_cpu_level(GetParam());
  const int64_t rows = 35;
  for (const LinearCase& c :
       {LinearCase{WeightFormat::kBf16, 70, 391}, LinearCase{WeightFormat::kFp8Block, 390, 608},
        LinearCase{WeightFormat::kFp4Group, 70, 608}}) {
    // Narrow scales, all that the tiles take, and beyond.
    for (const auto& [min_scale, max_scale] :
         {std::pair{110, 130}, std::pair{16, 240}, std::pair{0, 254}}) {
      Stored stored = RandomWeight(c.format, c.n, c.k, 40, min_scale, max_scale);
      if (c.format == WeightFormat::kBf16) {
        const uint32_t low = static_cast<uint32_t>(min_scale);
        std::mt19937 random(low);
        for (int64_t i = 0; i < c.n * c.k; ++i) {
          const uint32_t exponent = low + random() % static_cast<uint32_t>(max_scale - min_scale);
          const uint16_t bits = static_cast<uint16_t>((random() & 0x807f) | exponent << 7);
          std::memcpy(stored.weight.data() + 2 * i, &bits, 2);
        }
      }
      const LinearWeight weight = Pack(stored, stream);
      std::vector<Bf16> x = RowsOfAllMagnitudes(rows, c.k, 41);
      const TensorView all = View(x, rows, c.k);
      const std::vector<float> together = Multiply(weight, all, stream);
      for (int64_t size = 1; size <= 8; ++size) {
        for (int64_t first = 0; first + size <= rows; first += size) {
          const std::vector<float> y = Multiply(weight, all.Rows(first, first + size), stream);
          for (int64_t i = 0; i < size * c.n; ++i) {
            const float got = y[static_cast<size_t>(i)];
            const float want = together[static_cast<size_t>(first * c.n + i)];
            // Which NaN it is may depend on the order of operands.
            if (std::isnan(got) && std::isnan(want)) continue;
            ASSERT_TRUE(SameBits(&got, &want, 1))
                << Name(c) << " scales " << min_scale << " to " << max_scale << " rows " << size
                << " row " << first + i / c.n << " output " << i % c.n << ": " << got << " and "
                << want;
          }
        }
      }
    }
  }
}

TEST_P(LinearLevel, MoreRowsThanOneKernelCallTakesChangeNothing) {
  if (GetParam() == CpuLevel::kScalar) GTEST_SKIP() << "The scalar loops have no row blocks.";
  Stream stream(2);
  stream.set_cpu_level(GetParam());
  const int64_t rows = 2 * kLinearMaxRows + 37;
  for (const LinearCase& c :
       {LinearCase{WeightFormat::kBf16, 70, 100}, LinearCase{WeightFormat::kFp8Block, 70, 96},
        LinearCase{WeightFormat::kFp4Group, 70, 96}}) {
    const LinearWeight weight = Pack(RandomWeight(c.format, c.n, c.k, 8), stream);
    std::vector<Bf16> x = RandomRows(rows, c.k, 9);
    const std::vector<float> y = Multiply(weight, View(x, rows, c.k), stream);
    for (int64_t row = 0; row < rows; ++row) {
      const std::vector<float> alone =
          Multiply(weight, View(x, rows, c.k).Rows(row, row + 1), stream);
      ASSERT_TRUE(SameBits(y.data() + row * c.n, alone.data(), c.n)) << Name(c) << " row " << row;
    }
  }
}

TEST_P(LinearLevel, TheNumberOfThreadsChangesNothing) {
  Stream one(1);
  one.set_cpu_level(GetParam());
  for (int threads : {2, 3, 5}) {
    Stream many(threads);
    many.set_cpu_level(GetParam());
    for (const LinearCase& c : kLinearCases) {
      const LinearWeight weight = Pack(RandomWeight(c.format, c.n, c.k, 10), many);
      std::vector<Bf16> x = RandomRows(max_rows(), c.k, 11);
      for (int64_t rows : {int64_t{1}, int64_t{4}, max_rows()}) {
        EXPECT_TRUE(SameBits(Multiply(weight, View(x, rows, c.k), one),
                             Multiply(weight, View(x, rows, c.k), many)))
            << Name(c) << " threads " << threads << " rows " << rows;
      }
    }
  }
}

TEST_P(LinearLevel, StridedRowsGiveTheSameBitsAndLeaveTheGapsAlone) {
  Stream stream(2);
  stream.set_cpu_level(GetParam());
  for (const LinearCase& c : kLinearCases) {
    const LinearWeight weight = Pack(RandomWeight(c.format, c.n, c.k, 12), stream);
    const int64_t rows = 7;
    std::vector<Bf16> x = RandomRows(rows, c.k, 13);
    std::vector<Bf16> wide = RandomRows(rows, c.k + 19, 14);
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(wide.data() + row * (c.k + 19) + 5, x.data() + row * c.k,
                  static_cast<size_t>(2 * c.k));
    }
    std::vector<Bf16> want(static_cast<size_t>(rows * c.n));
    ASSERT_TRUE(
        Linear({.x = View(x, rows, c.k), .weight = &weight, .y = View(want, rows, c.n)}, stream)
            .has_value());
    const Bf16 mark{0x1234};
    std::vector<Bf16> y(static_cast<size_t>(rows * (c.n + 9)), mark);
    ASSERT_TRUE(Linear({.x = View(wide, rows, c.k + 19).Columns(5, 5 + c.k),
                        .weight = &weight,
                        .y = View(y, rows, c.n + 9).Columns(3, 3 + c.n)},
                       stream)
                    .has_value());
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < c.n + 9; ++i) {
        const bool gap = i < 3 || i >= 3 + c.n;
        const Bf16 expected = gap ? mark : want[static_cast<size_t>(row * c.n + i - 3)];
        ASSERT_EQ(y[static_cast<size_t>(row * (c.n + 9) + i)].bits, expected.bits)
            << Name(c) << " row " << row << " " << i;
      }
    }
  }
}

TEST_P(LinearLevel, GroupedRowsEqualPlainLinearOfEachGroup) {
  std::mt19937 random(15);
  for (int threads : {1, 3}) {
    Stream stream(threads);
    stream.set_cpu_level(GetParam());
    for (const LinearCase& c : kLinearCases) {
      const int64_t groups = 6;
      std::vector<LinearWeight> weights;
      for (int64_t g = 0; g < groups; ++g) {
        weights.push_back(
            Pack(RandomWeight(c.format, c.n, c.k, static_cast<uint32_t>(16 + g)), stream));
      }
      // An empty group without a weight, single rows, and more rows than a register block.
      std::vector<int32_t> offsets = {0, 1, 1, 2, 5, 6, static_cast<int32_t>(max_rows())};
      std::vector<const LinearWeight*> pointers;
      for (const LinearWeight& weight : weights) pointers.push_back(&weight);
      pointers[1] = nullptr;
      const int64_t source_rows = 11;
      std::vector<Bf16> x = RandomRows(source_rows, c.k, 17);
      std::vector<int32_t> index(static_cast<size_t>(max_rows()));
      for (int32_t& i : index) i = static_cast<int32_t>(random() % source_rows);
      std::vector<float> y = Unwritten(max_rows() * c.n);
      const Status status = GroupedLinear({.x = View(x, source_rows, c.k),
                                           .row_index = View(index),
                                           .group_offsets = View(offsets),
                                           .weights = pointers,
                                           .y = View(y, max_rows(), c.n)},
                                          stream);
      ASSERT_TRUE(status.has_value()) << status.error().message;
      for (int64_t g = 0; g < groups; ++g) {
        for (int32_t row = offsets[static_cast<size_t>(g)];
             row < offsets[static_cast<size_t>(g + 1)]; ++row) {
          const int32_t from = index[static_cast<size_t>(row)];
          const std::vector<float> want =
              Multiply(weights[static_cast<size_t>(g)],
                       View(x, source_rows, c.k).Rows(from, from + 1), stream);
          ASSERT_TRUE(SameBits(y.data() + row * c.n, want.data(), c.n))
              << Name(c) << " group " << g << " row " << row;
        }
      }
    }
  }
}

TEST_P(LinearLevel, ManyGroupsBeyondOneWaveOfRowsAreAllComputed) {
  if (GetParam() == CpuLevel::kScalar) GTEST_SKIP() << "The scalar loops have no waves.";
  Stream stream(2);
  stream.set_cpu_level(GetParam());
  const int64_t n = 40, k = 32, groups = 60, rows_per_group = 90;
  std::vector<LinearWeight> weights;
  std::vector<const LinearWeight*> pointers;
  std::vector<int32_t> offsets = {0};
  for (int64_t g = 0; g < groups; ++g) {
    weights.push_back(
        Pack(RandomWeight(WeightFormat::kFp4Group, n, k, static_cast<uint32_t>(g)), stream));
    offsets.push_back(static_cast<int32_t>((g + 1) * rows_per_group));
  }
  for (const LinearWeight& weight : weights) pointers.push_back(&weight);
  const int64_t rows = groups * rows_per_group;
  std::vector<Bf16> x = RandomRows(rows, k, 18);
  std::vector<float> y = Unwritten(rows * n);
  ASSERT_TRUE(GroupedLinear({.x = View(x, rows, k),
                             .row_index = {},
                             .group_offsets = View(offsets),
                             .weights = pointers,
                             .y = View(y, rows, n)},
                            stream)
                  .has_value());
  for (int64_t g = 0; g < groups; ++g) {
    const std::vector<float> want =
        Multiply(weights[static_cast<size_t>(g)],
                 View(x, rows, k).Rows(g * rows_per_group, (g + 1) * rows_per_group), stream);
    ASSERT_TRUE(SameBits(y.data() + g * rows_per_group * n, want.data(), rows_per_group * n))
        << "group " << g;
  }
}

TEST_P(LinearLevel, EveryCodeAndEveryScaleIsExact) {
  // x selects one column, so that y is code * scale exactly.
  Stream stream(1);
  stream.set_cpu_level(GetParam());
  for (WeightFormat format : {WeightFormat::kFp8Block, WeightFormat::kFp4Group}) {
    const bool fp8 = format == WeightFormat::kFp8Block;
    const int64_t n = fp8 ? 256 : 64, k = 64;
    for (int scale : {0, 1, 7, 17, 100, 127, 140, 239, 246, 254}) {
      Stored stored = RandomWeight(format, n, k, 19, scale, scale);
      for (int64_t output = 0; output < n; ++output) {
        for (int64_t i = 0; i < (fp8 ? k : k / 2); ++i) {
          uint8_t code = static_cast<uint8_t>(output + 16 * i + i);
          if (fp8 && (code & 0x7f) == 0x7f) code = 0;
          stored.weight[static_cast<size_t>(output * (fp8 ? k : k / 2) + i)] = code;
        }
      }
      const LinearWeight weight = Pack(stored, stream);
      std::vector<Bf16> x(static_cast<size_t>(k * k), Bf16{0});
      for (int64_t row = 0; row < k; ++row) x[static_cast<size_t>(row * k + row)] = F32ToBf16(1.0f);
      for (const std::vector<float>& y : {Multiply(weight, View(x, k, k), stream)}) {
        std::vector<float> codes(static_cast<size_t>(k)), scales(static_cast<size_t>(k / 32));
        for (int64_t output = 0; output < n; ++output) {
          UnpackLinearOutput(stored.source, output, codes, scales);
          for (int64_t row = 0; row < k; ++row) {
            const float want =
                codes[static_cast<size_t>(row)] * scales[static_cast<size_t>(row / 32)];
            ASSERT_EQ(y[static_cast<size_t>(row * n + output)], want)
                << "format " << static_cast<int>(format) << " scale " << scale << " output "
                << output << " column " << row;
          }
        }
      }
    }
  }
}

TEST_P(LinearLevel, NanCodesAndScalesMakeTheirOutputsNanAndNoOthers) {
  Stream stream(2);
  stream.set_cpu_level(GetParam());
  for (int64_t rows : {int64_t{1}, int64_t{9}}) {
    std::vector<Bf16> x = RandomRows(rows, 96, 20);
    std::fill(x.begin(), x.begin() + 96, Bf16{0});  // NaN times zero is NaN too
    Stored fp4 = RandomWeight(WeightFormat::kFp4Group, 100, 96, 21);
    fp4.scale[3 * 70 + 2] = 255;
    Stored fp8 = RandomWeight(WeightFormat::kFp8Block, 100, 96, 22);
    fp8.scale[3 * 1 + 1] = 255;  // outputs 32 ... 63
    fp8.weight[96 * 99 + 50] = 0xff;
    const LinearWeight weight4 = Pack(fp4, stream);
    const LinearWeight weight8 = Pack(fp8, stream);
    const std::vector<float> y4 = Multiply(weight4, View(x, rows, 96), stream);
    const std::vector<float> y8 = Multiply(weight8, View(x, rows, 96), stream);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t n = 0; n < 100; ++n) {
        EXPECT_EQ(std::isnan(y4[static_cast<size_t>(row * 100 + n)]), n == 70) << n;
        EXPECT_EQ(std::isnan(y8[static_cast<size_t>(row * 100 + n)]),
                  n == 99 || (n >= 32 && n < 64))
            << n;
      }
    }
  }
}

TEST_P(LinearLevel, NonFiniteInputsStayInTheirRow) {
  Stream stream(2);
  stream.set_cpu_level(GetParam());
  const LinearWeight weight = Pack(RandomWeight(WeightFormat::kFp8Block, 70, 64, 23), stream);
  const int64_t rows = 20;
  std::vector<Bf16> x = RandomRows(rows, 64, 24);
  const std::vector<float> want = Multiply(weight, View(x, rows, 64), stream);
  x[64 * 5 + 7] = Bf16{0x7fc0};
  x[64 * 9 + 63] = Bf16{0x7f80};
  const std::vector<float> y = Multiply(weight, View(x, rows, 64), stream);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t n = 0; n < 70; ++n) {
      const size_t at = static_cast<size_t>(row * 70 + n);
      if (row == 5) {
        EXPECT_TRUE(std::isnan(y[at]));
      } else if (row == 9) {
        EXPECT_FALSE(std::isfinite(y[at]));
      } else {
        EXPECT_TRUE(SameBits(&y[at], &want[at], 1)) << row;
      }
    }
  }
}

TEST_P(LinearLevel, TheReferenceSwitchReadsAnyLayout) {
  Stream stream(2);
  stream.set_cpu_level(GetParam());
  for (const LinearCase& c : kLinearCases) {
    const Stored stored = RandomWeight(c.format, c.n, c.k, 25);
    const LinearWeight weight = Pack(stored, stream);
    std::vector<Bf16> x = RandomRows(3, c.k, 26);
    std::vector<float> want = Unwritten(3 * c.n);
    LinearReference(stored.source, View(x, 3, c.k), View(want, 3, c.n));
    stream.set_use_reference(true);
    EXPECT_TRUE(SameBits(Multiply(weight, View(x, 3, c.k), stream), want)) << Name(c);
    stream.set_use_reference(false);
  }
}

TEST(Linear, RowsOfZeroAreAccepted) {
  Stream stream(2);
  const LinearWeight weight = Pack(RandomWeight(WeightFormat::kFp4Group, 70, 64, 27), stream);
  std::vector<Bf16> x = RandomRows(1, 64, 28);
  std::vector<float> y = Unwritten(70);
  EXPECT_TRUE(
      Linear({.x = View(x, 0, 64), .weight = &weight, .y = View(y, 0, 70)}, stream).has_value());
  EXPECT_EQ(y, Unwritten(70));
}

void ExpectInvalid(const Status& status, const std::string& part) {
  ASSERT_FALSE(status.has_value()) << "expected an error with: " << part;
  EXPECT_EQ(status.error().code, Code::kInvalidArgument);
  EXPECT_NE(status.error().message.find(part), std::string::npos) << status.error().message;
}

TEST(Linear, WrongWeightsAreRefusedWithASentence) {
  Stream stream(1);
  const auto pack = [&](const LinearSource& source) -> Status {
    Result<LinearWeight> weight = PackLinearWeight(source, stream);
    if (!weight.has_value()) return tl::unexpected<Error>(weight.error());
    return {};
  };
  const Stored fp8 = RandomWeight(WeightFormat::kFp8Block, 40, 64, 29);
  LinearSource source = fp8.source;
  source.k = 63;
  ExpectInvalid(pack(source), "multiple of 32");
  source = fp8.source;
  source.n = 0;
  ExpectInvalid(pack(source), "n = 0");
  source = fp8.source;
  source.n = 41;
  ExpectInvalid(pack(source), "expected F8_E4M3 [41, 64]");
  source = fp8.source;
  source.scale = {};
  ExpectInvalid(pack(source), "scale of a linear is missing");
  source = fp8.source;
  source.scale = source.scale.Rows(0, 1);
  ExpectInvalid(pack(source), "The scale of a linear is");
  source = fp8.source;
  source.format = WeightFormat::kFp4Group;
  ExpectInvalid(pack(source), "The weight of a linear is");
  const Stored bf16 = RandomWeight(WeightFormat::kBf16, 4, 5, 30);
  source = bf16.source;
  source.scale = fp8.source.scale;
  ExpectInvalid(pack(source), "has no scale");
}

TEST(Linear, WrongArgumentsAreRefusedWithASentence) {
  Stream stream(1);
  const LinearWeight weight = Pack(RandomWeight(WeightFormat::kFp4Group, 40, 64, 31), stream);
  std::vector<Bf16> x = RandomRows(4, 64, 32);
  std::vector<float> y = Unwritten(4 * 40);
  const LinearArgs good{.x = View(x, 4, 64), .weight = &weight, .y = View(y, 4, 40)};
  ASSERT_TRUE(Linear(good, stream).has_value());
  LinearArgs args = good;
  args.weight = nullptr;
  ExpectInvalid(Linear(args, stream), "without a weight");
  const LinearWeight unpacked;
  args.weight = &unpacked;
  ExpectInvalid(Linear(args, stream), "not been packed");
  args = good;
  args.x = View(x, 8, 32);
  ExpectInvalid(Linear(args, stream), "expected BF16 [rows, 64]");
  args = good;
  args.y = View(y, 5, 32);
  ExpectInvalid(Linear(args, stream), "[4, 40]");
  args = good;
  args.y = View(x, 4, 40);
  ExpectInvalid(Linear(args, stream), "overlaps");
  if (stream.cpu_level() != CpuLevel::kScalar) {
    stream.set_cpu_level(CpuLevel::kScalar);
    ExpectInvalid(Linear(good, stream), "was packed for the level");
  }
}

TEST(Linear, WrongGroupsAreRefusedWithASentence) {
  Stream stream(1);
  const LinearWeight weight = Pack(RandomWeight(WeightFormat::kFp4Group, 40, 64, 33), stream);
  const LinearWeight other = Pack(RandomWeight(WeightFormat::kFp4Group, 41, 64, 34), stream);
  std::vector<Bf16> x = RandomRows(4, 64, 35);
  std::vector<float> y = Unwritten(4 * 40);
  std::vector<int32_t> offsets = {0, 3, 4};
  std::vector<int32_t> index = {3, 0, 0, 1};
  const LinearWeight* both[] = {&weight, &weight};
  const GroupedLinearArgs good{.x = View(x, 4, 64),
                               .row_index = View(index),
                               .group_offsets = View(offsets),
                               .weights = both,
                               .y = View(y, 4, 40)};
  ASSERT_TRUE(GroupedLinear(good, stream).has_value());
  GroupedLinearArgs args = good;
  const LinearWeight* mixed[] = {&weight, &other};
  args.weights = mixed;
  ExpectInvalid(GroupedLinear(args, stream), "one shape");
  const LinearWeight* missing[] = {&weight, nullptr};
  args.weights = missing;
  ExpectInvalid(GroupedLinear(args, stream), "has 1 rows but no weight");
  args = good;
  std::vector<int32_t> descending = {0, 5, 4};
  args.group_offsets = View(descending);
  ExpectInvalid(GroupedLinear(args, stream), "must ascend");
  std::vector<int32_t> short_offsets = {0, 2, 3};
  args.group_offsets = View(short_offsets);
  ExpectInvalid(GroupedLinear(args, stream), "number of output rows");
  args = good;
  for (int32_t bad : {-1, 4}) {
    index[2] = bad;
    ExpectInvalid(GroupedLinear(args, stream), "must be from 0 to 3");
  }
  index[2] = 0;
  args.row_index = {};
  args.x = View(x, 3, 64);
  ExpectInvalid(GroupedLinear(args, stream), "3 input rows for 4");
}

}  // namespace
}  // namespace deepinfer
