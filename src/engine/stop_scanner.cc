#include "engine/stop_scanner.h"

#include <algorithm>

namespace deepinfer {

StopScanner::StopScanner(const std::vector<std::string>& stops) {
  for (const std::string& stop : stops) {
    Automaton automaton{stop, std::vector<size_t>(stop.size(), 0), 0};
    size_t matched = 0;
    for (size_t i = 1; i < stop.size(); ++i) {
      while (matched > 0 && stop[i] != stop[matched]) matched = automaton.fallback[matched - 1];
      if (stop[i] == stop[matched]) ++matched;
      automaton.fallback[i] = matched;
    }
    automata_.push_back(std::move(automaton));
  }
}

void StopScanner::Advance(Automaton& automaton, char byte) {
  size_t& state = automaton.state;
  if (state == automaton.stop.size()) state = automaton.fallback[state - 1];
  while (state > 0 && automaton.stop[state] != byte) state = automaton.fallback[state - 1];
  if (automaton.stop[state] == byte) ++state;
}

std::optional<StopScanner::Match> StopScanner::Push(std::string_view piece, bool may_stop) {
  if (automata_.empty()) return std::nullopt;
  for (size_t i = 0; i < piece.size(); ++i) {
    std::optional<Match> match;
    for (size_t stop = 0; stop < automata_.size(); ++stop) {
      Automaton& automaton = automata_[stop];
      Advance(automaton, piece[i]);
      if (automaton.state < automaton.stop.size() || !may_stop) continue;
      if (!match.has_value() || automaton.stop.size() > automata_[match->stop].stop.size())
        match = Match{stop, i + 1};
    }
    if (match.has_value()) return match;
  }
  return std::nullopt;
}

size_t StopScanner::held() const {
  size_t held = 0;
  for (const Automaton& automaton : automata_) {
    // A complete match that was passed over is decided text, except for its end that may begin
    // another one.
    const bool complete = automaton.state == automaton.stop.size();
    held = std::max(held, complete ? automaton.fallback[automaton.state - 1] : automaton.state);
  }
  return held;
}

}  // namespace deepinfer
