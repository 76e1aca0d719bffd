#include "ops/embedding/embedding.h"

#include "ops/cuda/device_layout_test_util.h"
#include "ops/gather_rows/gather_rows.h"

namespace deepinfer {
namespace {

using testing::CountDifferentBits;
using testing::DeviceTensor;
using testing::NormalTensor;
using testing::OwnedTensor;
using testing::Random;

class RowCopiesCuda : public testing::CudaTest {};

TEST_F(RowCopiesCuda, EmbeddingFillsAllStreamsAndTheFirstWeights) {
  for (auto [rows, hidden, streams] :
       {std::tuple<int64_t, int64_t, int64_t>{1, 5120, 4}, {7, 256, 4}, {3, 20, 4}, {5, 2, 4}}) {
    constexpr int64_t kVocab = 50;
    const OwnedTensor table = NormalTensor(DType::kBf16, {kVocab, hidden}, 1);
    OwnedTensor ids(DType::kI32, {rows});
    Random random(2);
    for (int64_t r = 0; r < rows; ++r)
      ids.Row<int32_t>(0)[r] = static_cast<int32_t>(random.Below(kVocab));
    OwnedTensor expected(DType::kBf16, {rows, streams, hidden});
    OwnedTensor pre(DType::kF32, {rows, streams});
    ASSERT_TRUE(Embedding({ids.view(), table.view(), expected.view(), pre.view()}, cpu_stream())
                    .has_value());
    const DeviceTensor table_device(table.view(), stream());
    const DeviceTensor ids_device(ids.view(), stream());
    const DeviceTensor out(DType::kBf16, {rows, streams, hidden}, stream());
    const DeviceTensor out_pre(DType::kF32, {rows, streams}, stream());
    EmbeddingArgs args{ids_device.view(), table_device.view(), out.view(), out_pre.view()};
    ASSERT_TRUE(Embedding(args, stream()).has_value());
    EXPECT_EQ(CountDifferentBits(out.Download(stream()).view(), expected.view()), 0);
    EXPECT_EQ(CountDifferentBits(out_pre.Download(stream()).view(), pre.view()), 0);
    const DeviceTensor alone(DType::kBf16, {rows, streams, hidden}, stream());
    args.streams = alone.view();
    args.first_pre = {};
    ASSERT_TRUE(Embedding(args, stream()).has_value());
    EXPECT_EQ(CountDifferentBits(alone.Download(stream()).view(), expected.view()), 0);
  }
}

TEST_F(RowCopiesCuda, GatherRowsMovesRowsOfAnySizeAndPlace) {
  for (const DType dtype : {DType::kBf16, DType::kF32}) {
    for (const int64_t channels : {1, 3, 4, 8, 64, 1280, 5120}) {
      for (const int64_t offset : {0, 1, 8}) {
        const OwnedTensor source = NormalTensor(dtype, {11, channels + 16}, 1);
        OwnedTensor index(DType::kI32, {6});
        const int32_t rows[] = {10, 0, 3, 3, 7, 1};
        std::copy_n(rows, 6, index.Row<int32_t>(0));
        OwnedTensor expected(dtype, {6, channels});
        ASSERT_TRUE(GatherRows({source.view().Columns(offset, offset + channels), index.view(),
                                expected.view()},
                               cpu_stream())
                        .has_value());
        const DeviceTensor source_device(source.view(), stream());
        const DeviceTensor index_device(index.view(), stream());
        const DeviceTensor out(dtype, {6, channels}, stream());
        ASSERT_TRUE(GatherRows({source_device.view().Columns(offset, offset + channels),
                                index_device.view(), out.view()},
                               stream())
                        .has_value());
        EXPECT_EQ(CountDifferentBits(out.Download(stream()).view(), expected.view()), 0)
            << channels << " channels at " << offset;
      }
    }
  }
}

}  // namespace
}  // namespace deepinfer
