// Finds stop strings in text that comes in pieces, in time linear in the text. Not for tokens.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace deepinfer {

class StopScanner {
 public:
  // `stops` are not empty strings.
  explicit StopScanner(const std::vector<std::string>& stops);

  struct Match {
    size_t stop = 0;  // index into the stop strings
    size_t end = 0;   // bytes of the pushed piece up to the end of the match
  };

  // Reads a piece. With `may_stop`, returns the first match that ends in it: the earliest end,
  // among equals the longest string; reading ends there. Without, matches are passed over.
  std::optional<Match> Push(std::string_view piece, bool may_stop);

  // Length of the longest end of the text read so far that could still become a match.
  size_t held() const;

 private:
  // A Knuth-Morris-Pratt automaton.
  struct Automaton {
    std::string stop;
    std::vector<size_t> fallback;  // [i]: longest proper prefix of stop that ends stop[0, i]
    size_t state = 0;              // bytes of stop that end the text
  };
  static void Advance(Automaton& automaton, char byte);

  std::vector<Automaton> automata_;
};

}  // namespace deepinfer
