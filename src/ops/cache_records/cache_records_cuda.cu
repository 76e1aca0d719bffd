// Writing the attention caches.
//
// Bound by memory and, at the few rows of a decode step, by the latency of the look-ups of a row's
// place. A lane has eight channels: two lanes hold a group of Q4E, four lanes one of Q8 and Q4P.
#include "ops/cache_records/cache_records.cuh"
#include "ops/cache_records/cache_records_impl.h"
#include "ops/rope/rope.cuh"

namespace deepinfer::cuda {
namespace {

constexpr int kBlock = 128;

uint32_t Blocks(int64_t threads) {
  return static_cast<uint32_t>((threads + kBlock - 1) / kBlock);
}

struct WindowRecordsParams {
  Bf16Rows kv;
  RotationTable table;
  Q8RecordFormat format;
  uint8_t* records;
  int64_t record_stride;
  int64_t rows;
  int lanes_per_row;  // a multiple of 4
};

__global__ void WindowRecordsKernel(const WindowRecordsParams p) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  const int64_t row = thread / p.lanes_per_row;
  const int channel = static_cast<int>(thread % p.lanes_per_row) * kLaneChannels;
  WaitForPreviousKernel();
  AllowNextKernel();
  float x[kLaneChannels] = {};
  if (row < p.rows) {
    Unpack(LoadChannels(p.kv, row, channel), x);
    RotateChannels(p.table, row, channel, p.kv.channels, x);
  }
  const Q8Piece piece = MakeQ8Piece(x, p.format.bf16);
  if (row < p.rows) StoreQ8Piece(p.format, p.records + row * p.record_stride, channel, piece);
}

struct WritePagesParams {
  WindowPages pages;
  const uint8_t* records;
  int64_t record_stride;
  int64_t rows;
  int pieces_per_row;
};

// Unit: what records and places are a multiple of.
template <class Unit>
__global__ void WritePagesKernel(const WritePagesParams p) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  const int64_t row = thread / p.pieces_per_row;
  const auto piece = static_cast<int>(thread % p.pieces_per_row);
  WaitForPreviousKernel();
  AllowNextKernel();
  if (row >= p.rows) return;
  const Unit value = reinterpret_cast<const Unit*>(p.records + row * p.record_stride)[piece];
  uint8_t* place = WindowPlace(p.pages, row);
  if (place != nullptr) reinterpret_cast<Unit*>(place)[piece] = value;
}

struct WriteEntriesParams {
  Bf16Rows values;
  RotationTable table;
  uint8_t* blocks;
  int64_t block_stride;
  int entries_per_block;
  int record_bytes;
  const int32_t* sequence;
  const int32_t* index;
  const int32_t* block_table;
  int64_t block_table_stride;
  int64_t entries;
  int lanes_per_entry;  // a multiple of a group's lanes
  bool bf16;
  bool vector;  // records allow 4-byte stores of codes, 16-byte stores of bf16
};

// Scale: the group's quantiser; kLanes: lanes per group.
template <class Scale, int kLanes>
__global__ void WriteEntriesKernel(const WriteEntriesParams p) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  const int64_t entry = thread / p.lanes_per_entry;
  const int channel = static_cast<int>(thread % p.lanes_per_entry) * kLaneChannels;
  WaitForPreviousKernel();
  AllowNextKernel();
  const int32_t index = entry < p.entries ? p.index[entry] : -1;
  float x[kLaneChannels] = {};
  if (index >= 0) {
    Unpack(LoadChannels(p.values, entry, channel), x);
    RotateChannels(p.table, entry, channel, p.values.channels, x);
  }
  const Scale scale(LaneGroupMax<kLanes>(Amax(x)));
  if (index < 0 || channel >= p.values.channels) return;
  const uint32_t codes = E2M1Codes(x, scale);
  const int32_t block =
      p.block_table[p.sequence[entry] * p.block_table_stride + index / p.entries_per_block];
  uint8_t* record = p.blocks + block * p.block_stride +
                    static_cast<int64_t>(index % p.entries_per_block) * p.record_bytes;
  if (p.bf16) {
    uint32_t pairs[4];
    DecodeE2M1x8(codes, scale.bf16x2(), pairs);
    Bf16Rows row;
    row.data = reinterpret_cast<uint16_t*>(record);
    row.channels = p.values.channels;
    row.vector = p.vector;
    StoreChannels(row, 0, channel, {{pairs[0], pairs[1], pairs[2], pairs[3]}});
    return;
  }
  if (p.vector) {
    *reinterpret_cast<uint32_t*>(record + channel / 2) = codes;
  } else {
    for (int i = 0; i < 4; ++i) record[channel / 2 + i] = static_cast<uint8_t>(codes >> (8 * i));
  }
  constexpr int kGroup = kLanes * kLaneChannels;
  if (channel % kGroup == 0)
    record[p.values.channels / 2 + channel / kGroup] = static_cast<uint8_t>(scale.ScaleByte());
}

}  // namespace

Status WindowRecords(const WindowRecordsArgs& args, Stream& stream) {
  const int64_t channels = args.kv.dim(1);
  const bool bf16 = args.records.dim(1) == 2 * channels;
  const WindowRecordsParams params{
      .kv = Bf16Rows(args.kv),
      .table = RotationTable(args.table, channels),
      .format = {.channels = static_cast<int>(channels),
                 .bf16 = bf16,
                 .vector =
                     IsAligned(args.records.data(), args.records.row_stride(), bf16 ? 16 : 8)},
      .records = args.records.Row<uint8_t>(0),
      .record_stride = args.records.row_stride(),
      .rows = args.kv.rows(),
      .lanes_per_row = static_cast<int>((channels + 31) / 32 * 4)};
  const LaunchConfig config{.grid = {Blocks(params.rows * params.lanes_per_row)},
                            .block = kBlock,
                            .overlap_previous = true};
  return Launch("WindowRecords", WindowRecordsKernel, config, stream, params);
}

Status WriteWindowPages(const WriteWindowPagesArgs& args, Stream& stream) {
  WritePagesParams params{.pages = WindowPages(args.pages, args.layout),
                          .records = args.records.Row<uint8_t>(0),
                          .record_stride = args.records.row_stride(),
                          .rows = args.records.rows(),
                          .pieces_per_row = 0};
  const auto launch = [&](auto kernel, int unit) {
    params.pieces_per_row = params.pages.record_bytes / unit;
    const LaunchConfig config{.grid = {Blocks(params.rows * params.pieces_per_row)},
                              .block = kBlock,
                              .overlap_previous = true};
    return Launch("WriteWindowPages", kernel, config, stream, params);
  };
  const auto fits = [&](int64_t unit) {
    return IsAligned(args.records.data(), args.records.row_stride(), unit) &&
           IsAligned(args.pages.data(), args.pages.row_stride(), unit) &&
           args.pages.dim(2) % unit == 0;
  };
  if (fits(16)) return launch(WritePagesKernel<uint4>, 16);
  if (fits(4)) return launch(WritePagesKernel<uint32_t>, 4);
  return launch(WritePagesKernel<uint8_t>, 1);
}

Status WriteEntries(const WriteEntriesArgs& args, Stream& stream) {
  const int64_t channels = args.values.dim(1);
  const bool bf16 = args.blocks.dim(2) == 2 * channels;
  const int64_t unit = bf16 ? 16 : 4;
  WriteEntriesParams params{
      .values = Bf16Rows(args.values),
      .table = RotationTable(args.table, channels),
      .blocks = args.blocks.Row<uint8_t>(0),
      .block_stride = args.blocks.row_stride(),
      .entries_per_block = static_cast<int>(args.blocks.dim(1)),
      .record_bytes = static_cast<int>(args.blocks.dim(2)),
      .sequence = args.entries.sequence.Row<int32_t>(0),
      .index = args.entries.index.Row<int32_t>(0),
      .block_table = args.layout.block_table.Row<int32_t>(0),
      .block_table_stride = args.layout.block_table.row_stride(),
      .entries = args.entries.count(),
      .lanes_per_entry = static_cast<int>((channels + 31) / 32 * 4),
      .bf16 = bf16,
      .vector = IsAligned(args.blocks.data(), args.blocks.row_stride(), unit) &&
                args.blocks.dim(2) % unit == 0};
  const LaunchConfig config{.grid = {Blocks(params.entries * params.lanes_per_entry)},
                            .block = kBlock,
                            .overlap_previous = true};
  if (args.kind == EntryRecord::kIndexKey)
    return Launch("WriteEntries", WriteEntriesKernel<Q4PScale, 4>, config, stream, params);
  if (args.numerics == Numerics::kProduction) {
    return Launch("WriteEntries", WriteEntriesKernel<Q4EScale<Numerics::kProduction>, 2>, config,
                  stream, params);
  }
  return Launch("WriteEntries", WriteEntriesKernel<Q4EScale<Numerics::kReference>, 2>, config,
                stream, params);
}

}  // namespace deepinfer::cuda
