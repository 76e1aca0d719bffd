#include "text/json_text.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

namespace deepinfer {
namespace {

TEST(JsonTextTest, ValuesOfEveryKindAreJson) {
  for (const char* text : {"null", "true", "false", "0", "-0", "-1.5e3", "12E+7", "1e999",
                           "123456789012345678901234567890", "\"\"", R"("a\n\u00e9\/\"\\")", "[]",
                           "{}", "[1, [2], {}]", R"({"a": {"b": [1, 2.50, null]}, "a": 1})",
                           " \t\r\n[ 1 , 2 ] ", R"("\ud800")"}) {
    EXPECT_TRUE(IsJson(text)) << text;
  }
}

TEST(JsonTextTest, AnythingElseIsNot) {
  for (const char* text :
       {"",           " ",     "two",      "'x'",     "{a:1}",       "01",       "+1",
        "1.",         ".5",    "1e",       "-",       "NaN",         "Infinity", "tru",
        "[1,]",       "[1 2]", "[",        "]",       "{",           "{\"a\"}",  "{\"a\":}",
        "{\"a\":1,}", "{1:2}", "\"",       "\"\\x\"", "\"\\u12g4\"", "\"a\nb\"", "1 2",
        "{}}",        "[1}",   "\"\\u12\""}) {
    EXPECT_FALSE(IsJson(text)) << text;
  }
}

TEST(JsonTextTest, DeepNestingNeedsNoStack) {
  const std::string open(1 << 20, '[');
  EXPECT_TRUE(IsJson(open + std::string(1 << 20, ']')));
  EXPECT_FALSE(IsJson(open));
}

RC_GTEST_PROP(JsonTextTest, AgreesWithAnIndependentParser, ()) {
  static const std::string kParts[] = {"{",      "}",    "[",    "]", ",",  ":",  "\"a\"", "1",
                                       "-0.5e1", "true", "null", " ", "\"", "\\", "0",     "e"};
  std::string text;
  for (const int part : *rc::gen::container<std::vector<int>>(rc::gen::inRange(0, 16)))
    text += kParts[part];
  RC_ASSERT(IsJson(text) == nlohmann::json::accept(text));
}

TEST(JsonTextTest, OuterSpaceIsTrimmed) {
  EXPECT_EQ(TrimJsonSpace(" \t\n\r[1 ,2]\n"), "[1 ,2]");
  EXPECT_EQ(TrimJsonSpace(" \n "), "");
  EXPECT_EQ(TrimJsonSpace("\fx\f"), "\fx\f");
}

}  // namespace
}  // namespace deepinfer
