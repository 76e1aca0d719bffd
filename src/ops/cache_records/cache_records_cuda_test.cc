#include "ops/cache_records/cache_records.h"

#include "ops/cuda/device_layout_test_util.h"
#include "ops/quantize/group_quantize.h"

namespace deepinfer {
namespace {

using testing::Bytes;
using testing::DeviceEntries;
using testing::DeviceLayout;
using testing::DeviceTensor;
using testing::NormalTensor;
using testing::OwnedTensor;
using testing::RandomTable;
using testing::TestEntries;
using testing::TestLayout;

class CacheRecordsCuda : public testing::CudaTest {};

struct Width {
  int64_t channels, pairs;
};
// Records of 66 and 34 bytes allow no wide stores.
constexpr Width kWidths[] = {{64, 8}, {512, 32}, {128, 32}, {96, 5}};

TEST_F(CacheRecordsCuda, WindowRecordsHaveTheBytesOfTheCpuForEveryRowCount) {
  for (const Width& w : kWidths) {
    for (const int64_t bytes : {Q8RecordBytes(w.channels), Bf16RecordBytes(w.channels)}) {
      const int64_t rows = 9;
      const OwnedTensor kv = NormalTensor(DType::kBf16, {rows, w.channels}, 1, 3.0f);
      const OwnedTensor table = RandomTable(rows, w.pairs, 2);
      OwnedTensor expected(DType::kU8, {rows, bytes});
      ASSERT_TRUE(
          WindowRecords({kv.view(), table.view(), expected.view()}, cpu_stream()).has_value());
      const DeviceTensor kv_device(kv.view(), stream());
      const DeviceTensor table_device(table.view(), stream());
      const DeviceTensor records(DType::kU8, {rows, bytes}, stream());
      ASSERT_TRUE(WindowRecords({kv_device.view(), table_device.view(), records.view()}, stream())
                      .has_value());
      EXPECT_EQ(Bytes(records.Download(stream()).view()), Bytes(expected.view()))
          << w.channels << " channels, records of " << bytes;
      const DeviceTensor alone(DType::kU8, {1, bytes}, stream());
      ASSERT_TRUE(
          WindowRecords({kv_device.view().Rows(7, 8), table_device.view().Rows(7, 8), alone.view()},
                        stream())
              .has_value());
      EXPECT_EQ(Bytes(alone.Download(stream()).view()), Bytes(expected.view().Rows(7, 8)));
    }
  }
}

TEST_F(CacheRecordsCuda, WindowPagesAreThoseOfTheCpu) {
  for (const int64_t bytes : {33, 66, 528, 1024}) {
    TestLayout layout({{1, 5, 150}, {2, 400, 1}, {3, 0, 1}, {4, 300, 40}, {5, 100, 60}}, 1, 20);
    layout.set_window_begin(3, 330);
    layout.view().window_first_page.Row<int32_t>(0)[4] = 1;  // rows before it are skipped
    OwnedTensor records(DType::kU8, {layout.rows(), bytes});
    testing::Random random(4);
    for (int64_t i = 0; i < layout.rows() * bytes; ++i)
      records.Row<uint8_t>(0)[i] = static_cast<uint8_t>(random.Next());
    OwnedTensor pages(DType::kU8, {layout.num_pages(), TestLayout::kPageRows, bytes});
    std::fill_n(pages.Row<uint8_t>(0), pages.bytes(), uint8_t{0xff});
    ASSERT_TRUE(
        WriteWindowPages({records.view(), layout.view(), pages.view()}, cpu_stream()).has_value());
    const DeviceLayout layout_device(layout.view(), stream());
    const DeviceTensor records_device(records.view(), stream());
    const DeviceTensor pages_device(DType::kU8, {layout.num_pages(), TestLayout::kPageRows, bytes},
                                    stream());
    ASSERT_TRUE(WriteWindowPages({records_device.view(), layout_device.view(), pages_device.view()},
                                 stream())
                    .has_value());
    EXPECT_EQ(Bytes(pages_device.Download(stream()).view()), Bytes(pages.view())) << bytes;
  }
}

TEST_F(CacheRecordsCuda, EntriesAreThoseOfTheCpuAndPaddingWritesNothing) {
  const TestLayout layout({{1, 5, 40}, {2, 400, 1}, {3, 0, 3}, {4, 301, 14}}, 4);
  const DeviceLayout layout_device(layout.view(), stream());
  for (const int64_t ratio : {1, 2}) {
    const TestEntries entries(layout, ratio);
    const DeviceEntries entries_device(entries.view(), stream());
    for (const EntryRecord kind : {EntryRecord::kCompressedKv, EntryRecord::kIndexKey}) {
      for (const Width& w : kWidths) {
        const int64_t packed = kind == EntryRecord::kCompressedKv ? Q4ERecordBytes(w.channels)
                                                                  : Q4PRecordBytes(w.channels);
        for (const int64_t bytes : {packed, Bf16RecordBytes(w.channels)}) {
          for (const Numerics numerics : {Numerics::kProduction, Numerics::kReference}) {
            const OwnedTensor values =
                NormalTensor(DType::kBf16, {entries.count(), w.channels}, 5, 2.0f);
            const OwnedTensor table = RandomTable(entries.count(), w.pairs, 6);
            const int64_t per_block = 128 / ratio;
            OwnedTensor blocks(DType::kU8, {16, per_block, bytes});
            std::fill_n(blocks.Row<uint8_t>(0), blocks.bytes(), uint8_t{0xff});
            WriteEntriesArgs args{.kind = kind,
                                  .values = values.view(),
                                  .table = table.view(),
                                  .entries = entries.view(),
                                  .layout = layout.view(),
                                  .blocks = blocks.view(),
                                  .numerics = numerics};
            ASSERT_TRUE(WriteEntries(args, cpu_stream()).has_value());
            const DeviceTensor values_device(values.view(), stream());
            const DeviceTensor table_device(table.view(), stream());
            const DeviceTensor blocks_device(DType::kU8, {16, per_block, bytes}, stream());
            args.values = values_device.view();
            args.table = table_device.view();
            args.entries = entries_device.view();
            args.layout = layout_device.view();
            args.blocks = blocks_device.view();
            ASSERT_TRUE(WriteEntries(args, stream()).has_value());
            EXPECT_EQ(Bytes(blocks_device.Download(stream()).view()), Bytes(blocks.view()))
                << w.channels << " channels, records of " << bytes << ", ratio " << ratio;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace deepinfer
