// Which rows of a step belong to which sequence, as device arrays: the part of a step's description
// that operations on per-sequence state need. Rows of a sequence are consecutive and in ascending
// position.
#pragma once

#include "tensor/tensor_view.h"

namespace deepinfer {

struct BatchLayout {
  TensorView positions;     // [rows] i32, absolute position of the row's token
  TensorView row_sequence;  // [rows] i32, index of the row's sequence in this step
  TensorView
      sequence_start;  // [sequences + 1] i32, first row of each sequence; the last element is rows
  TensorView sequence_slot;  // [sequences] i32, slot in the state pools
  TensorView block_table;  // [sequences, max blocks] i32, cache block of each 128 tokens; -1 beyond
                           // the sequence's blocks

  int64_t num_rows() const {
    return positions.rows();
  }
  int64_t num_sequences() const {
    return sequence_slot.rows();
  }
};

// Compressed entries that become complete in this step, for one compression ratio, in order of
// sequence and index.
struct CompressedEntries {
  int64_t ratio = 1;
  TensorView last_row;  // [entries] i32, row of the last token of the entry's group
  TensorView sequence;  // [entries] i32, index of the sequence in this step
  TensorView index;     // [entries] i32, entry number j; its position is j * ratio

  int64_t count() const {
    return last_row.rows();
  }
};

}  // namespace deepinfer
