#include "ops/cuda/device_layout_test_util.h"
#include "ops/rope/rope.h"

namespace deepinfer {
namespace {

using testing::CountDifferentBits;
using testing::DeviceTensor;
using testing::NormalTensor;
using testing::OwnedTensor;
using testing::RandomTable;

class RopeCuda : public testing::CudaTest {};

// Correctly rounded from double on both sides: a difference needs a double that lies within an ulp
// or two (2^-51) of the middle between two floats, one value of about 2^26.
TEST_F(RopeCuda, TheTableIsCorrectlyRounded) {
  for (const int64_t scale : {1, 2}) {
    const int64_t rows = 23;
    const int64_t pairs = 32;
    OwnedTensor positions(DType::kI32, {rows});
    OwnedTensor frequencies(DType::kF32, {pairs});
    for (int64_t r = 0; r < rows; ++r) {
      positions.Row<int32_t>(0)[r] =
          static_cast<int32_t>(r < 3 ? r : (r == 3 ? 1048575 : r * r * r * 89 + 7));
    }
    for (int64_t i = 0; i < pairs; ++i) {
      frequencies.Row<float>(0)[i] =
          static_cast<float>(std::pow(10000.0, -2.0 * static_cast<double>(i) / 64.0));
    }
    OwnedTensor expected(DType::kF32, {rows, pairs, 2});
    RopeTableArgs args{.positions = positions.view(),
                       .scale = scale,
                       .frequencies = frequencies.view(),
                       .table = expected.view()};
    ASSERT_TRUE(RopeTable(args, cpu_stream()).has_value());
    const DeviceTensor positions_device(positions.view(), stream());
    const DeviceTensor frequencies_device(frequencies.view(), stream());
    const DeviceTensor table(DType::kF32, {rows, pairs, 2}, stream());
    args.positions = positions_device.view();
    args.frequencies = frequencies_device.view();
    args.table = table.view();
    ASSERT_TRUE(RopeTable(args, stream()).has_value());
    EXPECT_EQ(CountDifferentBits(table.Download(stream()).view(), expected.view()), 0);
  }
}

struct Case {
  int64_t rows, heads, channels, pairs;
  bool quantize;
};
// Three pairs of 20 channels are not whole lanes.
constexpr Case kCases[] = {{3, 8, 64, 8, false},   {2, 64, 512, 32, false}, {5, 3, 20, 3, false},
                           {3, 4, 64, 8, true},    {2, 32, 128, 32, true},  {4, 1, 32, 16, true},
                           {4, 5, 96, 7, true},    {300, 4, 64, 8, true},   {300, 8, 64, 8, false},
                           {150, 65, 16, 8, false}};

TEST_F(RopeCuda, HasTheBitsOfTheCpuForEveryRowCount) {
  for (const Case& c : kCases) {
    const OwnedTensor x = NormalTensor(DType::kBf16, {c.rows, c.heads, c.channels}, 1, 2.0f);
    const OwnedTensor table = RandomTable(c.rows, c.pairs, 2);
    const DeviceTensor x_device(x.view(), stream());
    const DeviceTensor table_device(table.view(), stream());
    const DeviceTensor alone(x.view(), stream());
    ASSERT_TRUE(Rope({x_device.view(), table_device.view(), c.quantize}, stream()).has_value());
    ASSERT_TRUE(
        Rope({alone.view().Rows(1, 2), table_device.view().Rows(1, 2), c.quantize}, stream())
            .has_value());
    ASSERT_TRUE(Rope({x.view(), table.view(), c.quantize}, cpu_stream()).has_value());
    const OwnedTensor result = x_device.Download(stream());
    EXPECT_EQ(CountDifferentBits(result.view(), x.view()), 0)
        << c.rows << " x " << c.heads << " x " << c.channels << " " << c.quantize;
    EXPECT_EQ(CountDifferentBits(alone.Download(stream()).view().Rows(1, 2), x.view().Rows(1, 2)),
              0);
  }
}

}  // namespace
}  // namespace deepinfer
