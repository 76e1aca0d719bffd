#include "text/conversation_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace deepinfer {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

JsonValue Json(const std::string& text) {
  return JsonValue::Parse(text).value();
}

Error CheckpointRefusal(const std::string& line) {
  const auto chat = ChatFromCheckpointMessages(Json(line));
  EXPECT_FALSE(chat.has_value()) << line;
  return chat.has_value() ? Error{} : chat.error();
}

Error RecipeRefusal(const std::string& conversation) {
  const auto chat = ChatFromConversation(Json(conversation));
  EXPECT_FALSE(chat.has_value()) << conversation;
  return chat.has_value() ? Error{} : chat.error();
}

TEST(ConversationJson, EffortIsANameOrAnInteger) {
  const auto line = [](const std::string& effort) {
    return R"({"messages": [], "effort": )" + effort + "}";
  };
  const std::pair<const char*, int> accepted[] = {
      {"1", 1},         {"37", 37},       {"100", 100}, {"\"low\"", 50},
      {"\"high\"", 75}, {"\"max\"", 100}, {"null", 75}};
  for (const auto& [effort, value] : accepted) {
    EXPECT_EQ(ChatFromCheckpointMessages(Json(line(effort)))->reasoning_effort, value);
  }
  for (const char* refused : {"0", "101", "-1", "1.0", "true", "\"75\"", "\"xhigh\"", "[]"}) {
    EXPECT_EQ(CheckpointRefusal(line(refused)).field, "effort") << refused;
  }
  EXPECT_EQ(ChatFromConversation(Json(R"({"messages": [], "reasoning_effort": "xhigh"})"))
                ->reasoning_effort,
            75);
  EXPECT_EQ(RecipeRefusal(R"({"messages": [], "reasoning_effort": "huge"})").field,
            "reasoning_effort");
}

TEST(ConversationJson, BlocksOfUsersStayBlocks) {
  const auto chat = ChatFromCheckpointMessages(Json(R"({"messages": [{"role": "user", "content": [
      {"type": "text", "text": "a"},
      {"type": "image_url", "image_url": {"url": "http://i", "detail": "low"}},
      {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}},
      {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text", "text": "r"},
          {"type": "image", "source": {"type": "url", "url": "http://j"}}, {"type": "audio"}]},
      {"type": "video"}]}]})"));
  ASSERT_TRUE(chat.has_value()) << chat.error().message;
  const std::vector<ContentBlock>& blocks = chat->messages[0].blocks;
  ASSERT_EQ(blocks.size(), 5u);
  EXPECT_EQ(blocks[0].content.text, "a");
  EXPECT_EQ(blocks[1].content.images[0].url, "http://i");
  EXPECT_EQ(blocks[1].content.images[0].detail, "low");
  EXPECT_EQ(blocks[1].content.images[0].path, "messages[0].content[1]");
  EXPECT_EQ(blocks[2].content.images[0].url, "data:image/png;base64,AA");
  EXPECT_EQ(blocks[3].kind, ContentBlock::Kind::kToolResult);
  EXPECT_EQ(blocks[3].tool_call_id, "x");
  EXPECT_EQ(blocks[3].content.text, "r\n\n\n\n[Unsupported audio]");
  EXPECT_THAT(blocks[3].content.image_offsets, ElementsAre(3));
  EXPECT_EQ(blocks[4].kind, ContentBlock::Kind::kUnsupported);
  EXPECT_EQ(blocks[4].content.text, "video");
}

TEST(ConversationJson, BlocksOfOthersAreJoinedTexts) {
  const auto chat = ChatFromCheckpointMessages(Json(
      R"({"messages": [{"role": "tool", "tool_call_id": "i", "content": [
          {"type": "text", "text": "a"}, {"type": "video"}, {"type": "text", "text": "b"}]}]})"));
  ASSERT_TRUE(chat.has_value()) << chat.error().message;
  EXPECT_EQ(chat->messages[0].content.text, "a\n\nb");
}

TEST(ConversationJson, ImageTokensThatAreSpeltOutGetAsciiBars) {
  const std::string token = "<｜deepseek_image｜>";
  const auto chat = ChatFromCheckpointMessages(
      Json(R"({"messages": [{"role": "user", "content": ")" + token + token +
           R"("}, {"role": "assistant", "content": null, "reasoning_content": "x)" + token +
           R"("}, {"role": "user", "content": [{"type": "text", "text": ")" + token + R"("}]}]})"));
  ASSERT_TRUE(chat.has_value()) << chat.error().message;
  EXPECT_EQ(chat->messages[0].content.text, "<|deepseek_image|><|deepseek_image|>");
  EXPECT_EQ(chat->messages[1].reasoning_content, "x<|deepseek_image|>");
  EXPECT_EQ(chat->messages[2].blocks[0].content.text, "<|deepseek_image|>");
}

TEST(ConversationJson, ALongRowOfImageTokensIsRewrittenInOneGo) {
  std::string text;
  for (int i = 0; i < 100000; ++i) text += "<｜deepseek_image｜>";
  const auto chat = ChatFromCheckpointMessages(
      Json(R"({"messages": [{"role": "user", "content": ")" + text + R"("}]})"));
  ASSERT_TRUE(chat.has_value()) << chat.error().message;
  EXPECT_EQ(chat->messages[0].content.text.size(), 100000 * sizeof("<|deepseek_image|>") - 100000);
}

TEST(ConversationJson, ToolsOfALineKeepAllDigits) {
  const std::string line =
      R"({"messages": [{"role": "system", "tools": [{"type": "function", "function":
          {"name": "f", "n": 10000000000000000000000000}}], "response_format":
          {"n":10000000000000000000000000}}]})";
  const auto chat = ChatFromCheckpointLine(line);
  ASSERT_TRUE(chat.has_value()) << chat.error().message;
  EXPECT_EQ(chat->messages[0].tools[0].name, "f");
  EXPECT_EQ(chat->messages[0].tools[0].function,
            R"({"name": "f", "n": 10000000000000000000000000})");
  EXPECT_EQ(chat->messages[0].response_format, R"({"n": 10000000000000000000000000})");
}

TEST(ConversationJson, TheFirstImageTokensOfAConversationAreItsImages) {
  const std::string token = "<｜deepseek_image｜>";
  const auto chat = ChatFromConversation(Json(R"({"messages": [{"role": "user", "content": "a)" +
                                              token + "b" + token + R"(", "images": 1}]})"));
  ASSERT_TRUE(chat.has_value()) << chat.error().message;
  EXPECT_EQ(chat->messages[0].content.text, "ab" + token);
  EXPECT_THAT(chat->messages[0].content.image_offsets, ElementsAre(1));
}

TEST(ConversationJson, RefusesWithTheFieldAtFault) {
  EXPECT_EQ(CheckpointRefusal("{}").field, "messages");
  EXPECT_EQ(CheckpointRefusal("[]").field, "conversation");
  EXPECT_EQ(CheckpointRefusal(R"({"messages": [1]})").field, "messages[0]");
  EXPECT_EQ(CheckpointRefusal(R"({"messages": [{"role": "developer"}]})").field,
            "messages[0].role");
  EXPECT_EQ(CheckpointRefusal(R"({"messages": [{"role": "user", "content": 1}]})").field,
            "messages[0].content");
  EXPECT_EQ(CheckpointRefusal(R"({"messages": [{"role": "user", "content": [1]}]})").field,
            "messages[0].content[0]");
  EXPECT_EQ(CheckpointRefusal(R"({"messages": [{"role": "user", "wo_eos": 1}]})").field,
            "messages[0].wo_eos");
  EXPECT_EQ(CheckpointRefusal(R"({"messages": [{"role": "user", "tools": [1]}]})").field,
            "messages[0].tools[0].function");
  EXPECT_EQ(CheckpointRefusal(
                R"({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]})")
                .field,
            "messages[0].tool_calls[0].name");
  EXPECT_EQ(CheckpointRefusal(R"({"messages": [], "mode": "fast"})").field, "mode");
  EXPECT_EQ(CheckpointRefusal(R"({"messages": [], "drop_thinking": 1})").field, "drop_thinking");
  EXPECT_EQ(RecipeRefusal(R"({"messages": [{"role": "user", "images": -1}]})").field,
            "messages[0].images");
  EXPECT_EQ(RecipeRefusal(R"({"messages": [], "thinking": 1})").field, "thinking");
  EXPECT_EQ(RecipeRefusal(R"({"messages": [], "tools": [{}]})").field, "tools[0].name");
  EXPECT_EQ(RecipeRefusal(R"({"messages": [], "tool_choice": "f"})").field, "tool_choice");
  EXPECT_THAT(RecipeRefusal(R"({"messages": [], "response_format": "json_object",
                                "response_regex": "a"})")
                  .message,
              HasSubstr("Only one of"));
  EXPECT_FALSE(ChatFromCheckpointLine("{\"messages\": [").has_value());
}

}  // namespace
}  // namespace deepinfer
