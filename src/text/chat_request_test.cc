#include "text/chat_request.h"

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <chrono>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "text/chat_render.h"
#include "text/json_schema_shape.h"
#include "text/prompt_json.h"
#include "text/text_test_data.h"

namespace deepinfer {
namespace {

// The recorded cases, read with the code that reads requests: numbers and key order matter.
std::vector<JsonValue> RecordedCases(const std::string& name) {
  std::vector<JsonValue> cases;
  std::ifstream file(std::string(DI_TEST_DATA_DIR "/encoding/") + name);
  std::string line;
  while (std::getline(file, line)) cases.push_back(JsonValue::Parse(line).value());
  EXPECT_FALSE(cases.empty()) << name;
  return cases;
}

ChatApi ApiOf(const JsonValue& recorded) {
  const JsonValue* api = recorded.Find("api");
  if (api == nullptr) return ChatApi::kChatCompletions;
  return *api->if_string() == "messages" ? ChatApi::kMessages : ChatApi::kResponses;
}

ConversionOptions OptionsOf(const JsonValue& recorded) {
  ConversionOptions options;
  const JsonValue* given = recorded.Find("options");
  if (given == nullptr) return options;
  for (const auto& [key, value] : *given->if_object()) {
    if (key == "reasoning_content_behavior") {
      options.require_reasoning_content = *value.if_string() == "reject";
    } else if (key == "messages_web_search") {
      options.messages_web_search_refused = *value.if_string() == "reject";
    } else if (key == "responses_web_search") {
      options.responses_web_search_refused = *value.if_string() == "reject";
    } else {
      ADD_FAILURE() << key;
    }
  }
  return options;
}

JsonValue OrNull(const std::optional<int64_t>& number) {
  return number.has_value() ? JsonValue(*number) : JsonValue();
}

JsonValue ConstraintJson(const std::optional<OutputConstraint>& constraint) {
  if (!constraint.has_value()) return {};
  const char* const kNames[] = {"json", "regex", "tool_call", "tool_call_required"};
  return JsonValue::Array{kNames[static_cast<int>(constraint->kind)], constraint->schema};
}

size_t NumImages(const Chat& chat) {
  size_t count = 0;
  for (const Message& message : chat.messages) {
    EXPECT_EQ(message.content.images.size(), message.content.image_offsets.size());
    count += message.content.images.size();
  }
  return count;
}

JsonValue ParserJson(const OutputParserOptions& parser) {
  const char* const kStarts[] = {"content", "reasoning", "reasoning_continuation",
                                 "content_continuation", "tool_calls"};
  JsonValue json;
  json.Set("start", kStarts[static_cast<int>(parser.start)]);
  json.Set("tools", parser.tools);
  json.Set("json", parser.json);
  return json;
}

void ExpectPromptAsRecorded(const JsonValue& recorded, const Chat& chat) {
  const Result<ChatPrompt> prompt = RenderChat(chat, ChatDialect::kV41);
  ASSERT_TRUE(prompt.has_value()) << prompt.error().message;
  EXPECT_EQ(prompt->text, *recorded.Find("prompt")->if_string());
  JsonValue::Array specials;
  for (const ChatPrompt::Range& range : prompt->specials) {
    specials.push_back(
        JsonValue::Array{static_cast<int64_t>(range.begin), static_cast<int64_t>(range.end)});
  }
  EXPECT_EQ(JsonValue(specials), *recorded.Find("special"));
  const JsonValue parser = ParserJson(prompt->parser);
  for (const auto& [key, value] : *parser.if_object())
    EXPECT_EQ(value, *recorded.Find("parser")->Find(key)) << key;
  EXPECT_EQ(prompt->images.size(), NumImages(chat));
  if (const JsonValue* ids = recorded.Find("ids");
      ids != nullptr && RenamedTokenizer() != nullptr) {
    const Result<std::vector<int32_t>> encoded = EncodeChatPrompt(*RenamedTokenizer(), *prompt);
    ASSERT_TRUE(encoded.has_value()) << encoded.error().message;
    EXPECT_EQ(JsonValue(JsonValue::Array(encoded->begin(), encoded->end())), *ids);
  }
}

void ExpectAsRecorded(const JsonValue& recorded) {
  SCOPED_TRACE(*recorded.Find("id")->if_string());
  const auto converted =
      ConvertRequest(ApiOf(recorded), *recorded.Find("request"), OptionsOf(recorded));
  if (const JsonValue* error = recorded.Find("error")) {
    ASSERT_FALSE(converted.has_value());
    EXPECT_EQ(converted.error().malformed, *error->Find("malformed")->if_bool())
        << converted.error().message;
    EXPECT_TRUE(converted.error().message.ends_with('.')) << converted.error().message;
    EXPECT_FALSE(converted.error().field.empty()) << converted.error().message;
    return;
  }
  ASSERT_TRUE(converted.has_value()) << converted.error().message;
  const JsonValue& sampling = *recorded.Find("sampling");
  EXPECT_EQ(converted->temperature, static_cast<float>(sampling.Find("temperature")->AsDouble()));
  EXPECT_EQ(converted->top_p, static_cast<float>(sampling.Find("top_p")->AsDouble()));
  EXPECT_EQ(OrNull(converted->max_tokens), *sampling.Find("max_tokens"));
  EXPECT_EQ(OrNull(converted->top_logprobs), *sampling.Find("top_logprobs"));
  EXPECT_EQ(converted->logprobs, *sampling.Find("logprobs")->if_bool());
  const JsonValue* seed = sampling.Find("seed");
  EXPECT_EQ(OrNull(converted->seed), seed != nullptr ? *seed : JsonValue());
  EXPECT_EQ(ConstraintJson(converted->constraint).Dump(), sampling.Find("constraint")->Dump());
  JsonValue::Array stop(converted->stop.begin(), converted->stop.end());
  EXPECT_EQ(JsonValue(stop), *recorded.Find("parser")->Find("stop"));
  EXPECT_EQ(static_cast<int64_t>(NumImages(converted->chat)), *recorded.Find("images")->if_int64());
  JsonValue namespaces{JsonValue::Object{}};
  for (const auto& [name, parts] : converted->namespaces)
    namespaces.Set(name, JsonValue::Array{parts.first, parts.second});
  const JsonValue* expected = recorded.Find("namespaces");
  EXPECT_EQ(namespaces, expected != nullptr ? *expected : JsonValue(JsonValue::Object{}));
  ExpectPromptAsRecorded(recorded, converted->chat);
}

TEST(ChatRequest, ChatCompletionsAreConvertedAsRecorded) {
  for (const JsonValue& recorded : RecordedCases("render.jsonl")) ExpectAsRecorded(recorded);
}

TEST(ChatRequest, MessagesAndResponsesAreConvertedAsRecorded) {
  for (const JsonValue& recorded : RecordedCases("convert.jsonl")) ExpectAsRecorded(recorded);
}

// The text of the request in a recorded case, with all digits of its numbers.
std::string RequestText(const std::string& line) {
  const std::vector<JsonMemberText> members = PythonJsonMembers(line).value();
  for (const JsonMemberText& member : members) {
    if (member.key == "request") return member.value;
  }
  return {};
}

// Requests in the checkpoint's own encoding; it differs from the toolkit's in few of the cases.
TEST(ChatRequest, TheCheckpointProfileGivesItsOwnPrompts) {
  int differing = 0;
  std::ifstream file(DI_TEST_DATA_DIR "/encoding/render.jsonl");
  std::string line;
  while (std::getline(file, line)) {
    const JsonValue recorded = JsonValue::Parse(line).value();
    if (recorded.Find("error") != nullptr) continue;
    SCOPED_TRACE(*recorded.Find("id")->if_string());
    ConversionOptions options = OptionsOf(recorded);
    options.profile = EncodingProfile::kCheckpoint;
    const auto converted =
        ConvertRequestText(ChatApi::kChatCompletions, RequestText(line), options);
    ASSERT_TRUE(converted.has_value()) << converted.error().message;
    const Result<ChatPrompt> prompt = RenderChat(converted->chat, ChatDialect::kV41);
    ASSERT_TRUE(prompt.has_value()) << prompt.error().message;
    const JsonValue* expected = recorded.Find("prompt_e");
    if (expected != nullptr) ++differing;
    if (expected == nullptr) expected = recorded.Find("prompt");
    EXPECT_EQ(prompt->text, *expected->if_string());
  }
  EXPECT_GT(differing, 20);
}

tl::expected<ConvertedRequest, RequestProblem> Convert(ChatApi api, std::string_view body,
                                                       const ConversionOptions& options = {}) {
  return ConvertRequestText(api, body, options);
}

std::string Body(std::string_view members) {
  return fmt::format(R"({{"model": "DeepSeek-V4.1-Flash", {}}})", members);
}

// "field: message", or "" if the request is fine.
std::string ProblemOf(ChatApi api, std::string_view members,
                      const ConversionOptions& options = {}) {
  const auto converted = Convert(api, Body(members), options);
  if (converted.has_value()) return "";
  return fmt::format("{}{}: {}", converted.error().malformed ? "malformed " : "",
                     converted.error().field, converted.error().message);
}

TEST(ChatRequest, MistakesAreNamedWithTheirPath) {
  EXPECT_EQ(ProblemOf(ChatApi::kChatCompletions,
                      R"("messages": [{"role": "user", "content": [{"type": "text"}]}])"),
            "malformed messages[0].content[0].text: messages[0].content[0].text is missing.");
  EXPECT_EQ(ProblemOf(ChatApi::kChatCompletions,
                      R"("messages": [{"role": "user", "content": "x"}], "temperature": 3)"),
            "temperature: temperature is 3; it must be 0 ... 2.");
  EXPECT_EQ(ProblemOf(ChatApi::kMessages,
                      R"("messages": [{"role": "user", "content": [{"type": "tool_result", )"
                      R"("tool_use_id": "q"}]}])"),
            "messages[0].content[0].tool_use_id: messages[0].content[0].tool_use_id is 'q', which "
            "is no call of the message before that is still to be answered.");
  EXPECT_EQ(ProblemOf(ChatApi::kResponses, R"("input": [{"type": "function_call", "call_id": "1", )"
                                           R"("name": "f", "arguments": "{}"}])"),
            "input[0]: input[0] comes before the output of the call '1'.");
  const auto no_json = Convert(ChatApi::kResponses, "{");
  ASSERT_FALSE(no_json.has_value());
  EXPECT_TRUE(no_json.error().malformed);
}

TEST(ChatRequest, AWrongShapeCountsBeforeAValueThatIsNotAllowed) {
  EXPECT_EQ(ProblemOf(ChatApi::kChatCompletions,
                      R"("temperature": 3, "messages": [{"role": "user", "content": 5}])"),
            "malformed messages[0].content: messages[0].content must be a string or a list.");
}

TEST(ChatRequest, EffortsAreNamesOrIntegers) {
  const auto effort = [](std::string_view value) {
    const auto converted = Convert(
        ChatApi::kChatCompletions,
        Body(fmt::format(
            R"("messages": [{{"role": "user", "content": "x"}}], "reasoning_effort": {})", value)));
    return converted.has_value() ? (converted->chat.thinking ? converted->chat.reasoning_effort : 0)
                                 : -1;
  };
  EXPECT_EQ(effort("37"), 37);
  EXPECT_EQ(effort("1"), 1);
  EXPECT_EQ(effort("100"), 100);
  EXPECT_EQ(effort("\"minimal\""), 50);
  EXPECT_EQ(effort("\"ultra\""), 100);
  EXPECT_EQ(effort("\"none\""), 0);
  EXPECT_EQ(effort("null"), 75);
  for (const std::string_view wrong : {"0", "101", "1.0", "true", "\"75\"", "\"High\""})
    EXPECT_EQ(effort(wrong), -1) << wrong;
}

TEST(ChatRequest, ModelNamesAreAnOption) {
  const std::string_view body =
      R"({"model": "mine", "messages": [{"role": "user", "content": "x"}]})";
  ConversionOptions options;
  EXPECT_FALSE(Convert(ChatApi::kChatCompletions, body, options).has_value());
  options.model_names = {"mine"};
  EXPECT_TRUE(Convert(ChatApi::kChatCompletions, body, options).has_value());
  options.model_names = {};
  EXPECT_TRUE(Convert(ChatApi::kChatCompletions, body, options).has_value());
}

TEST(ChatRequest, TheApplyPatchToolIsAFunctionWithOneText) {
  const auto converted =
      Convert(ChatApi::kResponses,
              Body(R"("input": "x", "tools": [{"type": "custom", "name": "apply_patch"}])"));
  ASSERT_TRUE(converted.has_value()) << converted.error().message;
  ASSERT_EQ(converted->chat.tools.size(), 1u);
  const JsonValue function = *JsonValue::Parse(converted->chat.tools[0].function);
  EXPECT_EQ(function.Find("parameters")->Find("required")->Dump(), R"(["input"])");
}

// A long text that is named many times must not become as many copies.
TEST(ChatRequest, RepetitionsOfALongTextAreBounded) {
  const std::string description(100000, 'x');
  std::string references;
  for (int i = 0; i < 10000; ++i)
    references += R"({"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}},)";
  EXPECT_NE(
      ProblemOf(ChatApi::kMessages,
                fmt::format(R"("tools": [{{"name": "f", "description": "{}", "input_schema": )"
                            R"({{"type": "object"}}}}], "messages": [{{"role": "system", )"
                            R"("content": [{}{{"type": "text", "text": ""}}]}}])",
                            description, references)),
      "");
  std::string functions;
  for (int i = 0; i < 10000; ++i)
    functions += fmt::format(R"({}{{"type": "function", "name": "f{}"}})", i > 0 ? "," : "", i);
  EXPECT_NE(ProblemOf(ChatApi::kResponses,
                      fmt::format(R"("input": "x", "tools": [{{"type": "namespace", "name": "n", )"
                                  R"("description": "{}", "tools": [{}]}}])",
                                  description, functions)),
            "");
}

std::string Rebuilt(std::string_view schema) {
  const Result<JsonValue> rebuilt = StrictSchema(*JsonValue::Parse(schema));
  return rebuilt.has_value() ? rebuilt->Dump() : rebuilt.error().message;
}

TEST(StrictSchema, IsRebuiltFromWhatAStrictSchemaMayHave) {
  EXPECT_EQ(Rebuilt(R"({"title": "T", "description": "d", "type": "object", "properties": {
      "s": {"minLength": 1, "pattern": "x", "type": "string", "format": "uuid", "enum": ["a"]},
      "n": {"minimum": 1, "type": "number", "default": 2.5, "const": null},
      "a": {"items": {"$ref": "#/$defs/q", "title": "t"}, "type": "array", "maxItems": 3},
      "o": {"anyOf": [{"type": "null", "x": 1}, {"type": "boolean"}], "description": "o"},
      "l": {"type": ["string", "null"], "minLength": 2}}})"),
            R"({"type": "object", "properties": {"s": {"type": "string", "pattern": "x", )"
            R"("format": "uuid", "enum": ["a"]}, "n": {"type": "number", "default": 2.5, )"
            R"("minimum": 1}, "a": {"type": "array", "items": {"$ref": "#/$defs/q"}}, )"
            R"("o": {"anyOf": [{"type": "null"}, {"type": "boolean"}], "description": "o"}, )"
            R"("l": {"type": ["string", "null"]}}, "additionalProperties": false, )"
            R"("required": ["s", "n", "a", "o", "l"], "description": "d"})");
  EXPECT_EQ(
      Rebuilt(R"({"type": "object"})"),
      R"({"type": "object", "properties": {}, "additionalProperties": false, "required": []})");
}

TEST(StrictSchema, MistakesAreNamedWithTheirPath) {
  EXPECT_EQ(Rebuilt(R"({"type": "object", "properties": {"a": {"type": "array", "items": {}}}})"),
            "$.properties.a.items needs one of 'type', 'anyOf' and '$ref' in a strict schema.");
  EXPECT_EQ(Rebuilt(R"({"type": "object", "properties": {"a": {"type": "object"}}})"),
            "$.properties.a is an object without properties, which a strict schema may not have.");
  EXPECT_EQ(Rebuilt(R"({"type": "object", "properties": {"a": {"type": "null"}}, "required": []})"),
            "$.required must name all properties in a strict schema.");
  EXPECT_EQ(Rebuilt(R"({"type": "string"})"), "$ must be a schema of the type object.");
}

TEST(JsonSchemaShape, FindsWhatIsNoSchema) {
  const auto shape = [](std::string_view text) {
    const Status status = CheckJsonSchemaShape(*JsonValue::Parse(text));
    return status.has_value() ? std::string() : status.error().message;
  };
  EXPECT_EQ(shape(R"({"type": "object", "properties": {"a": {"$ref": "#/$defs/b~1c"}}, "$defs": )"
                  R"({"b/c": true}, "unknown": 5})"),
            "");
  EXPECT_EQ(shape(R"({"properties": {"a": {"type": "foo"}}})"),
            "$.properties.a.type must be object, string, number, integer, array, boolean or null.");
  EXPECT_EQ(shape(R"({"anyOf": [{}, 5]})"), "$.anyOf[1] must be an object, true or false.");
  EXPECT_EQ(shape(R"({"$ref": "#/x"})"), "$.$ref leads nowhere: '#/x'.");
  for (const std::string_view wrong :
       {R"({"required": ["a", "a"]})", R"({"minLength": -1})", R"({"minLength": 1.5})",
        R"({"multipleOf": 0})", R"({"allOf": []})", R"({"enum": 5})", R"({"pattern": 5})", "null",
        R"({"items": [{}]})"}) {
    EXPECT_NE(shape(wrong), "") << wrong;
  }
}

TEST(JsonSchemaShape, ManyReferencesTakeNoQuadraticTime) {
  std::string properties;
  std::string definitions;
  for (int i = 0; i < 50000; ++i) {
    properties += fmt::format(R"({}"p{}": {{"$ref": "#/$defs/d{}"}})", i > 0 ? "," : "", i, i);
    definitions += fmt::format(R"({}"d{}": true)", i > 0 ? "," : "", i);
  }
  const JsonValue schema = *JsonValue::Parse(
      fmt::format(R"({{"properties": {{{}}}, "$defs": {{{}}}}})", properties, definitions));
  const auto start = std::chrono::steady_clock::now();
  EXPECT_TRUE(CheckJsonSchemaShape(schema).has_value());
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

// Recorded requests with a value replaced by another kind, or left out: never a crash, and what is
// accepted can be rendered.
RC_GTEST_PROP(ChatRequest, DamagedRequestsAreRefusedOrRendered, (uint64_t seed)) {
  static const std::vector<JsonValue> cases = [] {
    std::vector<JsonValue> all = RecordedCases("convert.jsonl");
    for (JsonValue& recorded : RecordedCases("render.jsonl")) all.push_back(std::move(recorded));
    return all;
  }();
  std::mt19937_64 random(seed);
  const JsonValue& recorded = cases[random() % cases.size()];
  JsonValue body = *recorded.Find("request");
  JsonValue* at = &body;
  for (;;) {
    if (JsonValue::Object* members = at->if_object(); members != nullptr && !members->empty()) {
      at = &(*members)[random() % members->size()].second;
    } else if (JsonValue::Array* items = at->if_array(); items != nullptr && !items->empty()) {
      at = &(*items)[random() % items->size()];
    } else {
      break;
    }
    if (random() % 4 == 0) break;
  }
  const std::vector<JsonValue> kinds = {
      nullptr, true, 5, -1, 1.5, "x", "", JsonValue::Array(), JsonValue(JsonValue::Object())};
  *at = kinds[random() % kinds.size()];
  for (const EncodingProfile profile : {EncodingProfile::kRecipe, EncodingProfile::kCheckpoint}) {
    ConversionOptions options = OptionsOf(recorded);
    options.profile = profile;
    const auto converted = ConvertRequest(ApiOf(recorded), body, options);
    if (!converted.has_value()) {
      RC_ASSERT(!converted.error().message.empty());
      continue;
    }
    const Result<ChatPrompt> prompt = RenderChat(converted->chat, ChatDialect::kV41);
    RC_ASSERT(prompt.has_value() || !prompt.error().message.empty());
  }
}

}  // namespace
}  // namespace deepinfer
