#include "grammar/grammar.h"

#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/sanitizer_for_test.h"
#include "grammar/grammar_test_util.h"

namespace deepinfer {
namespace {

using Kind = GrammarSpec::Kind;
using Texts = std::vector<std::string_view>;
using Verdict = TokenConstraint::Verdict;

void Check(Kind kind, std::string_view text, const Texts& allowed, const Texts& refused) {
  SCOPED_TRACE(text);
  const auto grammar = CompileText(kind, text);
  ASSERT_TRUE(grammar.has_value()) << grammar.error().message;
  for (const std::string_view output : allowed) EXPECT_TRUE(Allows(**grammar, output)) << output;
  for (const std::string_view output : refused) EXPECT_FALSE(Allows(**grammar, output)) << output;
}

constexpr double kRefusalSeconds = kHasSanitizer ? 10 : 1;

void ExpectRefused(Kind kind, std::string_view text, Code code, std::string_view part) {
  SCOPED_TRACE(text);
  const std::clock_t begin = std::clock();
  const auto grammar = CompileText(kind, text);
  ASSERT_FALSE(grammar.has_value());
  EXPECT_EQ(CodeName(grammar.error().code), CodeName(code)) << grammar.error().message;
  EXPECT_THAT(grammar.error().message, testing::HasSubstr(std::string(part)));
  // Of the processor, so that other programs do not count.
  EXPECT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, kRefusalSeconds);
}

std::shared_ptr<const CompiledGrammar> MustCompile(Kind kind, std::string_view text) {
  auto grammar = CompileText(kind, text);
  EXPECT_TRUE(grammar.has_value()) << grammar.error().message;
  return *grammar;
}

// ---- Kinds
// ---------------------------------------------------------------------------------------
TEST(Grammar, JsonObjectAllowsAnyObjectAndNothingElse) {
  Check(Kind::kJsonObject, "", {"{}", R"({"a":[1,{"b":null}], "c": "d"})"},
        {"[]", "1", "\"a\"", "{", "{}{}"});
}

TEST(Grammar, RegexMatchesTheWholeOutput) {
  Check(Kind::kRegex, "[a-c]+x?", {"a", "abcx"}, {"", "x", "abcxx", "abd"});
  Check(Kind::kRegex, "^(?:ab|c){2,3}$", {"abab", "cabc"}, {"ab", "cccc"});
  Check(Kind::kRegex, "\\d{2}\\.\\w\\s\\S", {"12.a b"}, {"12xa b", "1.a b"});
  Check(Kind::kRegex, "a|b|", {"a", "b", ""}, {"c", "ab"});
  Check(Kind::kRegex, "a.b",
        {"axb",
         "a\xE4\xB8\xAD"
         "b"},
        {"a\nb", "ab"});
  Check(Kind::kRegex, "x{2}{", {"xx{"}, {"xx"});
  Check(Kind::kRegex, "(?<year>[0-9]{4})", {"2024"}, {"24"});
  Check(Kind::kRegex, "\\u4e2d\\x41\\u{1F600}\\cA",
        {"\xE4\xB8\xAD"
         "A\xF0\x9F\x98\x80\x01"},
        {"A"});
  Check(Kind::kRegex, "[\\]\\-a-c]+", {"]-abc"}, {"d", "\\"});
}

TEST(Grammar, RegexClassesReachDownToNul) {
  Check(Kind::kRegex, "[\\x00-\\u00ff]+",
        {std::string_view("\0a\xC3\xBF", 4), std::string_view("\0", 1)}, {"", "\xC4\x80"});
  Check(Kind::kEbnf, "root ::= [\\x00-\\u00ff]+", {std::string_view("\0a\xC3\xBF", 4)},
        {"", "\xC4\x80"});
  Check(Kind::kEbnf, "root ::= \"a\" [\\0c] \"b\"", {std::string_view("a\0b", 3), "acb"},
        {"a", "ab"});
  ExpectRefused(Kind::kEbnf, "root ::= \"a\\0b\"", Code::kUnsupported, "NUL");
  ExpectRefused(Kind::kRegex, "a\\0b", Code::kUnsupported, "NUL");
}

// By code point, in every byte: what a class allows at its edges, and nothing malformed.
TEST(Grammar, ClassesBeyondAsciiAreExactInTheirBytes) {
  const auto utf8 = [](uint32_t c) {
    std::string out;
    if (c < 0x80) {
      out += static_cast<char>(c);
    } else if (c < 0x800) {
      out += {static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 63))};
    } else if (c < 0x10000) {
      out += {static_cast<char>(0xE0 | c >> 12), static_cast<char>(0x80 | (c >> 6 & 63)),
              static_cast<char>(0x80 | (c & 63))};
    } else {
      out += {static_cast<char>(0xF0 | c >> 18), static_cast<char>(0x80 | (c >> 12 & 63)),
              static_cast<char>(0x80 | (c >> 6 & 63)), static_cast<char>(0x80 | (c & 63))};
    }
    return out;
  };
  struct Case {
    std::string pattern;
    uint32_t first;
    uint32_t last;
    bool negated;
  };
  const std::vector<Case> cases = {{"[\\u4e00-\\u9fff]", 0x4e00, 0x9fff, false},
                                   {"[^\\u4e00-\\u9fff]", 0x4e00, 0x9fff, true},
                                   {"[\\u00e9-\\u07fe]", 0xe9, 0x7fe, false},
                                   {"[\\u{ffff}-\\u{10001}]", 0xffff, 0x10001, false},
                                   {"[^\\x20-\\u{10fffe}]", 0x20, 0x10fffe, true}};
  for (const Case& c : cases) {
    const auto grammar = MustCompile(Kind::kRegex, c.pattern);
    for (const uint32_t edge :
         {c.first, c.last, 0x80u, 0x7ffu, 0x800u, 0xd7ffu, 0xe000u, 0xffffu, 0x10ffffu}) {
      for (int64_t value = int64_t{edge} - 65; value <= int64_t{edge} + 65;
           value += 1 + (value & 1)) {
        if (value < 0 || value > 0x10ffff || (value >= 0xd800 && value <= 0xdfff)) continue;
        const bool inside = value >= c.first && value <= c.last;
        ASSERT_EQ(AllowsTokens(*grammar, utf8(static_cast<uint32_t>(value)), false),
                  inside != c.negated)
            << c.pattern << value;
      }
    }
    for (const char* malformed : {"\xC0\x80", "\xE0\x80\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80",
                                  "\xE4\xB8", "\x80", "\xFF"}) {
      EXPECT_FALSE(Allows(*grammar, malformed)) << c.pattern;
    }
  }
}

TEST(Grammar, EbnfRulesAreFollowed) {
  Check(
      Kind::kEbnf,
      "root ::= expr (\"=\" expr)*\nexpr ::= term ([-+*/] term)*\nterm ::= num | \"(\" expr \")\"\n"
      "num  ::= [0-9]+  # digits\n",
      {"1+2", "(3*4)-5=7"}, {"", "1+", "(1"});
  Check(Kind::kEbnf, "root ::= ( ) | [^a-z\\]]{2,3}", {"", "AB", "ABC"}, {"a", "A", "]]"});
  Check(Kind::kEbnf, "root ::= a\na ::= \"\\x41\\u0042\\U00000043\\\"\"", {"ABC\""}, {"ABC"});
}

TEST(Grammar, LeftRecursionCompilesOrIsRefusedByName) {
  Check(Kind::kEbnf, "root ::= root \"a\" | \"a\"", {"a", "aaa"}, {"", "b"});
  Check(Kind::kEbnf, "root ::= a \"x\" | \"y\"\na ::= root \"z\" | \"w\"",
        {"y", "wx", "yzx", "wxzx"}, {"x", "wz"});
  Check(Kind::kEbnf, "root ::= e root \"a\" | \"b\"\ne ::= \"\"", {"b", "baa"}, {"a", ""});
  ExpectRefused(Kind::kEbnf, "root ::= root root | \"a\"", Code::kInvalidArgument, "\"root\"");
  ExpectRefused(Kind::kEbnf, "root ::= root | \"a\"", Code::kInvalidArgument, "\"root\"");
  ExpectRefused(Kind::kEbnf, "root ::= b\nb ::= c\nc ::= \"\" b | \"x\"", Code::kInvalidArgument,
                "\"b\"");
  ExpectRefused(Kind::kEbnf, "root ::= \"a\" root", Code::kInvalidArgument, "No finite text");
  ExpectRefused(Kind::kEbnf, "root ::= root", Code::kInvalidArgument, "No finite text");
}

TEST(Grammar, AlternativesThatNeverEndAreLeftOut) {
  Check(Kind::kEbnf, "root ::= \"a\" | \"b\" loop\nloop ::= \"x\" loop", {"a"}, {"b", "bx"});
}

TEST(Grammar, ChoicesAreLiteralTexts) {
  GrammarSpec spec;
  spec.kind = Kind::kChoice;
  spec.choices = {"yes", "no", "a\"b\\[x]\n|", "yes, sir", ""};
  const auto grammar = TestCompiler().Compile(spec);
  ASSERT_TRUE(grammar.has_value()) << grammar.error().message;
  for (const std::string& choice : spec.choices) EXPECT_TRUE(Allows(**grammar, choice)) << choice;
  EXPECT_FALSE(Allows(**grammar, "yesno"));
  EXPECT_FALSE(Allows(**grammar, "a"));
  spec.choices = {};
  EXPECT_FALSE(TestCompiler().Compile(spec).has_value());
  spec.choices = {"\xFF"};
  EXPECT_FALSE(TestCompiler().Compile(spec).has_value());
}

TEST(Grammar, StructuralTagsPutOurGrammarsTogether) {
  constexpr std::string_view kTag = R"({"type":"structural_tag","format":{"type":"triggered_tags",
    "triggers":["<f"],"tags":[{"type":"tag","begin":"<f>","end":"</f>","content":{"type":"json_schema",
    "json_schema":{"type":"object","properties":{"n":{"type":"integer","minimum":-5}},"required":["n"]}}}],
    "at_least_one":false,"stop_after_first":false}})";
  Check(Kind::kStructuralTag, kTag,
        {"free text", "hello <f>{\"n\":-5}</f> and more", "<f>{\"n\": 3}</f>"},
        {"<f>{\"n\":-6}</f>", "<f>{\"n\":-}</f>", "<f>{}</f>", "<f>"});
  Check(Kind::kStructuralTag, R"({"type":"structural_tag","format":{"type":"sequence","elements":[
    {"type":"const_string","value":"A:"},{"type":"regex","pattern":"[0-9]{2}"},
    {"type":"grammar","grammar":"root ::= \"!\" | \"?\""}]}})",
        {"A:12!", "A:00?"}, {"A:1!", "A:12"});
  ExpectRefused(Kind::kStructuralTag, "{}", Code::kInvalidArgument, "structural_tag");
  ExpectRefused(Kind::kStructuralTag, "not json", Code::kInvalidArgument, "");
  ExpectRefused(Kind::kStructuralTag, R"({"type":"structural_tag","format":{"type":"nonsense"}})",
                Code::kUnsupported, "'nonsense'");
  ExpectRefused(Kind::kStructuralTag,
                R"({"type":"structural_tag","format":{"type":"tag","begin":"a"}})",
                Code::kInvalidArgument, "");
  const auto refused =
      CompileText(Kind::kStructuralTag, R"({"type":"structural_tag","format":{"type":"tag",
    "begin":"a","end":"b","content":{"type":"json_schema","json_schema":{"properties":{"x":{"not":{}}}}}}})");
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().field, "#/format/content/json_schema/properties/x/not");
}

TEST(Grammar, StructuralTagsWriteParametersInTheModelsNotation) {
  constexpr std::string_view kTag = R"({"type":"structural_tag","format":{"type":"json_schema",
    "style":"deepseek_v4_1_xml","json_schema":{"type":"object","properties":{"q":{"type":"string"},
    "n":{"type":"integer"}},"required":["q","n"]}}})";
  Check(Kind::kStructuralTag, kTag,
        {"<｜DSML｜ parameter name=\"q\" string=\"true\">hi \"x\"</｜DSML｜ parameter>"
         "<｜DSML｜ parameter name=\"n\" string=\"false\">12</｜DSML｜ parameter>"},
        {"<｜DSML｜ parameter name=\"q\" string=\"false\">1</｜DSML｜ parameter>"});
}

// ---- Matchers
// --------------------------------------------------------------------------------------
TEST(Grammar, MasksNeverAllowSpecialOrPaddedIds) {
  const auto grammar = MustCompile(Kind::kRegex, "(.|\\n)*");
  const auto matcher = grammar->NewMatcher(0);
  std::vector<uint32_t> mask = NewMask();
  ASSERT_EQ(matcher->FillMask(mask), Verdict::kMasked);
  for (int32_t id = 256 + static_cast<int32_t>(LongTokens().size());
       id < static_cast<int32_t>(mask.size() * 32); ++id) {
    EXPECT_EQ(MaskHas(mask, id), id == kEndId) << id;
  }
  EXPECT_TRUE(MaskHas(mask, 'a'));
}

TEST(Grammar, ARefusedTokenChangesNothing) {
  const auto matcher = MustCompile(Kind::kRegex, "abc")->NewMatcher(0);
  std::vector<uint32_t> before = NewMask();
  std::vector<uint32_t> after = NewMask();
  ASSERT_TRUE(matcher->Accept('a').has_value());
  ASSERT_EQ(matcher->FillMask(before), Verdict::kMasked);
  for (const int32_t id : {int32_t{'c'}, -1, 305, 320, int32_t{kTestVocabulary}, 1 << 30, kEndId}) {
    const Status status = matcher->Accept(id);
    ASSERT_FALSE(status.has_value()) << id;
    EXPECT_EQ(CodeName(status.error().code), CodeName(Code::kInternal));
    EXPECT_EQ(matcher->num_accepted(), 1);
    ASSERT_EQ(matcher->FillMask(after), Verdict::kMasked);
    EXPECT_EQ(before, after) << id;
  }
  EXPECT_TRUE(matcher->Accept('b').has_value());
}

TEST(Grammar, BehindTheTextOnlyTheEndIsAllowed) {
  const auto matcher = MustCompile(Kind::kRegex, "ab")->NewMatcher(8);
  std::vector<uint32_t> mask = NewMask();
  ASSERT_TRUE(matcher->Accept('a').has_value());
  ASSERT_TRUE(matcher->Accept('b').has_value());
  for (int round = 0; round < 3; ++round) {
    ASSERT_EQ(matcher->FillMask(mask), Verdict::kMasked);
    for (int32_t id = 0; id < kTestVocabulary; ++id)
      EXPECT_EQ(MaskHas(mask, id), id == kEndId) << id;
    ASSERT_FALSE(matcher->Accept('a').has_value());
    ASSERT_TRUE(matcher->Accept(kEndId).has_value());
  }
  EXPECT_EQ(matcher->num_accepted(), 5);
  matcher->Rollback(4);
  EXPECT_EQ(matcher->num_accepted(), 1);
  ASSERT_EQ(matcher->FillMask(mask), Verdict::kMasked);
  EXPECT_TRUE(MaskHas(mask, 'b'));
  EXPECT_FALSE(MaskHas(mask, kEndId));
}

TEST(Grammar, AStateWithoutTokensIsADeadEnd) {
  GrammarVocabulary vocabulary;
  vocabulary.token_bytes = {"a", "b", "\xE4", ""};
  vocabulary.end_ids = {3};
  vocabulary.vocab_size = 4;
  GrammarCompiler compiler(vocabulary, GrammarLimits{});
  GrammarSpec spec;
  spec.kind = Kind::kRegex;
  spec.text = "ac|b\u4e2d|\u4e2d";
  const auto grammar = compiler.Compile(spec);
  ASSERT_TRUE(grammar.has_value());
  std::vector<uint32_t> mask = NewMask(4);
  const auto matcher = (*grammar)->NewMatcher(0);
  ASSERT_TRUE(matcher->Accept(0).has_value());
  EXPECT_EQ(matcher->FillMask(mask), Verdict::kDeadEnd);
}

RC_GTEST_PROP(Grammar, RollbackRestoresEveryEarlierMask, ()) {
  static const auto grammar = MustCompile(
      Kind::kJsonSchema,
      R"({"type":"object","properties":{"a":{"type":"string","maxLength":4},"b":{"type":"array","items":{"enum":["x",12]}}},"required":["a"]})");
  const auto matcher = grammar->NewMatcher(1000);
  std::vector<std::vector<uint32_t>> masks;
  std::vector<int32_t> ids;
  std::vector<uint32_t> mask = NewMask();
  const auto steps = *rc::gen::container<std::vector<int>>(60, rc::gen::inRange(0, 1000));
  for (const int step : steps) {
    RC_ASSERT(matcher->FillMask(mask) == Verdict::kMasked);
    if (step % 5 == 0 && !ids.empty()) {
      const auto back = 1 + static_cast<size_t>(step) % ids.size();
      matcher->Rollback(static_cast<int64_t>(back));
      ids.resize(ids.size() - back);
      std::vector<uint32_t> again = NewMask();
      RC_ASSERT(matcher->FillMask(again) == Verdict::kMasked);
      RC_ASSERT(again == masks[ids.size()]);
      masks.resize(ids.size());
      continue;
    }
    std::vector<int32_t> allowed;
    for (int32_t id = 0; id < kTestVocabulary; ++id) {
      if (MaskHas(mask, id)) allowed.push_back(id);
    }
    RC_ASSERT(!allowed.empty());
    const int32_t id = allowed[static_cast<size_t>(step) % allowed.size()];
    RC_ASSERT(matcher->Accept(id).has_value());
    masks.push_back(mask);
    ids.push_back(id);
    RC_ASSERT(matcher->num_accepted() == static_cast<int64_t>(ids.size()));
  }
}

// ---- Limits
// ----------------------------------------------------------------------------------------
// Schemas whose states differ in what masks depend on: nesting, limits of lengths, counts.
const std::vector<std::string>& SchemasWithManyStates() {
  static const std::vector<std::string> schemas = {
      R"({"type":"string","maxLength":20})",
      R"({"type":"string","minLength":18,"maxLength":19})",
      R"({"type":"object","properties":{"a":{"type":"string","maxLength":18},"b":{"type":"string"}}})",
      R"({"anyOf":[{"type":"string","maxLength":17},{"type":"string","minLength":3,"maxLength":40},
          {"type":"array","items":{"type":"string","maxLength":30}}]})",
      R"({"type":"string","pattern":"^[a-c\"]*$","maxLength":21})",
      R"({"type":"array","items":{"$ref":"#"},"maxItems":3})",
      R"({"type":"object","additionalProperties":{"type":"integer","minimum":3,"maximum":120}})",
      "{}"};
  return schemas;
}

// Follows a random text; `visit` sees the matcher before each token, with its mask.
template <class Visit>
void FollowRandomText(const CompiledGrammar& grammar, uint64_t seed, const Visit& visit) {
  const auto matcher = grammar.NewMatcher(1);
  std::vector<uint32_t> mask = NewMask();
  for (int step = 0; step < 60; ++step) {
    ASSERT_EQ(matcher->FillMask(mask), TokenConstraint::Verdict::kMasked);
    visit(*matcher, mask);
    std::vector<int32_t> allowed;
    for (int32_t id = 0; id < kTestVocabulary; ++id) {
      if (MaskHas(mask, id) && id != kEndId) allowed.push_back(id);
    }
    if (allowed.empty()) return;
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    ASSERT_TRUE(matcher->Accept(allowed[(seed >> 33) % allowed.size()]).has_value());
  }
}

TEST(Grammar, MasksAllowExactlyTheTokensThatAreAccepted) {
  for (const std::string& schema : SchemasWithManyStates()) {
    const auto grammar = CompileText(Kind::kJsonSchema, schema);
    ASSERT_TRUE(grammar.has_value()) << grammar.error().message;
    for (uint64_t seed = 0; seed < 12; ++seed) {
      FollowRandomText(**grammar, seed, [&](TokenConstraint& matcher, const auto& mask) {
        for (int32_t id = 0; id < kTestVocabulary; ++id) {
          const bool accepted = matcher.Accept(id).has_value();
          ASSERT_EQ(MaskHas(mask, id), accepted) << schema << " token " << id;
          if (accepted) matcher.Rollback(1);
        }
      });
    }
  }
}

TEST(Grammar, CharactersBeforeHexDigitsAreThemselves) {
  Check(Kind::kJsonSchema, R"({"enum":["n\u00e9e","Gr\u00f6\u00dfe","\u0080a"]})",
        {"\"n\u00e9e\"", "\"Gr\u00f6\u00dfe\"", "\"\u0080a\""}, {"\"n\u0e9e\""});
  Check(Kind::kEbnf,
        "root ::= \"\x01"
        "AAAAAAAAAAAAAAAA\" | \"\u00e9a\"",
        {"\x01"
         "AAAAAAAAAAAAAAAA",
         "\u00e9a"},
        {"\u0e9a"});
}

TEST(Grammar, MasksGoOnBehindTheEndOfAnInnerRoot) {
  const std::tuple<Kind, std::string_view, std::string_view, std::string_view> cases[] = {
      {Kind::kJsonSchema, "{}", "[[1", "]]"},
      {Kind::kJsonSchema, "{}", "[[\"a\"", "]]"},
      {Kind::kJsonSchema, R"({"type":"array","items":{"$ref":"#"}})", "[[", "]]"},
      {Kind::kJsonSchema, R"({"type":"object","properties":{"name":{"$ref":"#"}}})", R"({"name":{)",
       "}}"},
      {Kind::kEbnf, R"x(root ::= "a" | "(" root "b")x", "(", "ab"},
      {Kind::kEbnf, R"x(root ::= "1" | "(" root "," root ")")x", "(", "1,"}};
  for (const auto& [kind, text, begin, token] : cases) {
    SCOPED_TRACE(text);
    const auto matcher = MustCompile(kind, text)->NewMatcher(0);
    for (const char byte : begin) {
      ASSERT_TRUE(matcher->Accept(static_cast<uint8_t>(byte)).has_value());
    }
    std::vector<uint32_t> mask = NewMask();
    ASSERT_EQ(matcher->FillMask(mask), Verdict::kMasked);
    const auto found = std::find(LongTokens().begin(), LongTokens().end(), token);
    ASSERT_NE(found, LongTokens().end());
    EXPECT_TRUE(MaskHas(mask, 256 + static_cast<int32_t>(found - LongTokens().begin())));
  }
}

TEST(Grammar, KeptMasksEqualComputedOnes) {
  GrammarLimits keeping;
  keeping.kept_mask_microseconds = 0;
  keeping.mask_cache_bytes = 40'000;  // some are dropped meanwhile
  GrammarLimits forgetting;
  forgetting.mask_cache_bytes = 0;
  GrammarCompiler keeper(TestVocabulary(), keeping);
  GrammarCompiler forgetter(TestVocabulary(), forgetting);
  for (const std::string& schema : SchemasWithManyStates()) {
    GrammarSpec spec;
    spec.text = schema;
    const auto kept = keeper.Compile(spec);
    const auto computed = forgetter.Compile(spec);
    ASSERT_TRUE(kept.has_value() && computed.has_value());
    for (uint64_t seed = 0; seed < 40; ++seed) {
      std::vector<std::vector<uint32_t>> masks;
      FollowRandomText(**computed, seed,
                       [&](TokenConstraint&, const auto& mask) { masks.push_back(mask); });
      size_t step = 0;
      FollowRandomText(**kept, seed, [&](TokenConstraint&, const auto& mask) {
        ASSERT_LT(step, masks.size());
        ASSERT_EQ(mask, masks[step++]) << schema << " seed " << seed;
      });
      EXPECT_EQ(step, masks.size());
    }
  }
  EXPECT_GT(keeper.counters().masks_found, 1000);
  EXPECT_EQ(forgetter.counters().masks_found, 0);
}

TEST(Grammar, BrokenInputsCostOnlyThemselves) {
  const std::vector<std::pair<Kind, std::string>> broken = {
      {Kind::kJsonSchema, "[]"},
      {Kind::kJsonSchema, "1"},
      {Kind::kJsonSchema, "{\"type\":1}"},
      {Kind::kJsonSchema, "{\"properties\":[]}"},
      {Kind::kJsonSchema, "{\"required\":\"a\"}"},
      {Kind::kJsonSchema, "{\"items\":3}"},
      {Kind::kJsonSchema, "{\"pattern\":3}"},
      {Kind::kJsonSchema, "\xFF"},
      {Kind::kRegex, "[a"},
      {Kind::kRegex, "(a"},
      {Kind::kRegex, "a)"},
      {Kind::kRegex, "*"},
      {Kind::kRegex, "a**"},
      {Kind::kRegex, "a{3,2}"},
      {Kind::kRegex, "\\"},
      {Kind::kRegex, "[z-a]"},
      {Kind::kRegex, "\\ud800"},
      {Kind::kEbnf, ""},
      {Kind::kEbnf, "root"},
      {Kind::kEbnf, "root ::="},
      {Kind::kEbnf, "root ::= x"},
      {Kind::kEbnf, "a ::= \"b\""},
      {Kind::kEbnf, "root ::= \"a"},
      {Kind::kEbnf, "root ::= [a"},
      {Kind::kEbnf, "root ::= (\"a\""},
      {Kind::kEbnf, "root ::= \"a\" ) "},
      {Kind::kEbnf, "root ::= \"\\q\""},
      {Kind::kEbnf, "root ::= \"a\"\nroot ::= \"b\""}};
  for (const auto& [kind, text] : broken) {
    ExpectRefused(kind, text, Code::kInvalidArgument, "");
    EXPECT_TRUE(Allows(*MustCompile(Kind::kRegex, "ok"), "ok"));
  }
  ExpectRefused(Kind::kEbnf, "root ::= \"a\" (= \"b\")", Code::kUnsupported, "look-ahead");
  ExpectRefused(Kind::kEbnf, "root[max_tokens=3] ::= \"a\"", Code::kUnsupported,
                "line 1, column 5");
  ExpectRefused(Kind::kEbnf, "root ::= TagDispatch((\"a\", root))", Code::kUnsupported,
                "TagDispatch");
}

std::string Repeated(std::string_view text, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

TEST(Grammar, HugeDescriptionsAreRefusedWithinASecond) {
  ExpectRefused(Kind::kRegex, Repeated("(", 100000), Code::kResourceExhausted, "deep");
  ExpectRefused(Kind::kEbnf, "root ::= " + Repeated("(", 100000), Code::kResourceExhausted, "deep");
  ExpectRefused(Kind::kRegex, "((((a{1000}){1000}){1000}){1000}){1000}", Code::kResourceExhausted,
                "states");
  ExpectRefused(Kind::kRegex, "a{99999999999}", Code::kResourceExhausted, "99999999999");
  ExpectRefused(Kind::kEbnf, "root ::= \"a\"{20000000}", Code::kResourceExhausted, "20000000");
  ExpectRefused(Kind::kJsonSchema, Repeated("[", 1000), Code::kInvalidArgument, "");
  ExpectRefused(Kind::kJsonSchema, std::string(2 << 20, ' '), Code::kResourceExhausted,
                "2097152 bytes");
  std::string many = R"({"properties":{)";
  for (int i = 0; i < 40000; ++i) many += fmt::format(R"({}"p{}":{{}})", i > 0 ? "," : "", i);
  ExpectRefused(Kind::kJsonSchema, many + "}}", Code::kResourceExhausted, "too large");
}

TEST(Grammar, NestedAlternativesCompileInSeconds) {
  std::string schema = R"({"type":"integer"})";
  for (int depth = 0; depth < 10; ++depth) {
    schema = fmt::format(
        R"({{"anyOf":[{0},{{"type":"object","properties":{{"a":{0}}}}},{{"type":"null"}}]}})",
        schema);
  }
  for (int depth = 0; depth < 20; ++depth) {
    schema = fmt::format(R"({{"anyOf":[{},{{"const":{}}}]}})", schema, depth);
  }
  const std::clock_t begin = std::clock();
  const auto grammar = CompileText(Kind::kJsonSchema, schema);
  ASSERT_TRUE(grammar.has_value()) << grammar.error().message;
  EXPECT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, 10 * kRefusalSeconds);
  EXPECT_TRUE(Allows(**grammar, R"({"a":{"a":null}})"));
}

// ---- The cache and the threads
// ---------------------------------------------------------------------
TEST(Grammar, EqualSpecificationsCompileOnce) {
  GrammarCompiler compiler(TestVocabulary(), GrammarLimits{});
  GrammarSpec spec;
  spec.text = R"({"type":"object","properties":{"a":{"type":"string","maxLength":20}}})";
  std::vector<std::thread> threads;
  std::atomic<int> good = 0;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      const auto grammar = compiler.Compile(spec);
      if (grammar && AllowsTokens(**grammar, R"({"a":"b"})", false)) ++good;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 8);
  EXPECT_EQ(compiler.counters().compiled, 1);
  ASSERT_TRUE(compiler.Compile(spec).has_value());
  EXPECT_GE(compiler.counters().cache_hits, 1);
  EXPECT_GT(compiler.counters().cache_bytes, 0);
  spec.max_whitespace = 0;
  ASSERT_TRUE(compiler.Compile(spec).has_value());
  EXPECT_EQ(compiler.counters().compiled, 2);
}

TEST(Grammar, TheCacheKeepsToItsLimitAndDropsTheOldest) {
  GrammarSpec spec;
  spec.kind = Kind::kRegex;
  spec.text = "a";
  GrammarLimits limits;
  {
    GrammarCompiler compiler(TestVocabulary(), limits);
    ASSERT_TRUE(compiler.Compile(spec).has_value());
    limits.cache_bytes = compiler.counters().cache_bytes * 5 / 2;
  }
  GrammarCompiler compiler(TestVocabulary(), limits);
  for (const char* text : {"a", "b", "a", "c", "a"}) {
    spec.text = text;
    ASSERT_TRUE(compiler.Compile(spec).has_value());
    EXPECT_LE(compiler.counters().cache_bytes, limits.cache_bytes);
  }
  EXPECT_EQ(compiler.counters().compiled, 3);  // "a" stayed, "b" went
  EXPECT_EQ(compiler.counters().cache_hits, 2);
}

TEST(Grammar, ATimeLimitFailsTheRequestByNameAndOthersGoOn) {
  GrammarLimits limits;
  limits.compile_seconds = 0.001;
  GrammarCompiler compiler(TestVocabulary(), limits);
  GrammarSpec spec;
  spec.kind = Kind::kChoice;
  for (int i = 0; i < 4000; ++i) spec.choices.push_back(fmt::format("{:07}", i * 7919 % 1000003));
  const auto grammar = compiler.Compile(spec);
  ASSERT_FALSE(grammar.has_value());
  EXPECT_EQ(CodeName(grammar.error().code), CodeName(Code::kResourceExhausted));
  EXPECT_THAT(grammar.error().message, testing::HasSubstr("compile_seconds"));
  EXPECT_EQ(compiler.counters().failed, 1);
  // Its thread ends it all the same, and the result is kept.
  for (int wait = 0; wait < 1000 && compiler.counters().compiled == 0; ++wait) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(compiler.counters().compiled, 1);
  EXPECT_TRUE(compiler.Compile(spec).has_value());
}

TEST(Grammar, AGrammarBeyondItsMemoryLimitIsRefused) {
  GrammarLimits limits;
  limits.max_grammar_bytes = 100;
  GrammarCompiler compiler(TestVocabulary(), limits);
  GrammarSpec spec;
  spec.text = "{}";
  const auto grammar = compiler.Compile(spec);
  ASSERT_FALSE(grammar.has_value());
  EXPECT_THAT(grammar.error().message, testing::HasSubstr("max_grammar_bytes"));
}

}  // namespace
}  // namespace deepinfer
