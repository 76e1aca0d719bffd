#include "text/incremental_decoder.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "text/text_test_data.h"

namespace deepinfer {
namespace {

TEST(IncrementalDecoder, RecordedStreams) {
  DI_SKIP_WITHOUT_PUBLISHED_TOKENIZER();
  for (const nlohmann::json& recorded : ReadCases("tokenizer/incremental.jsonl")) {
    IncrementalDecoder decoder(*PublishedTokenizer());
    std::vector<std::string> deltas;
    for (const int32_t id : recorded["ids"]) deltas.push_back(decoder.Push(id));
    EXPECT_EQ(deltas, recorded["deltas"].get<std::vector<std::string>>()) << recorded["id"];
    EXPECT_EQ(decoder.Flush(), recorded["flush"].get<std::string>()) << recorded["id"];
  }
}

TEST(IncrementalDecoder, FlushStartsANewStream) {
  const Tokenizer& tokenizer = SmallTokenizer();
  const auto euro = tokenizer.Encode("€");
  ASSERT_TRUE(euro.has_value());
  ASSERT_GE(euro->size(), 2u) << "The small vocabulary must cut this character.";
  IncrementalDecoder decoder(tokenizer);
  EXPECT_EQ(decoder.Push(euro->front()), "");
  EXPECT_EQ(decoder.Flush(), "\uFFFD");
  EXPECT_EQ(decoder.Flush(), "");
  std::string text;
  for (const int32_t id : *euro) text += decoder.Push(id);
  EXPECT_EQ(text, "€");
  EXPECT_EQ(decoder.Push(-1), "");
  EXPECT_EQ(decoder.Push(1 << 30), "");
}

RC_GTEST_PROP(IncrementalDecoder, DeltasOfAnyIdsAddUpToTheWholeText, ()) {
  const Tokenizer& tokenizer = SmallTokenizer();
  // Single bytes are 256 of the 512 ids, so that cut and invalid characters are common.
  const auto ids =
      *rc::gen::container<std::vector<int32_t>>(rc::gen::inRange(-2, tokenizer.vocab_size() + 2));
  IncrementalDecoder decoder(tokenizer);
  std::string text;
  for (size_t i = 0; i < ids.size(); ++i) {
    text += decoder.Push(ids[i]);
    IncrementalDecoder stopped = decoder;
    RC_ASSERT(text + stopped.Flush() == tokenizer.Decode(std::span(ids).first(i + 1)));
  }
}

}  // namespace
}  // namespace deepinfer
