// Masks that were costly to compute, by the state they belong to, for all matchers of a compiler:
// texts of one grammar meet the same states again and again. Bounded in bytes; the masks that were
// not asked for longest go first. For any number of threads.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

namespace deepinfer {

class MaskCache {
 public:
  explicit MaskCache(int64_t max_bytes) : max_bytes_(max_bytes) {}

  // Whether a mask was found and copied to `mask`.
  bool Find(const std::vector<int32_t>& key, std::span<uint32_t> mask);
  void Add(const std::vector<int32_t>& key, std::span<const uint32_t> mask);

  bool enabled() const {
    return max_bytes_ > 0;
  }
  int64_t found() const;  // since the beginning

 private:
  struct Entry {
    std::vector<int32_t> key;
    std::shared_ptr<const std::vector<uint32_t>> mask;
    int64_t bytes() const;
  };
  struct Hash {
    size_t operator()(std::span<const int32_t> key) const;
  };
  struct Same {
    bool operator()(std::span<const int32_t> a, std::span<const int32_t> b) const;
  };

  const int64_t max_bytes_;
  mutable std::mutex mutex_;
  int64_t bytes_ = 0;
  int64_t found_ = 0;
  std::list<Entry> entries_;  // latest first
  // The keys are those of the entries.
  std::unordered_map<std::span<const int32_t>, std::list<Entry>::iterator, Hash, Same> by_key_;
};

}  // namespace deepinfer
