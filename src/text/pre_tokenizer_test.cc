#include "text/pre_tokenizer.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "base/utf8.h"
#include "text/text_test_data.h"
#include "text/unicode_classes.h"

namespace deepinfer {
namespace {

// ---- A slow scanner, written from the patterns one by one ------------------------------------

using std::string_literals::operator""s;

using Chars = std::u32string;

bool Has(char32_t c, CharClass bits) {
  return (ClassOf(c) & bits) != 0;
}
bool IsNewline(char32_t c) {
  return c == U'\r' || c == U'\n';
}
bool IsSpace(char32_t c) {
  return Has(c, kWhiteSpace);
}
bool IsWord(char32_t c) {
  return Has(c, kLetter | kMark);
}
bool IsSymbol(char32_t c) {
  return Has(c, kSymbol);
}
bool IsAsciiLetter(char32_t c) {
  return (c >= U'A' && c <= U'Z') || (c >= U'a' && c <= U'z');
}
bool IsAsciiPunctuation(char32_t c) {
  return Chars(U"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~").find(c) != Chars::npos;
}

template <class Predicate>
size_t RunLength(const Chars& text, size_t at, Predicate predicate) {
  size_t end = at;
  while (end < text.size() && predicate(text[end])) ++end;
  return end - at;
}

// Each pattern returns the length of its match at `at`, 0 for none.
size_t MatchNumbers(const Chars& text, size_t at) {
  return std::min<size_t>(3, RunLength(text, at, [](char32_t c) { return Has(c, kNumber); }));
}

size_t MatchCjk(const Chars& text, size_t at) {
  return RunLength(text, at, [](char32_t c) {
    return (c >= 0x4E00 && c <= 0x9FA5) || (c >= 0x3040 && c <= 0x309F) ||
           (c >= 0x30A0 && c <= 0x30FF);
  });
}

size_t MatchWords(const Chars& text, size_t at) {
  const size_t left = text.size() - at;
  // [ASCII punctuation][A-Za-z]+
  if (IsAsciiPunctuation(text[at])) {
    if (const size_t n = RunLength(text, at + 1, IsAsciiLetter)) return 1 + n;
  }
  // [^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+
  if (!IsNewline(text[at]) && !Has(text[at], kLetter | kSymbol)) {
    if (const size_t n = RunLength(text, at + 1, IsWord)) return 1 + n;
  }
  if (const size_t n = RunLength(text, at, IsWord)) return n;
  // ' '?[\p{P}\p{S}]+[\r\n]*
  for (const size_t spaces : {1, 0}) {
    if (spaces == 1 && text[at] != U' ') continue;
    const size_t symbols = RunLength(text, at + spaces, IsSymbol);
    if (symbols > 0) return spaces + symbols + RunLength(text, at + spaces + symbols, IsNewline);
  }
  // \s*[\r\n]+ with backtracking
  const size_t white = RunLength(text, at, IsSpace);
  for (size_t n = white + 1; n-- > 0;) {
    if (const size_t newlines = RunLength(text, at + n, IsNewline)) return n + newlines;
  }
  // \s+(?!\S) with backtracking
  for (size_t n = white; n > 0; --n) {
    if (n == left || IsSpace(text[at + n])) return n;
  }
  // \s+
  return white;
}

template <class Match>
std::vector<Chars> Isolate(const std::vector<Chars>& texts, Match match) {
  std::vector<Chars> pieces;
  for (const Chars& text : texts) {
    size_t gap = 0;
    size_t at = 0;
    while (at < text.size()) {
      const size_t n = match(text, at);
      if (n == 0) {
        ++at;
        continue;
      }
      if (gap < at) pieces.push_back(text.substr(gap, at - gap));
      pieces.push_back(text.substr(at, n));
      at += n;
      gap = at;
    }
    if (gap < text.size()) pieces.push_back(text.substr(gap));
  }
  return pieces;
}

std::vector<std::string> SplitSlowly(const Chars& text) {
  std::vector<Chars> pieces = {text};
  pieces = Isolate(pieces, MatchNumbers);
  pieces = Isolate(pieces, MatchCjk);
  pieces = Isolate(pieces, MatchWords);
  std::vector<std::string> result;
  for (const Chars& piece : pieces) {
    result.emplace_back();
    for (const char32_t c : piece) AppendUtf8(c, &result.back());
  }
  return result;
}

std::vector<std::string> Split(std::string_view text) {
  std::vector<std::string> pieces;
  for (const std::string_view piece : SplitIntoPieces(text)) pieces.emplace_back(piece);
  return pieces;
}

// Characters at the edges of the classes and of the ranges in the patterns.
const Chars kEdges =
    U"aZ{`@[/:!'\"_~09\u00B2\u2167\u0660\u00BD "
    U"\t\n\r\v\f\u001C\u001F\u0000\u0001\u007F\u0085\u00A0\u1680\u2003\u2028\u2029"
    U"\u202F\u205F\u3000\u200B\uFEFF\u0301\u0E31\u094D\u4E00\u9FA5\u9FA6\u4DFF\u3040\u303F\u3041"
    U"\u3097\u3099\u309B"
    U"\u309F\u30A0\u30A2\u30FB\u30FC\u30FF\u3100\u3105\u3001\uFF0C\uFF5C\u2014\u2581\u00E9\u0434"
    U"\uD55C\u0378\uE000"
    U"\U0001F600\U0001F3FD\U0002A6D6\U0001D7D8"s;

TEST(UnicodeClasses, TableEqualsTheRecordedRanges) {
  const std::optional<std::string> text =
      ReadTextFile(DI_TEST_DATA_DIR "/tokenizer/unicode_classes.json");
  ASSERT_TRUE(text.has_value());
  const nlohmann::json recorded = nlohmann::json::parse(*text);
  std::vector<CharClass> expected(0x110000, 0);
  const auto mark = [&](const nlohmann::json& ranges, CharClass bit) {
    for (const auto& range : ranges) {
      for (size_t c = range[0].get<size_t>(); c <= range[1].get<size_t>(); ++c) expected[c] |= bit;
    }
  };
  mark(recorded["classes"]["L"], kLetter);
  mark(recorded["classes"]["M"], kMark);
  mark(recorded["classes"]["N"], kNumber);
  mark(recorded["classes"]["P"], kSymbol);
  mark(recorded["classes"]["S"], kSymbol);
  mark(recorded["white_space"], kWhiteSpace);
  mark({{0x0A, 0x0A}, {0x0D, 0x0D}}, kNewline);
  mark({{0x4E00, 0x9FA5}, {0x3040, 0x30FF}}, kCjk);
  mark({{'A', 'Z'}, {'a', 'z'}}, kAsciiLetter);
  for (uint32_t c = 0; c < expected.size(); ++c) ASSERT_EQ(int{ClassOf(c)}, int{expected[c]}) << c;
}

TEST(PreTokenizer, RecordedPieces) {
  for (const nlohmann::json& recorded : ReadCases("tokenizer/pieces.jsonl")) {
    EXPECT_EQ(Split(recorded["text"].get<std::string>()),
              recorded["pieces"].get<std::vector<std::string>>())
        << recorded["text"];
  }
}

TEST(PreTokenizer, SlowScannerGivesTheRecordedPiecesToo) {
  for (const nlohmann::json& recorded : ReadCases("tokenizer/pieces.jsonl")) {
    const auto text = recorded["text"].get<std::string>();
    Chars chars;
    for (const char* p = text.data(); p < text.data() + text.size();)
      chars.push_back(DecodeValidUtf8(p, &p));
    EXPECT_EQ(SplitSlowly(chars), recorded["pieces"].get<std::vector<std::string>>())
        << recorded["text"];
  }
}

TEST(PreTokenizer, EqualsTheSlowScannerOnAllShortTextsOfEdgeCharacters) {
  // All pairs and triples; about 700 000 texts.
  const size_t count = kEdges.size();
  for (size_t a = 0; a < count; ++a) {
    for (size_t b = 0; b < count; ++b) {
      for (size_t c = 0; c < count; ++c) {
        const Chars chars = {kEdges[a], kEdges[b], kEdges[c]};
        std::string text;
        for (const char32_t character : chars) AppendUtf8(character, &text);
        ASSERT_EQ(Split(text), SplitSlowly(chars)) << testing::PrintToString(text);
      }
    }
  }
}

RC_GTEST_PROP(PreTokenizer, EqualsTheSlowScannerOnRandomTexts, ()) {
  const auto index = rc::gen::inRange<size_t>(0, kEdges.size());
  Chars chars;
  for (const size_t i : *rc::gen::scale(3.0, rc::gen::container<std::vector<size_t>>(index)))
    chars.push_back(kEdges[i]);
  std::string text;
  for (const char32_t c : chars) AppendUtf8(c, &text);
  RC_ASSERT(Split(text) == SplitSlowly(chars));
}

RC_GTEST_PROP(PreTokenizer, WhiteSpaceAndNewlinesEqualTheSlowScanner, ()) {
  const auto character = rc::gen::element<char32_t>(U' ', U' ', U'\n', U'\r', U'\t', U'\u3000',
                                                    U'a', U'!', U'1', U'\u4E00');
  Chars chars;
  for (const char32_t c :
       *rc::gen::scale(2.0, rc::gen::container<std::vector<char32_t>>(character)))
    chars.push_back(c);
  std::string text;
  for (const char32_t c : chars) AppendUtf8(c, &text);
  RC_ASSERT(Split(text) == SplitSlowly(chars));
}

}  // namespace
}  // namespace deepinfer
