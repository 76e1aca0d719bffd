#include "engine/stop_scanner.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace deepinfer {
namespace {

// Where the first match ends, by trying every end in order, and which string it is.
std::optional<std::pair<size_t, size_t>> PlainSearch(const std::string& text,
                                                     const std::vector<std::string>& stops) {
  for (size_t end = 1; end <= text.size(); ++end) {
    std::optional<std::pair<size_t, size_t>> best;
    for (size_t i = 0; i < stops.size(); ++i) {
      const std::string& stop = stops[i];
      if (stop.size() > end || text.compare(end - stop.size(), stop.size(), stop) != 0) continue;
      if (!best.has_value() || stop.size() > stops[best->second].size()) best = {end, i};
    }
    if (best.has_value()) return best;
  }
  return std::nullopt;
}

size_t PlainHeld(const std::string& text, const std::vector<std::string>& stops) {
  size_t held = 0;
  for (const std::string& stop : stops) {
    for (size_t length = 1; length < stop.size() && length <= text.size(); ++length) {
      if (text.compare(text.size() - length, length, stop, 0, length) == 0)
        held = std::max(held, length);
    }
  }
  return held;
}

RC_GTEST_PROP(StopScanner, FindsWhatAPlainSearchFindsHoweverTheTextIsCut, ()) {
  const auto letters = rc::gen::element('a', 'b');
  const auto text = *rc::gen::container<std::string>(letters);
  auto stops = *rc::gen::container<std::vector<std::string>>(
      rc::gen::nonEmpty(rc::gen::container<std::string>(letters)));
  const auto expected = PlainSearch(text, stops);
  StopScanner scanner(stops);
  size_t read = 0;
  while (read < text.size()) {
    const size_t size = *rc::gen::inRange<size_t>(1, 5);
    const std::string piece = text.substr(read, size);
    const auto match = scanner.Push(piece, true);
    if (match.has_value()) {
      RC_ASSERT(expected.has_value());
      RC_ASSERT(read + match->end == expected->first);
      RC_ASSERT(stops[match->stop] == stops[expected->second]);
      return;
    }
    read += piece.size();
    RC_ASSERT(scanner.held() == PlainHeld(text.substr(0, read), stops));
  }
  RC_ASSERT(!expected.has_value());
}

TEST(StopScanner, MatchesBeforeTheMinimumArePassedOver) {
  StopScanner scanner({"aba"});
  EXPECT_FALSE(scanner.Push("xaba", false).has_value());
  EXPECT_EQ(scanner.held(), 1u);  // the last "a" may begin another one
  const auto match = scanner.Push("ba", true);
  ASSERT_TRUE(match.has_value());
  EXPECT_EQ(match->end, 2u);
}

TEST(StopScanner, WithoutStopStringsNothingIsHeld) {
  StopScanner scanner({});
  EXPECT_FALSE(scanner.Push("anything", true).has_value());
  EXPECT_EQ(scanner.held(), 0u);
}

}  // namespace
}  // namespace deepinfer
