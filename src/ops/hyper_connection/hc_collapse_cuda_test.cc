#include "ops/hyper_connection/hc_collapse.h"

#include "ops/cuda/cuda_test_util.h"

namespace deepinfer {
namespace {

using testing::DeviceTensor;
using testing::NormalTensor;
using testing::OwnedTensor;

class HcCollapseCuda : public testing::CudaTest {};

// Sums and quantiser are the same operations in the same order as on the CPU.
TEST_F(HcCollapseCuda, HasTheBitsOfTheCpu) {
  for (const int64_t hidden : {int64_t{64}, int64_t{96}, int64_t{5120}}) {
    for (const bool weighted : {false, true}) {
      const int64_t rows = 5;
      const OwnedTensor streams = NormalTensor(DType::kBf16, {rows, 4, hidden}, 1, 3.0f);
      const OwnedTensor pre = NormalTensor(DType::kF32, {rows, 4}, 2);
      const OwnedTensor expected(DType::kBf16, {rows, hidden});
      const DeviceTensor device_streams(streams.view(), stream());
      const DeviceTensor device_pre(pre.view(), stream());
      for (const bool quantize : {false, true}) {
        HcCollapseArgs args{.streams = streams.view(),
                            .pre = weighted ? pre.view() : TensorView(),
                            .y = expected.view(),
                            .quantize = quantize};
        ASSERT_TRUE(HcCollapse(args, cpu_stream()).has_value());
        const DeviceTensor wide(DType::kBf16, {rows, 3 * hidden}, stream());
        args.streams = device_streams.view();
        if (weighted) args.pre = device_pre.view();
        args.y = wide.view().Columns(hidden, 2 * hidden);
        ASSERT_TRUE(HcCollapse(args, stream()).has_value());
        const OwnedTensor result = wide.Download(stream());
        for (int64_t t = 0; t < rows; ++t) {
          for (int64_t d = 0; d < 3 * hidden; ++d) {
            const bool inside = d >= hidden && d < 2 * hidden;
            ASSERT_EQ(result.Row<Bf16>(t)[d].bits,
                      inside ? expected.Row<Bf16>(t)[d - hidden].bits : 0xffff)
                << "hidden " << hidden << " row " << t << " channel " << d;
          }
        }
        // A row alone.
        const DeviceTensor alone(DType::kBf16, {1, hidden}, stream());
        args.streams = args.streams.Rows(3, 4);
        if (weighted) args.pre = args.pre.Rows(3, 4);
        args.y = alone.view();
        ASSERT_TRUE(HcCollapse(args, stream()).has_value());
        EXPECT_EQ(testing::Bytes(alone.Download(stream()).view()),
                  testing::Bytes(expected.view().Rows(3, 4)));
      }
    }
  }
}

}  // namespace
}  // namespace deepinfer
