// Everything that the engine remembers about one sequence, behind five verbs: create, extend,
// truncate, save and restore. Prefix reuse, preemption, rollback of drafts, forks and transfer use
// these and nothing else. Book-keeping only: byte moves are appended to a list of StateCommands.
// Contract page: docs/state.md.
//
// Invariants: a state of n tokens refers to ceil(n / kBlockTokens) or more cache blocks, to the
// window pages of positions max(window_begin, n - history) ... n - 1 (history = window - 1 +
// rollback), and to one slot. Blocks and pages that new rows will write belong to it alone (copy on
// write).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "state/block_pool.h"
#include "state/state_command.h"

namespace deepinfer {

// Tokens per cache block and per window page. A multiple of every compression ratio.
inline constexpr int64_t kBlockTokens = 128;

// The memory that sequences and the prefix cache share, as numbers.
struct StatePools {
  StatePools(int64_t num_blocks, int64_t num_window_pages, int64_t num_slots, int64_t window_tokens,
             int64_t rollback_tokens)
      : blocks(num_blocks),
        window_pages(num_window_pages),
        slots(num_slots),
        window(window_tokens),
        rollback(rollback_tokens) {}

  BlockPool blocks;
  BlockPool window_pages;
  BlockPool slots;
  int64_t window;    // tokens that a row sees of its neighbourhood, itself included
  int64_t rollback;  // tokens by which a sequence can be truncated in place
  // Free one reclaimable block or page; set by the prefix cache. Called only while the pool has
  // reclaimable ids.
  std::function<void()> reclaim_block;
  std::function<void()> reclaim_window_page;

  int64_t available_blocks() const {
    return blocks.num_free() + blocks.num_reclaimable();
  }
  int64_t available_window_pages() const {
    return window_pages.num_free() + window_pages.num_reclaimable();
  }
  // An id with one reference, reclaimed if necessary; one must be available.
  int32_t TakeBlock();
  int32_t TakeWindowPage();
};

// A reusable beginning of a sequence: what Restore shares. Filled by PrefixCache::Find.
struct SharedPrefix {
  int64_t num_tokens = 0;
  std::vector<int32_t> blocks;  // of positions [0, num_tokens)
  // Of positions max(0, num_tokens - window + 1) ... num_tokens - 1; empty: no window history, and
  // rows from first_window_page * kBlockTokens on will be recomputed.
  std::vector<int32_t> window_pages;
  int64_t first_window_page = 0;
};

class SequenceState {
 public:
  // Create: an empty state. nullopt without a free slot.
  static std::optional<SequenceState> Create(StatePools& pools);
  // Restore: shares the prefix's blocks and pages, which must be referred to by someone until the
  // call. num_tokens must be a multiple of 2 (no open group). nullopt without a free slot.
  static std::optional<SequenceState> Restore(StatePools& pools, const SharedPrefix& prefix);
  // Restore from an image: takes fresh blocks, pages and a slot, and appends an import command.
  // nullopt, with nothing changed, if not all are available.
  static std::optional<SequenceState> Restore(StatePools& pools, std::shared_ptr<StateImage> image,
                                              std::vector<StateCommand>* commands);

  SequenceState(SequenceState&& other) noexcept;
  SequenceState& operator=(SequenceState&& other) noexcept;
  SequenceState(const SequenceState&) = delete;
  SequenceState& operator=(const SequenceState&) = delete;
  // Gives everything back.
  ~SequenceState();

  int64_t num_tokens() const {
    return num_tokens_;
  }
  int32_t slot() const {
    return slot_;
  }
  const std::vector<int32_t>& blocks() const {
    return blocks_;
  }
  const std::vector<int32_t>& window_pages() const {
    return window_pages_;
  }
  int64_t first_window_page() const {
    return first_window_page_;
  }
  // The first position whose window record the pages hold; in the first page. Later than the
  // beginning of that page after the restoration of an image.
  int64_t window_begin() const {
    return window_begin_;
  }

  // What Extend(rows) would take from the pools.
  struct Need {
    int64_t blocks = 0;
    int64_t window_pages = 0;
  };
  Need NeedFor(int64_t rows) const;
  // Extend: room for `rows` more tokens in blocks and pages that belong to this state alone. Copies
  // of shared, partly filled ones are appended to `commands`. Pages that have left the window
  // history are given back first: not by Advance, so that the pages of the latest rows can still be
  // published, and are not handed to another sequence of the same step. False, with nothing else
  // changed, if the pools cannot give what NeedFor says.
  bool Extend(int64_t rows, std::vector<StateCommand>* commands);
  // The next `rows` rows, for which there is room, have been handed to a step.
  void Advance(int64_t rows);
  // Truncate: forgets all but the first `tokens` tokens. False, with nothing changed, if that needs
  // history that is gone: window records that are no longer there or, for an odd number, more than
  // `rollback` tokens back or in front of what was restored. 0 is always possible.
  bool Truncate(int64_t tokens);
  // Save: the state as an image, by an export command. The state itself stays as it is.
  std::shared_ptr<StateImage> Save(std::vector<StateCommand>* commands) const;

 private:
  explicit SequenceState(StatePools& pools) : pools_(&pools) {}
  void ReleaseAll();
  int64_t pages_end() const {
    return first_window_page_ + static_cast<int64_t>(window_pages_.size());
  }
  void DropOldPages();

  StatePools* pools_ = nullptr;
  int32_t slot_ = -1;
  int64_t num_tokens_ = 0;
  int64_t most_tokens_ = 0;  // reached since the last Restore or truncation beyond rollback
  // The slot holds no compressor remainder of positions before this one, nor of those before
  // most_tokens - rollback - 1.
  int64_t remainder_begin_ = 0;
  std::vector<int32_t> blocks_;
  std::vector<int32_t> window_pages_;
  int64_t first_window_page_ = 0;
  int64_t window_begin_ = 0;
};

}  // namespace deepinfer
