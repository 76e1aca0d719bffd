// Finds added tokens (chat markers, placeholders, ...) in text: the leftmost occurrence, and the
// longest token there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace deepinfer {

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool special = false;
};

class AddedTokenMatcher {
 public:
  // Contents must be distinct and not empty.
  explicit AddedTokenMatcher(const std::vector<AddedToken>& tokens);

  struct Match {
    size_t begin;
    size_t end;
    int32_t id;
  };
  // The first match that begins at or after `from`.
  std::optional<Match> Find(std::string_view text, size_t from) const;

  std::optional<int32_t> IdOf(std::string_view content) const;

 private:
  // A trie in one hash map: (node, byte) -> child. Added tokens are rare in text, so only the first
  // byte must be quick.
  std::array<bool, 256> starts_{};
  std::unordered_map<uint64_t, uint32_t> children_;
  std::vector<int32_t> ids_;  // by node; -1: no token ends here
};

}  // namespace deepinfer
