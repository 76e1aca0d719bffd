// Writing the attention caches: rotation, quantisation and placement of window keys, compressed
// keys and index keys (model description, sections 7.2, 8, 9.1 and 16). Record formats:
// ops/quantize/group_quantize.h; the size of a buffer's records says whether they are packed or
// bf16.
#pragma once

#include "base/error.h"
#include "ops/batch_layout.h"
#include "ops/numerics.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

// records[t] = Q8(RoPE(kv[t])) of the step's own rows. Attention reads them from there; they reach
// the pages for later steps only after it (WriteWindowPages).
struct WindowRecordsArgs {
  TensorView kv;       // [rows, head_dim] bf16, after kv_norm
  TensorView table;    // [rows, pairs, 2] f32
  TensorView records;  // [rows, record bytes] U8
};
Status WindowRecords(const WindowRecordsArgs& args, Stream& stream);

// Copies each row's record to its place in the sequence's window pages. Skipped are rows whose page
// lies before the table, and rows before window_begin, which nobody may see.
struct WriteWindowPagesArgs {
  TensorView records;  // [rows, record bytes] U8
  BatchLayout layout;
  TensorView pages;  // [pages, positions per page, record bytes] U8
};
Status WriteWindowPages(const WriteWindowPagesArgs& args, Stream& stream);

// Places one record per completed entry: Q4E(RoPE(c)) for compressed keys, Q4P(RoPE(k)) for index
// keys, at the entry's position in the sequence's cache blocks.
enum class EntryRecord : uint8_t { kCompressedKv, kIndexKey };
struct WriteEntriesArgs {
  EntryRecord kind = EntryRecord::kCompressedKv;
  TensorView values;  // [entries, channels] bf16, after the norm
  TensorView table;   // [entries, pairs, 2] f32 at position j * ratio
  CompressedEntries entries;
  BatchLayout layout;
  TensorView blocks;  // [blocks, entries per block, record bytes] U8
  Numerics numerics = Numerics::kProduction;
};
Status WriteEntries(const WriteEntriesArgs& args, Stream& stream);

}  // namespace deepinfer
