#include "ops/cache_records/cache_records.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/cache_records/cache_records_impl.h"
#include "ops/quantize/group_quantize.h"
#include "ops/rope/rotate.h"
#include "ops/row_access.h"
#include "ops/validate.h"

namespace deepinfer {
namespace {

// Loads a bf16 vector, rotates its last channels and rounds them back to bf16, as fp32 values.
void LoadRotated(const Bf16* values, int64_t channels, const float* table, int64_t pairs,
                 float* out) {
  LoadBf16(values, channels, out);
  float* rotated = out + channels - 2 * pairs;
  RotatePairs(rotated, table, pairs);
  for (int64_t i = 0; i < 2 * pairs; ++i) rotated[i] = RoundToBf16(rotated[i]);
}

}  // namespace

Status WindowRecords(const WindowRecordsArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(ExpectTensor(args.kv, DType::kBf16, {-1, -1}, "WindowRecords", "kv"));
  const int64_t rows = args.kv.rows();
  const int64_t channels = args.kv.dim(1);
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.table, DType::kF32, {rows, -1, 2}, "WindowRecords", "table"));
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.records, DType::kU8, {rows, -1}, "WindowRecords", "records"));
  DI_RETURN_IF_ERROR(ExpectRecords(args.records, Q8RecordBytes(channels), Bf16RecordBytes(channels),
                                   "WindowRecords", "records"));
  if (stream.device().kind == DeviceKind::kCuda) return cuda::WindowRecords(args, stream);
  const bool bf16 = args.records.dim(1) == Bf16RecordBytes(channels);
  const int64_t pairs = args.table.dim(1);
  stream.pool().ParallelFor(rows, [&](int64_t begin, int64_t end, int) {
    std::vector<float> x(static_cast<size_t>(channels));
    for (int64_t r = begin; r < end; ++r) {
      LoadRotated(args.kv.Row<Bf16>(r), channels, args.table.Row<float>(r), pairs, x.data());
      if (bf16) {
        Q8InPlace(x.data(), channels);
        EncodeBf16Record(x.data(), channels, args.records.Row<uint8_t>(r));
      } else {
        EncodeQ8Record(x.data(), channels, args.records.Row<uint8_t>(r));
      }
    }
  });
  return {};
}

Status WriteWindowPages(const WriteWindowPagesArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.pages, DType::kU8, {-1, -1, -1}, "WriteWindowPages", "pages"));
  const int64_t page_rows = args.pages.dim(1);
  const int64_t record_bytes = args.pages.dim(2);
  DI_RETURN_IF_ERROR(ExpectTensor(args.records, DType::kU8, {args.layout.num_rows(), record_bytes},
                                  "WriteWindowPages", "records"));
  if (stream.device().kind == DeviceKind::kCuda) return cuda::WriteWindowPages(args, stream);
  const int32_t* positions = args.layout.positions.Row<int32_t>(0);
  const int32_t* sequence = args.layout.row_sequence.Row<int32_t>(0);
  const int32_t* first_page = args.layout.window_first_page.Row<int32_t>(0);
  const int32_t* window_begin = args.layout.window_begin.Row<int32_t>(0);
  stream.pool().ParallelFor(
      args.layout.num_rows(),
      [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; ++r) {
          const int64_t s = sequence[r];
          const int64_t page = positions[r] / page_rows - first_page[s];
          if (page < 0 || positions[r] < window_begin[s]) continue;
          const int32_t id = args.layout.window_table.Row<int32_t>(s)[page];
          std::memcpy(args.pages.Row<uint8_t>(id) + positions[r] % page_rows * record_bytes,
                      args.records.Row<uint8_t>(r), static_cast<size_t>(record_bytes));
        }
      },
      64);
  return {};
}

Status WriteEntries(const WriteEntriesArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(ExpectTensor(args.values, DType::kBf16, {args.entries.count(), -1},
                                  "WriteEntries", "values"));
  const int64_t channels = args.values.dim(1);
  DI_RETURN_IF_ERROR(ExpectTensor(args.table, DType::kF32, {args.entries.count(), -1, 2},
                                  "WriteEntries", "table"));
  const int64_t packed_bytes =
      args.kind == EntryRecord::kCompressedKv ? Q4ERecordBytes(channels) : Q4PRecordBytes(channels);
  DI_RETURN_IF_ERROR(ExpectTensor(args.blocks, DType::kU8, {-1, -1, -1}, "WriteEntries", "blocks"));
  DI_RETURN_IF_ERROR(ExpectRecords(args.blocks, packed_bytes, Bf16RecordBytes(channels),
                                   "WriteEntries", "blocks"));
  if (stream.device().kind == DeviceKind::kCuda) return cuda::WriteEntries(args, stream);
  const int64_t record_bytes = args.blocks.dim(2);
  const bool bf16 = record_bytes != packed_bytes;
  const int64_t entries_per_block = args.blocks.dim(1);
  const int64_t pairs = args.table.dim(1);
  const int32_t* sequence = args.entries.sequence.Row<int32_t>(0);
  const int32_t* index = args.entries.index.Row<int32_t>(0);
  stream.pool().ParallelFor(args.entries.count(), [&](int64_t begin, int64_t end, int) {
    std::vector<float> x(static_cast<size_t>(channels));
    std::vector<uint8_t> packed(static_cast<size_t>(packed_bytes));
    for (int64_t e = begin; e < end; ++e) {
      if (index[e] < 0) continue;
      LoadRotated(args.values.Row<Bf16>(e), channels, args.table.Row<float>(e), pairs, x.data());
      const int32_t block =
          args.layout.block_table.Row<int32_t>(sequence[e])[index[e] / entries_per_block];
      uint8_t* record =
          args.blocks.Row<uint8_t>(block) + (index[e] % entries_per_block) * record_bytes;
      uint8_t* codes = bf16 ? packed.data() : record;
      if (args.kind == EntryRecord::kCompressedKv) {
        EncodeQ4ERecord(x.data(), channels, args.numerics, codes);
        if (bf16) DecodeQ4ERecord(codes, channels, x.data());
      } else {
        EncodeQ4PRecord(x.data(), channels, codes);
        if (bf16) DecodeQ4PRecord(codes, channels, x.data());
      }
      if (bf16) EncodeBf16Record(x.data(), channels, record);
    }
  });
  return {};
}

}  // namespace deepinfer
