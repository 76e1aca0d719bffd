#include "engine/completion_text.h"

#include <gtest/gtest.h>

#include <vector>

namespace deepinfer {
namespace {

const Tokenizer& TestTokenizer() {
  static const Tokenizer tokenizer =
      *Tokenizer::Load(DI_TEST_DATA_DIR "/model/two/checkpoint/tokenizer.json");
  return tokenizer;
}

struct Streamed {
  std::vector<std::string> pieces;
  std::string text;
  std::optional<std::string> stop;
};

Streamed Stream(const std::vector<int32_t>& ids, const SamplingParams& params,
                size_t min_tokens = 0) {
  CompletionText text(TestTokenizer(), params);
  Streamed result;
  for (size_t i = 0; i < ids.size() && !text.stop_string().has_value(); ++i) {
    text.Push(ids[i], i + 1 >= min_tokens, &result.pieces.emplace_back());
    result.text += result.pieces.back();
  }
  result.text += text.Finish();
  result.stop = text.stop_string();
  return result;
}

std::vector<int32_t> Ids(const std::string& text) {
  std::vector<int32_t> ids;
  // One token per byte, so that stop strings and characters cross token boundaries everywhere.
  for (const char byte : text) {
    for (int32_t id = 0; id < TestTokenizer().vocab_size(); ++id) {
      if (TestTokenizer().TokenBytes(id) == std::string_view(&byte, 1)) {
        ids.push_back(id);
        break;
      }
    }
  }
  EXPECT_EQ(ids.size(), text.size());
  return ids;
}

TEST(CompletionText, AStopStringAcrossTokensIsNeverPartlyEmitted) {
  SamplingParams params;
  params.stop = {"aab"};
  const Streamed streamed = Stream(Ids("xaaaabz"), params);
  EXPECT_EQ(streamed.pieces, (std::vector<std::string>{"x", "", "", "a", "a", ""}));
  EXPECT_EQ(streamed.text, "xaa");
  EXPECT_EQ(streamed.stop, "aab");
}

TEST(CompletionText, TheStopStringStaysOnRequest) {
  SamplingParams params;
  params.stop = {"bc"};
  params.include_stop_str_in_output = true;
  EXPECT_EQ(Stream(Ids("abcd"), params).text, "abc");
}

TEST(CompletionText, HeldTextIsReleasedWhenItDoesNotMatch) {
  SamplingParams params;
  params.stop = {"end of text"};
  const Streamed streamed = Stream(Ids("the end of"), params);
  EXPECT_EQ(streamed.text, "the end of");
  EXPECT_FALSE(streamed.stop.has_value());
}

TEST(CompletionText, CharactersAreNeverCut) {
  const SamplingParams params;
  const Streamed streamed = Stream(Ids("é中😀"), params);
  EXPECT_EQ(streamed.pieces, (std::vector<std::string>{"", "é", "", "", "中", "", "", "", "😀"}));
}

TEST(CompletionText, AnUnfinishedCharacterAtTheEndBecomesAReplacementCharacter) {
  const SamplingParams params;
  std::vector<int32_t> ids = Ids("a😀");
  ids.pop_back();
  EXPECT_EQ(Stream(ids, params).text, "a\uFFFD");
}

TEST(CompletionText, SpecialTokensLeaveNoTextUnlessAskedFor) {
  SamplingParams params;
  const std::vector<int32_t> ids = {2, Ids("a")[0], 2};
  EXPECT_EQ(Stream(ids, params).text, "a");
  params.skip_special_tokens = false;
  const std::string pad(TestTokenizer().TokenBytes(2));
  EXPECT_EQ(Stream(ids, params).text, pad + "a" + pad);
}

TEST(CompletionText, AMatchCompletedBeforeTheMinimumDoesNotCount) {
  SamplingParams params;
  params.stop = {"ab"};
  EXPECT_EQ(Stream(Ids("abab"), params, 3).text, "ab");
  EXPECT_EQ(Stream(Ids("abab"), params, 5).text, "abab");
  EXPECT_EQ(Stream(Ids("abab"), params, 2).text, "");
}

}  // namespace
}  // namespace deepinfer
