#include "state/block_pool.h"

#include <fmt/core.h>

#include "base/check.h"

namespace deepinfer {
namespace {

constexpr int kNumRanks = 2;

}  // namespace

BlockPool::BlockPool(int64_t count)
    : references_(static_cast<size_t>(count), 0),
      cached_(static_cast<size_t>(count), 0),
      rank_(static_cast<size_t>(count), 0),
      links_(static_cast<size_t>(count + kNumRanks)) {
  for (int rank = 0; rank < kNumRanks; ++rank) link(Head(rank)) = {Head(rank), Head(rank)};
  free_.reserve(static_cast<size_t>(count));
  for (int64_t id = count - 1; id >= 0; --id) free_.push_back(static_cast<int32_t>(id));
}

int32_t BlockPool::Take() {
  DI_CHECK(!free_.empty());
  const int32_t id = free_.back();
  free_.pop_back();
  references_[static_cast<size_t>(id)] = 1;
  return id;
}

void BlockPool::Retain(int32_t id) {
  const auto i = static_cast<size_t>(id);
  DI_CHECK_GE(references_[i], 1);
  if (references_[i]++ == 1 && cached_[i] != 0) Unlink(id);
}

void BlockPool::Release(int32_t id) {
  const auto i = static_cast<size_t>(id);
  DI_CHECK_GE(references_[i], cached_[i] != 0 ? 2 : 1);
  if (--references_[i] == 0) {
    free_.push_back(id);
  } else if (references_[i] == 1 && cached_[i] != 0) {
    Append(id);
  }
}

void BlockPool::RetainForCache(int32_t id) {
  const auto i = static_cast<size_t>(id);
  DI_CHECK_GE(references_[i], 1);
  DI_CHECK_EQ(int{cached_[i]}, 0);
  cached_[i] = 1;
  rank_[i] = 0;
  ++references_[i];
}

void BlockPool::ReleaseFromCache(int32_t id) {
  const auto i = static_cast<size_t>(id);
  DI_CHECK_EQ(int{cached_[i]}, 1);
  cached_[i] = 0;
  if (--references_[i] > 0) return;
  Unlink(id);
  free_.push_back(id);
}

int32_t BlockPool::FirstReclaimable() const {
  return NextReclaimable(Head(0));
}

int32_t BlockPool::NextReclaimable(int32_t id) const {
  // The head of one rank leads on to the next rank.
  int32_t next = links_[static_cast<size_t>(id)].next;
  while (next >= size() && next + 1 < Head(kNumRanks))
    next = links_[static_cast<size_t>(next + 1)].next;
  return next < size() ? next : -1;
}

void BlockPool::Touch(int32_t id) {
  const auto i = static_cast<size_t>(id);
  if (cached_[i] == 0 || references_[i] != 1) return;
  Unlink(id);
  Append(id);
}

void BlockPool::SetRank(int32_t id, int rank, Place place) {
  const auto i = static_cast<size_t>(id);
  DI_CHECK(rank >= 0 && rank < kNumRanks);
  DI_CHECK_EQ(int{cached_[i]}, 1);
  if (rank_[i] == rank) return;
  const bool listed = references_[i] == 1;
  if (listed) Unlink(id);
  rank_[i] = static_cast<uint8_t>(rank);
  if (!listed) return;
  if (place == Place::kLast) {
    Append(id);
  } else {
    InsertAfter(id, Head(rank));
  }
}

void BlockPool::Append(int32_t id) {
  InsertAfter(id, link(Head(rank(id))).previous);
}

void BlockPool::InsertAfter(int32_t id, int32_t previous) {
  const int32_t next = link(previous).next;
  link(id) = {previous, next};
  link(previous).next = id;
  link(next).previous = id;
  ++num_reclaimable_;
}

void BlockPool::Unlink(int32_t id) {
  const auto [previous, next] = link(id);
  link(previous).next = next;
  link(next).previous = previous;
  --num_reclaimable_;
}

std::string BlockPool::FindViolation() const {
  std::vector<int> times_free(references_.size(), 0);
  for (const int32_t id : free_) {
    if (id < 0 || id >= size()) return fmt::format("{} on the free list is not an id", id);
    ++times_free[static_cast<size_t>(id)];
  }
  int64_t reclaimable = 0;
  for (size_t i = 0; i < references_.size(); ++i) {
    const bool free = references_[i] == 0;
    if (times_free[i] != (free ? 1 : 0)) {
      return fmt::format("id {} has {} references and is on the free list {} times", i,
                         references_[i], times_free[i]);
    }
    if (cached_[i] != 0 && free) return fmt::format("id {} is cached and free", i);
    if (cached_[i] != 0 && references_[i] == 1) ++reclaimable;
  }
  if (reclaimable != num_reclaimable_)
    return fmt::format("{} ids are reclaimable and {} are counted", reclaimable, num_reclaimable_);
  int64_t listed = 0;
  int last_rank = 0;
  for (int32_t id = FirstReclaimable(); id >= 0; id = NextReclaimable(id)) {
    const auto i = static_cast<size_t>(id);
    if (cached_[i] == 0 || references_[i] != 1)
      return fmt::format("id {} is listed as reclaimable and is not", id);
    if (rank_[i] < last_rank) return fmt::format("id {} is listed under a wrong rank", id);
    last_rank = rank_[i];
    if (++listed > reclaimable) break;
  }
  if (listed != reclaimable)
    return fmt::format("{} ids are reclaimable and {} are listed", reclaimable, listed);
  return {};
}

}  // namespace deepinfer
