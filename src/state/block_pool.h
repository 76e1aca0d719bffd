// Numbered units of cache memory with reference counts: cache blocks, window pages and slots each
// have a pool. Book-keeping only; the bytes belong to CacheMemory.
//
// Invariant: every id is either free with no reference, or in use with at least one. One of the
// references may belong to the prefix cache ("cached"); an id that has no other is reclaimable.
// Reclaimable ids are listed in the order in which they became so: the first is the one that has
// been out of use for longest.
// Contract page: docs/state.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace deepinfer {

class BlockPool {
 public:
  explicit BlockPool(int64_t count);

  int64_t size() const {
    return static_cast<int64_t>(references_.size());
  }
  int64_t num_free() const {
    return static_cast<int64_t>(free_.size());
  }
  // Ids that only the prefix cache refers to.
  int64_t num_reclaimable() const {
    return num_reclaimable_;
  }
  int32_t references(int32_t id) const {
    return references_[static_cast<size_t>(id)];
  }
  bool cached(int32_t id) const {
    return cached_[static_cast<size_t>(id)] != 0;
  }

  // An id with one reference; at least one must be free. Low ids first, then the latest released.
  int32_t Take();
  void Retain(int32_t id);
  // Gives one reference back; the last one frees the id.
  void Release(int32_t id);
  // The prefix cache's own reference, at most one per id.
  void RetainForCache(int32_t id);
  void ReleaseFromCache(int32_t id);

  // The reclaimable ids in the order in which they should go: those of rank 0 before those of rank
  // 1, and within a rank those that became reclaimable first. -1: no more.
  int32_t FirstReclaimable() const;
  int32_t NextReclaimable(int32_t id) const;
  // A reclaimable id is made the last of its rank; others are left alone.
  void Touch(int32_t id);
  // Ranks hold for cached ids; RetainForCache starts with 0. A reclaimable id whose rank changes
  // becomes the last of its new rank, or the first.
  enum class Place : uint8_t { kFirst, kLast };
  void SetRank(int32_t id, int rank, Place place);
  int rank(int32_t id) const {
    return rank_[static_cast<size_t>(id)];
  }

  // Empty, or what is wrong with the invariant. Takes time proportional to the size.
  std::string FindViolation() const;

 private:
  struct Link {
    int32_t previous;
    int32_t next;
  };
  int32_t Head(int rank) const {
    return static_cast<int32_t>(size()) + rank;
  }
  Link& link(int32_t id) {
    return links_[static_cast<size_t>(id)];
  }
  void Append(int32_t id);
  void InsertAfter(int32_t id, int32_t previous);
  void Unlink(int32_t id);

  std::vector<int32_t> references_;
  std::vector<uint8_t> cached_;
  std::vector<uint8_t> rank_;
  std::vector<int32_t> free_;
  std::vector<Link> links_;  // rings of reclaimable ids; the heads of rank 0 and 1 come last
  int64_t num_reclaimable_ = 0;
};

}  // namespace deepinfer
