#include "text/added_tokens.h"

#include <gtest/gtest.h>

namespace deepinfer {
namespace {

TEST(AddedTokens, LeftmostThenLongest) {
  const AddedTokenMatcher matcher(
      {{"<a>", 1, false}, {"<a>b", 2, false}, {"b<", 3, true}, {"<", 4, false}});
  const auto find = [&](std::string_view text, size_t from) {
    const auto match = matcher.Find(text, from);
    return match.has_value()
               ? std::vector<size_t>{match->begin, match->end, static_cast<size_t>(match->id)}
               : std::vector<size_t>{};
  };
  EXPECT_EQ(find("x<a>b<a>", 0), (std::vector<size_t>{1, 5, 2}));
  EXPECT_EQ(find("x<a>b<a>", 4), (std::vector<size_t>{4, 6, 3}));
  EXPECT_EQ(find("x<a>c", 0), (std::vector<size_t>{1, 4, 1}));
  EXPECT_EQ(find("x<a", 0), (std::vector<size_t>{1, 2, 4}));
  EXPECT_EQ(find("xyz", 0), (std::vector<size_t>{}));
  EXPECT_EQ(find("", 0), (std::vector<size_t>{}));
}

TEST(AddedTokens, FindsIdsByWholeContent) {
  const AddedTokenMatcher matcher({{"<a>", 7, false}, {"<a>b", 8, false}});
  EXPECT_EQ(matcher.IdOf("<a>"), 7);
  EXPECT_EQ(matcher.IdOf("<a>b"), 8);
  EXPECT_EQ(matcher.IdOf("<a>c"), std::nullopt);
  EXPECT_EQ(matcher.IdOf("x<a>"), std::nullopt);
  EXPECT_EQ(matcher.IdOf("<a"), std::nullopt);
  EXPECT_EQ(matcher.IdOf(""), std::nullopt);
}

TEST(AddedTokens, WithoutTokensNothingMatches) {
  EXPECT_FALSE(AddedTokenMatcher({}).Find("<a>", 0).has_value());
}

}  // namespace
}  // namespace deepinfer
