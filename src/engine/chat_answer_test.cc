// The answer of a conversation as the engine reads it, token by token: its message, its finish
// reason, and pieces that add up to the same.
#include "engine/chat_answer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/utf8.h"

namespace deepinfer {
namespace {

using Start = OutputParserOptions::Start;

const Tokenizer& TestTokenizer() {
  static const Tokenizer tokenizer =
      *Tokenizer::Load(DI_TEST_DATA_DIR "/model/two/checkpoint/tokenizer.json");
  return tokenizer;
}

// "@" is the token of the markup and "#" the end of reasoning; everything else is one token per
// byte, so that characters and stop strings cross token boundaries everywhere.
std::vector<int32_t> Ids(const std::string& text) {
  std::vector<int32_t> ids;
  for (const char byte : text) {
    if (byte == '@' || byte == '#') {
      ids.push_back(TestTokenizer().IdOf(byte == '@' ? "｜DSML｜" : "</think>").value());
      continue;
    }
    for (int32_t id = 0; id < TestTokenizer().vocab_size(); ++id) {
      if (TestTokenizer().TokenBytes(id) == std::string_view(&byte, 1)) {
        ids.push_back(id);
        break;
      }
    }
  }
  EXPECT_EQ(ids.size(), text.size());
  return ids;
}

struct Read {
  ParsedMessage message;
  FinishReason reason = FinishReason::kNone;
  std::optional<std::string> stop_string;
};

// Reads the first `count` tokens, after which generation ended for `reason`.
Read ReadAnswer(const std::vector<int32_t>& ids, size_t count, FinishReason reason, Start start,
                const SamplingParams& params = {}) {
  OutputParserOptions options;
  options.start = start;
  options.tools = true;
  ChatAnswer answer(TestTokenizer(), params, options, 7);
  std::string content;
  std::string reasoning;
  const auto take = [](std::string* piece, std::string* all) {
    EXPECT_FALSE(FindInvalidUtf8(*piece).has_value()) << *piece;
    *all += *piece;
    piece->clear();
  };
  std::string content_piece;
  std::string reasoning_piece;
  for (size_t i = 0; i < count && !answer.stop_string().has_value(); ++i) {
    answer.Push(ids[i], true, &content_piece, &reasoning_piece);
    take(&content_piece, &content);
    take(&reasoning_piece, &reasoning);
  }
  Read read;
  read.stop_string = answer.stop_string();
  read.reason = answer.Finish(read.stop_string.has_value() ? FinishReason::kStop : reason,
                              &content_piece, &reasoning_piece);
  take(&content_piece, &content);
  take(&reasoning_piece, &reasoning);
  read.message = answer.TakeMessage();
  EXPECT_EQ(read.message.content, content);
  EXPECT_EQ(read.message.reasoning_content, reasoning);
  return read;
}

Read ReadAll(const std::string& text, FinishReason reason, Start start = Start::kContent,
             const SamplingParams& params = {}) {
  const std::vector<int32_t> ids = Ids(text);
  return ReadAnswer(ids, ids.size(), reason, start, params);
}

constexpr char kCall[] =
    "<@ calls>\n<@ invoke name=\"f\">\n<@ parameter name=\"a\" string=\"false\">[1, {\"b\": 2}]</@ "
    "parameter>\n</@ invoke>\n</@ calls>";

TEST(ChatAnswer, T043CallsAreTheReasonOnlyIfThereIsOne) {
  const Read call = ReadAll(std::string("Hi.\n\n") + kCall, FinishReason::kStop);
  EXPECT_EQ(call.reason, FinishReason::kToolCalls);
  EXPECT_EQ(call.message.content, "Hi.");
  ASSERT_EQ(call.message.tool_calls.size(), 1u);
  EXPECT_EQ(call.message.tool_calls[0].name, "f");
  EXPECT_EQ(call.message.tool_calls[0].arguments, R"({"a": [1, {"b": 2}]})");
  EXPECT_THAT(call.message.tool_calls[0].id, testing::StartsWith("call_00_ET_"));
  for (const char* text : {"Hi.", "<@ calls>\n</@ calls>", "<@ calls>\nnonsense\n</@ calls>",
                           "<@ calls>\n<@ invoke name=\"\">\n</@ invoke>\n</@ calls>", "<@", ""}) {
    const Read none = ReadAll(text, FinishReason::kStop);
    EXPECT_EQ(none.reason, FinishReason::kStop) << text;
    EXPECT_TRUE(none.message.tool_calls.empty()) << text;
  }
}

TEST(ChatAnswer, T044ACallThatIsCutAtAnyTokenIsNoFinishedCall) {
  const std::string text = std::string("Hi.\n\n") + kCall;
  const std::vector<int32_t> ids = Ids(text);
  const size_t marker = text.find('@');
  size_t with_call = 0;
  for (size_t count = 0; count <= ids.size(); ++count) {
    for (const FinishReason reason :
         {FinishReason::kLength, FinishReason::kDeadline, FinishReason::kAbort}) {
      const Read read = ReadAnswer(ids, count, reason, Start::kContent);
      EXPECT_EQ(read.reason, reason) << count;
      EXPECT_EQ(read.message.content, count <= marker ? text.substr(0, count) : "Hi.") << count;
      if (read.message.tool_calls.empty()) continue;
      ++with_call;
      // What is reported is whole.
      EXPECT_EQ(read.message.tool_calls[0].arguments, R"({"a": [1, {"b": 2}]})") << count;
    }
  }
  EXPECT_GT(with_call, 0u);
  EXPECT_LT(with_call, ids.size());  // of three times as many readings
}

TEST(ChatAnswer, T053ReasoningEndsAtItsMarkWhereverThatIs) {
  const Read at_once = ReadAll("#Yes.", FinishReason::kStop, Start::kReasoning);
  EXPECT_EQ(at_once.message.reasoning_content, "");
  EXPECT_EQ(at_once.message.content, "Yes.");
  const Read later = ReadAll("Hm, é.\n#\n\nYes.", FinishReason::kStop, Start::kReasoning);
  EXPECT_EQ(later.message.reasoning_content, "Hm, é.");
  EXPECT_EQ(later.message.content, "Yes.");
  const Read never = ReadAll("Hm, and so on", FinishReason::kLength, Start::kReasoning);
  EXPECT_EQ(never.message.reasoning_content, "Hm, and so on");
  EXPECT_EQ(never.message.content, "");
  EXPECT_EQ(never.reason, FinishReason::kLength);
  const Read call = ReadAll(std::string("Hm.\n\n") + kCall, FinishReason::kStop, Start::kReasoning);
  EXPECT_EQ(call.message.reasoning_content, "Hm.");
  EXPECT_EQ(call.reason, FinishReason::kToolCalls);
}

TEST(ChatAnswer, T082StopStringsEndTheContentAndNothingElse) {
  SamplingParams params;
  params.stop = {"Yes"};
  const Read only_reasoning =
      ReadAll("Yes? Yes!#No.", FinishReason::kStop, Start::kReasoning, params);
  EXPECT_EQ(only_reasoning.message.reasoning_content, "Yes? Yes!");
  EXPECT_EQ(only_reasoning.message.content, "No.");
  EXPECT_FALSE(only_reasoning.stop_string.has_value());
  const Read content =
      ReadAll("Yes?#No. Yes. No.", FinishReason::kLength, Start::kReasoning, params);
  EXPECT_EQ(content.message.content, "No. ");
  EXPECT_EQ(content.stop_string, "Yes");
  EXPECT_EQ(content.reason, FinishReason::kStop);
  params.include_stop_str_in_output = true;
  EXPECT_EQ(ReadAll("Yes?#No. Yes. No.", FinishReason::kLength, Start::kReasoning, params)
                .message.content,
            "No. Yes");
}

}  // namespace
}  // namespace deepinfer
