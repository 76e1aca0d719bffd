// For the tests of this module: a small vocabulary, and whether a grammar allows a text.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "grammar/grammar.h"

namespace deepinfer {

// Ids 0 ... 255 are the single bytes, then come longer tokens, then special ones without text, of
// which kEndId ends the text, then rows behind the tokenizer's size.
inline const std::vector<std::string>& LongTokens() {
  static const std::vector<std::string> tokens = {"{\"",
                                                  "\":",
                                                  "\",",
                                                  "\"}",
                                                  "\": \"",
                                                  "\", \"",
                                                  "true",
                                                  "false",
                                                  "null",
                                                  "12",
                                                  "345",
                                                  "0.5",
                                                  "ab",
                                                  "abc",
                                                  "name",
                                                  "hello",
                                                  "  ",
                                                  "\n  ",
                                                  "[[",
                                                  "]]",
                                                  "},{",
                                                  "\\\"",
                                                  "\\n",
                                                  "\\u00",
                                                  "\xC3\xA9",
                                                  "\xE4\xB8",
                                                  "\xE4\xB8\xAD\xE6\x96\x87",
                                                  "\xF0\x9F\x98\x80",
                                                  "a\"",
                                                  "\\u",
                                                  "1,",
                                                  "-1",
                                                  "}}",
                                                  "[]",
                                                  "{}",
                                                  "://"};
  return tokens;
}
inline constexpr int32_t kEndId = 300;
inline constexpr int64_t kTestVocabulary = 333;

inline GrammarVocabulary TestVocabulary() {
  GrammarVocabulary vocabulary;
  for (int byte = 0; byte < 256; ++byte) {
    vocabulary.token_bytes.emplace_back(1, static_cast<char>(byte));
  }
  for (const std::string& token : LongTokens()) vocabulary.token_bytes.push_back(token);
  vocabulary.token_bytes.resize(310);
  vocabulary.end_ids = {kEndId};
  vocabulary.vocab_size = kTestVocabulary;
  return vocabulary;
}

inline bool MaskHas(const std::vector<uint32_t>& mask, int32_t id) {
  return (mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
}

inline std::vector<uint32_t> NewMask(int64_t vocab_size = kTestVocabulary) {
  return std::vector<uint32_t>(static_cast<size_t>((vocab_size + 31) / 32), 0xDEADBEEF);
}

// Whether the text comes through token by token and may end there; mask and Accept must agree at
// every step. With `longest`, the longest tokens that fit are used, else single bytes.
inline bool AllowsTokens(const CompiledGrammar& grammar, std::string_view text, bool longest) {
  static const GrammarVocabulary vocabulary = TestVocabulary();
  const auto matcher = grammar.NewMatcher(8);
  std::vector<uint32_t> mask = NewMask();
  size_t at = 0;
  while (true) {
    const TokenConstraint::Verdict verdict = matcher->FillMask(mask);
    if (verdict == TokenConstraint::Verdict::kDeadEnd) return false;
    int32_t id = kEndId;
    size_t length = 0;
    if (at < text.size()) {
      id = static_cast<uint8_t>(text[at]);
      length = 1;
      for (size_t i = 256; longest && i < 256 + LongTokens().size(); ++i) {
        const std::string& token = vocabulary.token_bytes[i];
        if (token.size() > length && text.substr(at).starts_with(token)) {
          id = static_cast<int32_t>(i);
          length = token.size();
        }
      }
    }
    const bool allowed = MaskHas(mask, id);
    const int64_t before = matcher->num_accepted();
    const bool accepted = matcher->Accept(id).has_value();
    if (allowed != accepted) throw std::string("mask and Accept differ");
    if (matcher->num_accepted() != before + (accepted ? 1 : 0)) throw std::string("count");
    if (!accepted) return false;
    if (id == kEndId) return true;
    at += length;
  }
}

inline bool Allows(const CompiledGrammar& grammar, std::string_view text) {
  const bool bytes = AllowsTokens(grammar, text, false);
  if (bytes != AllowsTokens(grammar, text, true)) throw std::string("bytes and tokens differ");
  return bytes;
}

inline GrammarCompiler& TestCompiler() {
  static GrammarCompiler compiler(TestVocabulary(), GrammarLimits{});
  return compiler;
}

inline Result<std::shared_ptr<const CompiledGrammar>> CompileText(GrammarSpec::Kind kind,
                                                                  std::string_view text,
                                                                  int max_whitespace = 2) {
  GrammarSpec spec;
  spec.kind = kind;
  spec.text = text;
  spec.max_whitespace = max_whitespace;
  return TestCompiler().Compile(spec);
}

}  // namespace deepinfer
