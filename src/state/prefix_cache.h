// Which beginnings of earlier sequences can be reused: a tree of cache blocks keyed by their
// tokens, one tree per salt. A node is one block (the last one of a branch may be partly filled)
// and holds a reference to its cache block and, while there is room, to the window page of the same
// positions. Book-keeping only. Contract page: docs/state.md.
//
// A prefix of H tokens can be continued exactly if its blocks are here and so are the window pages
// of the `window - 1` positions before H. H is even (no open compressor group) but otherwise any
// position, also inside a block: the continuation copies a shared block before it writes to it.
//
// Eviction. Blocks: the least recently used leaf that no sequence refers to, so that an ancestor
// never goes before its descendants. A sequence can refer to a descendant and not to the ancestor
// (it ran the same tokens at the same time and kept its own block for them). If only such ancestors
// are left, the deepest goes, and the cache forgets what hangs below it; sequences keep theirs. So
// whatever the pool counts as reclaimable can be reclaimed. Window pages go independently and
// before blocks: first those in the middle of a branch (useful only if somebody branches off
// exactly there), then those at the ends of sequences and at branch points, least recently used
// first.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "state/sequence_state.h"

namespace deepinfer {

// What a hit must bring along beside the blocks.
enum class WindowNeed : uint8_t {
  kExact,  // the window pages before the hit
  kNone,   // blocks only; the caller recomputes window history (bounded replay)
};

struct PrefixCacheCounters {
  int64_t lookups = 0;
  int64_t hits = 0;              // lookups that reused at least one token
  int64_t looked_up_tokens = 0;  // tokens that lookups asked for
  int64_t hit_tokens = 0;
  int64_t inserted_blocks = 0;
  int64_t evicted_blocks = 0;
  int64_t evicted_window_pages = 0;
};

class PrefixCache {
 public:
  // Installs itself as the reclaimer of `pools`, which must outlive it. Only these bits of the
  // hashes of blocks are used: tests make them collide.
  explicit PrefixCache(StatePools& pools, uint64_t hash_mask = ~uint64_t{0});
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  // Where an insertion has got to. Owned by the caller, one per sequence; a fresh one is always
  // right, and one whose node has been evicted is noticed.
  struct Cursor {
    int64_t num_blocks = 0;  // full blocks that Insert has seen
    uint64_t serial = 0;     // of the node of the last of them
    int32_t block = -1;      // and its cache block
  };

  // The longest reusable prefix of `tokens` with at most `limit` tokens; num_tokens 0: none. Its
  // blocks and pages stay valid until the next call that can reclaim: Restore or retain them first.
  // Counts as a use.
  SharedPrefix Find(std::string_view salt, std::span<const int32_t> tokens, int64_t limit,
                    WindowNeed need);

  // Records that `state` holds the exact records of tokens [0, tokens.size()), which is at most
  // state.num_tokens(). What is known already is kept; missing window pages of known nodes are
  // taken over. `is_end`: the sequence ends here or is set aside, so its partly filled last block
  // and its window pages are worth keeping; else only full blocks are recorded.
  // With a cursor, only blocks that have become full since the last call cost anything. It belongs
  // to one salt and to tokens that only grow: start a new one when tokens that were inserted
  // change. Pages are taken from the state as it is now: call this before the Extend that gives
  // them back.
  void Insert(std::string_view salt, std::span<const int32_t> tokens, const SequenceState& state,
              bool is_end, Cursor* cursor = nullptr);

  // Gives back every reference; what sequences use stays with them.
  void Clear();

  const PrefixCacheCounters& counters() const {
    return counters_;
  }
  int64_t num_nodes() const;

  // Empty, or what is wrong with the invariants.
  std::string FindViolation() const;

 private:
  struct Node;
  struct Tree;
  void ReclaimBlock();
  void ReclaimWindowPage();
  Node* CursorNode(const Cursor& cursor) const;
  Node* Record(Node* parent, std::span<const int32_t> tokens, const SequenceState& state);
  void RecordEnd(Node* parent, std::span<const int32_t> tokens, const SequenceState& state);
  void TakeOverPage(Node* node, const SequenceState& state);
  bool PageIsWanted(const Node* node) const;
  void RankPages(Node* node, BlockPool::Place place);
  void Touch(Node* node);
  void DropPage(Node* node);
  void RemoveLeaf(Node* node);
  int64_t RemoveSubtree(Node* node);
  std::string FindViolationAt(const Node* node) const;

  StatePools& pools_;
  std::unique_ptr<Tree> tree_;
  PrefixCacheCounters counters_;
};

}  // namespace deepinfer
