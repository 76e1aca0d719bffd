// How many rows each user has been given, for fairness between users. A user is present while it
// has a sequence that is ready; one that comes starts at the least service of those present, so
// that neither an absence nor a long history is an advantage.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <unordered_map>
#include <vector>

namespace deepinfer {

class UserService {
 public:
  // One more ready sequence of the user; the index stays valid until as many Leave calls.
  size_t Join(const std::string& name) {
    const auto found = index_.find(name);
    if (found != index_.end()) {
      ++users_[found->second].sequences;
      return found->second;
    }
    const int64_t start = Least();
    size_t user = users_.size();
    if (free_.empty()) {
      users_.emplace_back();
    } else {
      user = free_.back();
      free_.pop_back();
    }
    users_[user] = {name, start, 1};
    index_.emplace(name, user);
    return user;
  }

  void Leave(size_t user) {
    if (--users_[user].sequences > 0) return;
    index_.erase(users_[user].name);
    users_[user] = {};
    free_.push_back(user);
  }

  void Serve(size_t user, int64_t rows) {
    users_[user].service += rows;
  }
  int64_t service(size_t user) const {
    return users_[user].service;
  }
  size_t num_present() const {
    return index_.size();
  }

 private:
  struct User {
    std::string name;
    int64_t service = 0;
    int64_t sequences = 0;
  };

  int64_t Least() const {
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const User& user : users_)
      if (user.sequences > 0) least = std::min(least, user.service);
    return index_.empty() ? 0 : least;
  }

  std::vector<User> users_;
  std::vector<size_t> free_;
  std::unordered_map<std::string, size_t> index_;
};

}  // namespace deepinfer
