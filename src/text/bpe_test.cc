#include "text/bpe.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>
#include <set>

namespace deepinfer {
namespace {

std::array<int32_t, 256> IdentityBytes() {
  std::array<int32_t, 256> ids{};
  for (int32_t byte = 0; byte < 256; ++byte) ids[static_cast<size_t>(byte)] = byte;
  return ids;
}

// The definition: merge the leftmost pair of the lowest rank until there is none.
std::vector<int32_t> MergeSlowly(const std::vector<Merge>& merges, std::string_view piece) {
  std::map<std::pair<int32_t, int32_t>, size_t> ranks;
  for (size_t rank = 0; rank < merges.size(); ++rank)
    ranks[{merges[rank].left, merges[rank].right}] = rank;
  std::vector<int32_t> ids;
  for (const char c : piece) ids.push_back(static_cast<uint8_t>(c));
  while (true) {
    size_t best = merges.size();
    size_t at = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const auto pair = ranks.find({ids[i], ids[i + 1]});
      if (pair != ranks.end() && pair->second < best) {
        best = pair->second;
        at = i;
      }
    }
    if (best == merges.size()) return ids;
    ids[at] = merges[best].result;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
}

std::vector<int32_t> Encode(const std::vector<Merge>& merges, std::string_view piece) {
  std::vector<int32_t> ids;
  Bpe(merges, IdentityBytes()).Encode(piece, &ids);
  return ids;
}

TEST(Bpe, LowestRankFirstThenLeftmost) {
  const std::vector<Merge> merges = {
      {'b', 'c', 300}, {'a', 'b', 301}, {'a', 'a', 302}, {302, 'a', 303}};
  EXPECT_EQ(Encode(merges, "abc"), (std::vector<int32_t>{'a', 300}));
  EXPECT_EQ(Encode(merges, "aaa"), (std::vector<int32_t>{303}));
  EXPECT_EQ(Encode(merges, "aaaaa"), (std::vector<int32_t>{302, 303}));
  EXPECT_EQ(Encode(merges, "x"), (std::vector<int32_t>{'x'}));
  EXPECT_EQ(Encode(merges, ""), (std::vector<int32_t>{}));
  EXPECT_EQ(Encode({}, "ab"), (std::vector<int32_t>{'a', 'b'}));
}

RC_GTEST_PROP(Bpe, ShortAndLongPiecesFollowTheDefinition, ()) {
  // Random merges over three letters, in random order: a merge may come before those that make its
  // parts.
  std::vector<int32_t> symbols = {'a', 'b', 'c'};
  std::set<std::pair<int32_t, int32_t>> used;
  std::vector<Merge> merges;
  const int count = *rc::gen::inRange(0, 40);
  for (int i = 0; i < count; ++i) {
    const int32_t left = symbols[*rc::gen::inRange<size_t>(0, symbols.size())];
    const int32_t right = symbols[*rc::gen::inRange<size_t>(0, symbols.size())];
    if (!used.insert({left, right}).second) continue;
    const auto result = static_cast<int32_t>(256 + merges.size());
    merges.push_back({left, right, result});
    symbols.push_back(result);
  }
  if (*rc::gen::arbitrary<bool>() && merges.size() > 1) {
    for (size_t i = merges.size() - 1; i > 0; --i)
      std::swap(merges[i], merges[*rc::gen::inRange<size_t>(0, i + 1)]);
  }
  const size_t size = *rc::gen::element<size_t>(1, 2, 3, 7, 20, 95, 96, 97, 98, 150, 300);
  const auto letters = *rc::gen::container<std::string>(size, rc::gen::element('a', 'a', 'b', 'c'));
  RC_ASSERT(Encode(merges, letters) == MergeSlowly(merges, letters));
}

}  // namespace
}  // namespace deepinfer
