#include "text/marker_matcher.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace deepinfer {
namespace {

struct Found {
  std::string released;  // before the marker, or at the end
  int marker = MarkerMatcher::kNone;
  std::string rest;  // behind the marker
};

// `cuts`: sizes of the pieces; what remains is the last one.
Found Find(const MarkerSet& set, std::string_view text, const std::vector<size_t>& sizes = {}) {
  MarkerMatcher matcher;
  matcher.Watch(set);
  Found found;
  const auto release = [&](std::string_view piece) { found.released += piece; };
  size_t begin = 0;
  for (size_t i = 0; i <= sizes.size(); ++i) {
    const size_t size =
        i < sizes.size() ? std::min(sizes[i], text.size() - begin) : text.size() - begin;
    std::string_view piece = text.substr(begin, size);
    begin += size;
    found.marker = matcher.Feed(&piece, false, release);
    if (found.marker == MarkerMatcher::kNone) continue;
    found.rest = std::string(piece) + std::string(text.substr(begin));
    return found;
  }
  matcher.End(release);
  return found;
}

TEST(MarkerMatcherTest, TheMarkerThatEndsFirstWins) {
  const MarkerSet set({{.text = "abcd"}, {.text = "bc"}});
  const Found found = Find(set, "xabcd");
  EXPECT_EQ(found.marker, 1);
  EXPECT_EQ(found.released, "xa");
  EXPECT_EQ(found.rest, "d");
}

TEST(MarkerMatcherTest, OfTwoThatEndTogetherTheFirstGivenWins) {
  EXPECT_EQ(Find(MarkerSet({{.text = "b"}, {.text = "ab"}}), "ab").released, "a");
  EXPECT_EQ(Find(MarkerSet({{.text = "ab"}, {.text = "b"}}), "ab").released, "");
}

TEST(MarkerMatcherTest, ABeginningThatFailsMayContainAnotherBeginning) {
  EXPECT_EQ(Find(MarkerSet({{.text = "aab"}}), "aaab").released, "a");
  EXPECT_EQ(Find(MarkerSet({{.text = "abac"}}), "ababac").released, "ab");
}

TEST(MarkerMatcherTest, OnlyWhatIsInDoubtIsHeld) {
  const MarkerSet set({{.text = "</x>", .newlines_before = true}});
  MarkerMatcher matcher;
  matcher.Watch(set);
  std::string released;
  const auto feed = [&](std::string_view text) {
    EXPECT_EQ(matcher.Feed(&text, false, [&](std::string_view piece) { released += piece; }),
              MarkerMatcher::kNone);
    return matcher.held();
  };
  EXPECT_EQ(feed("a\n\n"), 2u);
  EXPECT_EQ(feed("</"), 4u);
  EXPECT_EQ(released, "a");
  EXPECT_EQ(feed("<"), 1u);
  EXPECT_EQ(released, "a\n\n</");
}

TEST(MarkerMatcherTest, NewlinesBeforeAMarkerBelongToIt) {
  const MarkerSet set({{.text = "<x>", .newlines_before = true}});
  EXPECT_EQ(Find(set, "a\n\n\n<x>").released, "a");
  EXPECT_EQ(Find(set, "a\nb\n<x>").released, "a\nb");
  // One that ends a partial match does not.
  EXPECT_EQ(Find(set, "<\n<x>").released, "<\n");
  EXPECT_EQ(Find(set, "<\n\n<x>").released, "<\n");
}

TEST(MarkerMatcherTest, AMarkerOfTheFirstByteCountsThereOnly) {
  const MarkerSet set({{.text = "\n", .only_first = true}});
  EXPECT_EQ(Find(set, "\nx").marker, 0);
  EXPECT_EQ(Find(set, "x\n").marker, MarkerMatcher::kNone);
}

TEST(MarkerMatcherTest, PartsOfSpecialTokensHaveToComeFromThem) {
  const MarkerSet set({{.text = "<M>", .special_begin = 1, .special_end = 2}});
  MarkerMatcher matcher;
  const auto feed = [&](std::string_view text, bool special) {
    return matcher.Feed(&text, special, [](std::string_view) {});
  };
  matcher.Watch(set);
  EXPECT_EQ(feed("<", false), MarkerMatcher::kNone);
  EXPECT_EQ(feed("M", false), MarkerMatcher::kNone);
  EXPECT_EQ(matcher.held(), 0u);  // it can be no marker any more
  EXPECT_EQ(feed("><", false), MarkerMatcher::kNone);
  EXPECT_EQ(feed("M", true), MarkerMatcher::kNone);
  EXPECT_EQ(matcher.held(), 2u);
  EXPECT_EQ(feed(">", false), 0);
}

RC_GTEST_PROP(MarkerMatcherTest, TheResultDoesNotDependOnTheCuts, ()) {
  const auto letters = rc::gen::elementOf(std::string("ab\n"));
  const auto word = rc::gen::nonEmpty(rc::gen::container<std::string>(letters));
  std::vector<Marker> markers;
  for (std::string& text : *rc::gen::container<std::vector<std::string>>(2, word))
    markers.push_back({.text = std::move(text)});
  markers.push_back({.text = *word, .newlines_before = true});
  const MarkerSet set(markers);
  const std::string text = *rc::gen::container<std::string>(letters);
  const Found whole = Find(set, text);
  const Found cut =
      Find(set, text, *rc::gen::container<std::vector<size_t>>(rc::gen::inRange<size_t>(0, 4)));
  RC_ASSERT(cut.released == whole.released);
  RC_ASSERT(cut.marker == whole.marker);
  RC_ASSERT(cut.rest == whole.rest);
  // The first of the markers by a plain search.
  size_t first_end = std::string::npos;
  for (const Marker& marker : markers) {
    if (const size_t at = text.find(marker.text); at != std::string::npos)
      first_end = std::min(first_end, at + marker.text.size());
  }
  // (Text that begins with a newline is found elsewhere when newlines before it are swallowed.)
  if (markers[2].text[0] == '\n') return;
  RC_ASSERT((whole.marker == MarkerMatcher::kNone) == (first_end == std::string::npos));
  if (first_end != std::string::npos) RC_ASSERT(whole.rest == text.substr(first_end));
}

}  // namespace
}  // namespace deepinfer
