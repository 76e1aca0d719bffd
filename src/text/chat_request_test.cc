#include "text/chat_request.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "text/chat_render.h"
#include "text/json_schema_shape.h"
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

// Requests in the checkpoint's own encoding; it differs from the toolkit's in few of the cases.
TEST(ChatRequest, TheCheckpointProfileGivesItsOwnPrompts) {
  int differing = 0;
  for (const JsonValue& recorded : RecordedCases("render.jsonl")) {
    if (recorded.Find("error") != nullptr) continue;
    SCOPED_TRACE(*recorded.Find("id")->if_string());
    ConversionOptions options = OptionsOf(recorded);
    options.profile = EncodingProfile::kCheckpoint;
    const auto converted =
        ConvertRequest(ChatApi::kChatCompletions, *recorded.Find("request"), options);
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

}  // namespace
}  // namespace deepinfer
