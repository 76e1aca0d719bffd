#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "base/json_value.h"
#include "grammar/grammar_test_util.h"

namespace deepinfer {
namespace {

using Texts = std::vector<std::string_view>;

// What a schema must allow and what it must not.
void Check(std::string_view schema, const Texts& allowed, const Texts& refused,
           int max_whitespace = 2) {
  SCOPED_TRACE(schema);
  const auto grammar = CompileText(GrammarSpec::Kind::kJsonSchema, schema, max_whitespace);
  ASSERT_TRUE(grammar.has_value()) << grammar.error().message;
  for (const std::string_view text : allowed) EXPECT_TRUE(Allows(**grammar, text)) << text;
  for (const std::string_view text : refused) EXPECT_FALSE(Allows(**grammar, text)) << text;
}

void ExpectRefused(std::string_view schema, Code code, std::string_view field,
                   std::string_view part = {}) {
  SCOPED_TRACE(schema);
  const auto grammar = CompileText(GrammarSpec::Kind::kJsonSchema, schema);
  ASSERT_FALSE(grammar.has_value());
  EXPECT_EQ(CodeName(grammar.error().code), CodeName(code)) << grammar.error().message;
  EXPECT_EQ(grammar.error().field, field) << grammar.error().message;
  EXPECT_THAT(grammar.error().message, testing::HasSubstr(std::string(part)));
}

TEST(SchemaTable, TypeNamesOneKindOfValue) {
  Check(R"({"type":"null"})", {"null"}, {"nul", "true", "0"});
  Check(R"({"type":"boolean"})", {"true", "false"}, {"null", "\"true\"", "1"});
  Check(R"({"type":"integer"})", {"0", "-1", "42", "1234567890123456789"},
        {"-", "-0", "01", "1.0", "1e3", "\"1\"", ""});
  Check(R"({"type":"number"})", {"0", "-0.5", "1e9", "1.25E-3", "345"},
        {"-", ".5", "1.", "01", "NaN", "+1", "1e", "1e999"});
  Check(R"({"type":"string"})", {R"("")", R"("abc")", R"("a\"b")", "\"\xC3\xA9\""},
        {"abc", "\"a", "\"a\nb\"", R"("\x")", "\"\x01\""});
  Check(R"({"type":"array"})", {"[]", "[1]", "[1, \"a\", [null], {}]"},
        {"[", "[1,]", "[,1]", "{}"});
  Check(R"({"type":"object"})", {"{}", R"({"a":1})", R"({"a": {"b": []}, "c": "d"})"},
        {"{", R"({"a"})", R"({"a":1,})", "[]", R"({a:1})"});
}

TEST(SchemaTable, TypeListsAllowAnyOfTheirTypes) {
  Check(R"({"type":["string","null"]})", {"\"a\"", "null"}, {"1", "true"});
  Check(R"({"type":["integer","number"],"maximum":3})", {"3", "2.5"}, {"4"});
  ExpectRefused(R"({"type":"text"})", Code::kInvalidArgument, "#/type", "no type");
  ExpectRefused(R"({"type":[]})", Code::kInvalidArgument, "#/type");
}

TEST(SchemaTable, BooleanSchemasAllowEverythingOrNothing) {
  Check("true", {"1", "{}", "[null]", "\"a\""}, {"", "a"});
  Check("{}", {"1", "{\"a\":[]}", "null"}, {"nul"});
  ExpectRefused("false", Code::kInvalidArgument, "", "No finite text");
}

TEST(SchemaTable, EnumAndConstAllowTheirValuesOnly) {
  Check(R"({"enum":["a","b",1,null,true,1.5]})", {"\"a\"", "\"b\"", "1", "null", "true", "1.5"},
        {"\"c\"", "2", "a", "false", "1.0"});
  Check(R"({"const":"http://a/b"})", {R"("http://a/b")"}, {R"("http:\/\/a\/b")", "\"http\""});
  Check(R"({"const":{"a":[1,2]}})", {R"({"a":[1,2]})", R"({ "a" : [1, 2] })"}, {R"({"a":[2,1]})"});
  Check(R"({"type":"string","enum":["a",1]})", {"\"a\""}, {"1"});
  Check(R"({"const":"a\"\\\n"})", {R"("a\"\\\n")"}, {});
  ExpectRefused(R"({"enum":[]})", Code::kInvalidArgument, "#/enum");
  ExpectRefused(R"({"enum":["abc"],"maxLength":2})", Code::kUnsupported, "#/maxLength");
}

TEST(SchemaTable, LengthsCountCharactersInAnySpelling) {
  constexpr std::string_view kSchema = R"({"type":"string","maxLength":5})";
  Check(kSchema,
        {R"("\"\"\"\"\"")", R"("\n\n\n\n\n")", "\"\xF0\x9F\x98\x80\xF0\x9F\x98\x80\"",
         R"("\ud83d\ude00\ud83d\ude00\ud83d\ude00\ud83d\ude00\ud83d\ude00")", R"("\\\/\b\f\t")",
         "\"\xE4\xB8\xAD\xE6\x96\x87\""},
        {R"("\"\"\"\"\"\"")", "\"abcdef\"", "\"a\nb\"", R"("\ud83d")", R"("\ude00")", R"("\u12")"});
  Check(R"({"type":"string","minLength":2,"maxLength":3})", {"\"ab\"", "\"abc\"", R"("\u0041b")"},
        {"\"a\"", "\"abcd\"", R"("\n")"});
  Check(R"({"type":"string","minLength":3})", {"\"abc\"", "\"abcdefg\""}, {"\"ab\""});
  Check(R"({"type":"string","maxLength":0})", {"\"\""}, {"\"a\""});
  ExpectRefused(R"({"type":"string","minLength":3,"maxLength":2})", Code::kInvalidArgument,
                "#/maxLength");
  ExpectRefused(R"({"type":"string","maxLength":-1})", Code::kInvalidArgument, "#/maxLength");
}

TEST(SchemaTable, StringsAreUtf8) {
  Check(R"({"type":"string"})", {"\"\xE0\xA4\x85\"", "\"\xF0\x90\x80\x80\"", "\"\xED\x9F\xBF\""},
        {"\"\xE0\x99\xA1\"", "\"\xF0\x8F\xAC\xAC\"", "\"\xC1\x81\"", "\"\xED\xA0\x80\"",
         "\"\xF4\x90\x80\x80\"", "\"\x80\"", "\"\xE4\xB8\""});
}

// Every count around the bounds, in plain characters and in escapes of each kind.
TEST(SchemaTable, SmallLengthsAreExactInEverySpelling) {
  const std::vector<std::string> spellings = {"a", "\\n", "\\u0041", "\\ud83d\\ude00",
                                              "\xF0\x9F\x98\x80"};
  for (int min = 0; min <= 16; min += 4) {
    for (int max = min; max <= 16; max += 5) {
      const auto grammar = CompileText(
          GrammarSpec::Kind::kJsonSchema,
          fmt::format(R"({{"type":"string","minLength":{},"maxLength":{}}})", min, max));
      ASSERT_TRUE(grammar.has_value()) << grammar.error().message;
      for (int count = 0; count <= 18; ++count) {
        for (size_t first = 0; first < spellings.size(); ++first) {
          std::string text = "\"";
          for (int i = 0; i < count; ++i)
            text += spellings[(first + static_cast<size_t>(i * i)) % spellings.size()];
          ASSERT_EQ(AllowsTokens(**grammar, text + "\"", false), count >= min && count <= max)
              << min << max << text;
        }
      }
    }
  }
}

TEST(SchemaTable, GreatLengthsAreCountedAndHaveANamedLimit) {
  for (const int64_t length : {10, 1000, 100000, 10000000}) {
    const auto schema = fmt::format(R"({{"type":"string","maxLength":{}}})", length);
    const auto grammar = CompileText(GrammarSpec::Kind::kJsonSchema, schema);
    ASSERT_TRUE(grammar.has_value()) << grammar.error().message;
    EXPECT_LT((*grammar)->memory_bytes(), 4 << 20) << length;
    if (length > 1000) continue;
    const std::string fits(static_cast<size_t>(length), 'a');
    EXPECT_TRUE(Allows(**grammar, "\"" + fits + "\"")) << length;
    EXPECT_FALSE(Allows(**grammar, "\"" + fits + "a\"")) << length;
    EXPECT_FALSE(Allows(**grammar, "\"" + fits + R"(\u0041")")) << length;
  }
  ExpectRefused(R"({"type":"string","maxLength":10000001})", Code::kResourceExhausted,
                "#/maxLength", "10000000");
  ExpectRefused(R"({"type":"array","maxItems":1e12})", Code::kResourceExhausted, "#/maxItems");
}

TEST(SchemaTable, PatternsAreFoundAnywhereUnlessAnchored) {
  Check(R"({"type":"string","pattern":"^[a-c]+$"})", {"\"abc\""}, {"\"\"", "\"abd\"", "\"xabc\""});
  Check(R"({"type":"string","pattern":"b"})", {"\"b\"", "\"abc\"", R"("\"b\n")"},
        {"\"ac\"", "\"\""});
  Check(R"({"type":"string","pattern":"^a"})", {"\"a\"", "\"ab\""}, {"\"ba\""});
  Check(R"({"type":"string","pattern":"^\"\\\\[\\n]$"})", {R"("\"\\\n")"}, {R"("""")"});
  Check(R"({"type":"string","pattern":"^\\d{3}-\\d{4}$"})", {"\"555-1234\""}, {"\"5555-123\""});
  Check(R"({"type":"string","pattern":"^[^a]$"})", {"\"b\"", R"("\"")", R"("\u0001")"},
        {"\"a\"", "\"\x01\""});
  Check(R"({"type":"string","pattern":"^[a-z]+$","maxLength":3})", {"\"abc\""},
        {"\"abcd\"", "\"\""});
  Check(R"({"type":"string","pattern":"^a{2}$","minLength":1,"maxLength":5})", {"\"aa\""},
        {"\"a\""});
  ExpectRefused(R"({"type":"string","pattern":"^(ab)+$","maxLength":3})", Code::kUnsupported,
                "#/pattern");
  ExpectRefused(R"({"type":"string","pattern":"(?=a)b"})", Code::kUnsupported, "#/pattern",
                "look-ahead");
  ExpectRefused(R"({"type":"string","pattern":"[a"})", Code::kInvalidArgument, "#/pattern",
                "not closed");
}

TEST(SchemaTable, FormatsAreEnforced) {
  const auto format = [](std::string_view name) {
    return fmt::format(R"({{"type":"string","format":"{}"}})", name);
  };
  Check(format("date"), {"\"2024-02-28\"", "\"1999-12-31\""},
        {"\"2024-02-30\"", "\"2024-13-01\"", "\"2024-1-1\"", "\"0000-01-01\""});
  Check(format("time"), {"\"23:59:59Z\"", "\"01:02:03.5+02:00\""}, {"\"24:00:00Z\"", "\"10:00\""});
  Check(format("date-time"), {"\"2024-02-01T10:00:00Z\""}, {"\"2024-02-01 10:00:00Z\""});
  Check(format("uuid"), {"\"123e4567-e89b-12d3-a456-426614174000\""}, {"\"123e4567\""});
  Check(format("ipv4"), {"\"10.0.0.255\""}, {"\"10.0.0.256\"", "\"10.0.0\"", "\"01.0.0.0\""});
  Check(format("ipv6"), {"\"::1\"", "\"fe80::\"", "\"1:2:3:4:5:6:7:8\""},
        {"\"1:2\"", "\"1::2::3\""});
  Check(format("email"), {"\"a.b@c.de\""}, {"\"a@b\"", "\"@c.de\"", "\"a b@c.de\""});
  Check(format("hostname"), {"\"a-b.c\""}, {"\"-a\"", "\"a..b\""});
  Check(format("uri"), {"\"http://a.b/c?d=e#f\""}, {"\"a/b\"", "\"http:// a\""});
  Check(format("duration"), {"\"P1D\"", "\"PT1H30M\"", "\"P2W\"", "\"P1Y2M\""},
        {"\"P\"", "\"PT\"", "\"1D\""});
  Check(format("json-pointer"), {"\"\"", "\"/a/~1b\""}, {"\"a\"", "\"/~2\""});
  ExpectRefused(format("iri"), Code::kUnsupported, "#/format", "'iri'");
  ExpectRefused(R"({"type":"string","format":"date","pattern":"a"})", Code::kUnsupported,
                "#/format");
}

TEST(SchemaTable, IntegerBoundsEqualADirectCheck) {
  uint64_t state = 12345;
  const auto draw = [&](int64_t low, int64_t high) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return low + static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(high - low + 1));
  };
  for (int round = 0; round < 200; ++round) {
    const int64_t low = draw(-12, 12);
    const int64_t high = draw(low, 13);
    const bool low_exclusive = draw(0, 1) == 1 && high - low >= 2;
    const bool high_exclusive = draw(0, 1) == 1 && high - low >= 2;
    const int kind = static_cast<int>(draw(0, 2));  // 0: both, 1: lower only, 2: upper only
    std::string schema = R"({"type":"integer")";
    if (kind != 2)
      schema += fmt::format(",\"{}\":{}", low_exclusive ? "exclusiveMinimum" : "minimum", low);
    if (kind != 1)
      schema += fmt::format(",\"{}\":{}", high_exclusive ? "exclusiveMaximum" : "maximum", high);
    schema += "}";
    const auto grammar = CompileText(GrammarSpec::Kind::kJsonSchema, schema);
    ASSERT_TRUE(grammar.has_value()) << grammar.error().message;
    for (int64_t value = -150; value <= 150; ++value) {
      const bool expected = (kind == 2 || (low_exclusive ? value > low : value >= low)) &&
                            (kind == 1 || (high_exclusive ? value < high : value <= high));
      ASSERT_EQ(AllowsTokens(**grammar, std::to_string(value), false), expected) << schema << value;
    }
    EXPECT_FALSE(Allows(**grammar, "-"));
    EXPECT_FALSE(Allows(**grammar, "-0"));
  }
}

TEST(SchemaTable, IntegerBoundsReachTheEndsOfTheirRange) {
  Check(R"({"type":"integer","minimum":-9223372036854775808,"maximum":9223372036854775807})",
        {"-9223372036854775808", "9223372036854775807", "0"},
        {"-9223372036854775809", "9223372036854775808"});
  Check(R"({"type":"integer","minimum":995,"maximum":12003})", {"995", "1000", "12003", "9999"},
        {"994", "12004", "20000", "100"});
  Check(R"({"type":"integer","minimum":1.5,"maximum":3.5})", {"2", "3"}, {"1", "4"});
  Check(R"({"type":"integer","format":"int32"})", {"2147483647", "-2147483648"}, {"2147483648"});
  ExpectRefused(R"({"type":"integer","minimum":5,"maximum":4})", Code::kInvalidArgument, "");
}

TEST(SchemaTable, NumberBoundsEqualADirectCheck) {
  const std::vector<std::string> bounds = {"-2",  "-1.25", "-0.5", "0",    "0.01",
                                           "0.5", "1",     "1.5",  "9.75", "10"};
  const std::vector<std::string> values = {
      "-10",  "-2.01", "-2",     "-1.99",  "-1.26", "-1.25", "-1.249", "-1",   "-0.51",
      "-0.5", "-0.49", "-0.001", "0",      "0.0",   "0.001", "0.009",  "0.01", "0.011",
      "0.1",  "0.49",  "0.5",    "0.50",   "0.51",  "0.999", "1",      "1.0",  "1.001",
      "1.49", "1.5",   "1.51",   "2",      "9",     "9.7",   "9.74",   "9.75", "9.76",
      "9.8",  "10",    "10.0",   "10.001", "11",    "100"};
  for (size_t i = 0; i < bounds.size(); ++i) {
    for (size_t j = i + 1; j <= bounds.size(); ++j) {
      for (const bool exclusive : {false, true}) {
        std::string schema = fmt::format(R"({{"type":"number","{}":{})",
                                         exclusive ? "exclusiveMinimum" : "minimum", bounds[i]);
        if (j < bounds.size()) {
          schema +=
              fmt::format(R"(,"{}":{})", exclusive ? "exclusiveMaximum" : "maximum", bounds[j]);
        }
        schema += "}";
        const auto grammar = CompileText(GrammarSpec::Kind::kJsonSchema, schema);
        ASSERT_TRUE(grammar.has_value()) << schema << grammar.error().message;
        const double low = std::stod(bounds[i]);
        const double high = j < bounds.size() ? std::stod(bounds[j]) : 1e9;
        for (const std::string& text : values) {
          const double value = std::stod(text);
          const bool expected =
              exclusive ? value > low && value < high : value >= low && value <= high;
          ASSERT_EQ(AllowsTokens(**grammar, text, false), expected) << schema << text;
        }
      }
    }
  }
  Check(R"({"type":"number","maximum":-0.5})", {"-0.5", "-3", "-0.75"}, {"0", "-0.25", "-0"});
}

TEST(SchemaTable, MultipleOfIsEnforcedForWholeNumbers) {
  Check(R"({"type":"integer","multipleOf":7})", {"0", "7", "-14", "7007"}, {"1", "8", "-0", "07"});
  Check(R"({"type":"number","multipleOf":5,"minimum":1,"maximum":20})", {"5", "20"},
        {"0", "25", "7", "5.5"});
  Check(R"({"type":"integer","multipleOf":1})", {"3"}, {"3.5"});
  ExpectRefused(R"({"type":"number","multipleOf":0.1})", Code::kUnsupported, "#/multipleOf");
  ExpectRefused(R"({"type":"integer","multipleOf":0})", Code::kInvalidArgument, "#/multipleOf");
  ExpectRefused(R"({"type":"integer","multipleOf":1000})", Code::kUnsupported, "#/multipleOf");
}

TEST(SchemaTable, PropertiesComeInOrderAndAloneUnlessMoreAreAllowed) {
  constexpr std::string_view kSchema = R"({"type":"object","properties":{"a":{"type":"integer"},
      "b":{"type":"string"},"c":{"type":"null"}},"required":["b"]})";
  Check(kSchema,
        {R"({"b":"x"})", R"({"a":1,"b":"x"})", R"({"a":1,"b":"x","c":null})",
         R"({"b":"x","c":null})"},
        {"{}", R"({"a":1})", R"({"b":"x","a":1})", R"({"b":1})", R"({"b":"x","d":1})",
         R"({"b":"x",})", R"({,"b":"x"})", R"({"b":"x","b":"y"})"});
  Check(R"({"type":"object","properties":{"a":{"type":"integer"}}})", {"{}", R"({"a":1})"},
        {R"({"z":1})"});
  Check(R"({"properties":{"a/b":{"type":"integer"},"q\"":{"type":"null"}},"required":["a/b"]})",
        {R"({"a/b":1})", R"({"a/b":1,"q\"":null})"}, {R"({"a\/b":1})"});
  Check(R"({"type":"object","required":["a"]})", {R"({"a":1})", R"({"a":[]})"},
        {"{}", R"({"b":1})"});
}

TEST(SchemaTable, ObjectsWithoutPropertiesAreFreeOrEmpty) {
  Check(R"({"type":"object"})", {"{}", R"({"x":[1]})"}, {"[]"});
  Check(R"({"type":"object","properties":{}})", {"{}", R"({"x":1})"}, {"1"});
  Check(R"({"type":"object","additionalProperties":false})", {"{}", "{ }"}, {R"({"x":1})"});
}

TEST(SchemaTable, AdditionalPropertiesHaveOtherNames) {
  Check(R"({"type":"object","properties":{"ab":{"type":"integer"},"ac":{"type":"integer"}},
         "additionalProperties":{"type":"string"}})",
        {"{}", R"({"ab":1})", R"({"ab":1,"x":"y"})", R"({"a":"y"})", R"({"abc":"y","":"z"})",
         R"({"ad":"y"})", R"({"a\"":"y"})"},
        {R"({"ab":"y"})", R"({"x":1})", R"({"x":"y","ab":1})", R"({"\u0061b":"y"})",
         R"({"ab":1,"ac":"y"})"});
  Check(R"({"type":"object","additionalProperties":{"type":"integer"}})",
        {"{}", R"({"a":1,"b":2})"}, {R"({"a":"b"})"});
}

TEST(SchemaTable, PropertyCountsAreEnforced) {
  Check(R"({"properties":{"a":{"const":1},"b":{"const":1},"c":{"const":1}},"minProperties":2})",
        {R"({"a":1,"b":1})", R"({"b":1,"c":1})", R"({"a":1,"b":1,"c":1})"},
        {"{}", R"({"a":1})", R"({"c":1})"});
  Check(
      R"({"properties":{"a":{"const":1},"b":{"const":1},"c":{"const":1}},"maxProperties":1,"required":[]})",
      {"{}", R"({"a":1})", R"({"c":1})"}, {R"({"a":1,"b":1})"});
  Check(R"({"properties":{"a":{"const":1},"b":{"const":1}},"required":["b"],"maxProperties":2,
          "additionalProperties":{"const":2}})",
        {R"({"b":1})", R"({"a":1,"b":1})", R"({"b":1,"x":2})"},
        {R"({"a":1,"b":1,"x":2})", R"({"a":1})"});
  Check(R"({"type":"object","minProperties":1,"maxProperties":2})",
        {R"({"a":1})", R"({"a":1,"b":2})"}, {"{}", R"({"a":1,"b":2,"c":3})"});
  ExpectRefused(R"({"type":"object","minProperties":2})", Code::kUnsupported, "#/minProperties");
  ExpectRefused(R"({"properties":{"a":{}},"minProperties":2})", Code::kInvalidArgument,
                "#/minProperties");
}

TEST(SchemaTable, PatternPropertiesAndPropertyNamesHaveOneForm) {
  Check(
      R"({"type":"object","patternProperties":{"^x[0-9]$":{"type":"integer"}},"additionalProperties":false})",
      {"{}", R"({"x1":1})", R"({"x1":1,"x2":2})"}, {R"({"y1":1})", R"({"x1":"a"})"});
  Check(
      R"({"type":"object","propertyNames":{"pattern":"^[a-b]+$"},"additionalProperties":{"type":"null"}})",
      {"{}", R"({"ab":null})"}, {R"({"c":null})", R"({"a":1})"});
  Check(R"({"type":"object","propertyNames":{"enum":["a","b"]}})", {R"({"a":1})"}, {R"({"c":1})"});
  ExpectRefused(R"({"patternProperties":{"a":{}}})", Code::kUnsupported, "#/patternProperties");
  ExpectRefused(R"({"patternProperties":{"a":{},"b":{}},"additionalProperties":false})",
                Code::kUnsupported, "#/patternProperties");
  ExpectRefused(R"({"propertyNames":{"pattern":"a"},"required":["a"]})", Code::kUnsupported,
                "#/propertyNames");
}

TEST(SchemaTable, ItemsAndTheirCountsAreEnforced) {
  Check(R"({"type":"array","items":{"type":"integer"}})", {"[]", "[1]", "[1,2, 3]"},
        {"[\"a\"]", "[1,]"});
  Check(R"({"type":"array","items":{"type":"integer"},"minItems":2,"maxItems":3})",
        {"[1,2]", "[1,2,3]"}, {"[]", "[1]", "[1,2,3,4]"});
  Check(R"({"items":false})", {"[]"}, {"[1]"});
  Check(R"({"type":"array","maxItems":0})", {"[]"}, {"[1]"});
  Check(R"({"prefixItems":[{"type":"integer"},{"type":"string"}]})", {"[]", "[1]", "[1,\"a\"]"},
        {"[\"a\"]", "[1,\"a\",2]"});
  Check(
      R"({"prefixItems":[{"type":"integer"},{"type":"string"}],"items":{"type":"null"},"minItems":2})",
      {"[1,\"a\"]", "[1,\"a\",null,null]"}, {"[1]", "[1,\"a\",1]"});
  Check(R"({"items":[{"const":1}],"additionalItems":{"const":2}})", {"[1,2,2]"}, {"[2]"});
  Check(R"({"type":"array","uniqueItems":true,"maxItems":1})", {"[1]"}, {"[1,1]"});
  ExpectRefused(R"({"type":"array","uniqueItems":true})", Code::kUnsupported, "#/uniqueItems");
  ExpectRefused(R"({"type":"array","contains":{"const":1}})", Code::kUnsupported, "#/contains");
  ExpectRefused(R"({"prefixItems":[{}],"items":false,"minItems":2})", Code::kInvalidArgument,
                "#/minItems");
}

TEST(SchemaTable, AnyOfAllowsEachAlternativeBesideTheRest) {
  Check(R"({"anyOf":[{"type":"integer"},{"type":"string","maxLength":1}]})", {"1", "\"a\""},
        {"null", "\"ab\""});
  Check(R"({"type":"object","properties":{"a":{"const":1},"b":{"const":2}},
           "anyOf":[{"required":["a"]},{"required":["b"]}]})",
        {R"({"a":1})", R"({"b":2})", R"({"a":1,"b":2})"}, {"{}"});
  Check(R"({"anyOf":[false,{"const":1}]})", {"1"}, {"2"});
  ExpectRefused(R"({"anyOf":[]})", Code::kInvalidArgument, "#/anyOf");
}

TEST(SchemaTable, OneOfNeedsAlternativesThatExcludeEachOther) {
  Check(R"({"oneOf":[{"type":"integer"},{"type":"string"}]})", {"1", "\"a\""}, {"null"});
  Check(R"({"oneOf":[{"properties":{"k":{"const":"a"},"v":{"type":"integer"}},"required":["k"]},
                     {"properties":{"k":{"const":"b"}},"required":["k"]}]})",
        {R"({"k":"a","v":1})", R"({"k":"b"})"}, {R"({"k":"b","v":1})"});
  Check(R"({"oneOf":[{"const":1},{"const":2}]})", {"1", "2"}, {"3"});
  ExpectRefused(R"({"oneOf":[{"type":"integer"},{"type":"number"}]})", Code::kUnsupported,
                "#/oneOf", "alternatives 0 and 1");
  ExpectRefused(R"({"oneOf":[{"minimum":2},{"maximum":3}]})", Code::kUnsupported, "#/oneOf");
}

TEST(SchemaTable, AllOfIsMerged) {
  Check(R"({"allOf":[{"properties":{"a":{"type":"integer"}},"required":["a"]},
                     {"properties":{"b":{"type":"string"}},"required":["b"]}]})",
        {R"({"a":1,"b":"x"})"}, {R"({"a":1})", R"({"b":"x"})"});
  Check(R"({"allOf":[{"type":"integer","minimum":3},{"type":"number","maximum":5}]})", {"3", "5"},
        {"2", "6", "3.5"});
  Check(R"({"allOf":[{"enum":[1,2,3]},{"enum":[2,3,4]}]})", {"2", "3"}, {"1", "4"});
  Check(
      R"({"allOf":[{"properties":{"a":{"minimum":2}}},{"properties":{"a":{"type":"integer","maximum":3}},
           "additionalProperties":false}]})",
      {R"({"a":2})", "{}"}, {R"({"a":1})", R"({"a":4})"});
  Check(
      R"({"allOf":[{"properties":{"a":{}},"additionalProperties":false},{"properties":{"b":{}}}]})",
      {"{}", R"({"a":1})"}, {R"({"b":1})"});
  ExpectRefused(R"({"allOf":[{"type":"string"},{"type":"integer"}]})", Code::kInvalidArgument,
                "#/type");
  ExpectRefused(R"({"allOf":[{"pattern":"a"},{"pattern":"b"}]})", Code::kUnsupported, "#/pattern");
}

TEST(SchemaTable, ReferencesResolveAndMayRecur) {
  Check(R"({"$ref":"#/$defs/node","$defs":{"node":{"type":"object","properties":{
           "v":{"type":"integer"},"next":{"anyOf":[{"$ref":"#/$defs/node"},{"type":"null"}]}},
           "required":["v","next"]}}})",
        {R"({"v":1,"next":null})", R"({"v":1,"next":{"v":2,"next":null}})"},
        {R"({"v":1})", R"({"v":1,"next":2})"});
  Check(R"({"type":"array","items":{"$ref":"#"}})", {"[]", "[[],[[]]]"}, {"[1]"});
  Check(R"({"$ref":"#/definitions/a","maximum":3,"definitions":{"a":{"type":"integer"}}})", {"3"},
        {"4"});
  Check(R"({"$ref":"#/$defs/a~1b","$defs":{"a/b":{"const":1}}})", {"1"}, {"2"});
  ExpectRefused(R"({"$ref":"#/$defs/x"})", Code::kInvalidArgument, "#/$ref", "points to nothing");
  ExpectRefused(R"({"$ref":"http://a/b"})", Code::kUnsupported, "#/$ref");
  ExpectRefused(R"({"$ref":"#"})", Code::kResourceExhausted, "#");
  ExpectRefused(
      R"({"$ref":"#/$defs/a","$defs":{"a":{"anyOf":[{"$ref":"#/$defs/a"},{"const":1}]}}})",
      Code::kInvalidArgument, "", "stand for itself");
  ExpectRefused(R"({"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]})",
                Code::kInvalidArgument, "", "No finite text");
}

TEST(SchemaTable, UnevaluatedPropertiesCloseAMergedObject) {
  Check(
      R"({"allOf":[{"properties":{"a":{"const":1}}}],"properties":{"b":{"const":2}},"unevaluatedProperties":false})",
      {"{}", R"({"b":2})"}, {R"({"c":1})"});
  ExpectRefused(R"({"allOf":[{"unevaluatedProperties":false}]})", Code::kUnsupported,
                "#/unevaluatedProperties");
}

TEST(SchemaTable, WhatAGrammarCannotEnforceIsRefusedWithItsPlace) {
  for (const std::string_view keyword :
       {"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies",
        "contains", "minContains", "maxContains", "$dynamicRef", "$recursiveRef", "contentSchema",
        "unknownKeyword"}) {
    ExpectRefused(fmt::format(R"({{"properties":{{"a":{{"{}":{{}}}}}}}})", keyword),
                  Code::kUnsupported, fmt::format("#/properties/a/{}", keyword), keyword);
  }
}

TEST(SchemaTable, AnnotationsChangeNothing) {
  Check(
      R"({"title":"t","description":"d","default":1,"examples":[1],"$comment":"c","$id":"i","$schema":"s",
           "deprecated":true,"readOnly":true,"writeOnly":false,"x-order":3,"type":"integer"})",
      {"1"}, {"\"a\""});
}

TEST(SchemaTable, WhiteSpaceBetweenTokensIsBounded) {
  constexpr std::string_view kSchema =
      R"({"type":"object","properties":{"a":{"type":"array"}},"required":["a"]})";
  Check(kSchema, {R"({"a":[]})", "{ \n\"a\"  : \t[  ]\n }", R"({"a": [1, 2]})"},
        {"{   \"a\":[]}", " {\"a\":[]}", "{\"a\":[]} ", "{\"a\":   []}", R"({"a":[1,   2]})"});
  Check(kSchema, {R"({"a":[]})", R"({"a":[1,2]})"}, {R"({"a": []})", R"({"a":[1, 2]})"}, 0);
  Check(kSchema, {"{\n    \"a\": [\n        1\n    ]\n}"}, {}, 9);
  ExpectRefused("{", Code::kInvalidArgument, "");
}

// A schema of random keywords, at most `depth` levels deep.
std::string RandomSchema(uint64_t* state, int depth) {
  const auto draw = [&](uint64_t count) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (*state >> 33) % count;
  };
  const auto inner = [&] { return RandomSchema(state, depth - 1); };
  switch (draw(depth > 0 ? 14 : 8)) {
    case 0:
      return R"({"type":"boolean"})";
    case 1:
      return fmt::format(R"({{"type":"integer","minimum":-{},"maximum":{}}})", draw(99), draw(300));
    case 2:
      return fmt::format(R"({{"type":"string","minLength":{},"maxLength":{}}})", draw(3),
                         3 + draw(5));
    case 3:
      return R"({"enum":["a","b c",null,12,{"x":[1]}]})";
    case 4:
      return R"({"type":"string","pattern":"^[a-c]{1,3}(x|y)?$"})";
    case 5:
      return fmt::format(R"({{"type":"number","exclusiveMinimum":{}.5,"maximum":{}}})", draw(5),
                         6 + draw(9));
    case 6: {
      const uint64_t least = draw(20);
      return fmt::format(R"({{"type":"string","minLength":{},"maxLength":{}}})", least,
                         least + draw(20));
    }
    case 7:
      return R"({"type":"string","format":"date-time"})";
    case 8:
      return fmt::format(R"({{"type":"array","items":{},"minItems":{},"maxItems":{}}})", inner(),
                         draw(2), 1 + draw(3));
    case 9:
      return fmt::format(R"({{"anyOf":[{},{}]}})", inner(), inner());
    case 10:
      return fmt::format(
          R"({{"type":"object","properties":{{"a":{},"bb":{}}},"required":["a"],"additionalProperties":{}}})",
          inner(), inner(), draw(2) == 0 ? "false" : inner());
    case 11:
      return fmt::format(R"({{"type":"object","additionalProperties":{},"maxProperties":{}}})",
                         inner(), 1 + draw(3));
    case 12:
      return fmt::format(R"({{"properties":{{"k":{},"l":{},"m":{}}},"minProperties":{}}})", inner(),
                         inner(), inner(), 1 + draw(2));
    default:
      return fmt::format(R"({{"prefixItems":[{}],"items":{},"maxItems":4}})", inner(), inner());
  }
}

// Whatever is drawn, a token can follow until the text is complete, no token that the matcher takes
// is left out of a mask, and the text is JSON.
RC_GTEST_PROP(SchemaTable, RandomSchemasHaveNoDeadEndsAndYieldJson, ()) {
  uint64_t state = *rc::gen::arbitrary<uint32_t>();
  const std::string schema = RandomSchema(&state, 3);
  const int max_whitespace = *rc::gen::element(0, 1, 2, 9);
  const auto grammar = CompileText(GrammarSpec::Kind::kJsonSchema, schema, max_whitespace);
  if (!grammar.has_value()) RC_FAIL(schema + grammar.error().message);
  const GrammarVocabulary vocabulary = TestVocabulary();
  const auto matcher = (*grammar)->NewMatcher(0);
  std::vector<uint32_t> mask = NewMask();
  std::string text;
  for (int step = 0; step < 400; ++step) {
    if (matcher->FillMask(mask) != TokenConstraint::Verdict::kMasked) RC_FAIL(schema + text);
    if (MaskHas(mask, kEndId)) break;
    std::vector<int32_t> allowed;
    for (int32_t id = 0; id < kTestVocabulary; ++id) {
      if (MaskHas(mask, id)) allowed.push_back(id);
    }
    for (int32_t id = 256; id < kEndId; ++id) {
      if (!MaskHas(mask, id) && matcher->Accept(id).has_value()) {
        RC_FAIL(schema + text + " leaves out " + vocabulary.token_bytes[static_cast<size_t>(id)]);
      }
    }
    state = state * 6364136223846793005u + 1442695040888963407u;
    int32_t id = allowed[(state >> 33) % allowed.size()];
    // What closes something comes first when the text is long already.
    for (const int32_t close : {int32_t{'}'}, int32_t{']'}, int32_t{'"'}}) {
      if (step > 60 && MaskHas(mask, close)) id = close;
    }
    RC_ASSERT(matcher->Accept(id).has_value());
    text += vocabulary.token_bytes[static_cast<size_t>(id)];
  }
  if (MaskHas(mask, kEndId) && !JsonValue::Parse(text).has_value()) RC_FAIL(schema + text);
}

}  // namespace
}  // namespace deepinfer
