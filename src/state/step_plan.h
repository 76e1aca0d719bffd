// What one step does, as plain values that mean the same on every device: rows of any mix of
// sequences, and the state they read and write. Made by the engine from the scheduler's decision,
// carried out by the runtime. Spans are valid until the step has run.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "state/state_command.h"

namespace deepinfer {

// Tokens that the n-gram tables may look back (largest n-gram size - 1).
inline constexpr int64_t kMaxLookback = 3;

struct StepChunk {
  int32_t slot = -1;  // the sequence's slot
  int64_t begin = 0;  // position of the first row; the state holds the tokens before it
  int64_t num_rows = 0;
  // Ids of the rows; empty: one row, the token that was sampled last for this slot and that the
  // host need not know yet.
  std::span<const int32_t> tokens = {};
  // Ids at begin - 1, begin - 2, begin - 3; -1 before the sequence's start.
  std::array<int32_t, kMaxLookback> lookback = {-1, -1, -1};
  std::span<const int32_t> blocks = {};        // cache blocks of positions [0, begin + num_rows)
  std::span<const int32_t> window_pages = {};  // pages `first_window_page`, ... of the sequence
  int64_t first_window_page = 0;               // in units of kBlockTokens positions
  // No window key before this position is seen (0: all of the window).
  int64_t window_begin = 0;
  // Decoder bounded replay: rows before this position need no decoder half, and decoder layers see
  // no window key before it. 0: everything runs.
  int64_t decoder_begin = 0;
  // Compressed entries of tokens before this position exist already and must not be written again.
  int64_t entries_begin = 0;
  // The logits of that many last rows are wanted; they must not lie before decoder_begin.
  int64_t num_logit_rows = 0;
};

struct StepPlan {
  std::vector<StateCommand> commands;  // before the rows
  std::vector<StepChunk> chunks;       // each slot at most once
};

// A block of drafted tokens behind a sequence, which it does not change.
struct DraftChunk {
  int32_t anchor = -1;  // the token at position `length`: sampled, without state
  int64_t length = 0;   // tokens whose state the sequence holds
  std::span<const int32_t> window_pages = {};  // as of StepChunk, of the positions before `length`
  int64_t first_window_page = 0;
  // No key before this position is seen: the later of window_begin and decoder_begin of the steps
  // that ran the sequence.
  int64_t window_begin = 0;
};

}  // namespace deepinfer
