// Which rows of a step belong to which sequence, as device arrays: the part of a step's description
// that operations on per-sequence state need. Rows of a sequence are consecutive in ascending
// position; a sequence may have none.
#pragma once

#include "tensor/tensor_view.h"

namespace deepinfer {

struct BatchLayout {
  TensorView positions;     // [rows] i32, absolute position of the row's token
  TensorView row_sequence;  // [rows] i32, index of the row's sequence in this step
  TensorView
      sequence_start;  // [sequences + 1] i32, first row of each sequence; the last element is rows
  TensorView sequence_slot;  // [sequences] i32, slot that holds the compressor remainders
  TensorView block_table;  // [sequences, max blocks] i32, cache block of each 128 tokens; -1 beyond
                           // the sequence's blocks
  // Window pages hold the window keys of as many consecutive positions as a page has rows: page i
  // of the sequence those from i * rows on.
  TensorView window_table;       // [sequences, max pages] i32: pages window_first_page, ... of the
                                 // sequence; -1 beyond them
  TensorView window_first_page;  // [sequences] i32
  TensorView window_begin;       // [sequences] i32: window keys before this position do not exist

  int64_t num_rows() const {
    return positions.rows();
  }
  int64_t num_sequences() const {
    return sequence_slot.rows();
  }
};

// Compressed entries that are written in this step, for one compression ratio, in order of sequence
// and index: those that become complete, unless they are known already.
struct CompressedEntries {
  int64_t ratio = 1;
  TensorView last_row;  // [entries] i32, row of the last token of the entry's group
  TensorView sequence;  // [entries] i32, index of the sequence in this step
  TensorView index;  // [entries] i32, entry number j; its position is j * ratio. -1: padding, for
                     // which nothing is computed that is defined and nothing is written

  int64_t count() const {
    return last_row.rows();
  }
};

}  // namespace deepinfer
