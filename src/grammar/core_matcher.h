// What a matcher of the grammar library knows and does not offer to its callers: its state as a
// key, under which masks can be kept, and masks near the end of a string of limited length in less
// than the library's milliseconds. Not the interface of the module: that is grammar.h.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace xgrammar {
class GrammarMatcher;
class TokenizerInfo;
}  // namespace xgrammar

namespace deepinfer {

// Sets *key to what the masks of the matcher depend on: matchers of one compiled grammar with equal
// keys allow the same texts as far as one token reaches. False where the state is too large, or
// depends on more.
bool StateKey(const xgrammar::GrammarMatcher& matcher, std::vector<int32_t>* key);

// The tokens of a vocabulary by their number of characters.
class TokenLengths {
 public:
  explicit TokenLengths(const xgrammar::TokenizerInfo& vocabulary);

  // The tokens of at most this many characters, a bit each.
  std::span<const uint32_t> UpTo(int64_t characters) const;
  int64_t longest() const {
    return static_cast<int64_t>(set_of_.size()) - 1;
  }
  // Places in the library's sorted vocabulary of the tokens with more characters.
  std::span<const int32_t> LongerThan(int64_t characters) const;
  // Those with a backslash.
  std::span<const int32_t> with_backslash() const {
    return with_backslash_;
  }
  int64_t characters(int32_t place) const {
    return characters_[static_cast<size_t>(place)];
  }

 private:
  std::vector<int32_t> characters_;           // by place
  std::vector<size_t> set_of_;                // in up_to_, by number of characters
  std::vector<std::vector<uint32_t>> up_to_;  // for the numbers that a token has
  std::vector<int32_t> longest_first_;
  std::vector<size_t> num_longer_;  // in longest_first_, by number of characters
  std::vector<int32_t> with_backslash_;
};

// The mask when some text of limited length has fewer characters left than the longest token. False
// and nothing done in all other cases.
bool FillNearLimit(xgrammar::GrammarMatcher* matcher, const TokenLengths& lengths,
                   std::span<uint32_t> mask);

}  // namespace deepinfer
