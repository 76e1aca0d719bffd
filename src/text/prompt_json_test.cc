#include "text/prompt_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace deepinfer {
namespace {

using testing::ElementsAre;

TEST(PromptJson, IsWrittenAsPythonWritesIt) {
  const std::pair<const char*, const char*> cases[] = {
      {" { } ", "{}"},
      {"[\t]", "[]"},
      {"{\"a\":1,\"b\" : [true,null,false]}", "{\"a\": 1, \"b\": [true, null, false]}"},
      {"10000000000000000000000000", "10000000000000000000000000"},
      {"-0", "0"},
      {"-0.0", "-0.0"},
      {"1e5", "100000.0"},
      {"0.00001", "1e-05"},
      {"1E16", "1e+16"},
      {"[NaN,Infinity,-Infinity]", "[NaN, Infinity, -Infinity]"},
      {R"("\u00e9\/\u0001\ud83d\ude00")", "\"é/\\u0001😀\""},
      {R"({"a":1,"b":2,"a":"x"})", R"({"a": "x", "b": 2})"},
  };
  for (const auto& [text, expected] : cases) {
    const auto written = PythonJson(text);
    ASSERT_TRUE(written.has_value()) << text << written.error().message;
    EXPECT_EQ(*written, expected);
  }
}

TEST(PromptJson, WhatIsNotJsonIsRefused) {
  for (const char* text : {"",         " ",           "{",        "[1",       "[1,]", "{\"a\"}",
                           "{\"a\":}", "{\"a\":1,}",  "{a:1}",    "01",       "1.",   "-",
                           "+1",       "nan",         "True",     "'a'",      "\"a",  "\"\\\"",
                           "\"\\x\"",  "\"\\ud800\"", "\"\x01\"", "\"\xFF\"", "1 2",  "[1]]"}) {
    EXPECT_FALSE(PythonJson(text).has_value()) << text;
  }
}

TEST(PromptJson, NestingHasTheBoundOfJsonValues) {
  const auto nested = [](int levels) {
    return std::string(static_cast<size_t>(levels), '[') +
           std::string(static_cast<size_t>(levels), ']');
  };
  EXPECT_TRUE(PythonJson(nested(JsonValue::kMaxDepth)).has_value());
  EXPECT_FALSE(PythonJson(nested(JsonValue::kMaxDepth + 2)).has_value());
  EXPECT_FALSE(PythonJson(nested(1000000)).has_value());
}

TEST(PromptJson, MembersAndElementsComeInOrder) {
  EXPECT_THAT(PythonJsonMembers(R"({"b":"\n","a":[1,2],"b":3})").value(),
              ElementsAre(JsonMemberText{"b", false, "3"}, JsonMemberText{"a", false, "[1, 2]"}));
  EXPECT_THAT(PythonJsonElements(R"(["x",{"a":1}])").value(), ElementsAre("\"x\"", "{\"a\": 1}"));
  EXPECT_FALSE(PythonJsonMembers("[]").has_value());
  EXPECT_FALSE(PythonJsonElements("{}").has_value());
}

TEST(PromptJson, SmallDoublesDifferBetweenTheDialects) {
  const std::tuple<double, const char*, const char*> cases[] = {
      {1e-5, "1e-05", "0.00001"}, {-2.5e-5, "-2.5e-05", "-0.000025"},
      {1e-7, "1e-07", "1e-7"},    {1.5e-9, "1.5e-09", "1.5e-9"},
      {1e-10, "1e-10", "1e-10"},  {0.0001, "0.0001", "0.0001"},
      {1e16, "1e+16", "1e+16"},
  };
  for (const auto& [value, v41, v4] : cases) {
    EXPECT_EQ(DumpForPrompt(value, ChatDialect::kV41), v41);
    EXPECT_EQ(DumpForPrompt(value, ChatDialect::kV4), v4);
    JsonValue nested;
    JsonValue::Array elements;
    elements.emplace_back(value);
    elements.emplace_back("x");
    nested.Set("a\n", std::move(elements));
    EXPECT_EQ(DumpForPrompt(nested, ChatDialect::kV4),
              std::string("{\"a\\n\": [") + v4 + ", \"x\"]}");
  }
}

RC_GTEST_PROP(PromptJson, WritingAgainChangesNothing,
              (const std::vector<double>& numbers, const std::vector<int64_t>& integers)) {
  JsonValue value;
  JsonValue::Array array;
  for (const double number : numbers) array.emplace_back(number);
  for (const int64_t integer : integers) array.emplace_back(integer);
  value.Set("k", std::move(array));
  RC_ASSERT(PythonJson(value.DumpCompact()).value() == value.Dump());
  RC_ASSERT(PythonJson(value.Dump()).value() == value.Dump());
}

}  // namespace
}  // namespace deepinfer
