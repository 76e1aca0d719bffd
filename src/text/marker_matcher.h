// Finds the first of several strings in a stream that comes in pieces, and says which of the bytes
// so far are still in doubt: they may be the beginning of one of the strings. Every string has its
// own Knuth-Morris-Pratt state, so that the work is the number of bytes times the number of
// strings, and the result does not depend on where the stream is cut.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace deepinfer {

struct Marker {
  std::string text;  // not empty
  // Newlines directly before the text belong to it. (As in the vendor's toolkit, a newline that
  // ends a partial match does not.)
  bool newlines_before = false;
  bool only_first = false;  // the text is one byte, which counts as the first of the stream only
  // These bytes have to be the spelling of a special token. Such a text must not begin again inside
  // of itself, except with its last bytes.
  size_t special_begin = 0;
  size_t special_end = 0;
};

// The strings that are watched for, immutable. When several end at the same byte, the first wins.
class MarkerSet {
 public:
  explicit MarkerSet(std::vector<Marker> markers);

  size_t size() const {
    return patterns_.size();
  }

 private:
  friend class MarkerMatcher;

  struct Pattern {
    Marker marker;
    std::vector<uint32_t> borders;  // of every prefix, the longest that is also its suffix
  };

  std::vector<Pattern> patterns_;
  std::array<bool, 256> starts_{};  // bytes that can begin a match
};

// Reads a stream. `release` is called with text that is decided to be no marker, in order.
class MarkerMatcher {
 public:
  static constexpr int kNone = -1;

  // Begins a new stream; what is held must have been released or matched. `set` must outlive its
  // use.
  void Watch(const MarkerSet& set);

  // Takes bytes from the front of `*input` until a marker ends, whose number is returned, or
  // everything is taken: kNone. After a marker, Watch has to be called. `special`: the bytes are
  // the spelling of a special token.
  template <class Release>
  int Feed(std::string_view* input, bool special, const Release& release) {
    const Step step = Scan(*input, special);
    const size_t total = held() + step.consumed;
    const size_t decided = total - (step.marker == kNone ? InDoubt() : step.length);
    const size_t from_held = std::min(decided, held());
    const size_t from_input = decided - from_held;
    if (from_held > 0) release(std::string_view(held_).substr(held_begin_, from_held));
    if (from_input > 0) release(input->substr(0, from_input));
    held_begin_ += from_held;
    if (step.marker != kNone) {
      held_begin_ = 0;
      held_.clear();
    } else {
      Hold(input->substr(from_input, step.consumed - from_input));
    }
    input->remove_prefix(step.consumed);
    return step.marker;
  }

  // The stream ends: what is held is no marker.
  template <class Release>
  void End(const Release& release) {
    if (held() > 0) release(std::string_view(held_).substr(held_begin_));
    held_begin_ = 0;
    held_.clear();
  }

  size_t held() const {
    return held_.size() - held_begin_;
  }

 private:
  struct Step {
    size_t consumed = 0;
    int marker = kNone;
    size_t length = 0;  // of the match, newlines included
  };
  struct Progress {
    uint32_t matched = 0;
    // Bytes that have to be a special token's are not, so that this will be no match. It still
    // counts as a partial match where newlines are concerned: the same text gives the same result
    // with and without special tokens.
    bool spoilt = false;
    size_t newlines = 0;
  };

  Step Scan(std::string_view input, bool special);
  // The length of the match that `byte` completes, or 0.
  size_t Advance(const MarkerSet::Pattern& pattern, char byte, bool special,
                 Progress* progress) const;
  size_t InDoubt() const;
  void Hold(std::string_view bytes);

  const MarkerSet* set_ = nullptr;
  std::vector<Progress> progress_;  // of each pattern
  bool first_ = true;               // no byte has been seen
  bool idle_ = true;                // nothing is in doubt
  std::string held_;                // from held_begin_
  size_t held_begin_ = 0;
};

}  // namespace deepinfer
