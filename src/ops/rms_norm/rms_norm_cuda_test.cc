#include "ops/cuda/device_layout_test_util.h"
#include "ops/quantize/quantize.h"
#include "ops/rms_norm/rms_norm.h"

namespace deepinfer {
namespace {

using testing::CountDifferentBits;
using testing::DeviceTensor;
using testing::LargestSteps;
using testing::NormalTensor;
using testing::OwnedTensor;

class RmsNormCuda : public testing::CudaTest {};

struct Case {
  int64_t rows, channels;
};
// Several warps per row up to four rows per multiprocessor (and always beyond 2048 channels), one
// warp per row above; 24 and 100 channels are not whole lanes or warps.
constexpr Case kCases[] = {{1, 64},  {3, 128},   {5, 512},   {2, 1280},   {3, 5120}, {1, 24},
                           {4, 100}, {700, 512}, {650, 128}, {600, 1280}, {2, 9216}, {540, 2048}};

// The sum of squares in fp32 differs from the CPU's double sum by less than ten roundings of 2^-24,
// so the scale by five: at most one step of bf16, and that in about one of 2^-8 * 5 * 2^-24 / 2^-24
// values, 2 %; five times that is allowed.
TEST_F(RmsNormCuda, DiffersFromTheCpuInRareLastBits) {
  for (const Case& c : kCases) {
    const OwnedTensor x = NormalTensor(DType::kBf16, {c.rows, c.channels}, 1, 3.0f);
    const OwnedTensor weight = NormalTensor(DType::kBf16, {c.channels}, 2);
    OwnedTensor y(DType::kBf16, {c.rows, c.channels});
    ASSERT_TRUE(
        RmsNorm({.x = x.view(), .weight = weight.view(), .y = y.view(), .y_grid = {}}, cpu_stream())
            .has_value());
    const DeviceTensor x_device(x.view(), stream());
    const DeviceTensor weight_device(weight.view(), stream());
    const DeviceTensor y_device(DType::kBf16, {c.rows, c.channels}, stream());
    ASSERT_TRUE(RmsNorm({.x = x_device.view(),
                         .weight = weight_device.view(),
                         .y = y_device.view(),
                         .y_grid = {}},
                        stream())
                    .has_value());
    const OwnedTensor result = y_device.Download(stream());
    EXPECT_LE(LargestSteps(result.view(), y.view()), 1.0) << c.rows << " x " << c.channels;
    EXPECT_LE(CountDifferentBits(result.view(), y.view()),
              std::max<int64_t>(2, c.rows * c.channels / 10))
        << c.rows << " x " << c.channels;
  }
}

TEST_F(RmsNormCuda, TheGridIsTheQuantisedNorm) {
  for (const Case& c : kCases) {
    if (c.channels % 32 != 0) continue;
    const OwnedTensor x = NormalTensor(DType::kBf16, {c.rows, c.channels}, 3, 0.2f);
    const OwnedTensor weight = NormalTensor(DType::kBf16, {c.channels}, 4);
    const DeviceTensor x_device(x.view(), stream());
    const DeviceTensor weight_device(weight.view(), stream());
    const DeviceTensor y(DType::kBf16, {c.rows, c.channels}, stream());
    const DeviceTensor grid(DType::kBf16, {c.rows, c.channels}, stream());
    const DeviceTensor only_grid(DType::kBf16, {c.rows, c.channels}, stream());
    RmsNormArgs args{
        .x = x_device.view(), .weight = weight_device.view(), .y = y.view(), .y_grid = grid.view()};
    ASSERT_TRUE(RmsNorm(args, stream()).has_value());
    args.y = {};
    args.y_grid = only_grid.view();
    ASSERT_TRUE(RmsNorm(args, stream()).has_value());
    OwnedTensor expected(DType::kBf16, {c.rows, c.channels});
    const OwnedTensor normed = y.Download(stream());
    ASSERT_TRUE(QuantizeFp8({.x = normed.view(), .y = expected.view()}, cpu_stream()).has_value());
    const OwnedTensor result = grid.Download(stream());
    EXPECT_EQ(CountDifferentBits(result.view(), expected.view()), 0)
        << c.rows << " x " << c.channels;
    EXPECT_EQ(CountDifferentBits(only_grid.Download(stream()).view(), expected.view()), 0);
  }
}

TEST_F(RmsNormCuda, ARowHasTheSameBitsAloneAndInAnyBatchInPlaceAndStrided) {
  for (const Case& c : kCases) {
    const OwnedTensor x = NormalTensor(DType::kBf16, {c.rows, c.channels}, 5);
    const OwnedTensor weight = NormalTensor(DType::kBf16, {c.channels}, 6);
    const DeviceTensor weight_device(weight.view(), stream());
    const DeviceTensor together(x.view(), stream());
    RmsNormArgs args{
        .x = together.view(), .weight = weight_device.view(), .y = together.view(), .y_grid = {}};
    ASSERT_TRUE(RmsNorm(args, stream()).has_value());
    const OwnedTensor expected = together.Download(stream());
    // Rows of a wider tensor, of which the channels begin at the eighth.
    OwnedTensor wide(DType::kBf16, {c.rows, c.channels + 16});
    for (int64_t r = 0; r < c.rows; ++r) {
      std::memcpy(wide.Row<Bf16>(r) + 8, x.Row<Bf16>(r), static_cast<size_t>(c.channels) * 2);
    }
    const DeviceTensor wide_device(wide.view(), stream());
    for (int64_t r = 0; r < c.rows; r += std::max<int64_t>(1, c.rows / 3)) {
      const TensorView row = wide_device.view().Columns(8, 8 + c.channels).Rows(r, r + 1);
      args.x = row;
      args.y = row;
      ASSERT_TRUE(RmsNorm(args, stream()).has_value());
    }
    const OwnedTensor result = wide_device.Download(stream());
    for (int64_t r = 0; r < c.rows; r += std::max<int64_t>(1, c.rows / 3)) {
      EXPECT_EQ(std::memcmp(result.Row<Bf16>(r) + 8, expected.Row<Bf16>(r),
                            static_cast<size_t>(c.channels) * 2),
                0)
          << "row " << r << " of " << c.rows << " x " << c.channels;
    }
  }
}

TEST_F(RmsNormCuda, RowsThatNoBlockHoldsAreRefused) {
  const DeviceTensor x(DType::kBf16, {1, 20000}, stream());
  const DeviceTensor weight(DType::kBf16, {20000}, stream());
  const Status status =
      RmsNorm({.x = x.view(), .weight = weight.view(), .y = x.view(), .y_grid = {}}, stream());
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, Code::kUnsupported);
}

}  // namespace
}  // namespace deepinfer
