#include "state/block_pool.h"

#include <fmt/core.h>

#include "base/check.h"

namespace deepinfer {

BlockPool::BlockPool(int64_t count)
    : references_(static_cast<size_t>(count), 0), cached_(static_cast<size_t>(count), 0) {
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
  if (references_[i]++ == 1 && cached_[i] != 0) --num_reclaimable_;
}

void BlockPool::Release(int32_t id) {
  const auto i = static_cast<size_t>(id);
  DI_CHECK_GE(references_[i], cached_[i] != 0 ? 2 : 1);
  if (--references_[i] == 0) {
    free_.push_back(id);
  } else if (references_[i] == 1 && cached_[i] != 0) {
    ++num_reclaimable_;
  }
}

void BlockPool::RetainForCache(int32_t id) {
  const auto i = static_cast<size_t>(id);
  DI_CHECK_GE(references_[i], 1);
  DI_CHECK_EQ(int{cached_[i]}, 0);
  cached_[i] = 1;
  ++references_[i];
}

void BlockPool::ReleaseFromCache(int32_t id) {
  const auto i = static_cast<size_t>(id);
  DI_CHECK_EQ(int{cached_[i]}, 1);
  cached_[i] = 0;
  if (--references_[i] > 0) return;
  --num_reclaimable_;
  free_.push_back(id);
}

std::string BlockPool::FindViolation() const {
  std::vector<int> times_free(references_.size(), 0);
  for (const int32_t id : free_) ++times_free[static_cast<size_t>(id)];
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
  return {};
}

}  // namespace deepinfer
