// Scorers, task lines and the report of `deepinfer eval`, without a model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "apps/eval_report.h"
#include "apps/eval_scorer.h"
#include "apps/eval_task.h"

namespace deepinfer {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

JsonValue Json(std::string_view text) {
  Result<JsonValue> value = JsonValue::Parse(text);
  EXPECT_TRUE(value.has_value()) << text;
  return value.has_value() ? std::move(*value) : JsonValue();
}

// `expected` is JSON.
bool Accepts(std::string_view scorer, std::string_view expected, const ParsedMessage& answer) {
  const Result<std::unique_ptr<const Scorer>> made = MakeScorer(scorer, Json(expected));
  EXPECT_TRUE(made.has_value()) << scorer << " " << expected;
  return made.has_value() && (*made)->Accepts(answer);
}
bool Accepts(std::string_view scorer, std::string_view expected, std::string content) {
  ParsedMessage answer;
  answer.content = std::move(content);
  return Accepts(scorer, expected, answer);
}
bool AcceptsCalls(std::string_view expected, std::vector<ToolCall> calls) {
  ParsedMessage answer;
  answer.tool_calls = std::move(calls);
  return Accepts("tool_calls", expected, answer);
}

TEST(Scorer, TextsAreCompared) {
  EXPECT_TRUE(Accepts("exact", R"("Paris")", "Paris"));
  EXPECT_FALSE(Accepts("exact", R"("Paris")", " Paris"));
  EXPECT_FALSE(Accepts("exact", R"("Paris")", "paris"));
  EXPECT_TRUE(Accepts("trimmed", R"("Paris ")", "\n Paris\t"));
  EXPECT_FALSE(Accepts("trimmed", R"("Pa ris")", "Paris"));
  EXPECT_TRUE(Accepts("trimmed", R"("")", " \n"));
  EXPECT_TRUE(Accepts("prefix", R"("Par")", "Paris"));
  EXPECT_FALSE(Accepts("prefix", R"("Paris")", "Par"));
  EXPECT_TRUE(Accepts("contains", R"("ari")", "Paris"));
  EXPECT_FALSE(Accepts("contains", R"("rai")", "Paris"));
}

TEST(Scorer, OneOfSeveralTextsIsEnough) {
  EXPECT_TRUE(Accepts("exact", R"(["yes", "Yes"])", "Yes"));
  EXPECT_FALSE(Accepts("exact", R"(["yes", "Yes"])", "YES"));
}

TEST(Scorer, APatternMatchesTheWholeText) {
  EXPECT_TRUE(Accepts("regex", R"("[0-9]{3}-[a-z]+")", "123-abc"));
  EXPECT_FALSE(Accepts("regex", R"("[0-9]{3}-[a-z]+")", "123-abc."));
  EXPECT_FALSE(Accepts("regex", R"("[0-9]{3}-[a-z]+")", "123-"));
  EXPECT_TRUE(Accepts("regex", R"("Z.rich")", "Zürich"));
  EXPECT_FALSE(Accepts("regex", R"("a+")", ""));
}

TEST(Scorer, TheLastNumberOfATextCounts) {
  for (const auto& [text, expected] :
       std::vector<std::pair<std::string, std::string>>{{"487 + 965 = 1452", "1452"},
                                                        {"The answer is 1,452.", "1452"},
                                                        {"It is 12,345,678 in all", "12345678"},
                                                        {"1,2", "2"},
                                                        {"2024,123", "123"},
                                                        {"3 - 5 = -2", "-2"},
                                                        {"-2", "-2"},
                                                        {"10-3", "3"},
                                                        {"x-3", "3"},
                                                        {"(a)-3", "3"},
                                                        {"costs 4.50 euros", "4.5"},
                                                        {"0.1 + 0.2 = 0.3", "0.30000000000000004"},
                                                        {"it is 7.", "7"},
                                                        {"v1.2.3", "3"}}) {
    EXPECT_TRUE(Accepts("number", expected, text)) << text;
  }
  EXPECT_FALSE(Accepts("number", "1452", "1452 is what I get from 487"));
  EXPECT_FALSE(Accepts("number", "0", "none"));
  EXPECT_FALSE(Accepts("number", "2", "-2"));
  EXPECT_FALSE(Accepts("number", "1000001", "1000002"));
}

TEST(Scorer, JsonIsComparedByMeaning) {
  EXPECT_TRUE(Accepts("json", R"({"a": 1, "b": [1, 2]})", " {\"b\":[1,2.0],\"a\":1}\n"));
  EXPECT_FALSE(Accepts("json", R"({"a": 1})", R"({"a": 1, "b": 2})"));
  EXPECT_FALSE(Accepts("json", R"({"a": 1, "b": 2})", R"({"a": 1})"));
  EXPECT_FALSE(Accepts("json", R"({"a": 1, "b": 2})", R"({"a": 1, "c": 2})"));
  EXPECT_FALSE(Accepts("json", R"([1, 2])", R"([2, 1])"));
  EXPECT_FALSE(Accepts("json", R"({"a": "1"})", R"({"a": 1})"));
  EXPECT_FALSE(Accepts("json", R"({"a": 1})", R"({"a": 1)"));
  EXPECT_FALSE(Accepts("json", R"({"a": 1})", R"(Sure: {"a": 1})"));
  EXPECT_TRUE(Accepts("json", "null", "null"));
  // Integers that are one double.
  EXPECT_FALSE(Accepts("json", "9007199254740993", "9007199254740992"));
}

TEST(Scorer, CallsAreComparedByNameAndArguments) {
  const std::string_view expected = R"([{"name": "f", "arguments": {"a": 1, "b": "x"}}])";
  EXPECT_TRUE(AcceptsCalls(expected, {{"call_1", "f", R"({"b":"x","a":1})"}}));
  EXPECT_FALSE(AcceptsCalls(expected, {{"call_1", "g", R"({"b":"x","a":1})"}}));
  EXPECT_FALSE(AcceptsCalls(expected, {{"call_1", "f", R"({"b":"y","a":1})"}}));
  EXPECT_FALSE(AcceptsCalls(expected, {{"call_1", "f", "broken"}}));
  EXPECT_FALSE(AcceptsCalls(expected, {}));
  const ToolCall call = {"call_1", "f", R"({"a": 1, "b": "x"})"};
  EXPECT_FALSE(AcceptsCalls(expected, {call, call}));
  EXPECT_TRUE(AcceptsCalls("[]", {}));
  EXPECT_FALSE(AcceptsCalls("[]", {call}));
}

TEST(Scorer, WrongExpectationsAreRefusedByField) {
  const auto refused = [](std::string_view scorer, std::string_view expected,
                          std::string_view field, std::string_view says) {
    const auto made = MakeScorer(scorer, Json(expected));
    ASSERT_FALSE(made.has_value()) << scorer << " " << expected;
    EXPECT_EQ(made.error().field, field);
    EXPECT_THAT(made.error().message, HasSubstr(says));
  };
  refused("almost", "1", "scorer", "scorer is 'almost'; allowed are exact, ");
  refused("exact", "1", "expected", "expected is '1'; scorer 'exact' takes a string");
  refused("exact", "[]", "expected", "takes a string");
  refused("contains", R"(["a", 1])", "expected", "takes a string");
  refused("number", R"("7")", "expected", "takes a number");
  refused("regex", "7", "expected", "takes a pattern");
  refused("regex", R"("a(")", "expected", "expected: ");
  refused("tool_calls", R"({"name": "f", "arguments": {}})", "expected", "takes a list");
  refused("tool_calls", R"([{"name": "f", "arguments": "{}"}])", "expected", "takes a list");
  refused("tool_calls", R"([{"name": "f", "arguments": {}, "id": 1}])", "expected", "takes a list");
  refused("tool_calls", R"([7])", "expected", "takes a list");
}

class EvalTaskTest : public ::testing::Test {
 protected:
  Result<std::unique_ptr<EvalTask>> Read(std::string_view line) {
    id_.reset();
    return reader_.Read(line, ++number_, &id_);
  }
  void ExpectRefused(std::string_view line, std::string_view field, std::string_view says) {
    const Result<std::unique_ptr<EvalTask>> task = Read(line);
    ASSERT_FALSE(task.has_value()) << line;
    EXPECT_EQ(task.error().field, field) << line;
    EXPECT_THAT(task.error().message, HasSubstr(says)) << line;
  }

  EvalTaskReader reader_{[] {
    SamplingParams params;
    params.temperature = 0;
    params.max_tokens = 11;
    return params;
  }()};
  std::optional<LineId> id_;
  int64_t number_ = 0;
};

TEST_F(EvalTaskTest, ReadsAPrompt) {
  const auto task = Read(
      R"({"id": "a", "skill": "math", "prompt": "1+1=", "expected": 2, "scorer": "number", "context": 16})");
  ASSERT_TRUE(task.has_value()) << task.error().message;
  EXPECT_EQ((*task)->skill, "math");
  EXPECT_EQ((*task)->context, 16);
  EXPECT_EQ((*task)->scorer_name, "number");
  EXPECT_EQ(std::get<std::string>((*task)->request.prompt), "1+1=");
  EXPECT_EQ((*task)->request.sampling_params.temperature, 0);
  EXPECT_EQ((*task)->request.sampling_params.max_tokens, 11);
  EXPECT_EQ(id_->text, "a");
}

TEST_F(EvalTaskTest, ReadsAConversationWithItsOwnParameters) {
  const auto task = Read(
      R"({"id": 7, "skill": "talk", "messages": [{"role": "user", "content": "Hi"}], "thinking": false,
          "expected": "Hello", "scorer": "prefix", "sampling_params": {"max_tokens": 3}})");
  ASSERT_TRUE(task.has_value()) << task.error().message;
  const Chat& chat = std::get<Chat>((*task)->request.prompt);
  EXPECT_FALSE(chat.thinking);
  EXPECT_EQ(chat.messages[0].content.text, "Hi");
  EXPECT_EQ((*task)->request.sampling_params.max_tokens, 3);
  EXPECT_EQ((*task)->request.sampling_params.temperature, 0);
  EXPECT_FALSE((*task)->context.has_value());
  const auto thinking = Read(
      R"({"id": 8, "skill": "talk", "messages": [{"role": "user", "content": "Hi"}], "thinking": true,
          "reasoning_effort": 40, "expected": "Hello", "scorer": "prefix"})");
  ASSERT_TRUE(thinking.has_value()) << thinking.error().message;
  EXPECT_TRUE(std::get<Chat>((*thinking)->request.prompt).thinking);
  EXPECT_EQ(std::get<Chat>((*thinking)->request.prompt).reasoning_effort, 40);
}

TEST_F(EvalTaskTest, TasksShareADocument) {
  const auto document = Read(R"({"document": "table", "text": "A: 1\nB: 2"})");
  ASSERT_TRUE(document.has_value()) << document.error().message;
  EXPECT_EQ(*document, nullptr);
  const auto task = Read(
      R"({"id": 1, "skill": "lookup", "document": "table", "messages": [{"role": "user", "content": "See {document}\nA?"}],
          "expected": "1", "scorer": "trimmed"})");
  ASSERT_TRUE(task.has_value()) << task.error().message;
  EXPECT_EQ(std::get<Chat>((*task)->request.prompt).messages[0].content.text, "See A: 1\nB: 2\nA?");
  const auto prompt = Read(
      R"({"id": 2, "skill": "lookup", "document": "table", "prompt": "{document}{document}", "expected": "1", "scorer": "trimmed"})");
  ASSERT_TRUE(prompt.has_value()) << prompt.error().message;
  EXPECT_EQ(std::get<std::string>((*prompt)->request.prompt), "A: 1\nB: 2A: 1\nB: 2");
  // Without the field the text is a text.
  const auto plain = Read(
      R"({"id": 3, "skill": "lookup", "prompt": "{document}", "expected": "1", "scorer": "trimmed"})");
  ASSERT_TRUE(plain.has_value()) << plain.error().message;
  EXPECT_EQ(std::get<std::string>((*plain)->request.prompt), "{document}");
  ExpectRefused(R"({"document": "table", "text": "again"})", "document", "is there already");
  ExpectRefused(R"({"document": "b", "text": 7})", "text", "must be a string");
  ExpectRefused(R"({"document": "c", "text": "x", "id": 1})", "document", "document and text only");
  ExpectRefused(R"({"text": "x"})", "document", "document is missing");
  ExpectRefused(
      R"({"id": 4, "skill": "s", "document": "chart", "prompt": "{document}", "expected": "1", "scorer": "exact"})",
      "document", "document 'chart' is in no earlier line");
  ExpectRefused(
      R"({"id": 5, "skill": "s", "document": "table", "prompt": "x", "expected": "1", "scorer": "exact"})",
      "document", "no text of the prompt has {document}");
}

TEST_F(EvalTaskTest, WrongLinesAreRefusedByField) {
  ExpectRefused("{", "", "not valid JSON");
  ExpectRefused("[1]", "", "not a JSON object");
  ExpectRefused(R"({"skill": "s"})", "id", "id is missing");
  ExpectRefused(R"({"id": 1, "prompt": "x", "expected": "y", "scorer": "exact"})", "skill",
                "skill is missing");
  EXPECT_EQ(id_->text, "1");
  ExpectRefused(R"({"id": 1, "skill": "s", "prompt": "x", "expected": "y", "scorer": "exact"})",
                "id", "id '1' was used in line 4");
  ExpectRefused(R"({"id": 2, "skill": "", "prompt": "x", "expected": "y", "scorer": "exact"})",
                "skill", "skill is '\"\"'");
  ExpectRefused(R"({"id": 3, "skill": "s", "prompt": "x", "scorer": "exact"})", "expected",
                "expected is missing");
  ExpectRefused(R"({"id": 4, "skill": "s", "prompt": "x", "expected": "y"})", "scorer",
                "scorer is missing");
  ExpectRefused(R"({"id": 5, "skill": "s", "expected": "y", "scorer": "exact"})", "prompt",
                "the prompt is missing");
  ExpectRefused(
      R"({"id": 6, "skill": "s", "prompt": "x", "expected": "y", "scorer": "exact", "context": -1})",
      "context", "context is '-1'");
  ExpectRefused(
      R"({"id": 7, "skill": "s", "prompt": "x", "expected": "y", "scorer": "exact", "tokens": 1})",
      "tokens", "'tokens' is not a known field; known are id, skill, ");
  ExpectRefused(
      R"({"id": 12, "skill": "s", "prompt": "x", "expected": "y", "scorer": "exact", "skill": "t"})",
      "skill", "skill is given twice");
  ExpectRefused(
      R"({"id": 13, "skill": "s", "prompt": "x", "expected": [{"a": 1, "a": 2}], "scorer": "json"})",
      "expected[0].a", "expected[0].a is given twice");
  ExpectRefused(
      R"({"id": 8, "skill": "s", "prompt": "x", "expected": "y", "scorer": "exact", "sampling_params": {"n": 2}})",
      "sampling_params.n", "a task has one answer");
  ExpectRefused(
      R"({"id": 9, "skill": "s", "prompt": "x", "expected": "y", "scorer": "exact", "sampling_params": {"temperature": -1}})",
      "sampling_params.temperature", "temperature");
  ExpectRefused(
      R"({"id": 10, "skill": "s", "messages": [{"role": "nobody", "content": "x"}], "expected": "y", "scorer": "exact"})",
      "messages[0].role", "nobody");
}

TEST(EvalReport, CountsBySkillAndContext) {
  EvalReport report;
  report.Add("lookup", 8192, true);
  report.Add("lookup", 1024, true);
  report.Add("lookup", 8192, false);
  report.Add("copy", std::nullopt, false);
  EXPECT_EQ(report.Table(),
            "skill    context   tasks  correct  accuracy\n"
            "copy           -       1        0     0.0 %\n"
            "lookup      1024       1        1   100.0 %\n"
            "lookup      8192       2        1    50.0 %\n"
            "total                  4        2    50.0 %\n");
  EXPECT_EQ(report.failed(), 0);
  report.AddFailed("copy", std::nullopt);
  report.AddFailed("json", std::nullopt);
  report.AddUnreadable();
  EXPECT_EQ(report.failed(), 3);
  EXPECT_THAT(report.Table(),
              AllOf(HasSubstr("accuracy  failed\n"),
                    HasSubstr("copy           -       1        0     0.0 %       1\n"),
                    HasSubstr("json           -       0        0         -       1\n"),
                    HasSubstr("total                  4        2    50.0 %       3\n")));
  const nlohmann::json json = nlohmann::json::parse(report.Json());
  EXPECT_EQ(json["rows"].size(), 4u);
  EXPECT_EQ(json["rows"][3]["context"], 8192);
  EXPECT_EQ(json["rows"][3]["accuracy"], 0.5);
  EXPECT_TRUE(json["rows"][1]["accuracy"].is_null());
  EXPECT_EQ(json["rows"][0]["failed"], 1);
  EXPECT_EQ(json["tasks"], 4);
  EXPECT_EQ(json["failed"], 3);
}

}  // namespace
}  // namespace deepinfer
