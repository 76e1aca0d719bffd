#include "base/utf8.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace deepinfer {
namespace {

using std::string_literals::operator""s;

std::string Lossy(std::string_view bytes) {
  std::string text;
  AppendLossyUtf8(bytes, &text);
  return text;
}

TEST(Utf8, EveryScalarValueIsValidAndDecodes) {
  for (uint32_t code_point = 0; code_point < 0x110000; ++code_point) {
    if (code_point >= 0xD800 && code_point <= 0xDFFF) continue;
    std::string text;
    AppendUtf8(code_point, &text);
    ASSERT_EQ(FindInvalidUtf8(text), std::nullopt) << code_point;
    const char* next = nullptr;
    ASSERT_EQ(DecodeValidUtf8(text.data(), &next), code_point);
    ASSERT_EQ(next, text.data() + text.size());
    ASSERT_EQ(Lossy(text), text);
  }
}

TEST(Utf8, NamesTheFirstBadByte) {
  EXPECT_EQ(FindInvalidUtf8(""), std::nullopt);
  EXPECT_EQ(FindInvalidUtf8("abc\xFF"), 3u);
  EXPECT_EQ(FindInvalidUtf8("\xC3\xA9\xC3"), 2u);      // cut
  EXPECT_EQ(FindInvalidUtf8("a\xC0\x80"), 1u);         // overlong
  EXPECT_EQ(FindInvalidUtf8("a\xE0\x9F\xBF"), 1u);     // overlong
  EXPECT_EQ(FindInvalidUtf8("ab\xED\xA0\x80"), 2u);    // surrogate
  EXPECT_EQ(FindInvalidUtf8("\xF4\x90\x80\x80"), 0u);  // above U+10FFFF
  EXPECT_EQ(FindInvalidUtf8("\xF5\x80\x80\x80"), 0u);
  EXPECT_EQ(FindInvalidUtf8(std::string(1000, 'x') + "\x80"), 1000u);
}

TEST(Utf8, EachMaximalBrokenPartBecomesOneReplacement) {
  EXPECT_EQ(Lossy("a\xFFz"), "a\uFFFDz");
  EXPECT_EQ(Lossy("\xE6\x97z"), "\uFFFDz");  // two bytes of a character
  EXPECT_EQ(Lossy("\xE6\x97"), "\uFFFD");
  EXPECT_EQ(Lossy("\xED\xA0\x80"), "\uFFFD\uFFFD\uFFFD");  // no part of a surrogate can be valid
  EXPECT_EQ(Lossy("\xF0\x9F\x98\xF0\x9F\x98\x80"), "\uFFFD\U0001F600");
  EXPECT_EQ(Lossy("\xC0\xAF"), "\uFFFD\uFFFD");
}

TEST(Utf8, HoldsOnlyWhatCanStillBecomeACharacter) {
  std::string text;
  EXPECT_EQ(AppendDecidedUtf8("ab\xF0\x9F\x98", &text), 2u);
  EXPECT_EQ(text, "ab");
  text.clear();
  EXPECT_EQ(AppendDecidedUtf8("ab\xF0\x8F", &text), 4u);
  EXPECT_EQ(text, "ab\uFFFD\uFFFD");
}

RC_GTEST_PROP(Utf8, LossyTextIsValidAndKeepsValidText, (const std::string& bytes)) {
  const std::string text = Lossy(bytes);
  RC_ASSERT(!FindInvalidUtf8(text).has_value());
  RC_ASSERT(FindInvalidUtf8(bytes).has_value() || text == bytes);
}

RC_GTEST_PROP(Utf8, SimdAndScalarValidationAgree, ()) {
  // Mostly lead and continuation bytes, so that near misses are common.
  const auto byte =
      rc::gen::element<uint8_t>('a', 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC2, 0xDF, 0xE0,
                                0xE1, 0xED, 0xEF, 0xF0, 0xF1, 0xF4, 0xF5, 0xFF);
  std::string bytes;
  for (const uint8_t b : *rc::gen::container<std::vector<uint8_t>>(byte))
    bytes.push_back(static_cast<char>(b));
  // The decoder works byte by byte; it changes exactly the texts that the validation refuses.
  std::string decided;
  const size_t consumed = AppendDecidedUtf8(bytes, &decided);
  RC_ASSERT((consumed == bytes.size() && decided == bytes) == !FindInvalidUtf8(bytes).has_value());
}

}  // namespace
}  // namespace deepinfer
