#include "text/added_tokens.h"

#include "base/check.h"

namespace deepinfer {
namespace {

uint64_t Edge(uint32_t node, char byte) {
  return uint64_t{node} << 8 | static_cast<uint8_t>(byte);
}

}  // namespace

AddedTokenMatcher::AddedTokenMatcher(const std::vector<AddedToken>& tokens) : ids_(1, -1) {
  for (const AddedToken& token : tokens) {
    DI_CHECK(!token.content.empty());
    starts_[static_cast<uint8_t>(token.content[0])] = true;
    uint32_t node = 0;
    for (const char byte : token.content) {
      const auto [edge, is_new] =
          children_.try_emplace(Edge(node, byte), static_cast<uint32_t>(ids_.size()));
      if (is_new) ids_.push_back(-1);
      node = edge->second;
    }
    DI_CHECK_EQ(ids_[node], -1);
    ids_[node] = token.id;
  }
}

std::optional<AddedTokenMatcher::Match> AddedTokenMatcher::Find(std::string_view text,
                                                                size_t from) const {
  for (size_t begin = from; begin < text.size(); ++begin) {
    if (!starts_[static_cast<uint8_t>(text[begin])]) continue;
    std::optional<Match> longest;
    uint32_t node = 0;
    for (size_t at = begin; at < text.size(); ++at) {
      const auto edge = children_.find(Edge(node, text[at]));
      if (edge == children_.end()) break;
      node = edge->second;
      if (ids_[node] >= 0) longest = Match{begin, at + 1, ids_[node]};
    }
    if (longest.has_value()) return longest;
  }
  return std::nullopt;
}

std::optional<int32_t> AddedTokenMatcher::IdOf(std::string_view content) const {
  if (content.empty()) return std::nullopt;
  const std::optional<Match> match = Find(content, 0);
  if (!match.has_value() || match->begin != 0 || match->end != content.size()) return std::nullopt;
  return match->id;
}

}  // namespace deepinfer
