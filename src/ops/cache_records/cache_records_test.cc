#include "ops/cache_records/cache_records.h"

#include <gtest/gtest.h>

#include "ops/op_test_util.h"
#include "ops/quantize/group_quantize.h"
#include "ops/rope/rope.h"

namespace deepinfer {
namespace {

using testing::Chunk;
using testing::NormalTensor;
using testing::OwnedTensor;
using testing::TestLayout;

OwnedTensor Table(int64_t rows, int64_t pairs) {
  OwnedTensor table(DType::kF32, {rows, pairs, 2});
  testing::Random random(9);
  for (int64_t i = 0; i < rows * pairs; ++i) {
    const float angle = random.Uniform() * 6.28f;
    table.Row<float>(0)[2 * i] = std::cos(angle);
    table.Row<float>(0)[2 * i + 1] = std::sin(angle);
  }
  return table;
}

// Rows rotated by the Rope operation, as fp32.
std::vector<float> Rotated(const OwnedTensor& values, const OwnedTensor& table, int64_t row) {
  const int64_t channels = values.view().dim(1);
  OwnedTensor x(DType::kBf16, {1, 1, channels});
  std::memcpy(x.Row<Bf16>(0), values.Row<Bf16>(row), static_cast<size_t>(channels) * 2);
  Stream stream(1);
  EXPECT_TRUE(Rope({x.view(), table.view().Rows(row, row + 1)}, stream).has_value());
  std::vector<float> result(static_cast<size_t>(channels));
  for (int64_t i = 0; i < channels; ++i)
    result[static_cast<size_t>(i)] = testing::Value(x.view(), i);
  return result;
}

TEST(WindowRecords, AreTheQuantizedRotatedKeys) {
  for (auto [rows, channels, pairs] :
       {std::tuple<int64_t, int64_t, int64_t>{5, 64, 8}, {3, 512, 32}}) {
    const OwnedTensor kv = NormalTensor(DType::kBf16, {rows, channels}, 1, 3.0f);
    const OwnedTensor table = Table(rows, pairs);
    const int64_t bytes = Q8RecordBytes(channels);
    EXPECT_EQ(bytes, channels * 33 / 32);
    testing::ExpectRowsIndependent(rows, [&, bytes = bytes](Stream& stream, int64_t begin,
                                                            int64_t end) {
      OwnedTensor records(DType::kU8, {end - begin, bytes});
      EXPECT_TRUE(
          WindowRecords({kv.view().Rows(begin, end), table.view().Rows(begin, end), records.view()},
                        stream)
              .has_value());
      return testing::Bytes(records.view());
    });
    OwnedTensor records(DType::kU8, {rows, bytes});
    Stream stream(1);
    ASSERT_TRUE(WindowRecords({kv.view(), table.view(), records.view()}, stream).has_value());
    for (int64_t r = 0; r < rows; ++r) {
      std::vector<uint8_t> expected(static_cast<size_t>(bytes));
      EncodeQ8Record(Rotated(kv, table, r).data(), channels, expected.data());
      EXPECT_EQ(std::memcmp(expected.data(), records.Row<uint8_t>(r), expected.size()), 0);
    }
  }
}

// Records whose bytes name their sequence and position.
OwnedTensor NamedRecords(const TestLayout& layout, int64_t bytes) {
  OwnedTensor records(DType::kU8, {layout.rows(), bytes});
  for (int64_t r = 0; r < layout.rows(); ++r) {
    for (int64_t i = 0; i < bytes; ++i) {
      records.Row<uint8_t>(r)[i] =
          static_cast<uint8_t>(layout.chunk_of(r).id * 50 + layout.position(r) + i);
    }
  }
  return records;
}

constexpr int64_t kBytes = 33;

TEST(WriteWindowPages, PlacesEveryRowWhosePageIsInTheTable) {
  for (int threads : {1, 3}) {
    Stream stream(threads);
    TestLayout layout({{1, 5, 300}, {2, 400, 1}, {3, 0, 1}, {4, 300, 100}}, 1, 20);
    layout.set_window_begin(3, 330);
    OwnedTensor pages(DType::kU8, {layout.num_pages(), TestLayout::kPageRows, kBytes});
    const OwnedTensor records = NamedRecords(layout, kBytes);
    ASSERT_TRUE(
        WriteWindowPages({records.view(), layout.view(), pages.view()}, stream).has_value());
    std::vector<uint8_t> expected(testing::Bytes(pages.view()).size());
    for (int64_t r = 0; r < layout.rows(); ++r) {
      const int64_t s = layout.view().row_sequence.Row<int32_t>(0)[r];
      if (s == 3 && layout.position(r) < 330) continue;
      const uint8_t* place = layout.WindowPlace(pages.view(), s, layout.position(r));
      ASSERT_NE(place, nullptr);
      std::memcpy(expected.data() + (place - pages.Row<uint8_t>(0)), records.Row<uint8_t>(r),
                  kBytes);
    }
    EXPECT_EQ(testing::Bytes(pages.view()), expected);
  }
}

TEST(WriteWindowPages, SkipsRowsBeforeTheTable) {
  Stream stream(2);
  TestLayout layout({{1, 100, 200}}, 1, 0);
  layout.view().window_first_page.Row<int32_t>(0)[0] = 2;
  OwnedTensor pages(DType::kU8, {layout.num_pages(), TestLayout::kPageRows, kBytes});
  const OwnedTensor records = NamedRecords(layout, kBytes);
  ASSERT_TRUE(WriteWindowPages({records.view(), layout.view(), pages.view()}, stream).has_value());
  const int32_t third = layout.view().window_table.Row<int32_t>(0)[0];
  for (int64_t page = 0; page < layout.num_pages(); ++page) {
    for (int64_t i = 0; i < TestLayout::kPageRows; ++i) {
      const bool written = page == third && 256 + i < 300;
      const uint8_t* record = pages.Row<uint8_t>(page) + i * kBytes;
      if (written) {
        EXPECT_EQ(std::memcmp(record, records.Row<uint8_t>(156 + i), kBytes), 0) << i;
      } else {
        EXPECT_TRUE(std::all_of(record, record + kBytes, [](uint8_t b) { return b == 0; }));
      }
    }
  }
}

TEST(WriteEntries, PlacesRecordsByBlockTable) {
  constexpr int64_t kChannels = 128;
  constexpr int64_t kPairs = 32;
  constexpr int64_t kEntriesPerBlock = 4;
  for (EntryRecord kind : {EntryRecord::kCompressedKv, EntryRecord::kIndexKey}) {
    for (int threads : {1, 2}) {
      const int64_t bytes = kind == EntryRecord::kCompressedKv ? Q4ERecordBytes(kChannels)
                                                               : Q4PRecordBytes(kChannels);
      EXPECT_EQ(bytes, kind == EntryRecord::kCompressedKv ? 72 : 68);
      TestLayout layout({{1, 0, 12}, {2, 4, 2}}, 3);
      int32_t sequences[] = {0, 0, 0, 1};
      int32_t indices[] = {0, 3, 9, 5};
      OwnedTensor last_row(DType::kI32, {4});
      const OwnedTensor values = NormalTensor(DType::kBf16, {4, kChannels}, 1, 2.0f);
      const OwnedTensor table = Table(4, kPairs);
      OwnedTensor blocks(DType::kU8, {6, kEntriesPerBlock, bytes});
      WriteEntriesArgs args;
      args.kind = kind;
      args.values = values.view();
      args.table = table.view();
      args.entries = {1, last_row.view(), TensorView(sequences, DType::kI32, {4}),
                      TensorView(indices, DType::kI32, {4})};
      args.layout = layout.view();
      args.blocks = blocks.view();
      Stream stream(threads);
      ASSERT_TRUE(WriteEntries(args, stream).has_value());
      int64_t written = 0;
      for (int64_t e = 0; e < 4; ++e) {
        std::vector<uint8_t> expected(static_cast<size_t>(bytes));
        const std::vector<float> x = Rotated(values, table, e);
        if (kind == EntryRecord::kCompressedKv) {
          EncodeQ4ERecord(x.data(), kChannels, Numerics::kProduction, expected.data());
        } else {
          EncodeQ4PRecord(x.data(), kChannels, expected.data());
        }
        const int32_t block =
            layout.view().block_table.Row<int32_t>(sequences[e])[indices[e] / kEntriesPerBlock];
        const uint8_t* record = blocks.Row<uint8_t>(block) + indices[e] % kEntriesPerBlock * bytes;
        EXPECT_EQ(std::memcmp(record, expected.data(), expected.size()), 0) << e;
      }
      for (int64_t i = 0; i < 6 * kEntriesPerBlock; ++i) {
        const uint8_t* record = blocks.Row<uint8_t>(0) + i * bytes;
        written += std::any_of(record, record + bytes, [](uint8_t b) { return b != 0; });
      }
      EXPECT_EQ(written, 4);
    }
  }
}

TEST(CacheRecords, WrongShapesAreRefused) {
  Stream stream(1);
  OwnedTensor kv(DType::kBf16, {2, 64});
  OwnedTensor table(DType::kF32, {2, 8, 2});
  OwnedTensor records(DType::kU8, {2, 64});
  EXPECT_EQ(WindowRecords({kv.view(), table.view(), records.view()}, stream).error().field,
            "records");
}

}  // namespace
}  // namespace deepinfer
