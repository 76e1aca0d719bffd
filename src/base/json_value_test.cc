#include "base/json_value.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

namespace deepinfer {
namespace {

std::string Redumped(std::string_view text) {
  const Result<JsonValue> value = JsonValue::Parse(text);
  return value.has_value() ? value->Dump() : "refused: " + value.error().message;
}

bool Refused(std::string_view text) {
  const Result<JsonValue> value = JsonValue::Parse(text);
  return !value.has_value() && value.error().code == Code::kInvalidArgument;
}

std::string Repeated(std::string_view text, size_t times) {
  std::string out;
  for (size_t i = 0; i < times; ++i) out += text;
  return out;
}

TEST(JsonValue, WritesWhatPythonWrites) {
  EXPECT_EQ(Redumped(R"( {"a" : [1 ,2.50,true ,null], "b":{"c":"x"},"":[]} )"),
            R"({"a": [1, 2.5, true, null], "b": {"c": "x"}, "": []})");
  EXPECT_EQ(Redumped("{}"), "{}");
  EXPECT_EQ(Redumped(R"("\u00e9\/\u2028\ud83d\ude00\u007f")"), "\"é/\xE2\x80\xA8😀\x7f\"");
  EXPECT_EQ(Redumped(R"("\"\\\b\f\n\r\t\u0001\u001F")"), R"("\"\\\b\f\n\r\t\u0001\u001f")");
  EXPECT_EQ(JsonValue::Parse(R"({"a": [1, "x y", {"b": 2}]})")->DumpCompact(),
            R"({"a":[1,"x y",{"b":2}]})");
  EXPECT_EQ(
      JsonValue::Parse("[1e-7, 1e-6, 1e-5, 1.234e-5, 1e15, 1e16, 5e-324, 1.5e300]")->DumpCompact(),
      "[1e-7,1e-6,0.00001,0.00001234,1000000000000000.0,1e+16,5e-324,1.5e+300]");
}

TEST(JsonValue, KeepsIntegersOf64BitsAndMakesLargerOnesDoubles) {
  EXPECT_EQ(Redumped("[0, -1, 9223372036854775807, -9223372036854775808, 18446744073709551615]"),
            "[0, -1, 9223372036854775807, -9223372036854775808, 18446744073709551615]");
  EXPECT_EQ(Redumped("18446744073709551616"), "1.8446744073709552e+19");
  EXPECT_EQ(Redumped("-9223372036854775809"), "-9.223372036854776e+18");
  EXPECT_EQ(Redumped("-0"), "-0.0");
  EXPECT_EQ(Redumped("[-0.0, 0, 0.0]"), "[-0.0, 0, 0.0]");
}

TEST(JsonValue, WritesTheShortestDoubles) {
  EXPECT_EQ(
      Redumped("[1e-5, 0.0001, 0.00012345, 1e15, 1e16, 123456789012345680.0, 1E2]"),
      "[1e-05, 0.0001, 0.00012345, 1000000000000000.0, 1e+16, 1.2345678901234568e+17, 100.0]");
  EXPECT_EQ(Redumped("[100000.0, 1.5e300, 2.5E-300, 0.1, 5e-324, 1.7976931348623157e308]"),
            "[100000.0, 1.5e+300, 2.5e-300, 0.1, 5e-324, 1.7976931348623157e+308]");
  EXPECT_EQ(Redumped("9007199254740993.0"), "9007199254740992.0");
  EXPECT_EQ(Redumped("0.30000000000000004"), "0.30000000000000004");
}

TEST(JsonValue, TinyNumbersAreZeroAndHugeOnesRefused) {
  EXPECT_EQ(Redumped("[1e-400, -1e-400, 0e999999999999999999999, 0.0e-5]"),
            "[0.0, -0.0, 0.0, 0.0]");
  EXPECT_EQ(Redumped("1e-99999999999999999999999"), "0.0");
  EXPECT_EQ(Redumped("0." + std::string(400, '0') + "1e401"), "1.0");
  EXPECT_EQ(Redumped("1" + std::string(400, '0') + "e-400"), "1.0");
  EXPECT_EQ(Redumped("0." + std::string(1000, '0') + "1"), "0.0");
  for (const std::string text : {"1e400", "-1e400", "1e99999999999999999999", "1.8e308"})
    EXPECT_TRUE(Refused(text)) << text;
  EXPECT_TRUE(Refused(std::string(400, '9')));
}

TEST(JsonValue, RefusesWhatIsNotJson) {
  for (const std::string_view text : {"",          " ",          "NaN",         "Infinity",
                                      "-Infinity", "nan",        "tru",         "truee",
                                      "nul",       "01",         "-",           "+1",
                                      "1.",        ".5",         "1e",          "1e+",
                                      "-a",        "[1,]",       "[1 2]",       "[",
                                      "[1",        "{",          "{\"a\"",      "{\"a\":",
                                      "{\"a\":1",  "{\"a\":1,}", "{a:1}",       "{1:2}",
                                      "{\"a\" 1}", "'a'",        "\"a",         "\"\\",
                                      "\"\\x\"",   "\"\\u12\"",  "\"\\u12g4\"", "\"\\u+123\"",
                                      "\"\n\"",    "1 2",        "[]]",         "\xEF\xBB\xBF{}",
                                      "//x\n1"}) {
    EXPECT_TRUE(Refused(text)) << text;
  }
  EXPECT_TRUE(Refused(std::string_view("\"\0\"", 3)));
  EXPECT_TRUE(Refused(std::string_view("1\0", 2)));
  EXPECT_EQ(JsonValue::Parse("[1, x]").error().message,
            "Not valid JSON: expected a value at byte 4.");
}

TEST(JsonValue, RefusesLoneSurrogatesAndBrokenUtf8) {
  for (const std::string_view text :
       {R"("\ud800")", R"("\udc00")", R"("\ud800x")", R"("\ud800\n")", R"("\ud800\ud800")",
        R"("\ud800\u0041")", R"("\udc00\ud800")", R"({"\ud83d": 1})", R"("\ud83d\ude0")"}) {
    EXPECT_TRUE(Refused(text)) << text;
  }
  for (const std::string_view text :
       {"\"\xFF\"", "\"\xC0\x80\"", "\"\xED\xA0\x80\"", "\"\xE2\x82\""})
    EXPECT_TRUE(Refused(text));
}

TEST(JsonValue, Allows127LevelsOfNesting) {
  const std::string open_and_close = std::string(127, '[') + std::string(127, ']');
  EXPECT_EQ(Redumped(open_and_close), open_and_close);
  EXPECT_TRUE(Refused(std::string(128, '[') + std::string(128, ']')));
  EXPECT_FALSE(Refused(Repeated("{\"a\":", 127) + "1" + std::string(127, '}')));
  EXPECT_TRUE(Refused(Repeated("{\"a\":", 128) + "1" + std::string(128, '}')));
  EXPECT_TRUE(Refused(std::string(1000000, '[')));
  EXPECT_TRUE(Refused(Repeated("{\"a\":", 1000000)));
}

TEST(JsonValue, OfAKeyThatOccursTwiceTheLastValueStandsAtThePlaceOfTheFirst) {
  EXPECT_EQ(Redumped(R"({"a": 1, "b": 2, "a": 3, "c": 4, "b": 5, "\u0061": 6})"),
            R"({"a": 6, "b": 5, "c": 4})");
  std::string many = "{";
  std::string expected = "{";
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 100; ++i)
      many += "\"k" + std::to_string(i) + "\": " + std::to_string(round) + ", ";
  }
  for (int i = 0; i < 100; ++i) expected += "\"k" + std::to_string(i) + "\": 2, ";
  EXPECT_EQ(Redumped(many + "\"z\": 0}"), expected + "\"z\": 0}");
}

TEST(JsonValue, ObjectsOfVeryManyKeysTakeNoQuadraticTime) {
  std::string many = "{";
  for (int i = 0; i < 300000; ++i) many += "\"key " + std::to_string(i) + "\":0,";
  many += "\"\":1}";
  const auto start = std::chrono::steady_clock::now();
  const Result<JsonValue> value = JsonValue::Parse(many);
  ASSERT_TRUE(value.has_value());
  EXPECT_EQ(value->if_object()->size(), 300001u);
  // 4.5e10 comparisons would take more than half a minute.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(JsonValue, TellsKindsApart) {
  const JsonValue value = *JsonValue::Parse(
      R"({"i": -5, "u": 18446744073709551615, "d": 1.0, "s": "x", "b": false, "n": null, "a": [1]})");
  EXPECT_EQ(*value.Find("i")->if_int64(), -5);
  EXPECT_EQ(value.Find("i")->if_uint64(), nullptr);
  EXPECT_EQ(*value.Find("u")->if_uint64(), std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(value.Find("u")->if_int64(), nullptr);
  EXPECT_EQ(*value.Find("d")->if_double(), 1.0);
  EXPECT_EQ(*value.Find("s")->if_string(), "x");
  EXPECT_EQ(*value.Find("b")->if_bool(), false);
  EXPECT_TRUE(value.Find("n")->is_null());
  EXPECT_EQ(value.Find("a")->if_array()->size(), 1u);
  EXPECT_EQ(value.Find("x"), nullptr);
  EXPECT_EQ(value.Find("a")->Find("x"), nullptr);
  EXPECT_TRUE(value.Find("u")->is_number());
  EXPECT_FALSE(value.Find("s")->is_number());
  EXPECT_EQ(value.Find("i")->AsDouble(), -5.0);
  EXPECT_EQ(value.Find("u")->AsDouble(), 18446744073709551615.0);
  EXPECT_EQ(value.Find("s")->AsDouble(), 0.0);
  EXPECT_EQ(*JsonValue(uint64_t{7}).if_int64(), 7);
}

TEST(JsonValue, SetAddsAndReplacesInPlace) {
  JsonValue value;
  value.Set("b", 1);
  value.Set("a", "x");
  value.Set("b", JsonValue::Array{true, nullptr, 0.5});
  EXPECT_EQ(value.Dump(), R"({"b": [true, null, 0.5], "a": "x"})");
}

TEST(JsonValue, QuotesStrings) {
  EXPECT_EQ(JsonQuoted("a\"\\\n\x1b é"), "\"a\\\"\\\\\\n\\u001b é\"");
}

JsonValue RandomValue(std::mt19937_64* random, int depth) {
  const auto below = [random](uint64_t n) { return (*random)() % n; };
  const auto text = [&below] {
    static const std::vector<std::string> kPieces = {"a", "\"", "\\", "\n",   "\x01",         "é",
                                                     "😀", "/",  " ",  "\x7f", "\xE2\x80\xA8", "b"};
    std::string out;
    for (uint64_t n = below(6); n > 0; --n) out += kPieces[below(kPieces.size())];
    return out;
  };
  switch (below(depth > 0 ? 9 : 7)) {
    case 0:
      return nullptr;
    case 1:
      return below(2) == 0;
    case 2:
      return static_cast<int64_t>((*random)() >> below(64));
    case 3:
      return (*random)();
    case 4: {
      const uint64_t bits = (*random)();
      double value = 0;
      static_assert(sizeof(value) == sizeof(bits));
      std::memcpy(&value, &bits, sizeof(value));
      return std::isfinite(value) ? value : 0.5;
    }
    case 5:
      return static_cast<double>(below(1000000)) / 1000;
    case 6:
      return text();
    case 7: {
      JsonValue::Array items;
      for (uint64_t n = below(5); n > 0; --n) items.push_back(RandomValue(random, depth - 1));
      return items;
    }
    default: {
      JsonValue value{JsonValue::Object{}};
      for (uint64_t n = below(20); n > 0; --n) value.Set(text(), RandomValue(random, depth - 1));
      return value;
    }
  }
}

JsonValue RandomDocument(std::mt19937_64* random) {
  JsonValue::Array items;
  for (int i = 0; i < 10; ++i) items.push_back(RandomValue(random, 4));
  return items;
}

RC_GTEST_PROP(JsonValue, WhatIsWrittenIsReadBack, (uint64_t seed)) {
  std::mt19937_64 random(seed);
  const JsonValue value = RandomDocument(&random);
  const Result<JsonValue> spaced = JsonValue::Parse(value.Dump());
  RC_ASSERT(spaced.has_value());
  RC_ASSERT(*spaced == value);
  RC_ASSERT(spaced->Dump() == value.Dump());
  const Result<JsonValue> compact = JsonValue::Parse(value.DumpCompact());
  RC_ASSERT(compact.has_value());
  RC_ASSERT(*compact == value);
}

// Another library reads the same from what is written, and the other way round.
RC_GTEST_PROP(JsonValue, AgreesWithAnotherLibrary, (uint64_t seed)) {
  std::mt19937_64 random(seed);
  const std::string text = RandomDocument(&random).Dump();
  const auto other = nlohmann::ordered_json::parse(text, nullptr, false);
  RC_ASSERT(!other.is_discarded());
  const Result<JsonValue> value = JsonValue::Parse(other.dump(2));
  RC_ASSERT(value.has_value());
  RC_ASSERT(value->Dump() == text);
}

// Texts with a few bytes changed are valid for both libraries or for none.
RC_GTEST_PROP(JsonValue, RefusesWhatAnotherLibraryRefuses, (uint64_t seed)) {
  std::mt19937_64 random(seed);
  std::string text = RandomDocument(&random).Dump();
  constexpr std::string_view kBytes = "{}[]\",:\\u0e-+.1tfn \x80\xC3";
  for (int changes = 1 + static_cast<int>(random() % 3); changes > 0; --changes) {
    const size_t at = random() % (text.size() + 1);
    const char byte = kBytes[random() % kBytes.size()];
    if (random() % 2 == 0 && at < text.size()) {
      text[at] = byte;
    } else {
      text.insert(at, 1, byte);
    }
  }
  const bool expected = nlohmann::json::accept(text);
  const Result<JsonValue> value = JsonValue::Parse(text);
  // The other library takes numbers that overflow in accept().
  const bool overflow =
      !value.has_value() && value.error().message.find("too large") != std::string::npos;
  RC_ASSERT(value.has_value() == expected || overflow);
}

}  // namespace
}  // namespace deepinfer
