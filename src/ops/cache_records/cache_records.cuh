// Records of window keys and their places, for the kernels that write them.
#pragma once

#include "ops/batch_layout.h"
#include "ops/cuda/rows.cuh"
#include "ops/quantize/group_quantize.cuh"

namespace deepinfer::cuda {

// What one lane contributes to a Q8 record: its eight channels as codes, their group's scale byte,
// or as bf16.
struct Q8Piece {
  uint2 codes;
  uint32_t scale_byte;
  Bf16x8 grid;
};

// Warp: four lanes have the 32 channels of a group.
__device__ inline Q8Piece MakeQ8Piece(const float (&x)[kLaneChannels], bool bf16) {
  const Q8Scale scale(LaneGroupMax<4>(Amax(x)));
  Q8Piece piece = {};
  piece.scale_byte = scale.byte;
  if (bf16) {
    for (int i = 0; i < 4; ++i) piece.grid.pairs[i] = Q8Grid(x[2 * i], x[2 * i + 1], scale);
  } else {
    piece.codes = make_uint2(Q8Codes(x, scale), Q8Codes(x + 4, scale));
  }
  return piece;
}

// How records of `channels` channels are laid out. `vector`: every record begins at a multiple of
// 16 (bf16) or 8 (packed) bytes.
struct Q8RecordFormat {
  int channels = 0;
  bool bf16 = false;
  bool vector = false;
};

__device__ inline void StoreQ8Piece(const Q8RecordFormat& format, uint8_t* record, int channel,
                                    const Q8Piece& piece) {
  if (channel >= format.channels) return;
  if (format.bf16) {
    Bf16Rows row;
    row.data = reinterpret_cast<uint16_t*>(record);
    row.channels = format.channels;
    row.vector = format.vector;
    StoreChannels(row, 0, channel, piece.grid);
    return;
  }
  if (format.vector) {
    *reinterpret_cast<uint2*>(record + channel) = piece.codes;
  } else {
    for (int i = 0; i < kLaneChannels; ++i) {
      const uint32_t word = i < 4 ? piece.codes.x : piece.codes.y;
      record[channel + i] = static_cast<uint8_t>(word >> (8 * (i % 4)));
    }
  }
  if (channel % 32 == 0)
    record[format.channels + channel / 32] = static_cast<uint8_t>(piece.scale_byte);
}

// Where rows' records go in the sequences' window pages.
struct WindowPages {
  WindowPages() = default;
  WindowPages(const TensorView& view, const BatchLayout& layout)
      : pages(static_cast<uint8_t*>(view.data())),
        page_stride(view.row_stride()),
        page_rows(static_cast<int>(view.dim(1))),
        record_bytes(static_cast<int>(view.dim(2))),
        positions(static_cast<const int32_t*>(layout.positions.data())),
        row_sequence(static_cast<const int32_t*>(layout.row_sequence.data())),
        first_page(static_cast<const int32_t*>(layout.window_first_page.data())),
        window_begin(static_cast<const int32_t*>(layout.window_begin.data())),
        table(static_cast<const int32_t*>(layout.window_table.data())),
        table_stride(layout.window_table.row_stride()) {}
  uint8_t* pages = nullptr;
  int64_t page_stride = 0;
  int page_rows = 1;
  int record_bytes = 0;
  const int32_t* positions = nullptr;
  const int32_t* row_sequence = nullptr;
  const int32_t* first_page = nullptr;
  const int32_t* window_begin = nullptr;
  const int32_t* table = nullptr;
  int64_t table_stride = 0;
};

// The row's place, or null where nothing is written.
__device__ inline uint8_t* WindowPlace(const WindowPages& p, int64_t row) {
  const int32_t position = p.positions[row];
  const int32_t sequence = p.row_sequence[row];
  const int32_t page = position / p.page_rows - p.first_page[sequence];
  if (page < 0 || position < p.window_begin[sequence]) return nullptr;
  const int32_t id = p.table[sequence * p.table_stride + page];
  return p.pages + id * p.page_stride +
         static_cast<int64_t>(position % p.page_rows) * p.record_bytes;
}

}  // namespace deepinfer::cuda
