#include "grammar/mask_cache.h"

#include <algorithm>

namespace deepinfer {

int64_t MaskCache::Entry::bytes() const {
  constexpr int64_t kOverhead = 256;
  return static_cast<int64_t>(4 * (key.size() + mask->size())) + kOverhead;
}

size_t MaskCache::Hash::operator()(std::span<const int32_t> key) const {
  uint64_t hash = key.size();
  for (const int32_t value : key) {
    hash = (hash ^ static_cast<uint32_t>(value)) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return hash;
}

bool MaskCache::Same::operator()(std::span<const int32_t> a, std::span<const int32_t> b) const {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

bool MaskCache::Find(const std::vector<int32_t>& key, std::span<uint32_t> mask) {
  std::shared_ptr<const std::vector<uint32_t>> found;
  {
    std::lock_guard lock(mutex_);
    const auto entry = by_key_.find(key);
    if (entry == by_key_.end()) return false;
    entries_.splice(entries_.begin(), entries_, entry->second);
    found = entry->second->mask;
    ++found_;
  }
  std::copy(found->begin(), found->end(), mask.begin());
  return true;
}

void MaskCache::Add(const std::vector<int32_t>& key, std::span<const uint32_t> mask) {
  Entry entry{key, std::make_shared<const std::vector<uint32_t>>(mask.begin(), mask.end())};
  const int64_t bytes = entry.bytes();
  if (bytes > max_bytes_) return;
  std::lock_guard lock(mutex_);
  if (by_key_.count(entry.key) > 0) return;  // another thread was faster
  while (bytes_ + bytes > max_bytes_) {
    bytes_ -= entries_.back().bytes();
    by_key_.erase(entries_.back().key);
    entries_.pop_back();
  }
  entries_.push_front(std::move(entry));
  by_key_.emplace(entries_.front().key, entries_.begin());
  bytes_ += bytes;
}

int64_t MaskCache::found() const {
  std::lock_guard lock(mutex_);
  return found_;
}

}  // namespace deepinfer
