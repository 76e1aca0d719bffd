#include "text/chat_render.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <functional>
#include <random>

#include "base/json_value.h"
#include "text/conversation_json.h"
#include "text/text_test_data.h"

namespace deepinfer {
namespace {

using Ids = std::vector<int32_t>;
using Start = OutputParserOptions::Start;
using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

// A recorded line, as tests read it and as the library does.
struct Recorded {
  json line;
  std::string text;
};

std::vector<Recorded> ReadRecorded(const std::string& name) {
  std::vector<Recorded> recorded;
  std::ifstream file(std::string(DI_TEST_DATA_DIR "/") + name);
  std::string line;
  while (std::getline(file, line)) recorded.push_back({json::parse(line), line});
  EXPECT_FALSE(recorded.empty()) << name;
  return recorded;
}

Chat RecipeChat(const Recorded& recorded) {
  const JsonValue line = JsonValue::Parse(recorded.text).value();
  const auto chat = ChatFromConversation(*line.Find("conversation"));
  EXPECT_TRUE(chat.has_value()) << recorded.line["id"] << chat.error().message;
  return chat.value_or(Chat());
}

Chat CheckpointChat(const Recorded& recorded) {
  const auto chat = ChatFromCheckpointLine(recorded.text);
  EXPECT_TRUE(chat.has_value()) << recorded.line["id"] << chat.error().message;
  return chat.value_or(Chat());
}

ChatPrompt Rendered(const Chat& chat, ChatDialect dialect = ChatDialect::kV41) {
  const auto prompt = RenderChat(chat, dialect);
  EXPECT_TRUE(prompt.has_value()) << prompt.error().message;
  return prompt.value_or(ChatPrompt());
}

// The error of a conversation that must be refused.
Error Refusal(const Chat& chat, ChatDialect dialect = ChatDialect::kV41) {
  const auto prompt = RenderChat(chat, dialect);
  EXPECT_FALSE(prompt.has_value());
  return prompt.has_value() ? Error{} : prompt.error();
}

void ExpectPrompt(const Recorded& recorded, const ChatPrompt& prompt) {
  const json& line = recorded.line;
  EXPECT_EQ(prompt.text, line["prompt"].get<std::string>()) << line["id"] << line["about"];
  if (!line.contains("special")) return;
  std::vector<std::pair<size_t, size_t>> specials;
  for (const ChatPrompt::Range& range : prompt.specials)
    specials.emplace_back(range.begin, range.end);
  EXPECT_EQ(specials, (line["special"].get<std::vector<std::pair<size_t, size_t>>>()))
      << line["id"];
}

void ExpectIds(const Recorded& recorded, const ChatPrompt& prompt, const Tokenizer& tokenizer) {
  const auto ids = EncodeChatPrompt(tokenizer, prompt);
  ASSERT_TRUE(ids.has_value()) << recorded.line["id"] << ids.error().message;
  if (recorded.line.contains("ids")) {
    EXPECT_EQ(*ids, recorded.line["ids"].get<Ids>()) << recorded.line["id"];
  }
  if (recorded.line.contains("tokens")) {
    EXPECT_EQ(ids->size(), recorded.line["tokens"].get<size_t>()) << recorded.line["id"];
  }
}

size_t NumImages(const Chat& chat) {
  size_t count = 0;
  for (const Message& message : chat.messages) {
    count += message.content.images.size();
    for (const ContentBlock& block : message.blocks) count += block.content.images.size();
  }
  return count;
}

TEST(ChatRender, RecordedConversationsOfTheRecipeProfile) {
  size_t num_checked = 0;
  for (const Recorded& recorded : ReadRecorded("encoding/conversation.jsonl")) {
    const Chat chat = RecipeChat(recorded);
    const ChatPrompt prompt = Rendered(chat);
    ExpectPrompt(recorded, prompt);
    EXPECT_EQ(prompt.images.size(), recorded.line["images"].get<size_t>()) << recorded.line["id"];
    EXPECT_EQ(prompt.images.size(), NumImages(chat));
    ++num_checked;
  }
  EXPECT_EQ(num_checked, 96u);
}

TEST(ChatRender, RecordedIdsOfTheRecipeProfile) {
  DI_SKIP_WITHOUT_PUBLISHED_TOKENIZER();
  for (const Recorded& recorded : ReadRecorded("encoding/conversation.jsonl")) {
    ExpectIds(recorded, Rendered(RecipeChat(recorded)), *RenamedTokenizer());
  }
}

TEST(ChatRender, RecordedConversationsOfThePrecedingGeneration) {
  for (const Recorded& recorded : ReadRecorded("encoding/conversation_v4.jsonl")) {
    const ChatPrompt prompt = Rendered(RecipeChat(recorded), ChatDialect::kV4);
    ExpectPrompt(recorded, prompt);
    EXPECT_EQ(prompt.images.size(), recorded.line["images"].get<size_t>()) << recorded.line["id"];
  }
}

TEST(ChatRender, RecordedIdsOfThePrecedingGeneration) {
  DI_SKIP_WITHOUT_PUBLISHED_TOKENIZER();
  for (const Recorded& recorded : ReadRecorded("encoding/conversation_v4.jsonl")) {
    ExpectIds(recorded, Rendered(RecipeChat(recorded), ChatDialect::kV4), *PublishedTokenizer());
  }
}

TEST(ChatRender, RecordedConversationsOfTheCheckpointProfile) {
  size_t num_checked = 0;
  for (const Recorded& recorded : ReadRecorded("encoding/checkpoint_rules.jsonl")) {
    const ChatPrompt prompt = Rendered(CheckpointChat(recorded));
    ExpectPrompt(recorded, prompt);
    EXPECT_EQ(prompt.images.size(), recorded.line["images"].get<size_t>()) << recorded.line["id"];
    ++num_checked;
  }
  EXPECT_EQ(num_checked, 43u);
}

TEST(ChatRender, ExamplesOfTheModelDescription) {
  for (const Recorded& recorded : ReadRecorded("encoding/examples.jsonl")) {
    const ChatPrompt prompt = Rendered(CheckpointChat(recorded));
    ExpectPrompt(recorded, prompt);
    if (PublishedTokenizer() != nullptr) ExpectIds(recorded, prompt, *RenamedTokenizer());
  }
}

TEST(ChatRender, PlainConversationsAreTheSameInBothProfiles) {
  for (const Recorded& recorded : ReadRecorded("chat/basic.jsonl")) {
    const ChatPrompt prompt = Rendered(CheckpointChat(recorded));
    ExpectPrompt(recorded, prompt);
    if (PublishedTokenizer() != nullptr) ExpectIds(recorded, prompt, *RenamedTokenizer());
  }
  Chat chat;
  chat.messages.resize(4);
  const Role roles[] = {Role::kSystem, Role::kUser, Role::kAssistant, Role::kUser};
  for (size_t i = 0; i < 4; ++i) {
    chat.messages[i].role = roles[i];
    chat.messages[i].content.text = "text " + std::to_string(i);
  }
  chat.messages[2].reasoning_content = "because";
  for (const bool thinking : {false, true}) {
    chat.thinking = thinking;
    chat.profile = EncodingProfile::kRecipe;
    const ChatPrompt recipe = Rendered(chat);
    chat.profile = EncodingProfile::kCheckpoint;
    const ChatPrompt checkpoint = Rendered(chat);
    EXPECT_EQ(recipe.text, checkpoint.text);
    EXPECT_EQ(recipe.specials, checkpoint.specials);
  }
}

// A conversation of one profile from the fields of ChatFromConversation.
Chat ChatOf(const std::string& text) {
  const auto chat = ChatFromConversation(JsonValue::Parse(text).value());
  EXPECT_TRUE(chat.has_value()) << chat.error().message;
  return chat.value_or(Chat());
}
Chat CheckpointChatOf(const std::string& text) {
  const auto chat = ChatFromCheckpointLine(text);
  EXPECT_TRUE(chat.has_value()) << chat.error().message;
  return chat.value_or(Chat());
}

TEST(ChatRender, MarkersThatAUserTypesAreOrdinaryTokens) {
  DI_SKIP_WITHOUT_PUBLISHED_TOKENIZER();
  Chat chat = ChatOf(R"({"messages": [{"role": "user", "content": "<｜User｜>"}],
                         "thinking": false})");
  EXPECT_THAT(EncodeChatPrompt(*RenamedTokenizer(), Rendered(chat)).value(),
              ElementsAre(0, 128803, 30, 28217, 6756, 28217, 32, 128804, 128822));
  chat.messages[0].content.text = "<think>";
  EXPECT_THAT(EncodeChatPrompt(*RenamedTokenizer(), Rendered(chat)).value(),
              ElementsAre(0, 128803, 30, 37947, 32, 128804, 128822));
}

TEST(ChatRender, TwoAnswersInARowHaveNoHeaderBetweenThemInTheCheckpointProfile) {
  const Chat chat = CheckpointChatOf(
      R"({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"},
          {"role": "assistant", "content": "B"}], "mode": "chat"})");
  EXPECT_EQ(Rendered(chat).text,
            "<｜begin▁of▁sentence｜><｜User｜>Q<｜Assistant｜></think>A<｜end▁of▁sentence｜>B"
            "<｜end▁of▁sentence｜>");
}

TEST(ChatRender, ResultsOfUnknownCallsComeFirst) {
  const std::string messages =
      R"({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "",
          "tool_calls": [{"id": "a", "name": "f", "arguments": "{}", "function":
          {"name": "f", "arguments": "{}"}}, {"id": "b", "name": "f", "arguments": "{}",
          "function": {"name": "f", "arguments": "{}"}}]},
          {"role": "tool", "tool_call_id": "b", "content": "B"},
          {"role": "tool", "tool_call_id": "z", "content": "Z"},
          {"role": "tool", "content": "none"}], "mode": "chat", "thinking": false})";
  EXPECT_THAT(Rendered(CheckpointChatOf(messages)).text,
              HasSubstr("<tool_result>Z</tool_result>\n\n<tool_result>none</tool_result>\n\n"
                        "<tool_result>B</tool_result>"));
  EXPECT_THAT(Rendered(ChatOf(messages)).text,
              HasSubstr("<tool_result>Z</tool_result>\n\n<tool_result>B</tool_result>\n\n"
                        "<tool_result>none</tool_result>"));
}

TEST(ChatRender, ToolsOfAUserAreNotListedButKeepReasoningInTheCheckpointProfile) {
  const auto text = [](const std::string& tools) {
    return Rendered(CheckpointChatOf(
                        R"({"messages": [{"role": "user", "content": "Q", "tools": )" + tools +
                        R"(}, {"role": "assistant", "content": "A", "reasoning_content": "why"},
                            {"role": "user", "content": "R"}]})"))
        .text;
  };
  EXPECT_THAT(
      text(R"([{"function": {"name": "f"}}])"),
      testing::AllOf(HasSubstr("<think>why</think>A"), testing::Not(HasSubstr("## Tools"))));
  EXPECT_THAT(text("[]"), testing::Not(HasSubstr("why")));
}

TEST(ChatRender, ATaskKeepsTheNextUserMessageInATurnOfItsOwn) {
  const auto text = [](const std::string& task) {
    return Rendered(CheckpointChatOf(R"({"messages": [{"role": "user", "content": "Q", "task": )" +
                                     task + R"(}, {"role": "user", "content": "R"}],
                                     "mode": "chat"})"))
        .text;
  };
  EXPECT_THAT(text("\"title\""), HasSubstr("<｜User｜>Q<｜User｜>R<｜Assistant｜></think>"));
  EXPECT_THAT(text("null"), HasSubstr("<｜User｜>Q\n\nR<｜Assistant｜></think>"));
}

TEST(ChatRender, TimeIsProportionalToTheLengthOfTheConversation) {
  // 30000 calls, then as many turns with two results each: work for each pair would take minutes.
  Chat chat;
  Message calls;
  calls.role = Role::kAssistant;
  for (int i = 0; i < 30000; ++i) calls.tool_calls.push_back({std::to_string(i), "f", "{}"});
  chat.messages.push_back(std::move(calls));
  for (int i = 0; i < 30000; ++i) {
    for (const Role role : {Role::kLatestReminder, Role::kTool, Role::kTool}) {
      Message& message = chat.messages.emplace_back();
      message.role = role;
      if (role == Role::kTool) message.tool_call_id = std::to_string(i);
    }
  }
  for (const EncodingProfile profile : {EncodingProfile::kRecipe, EncodingProfile::kCheckpoint}) {
    chat.profile = profile;
    EXPECT_GT(Rendered(chat).specials.size(), 60000u);
  }
  chat.profile = EncodingProfile::kRecipe;
  EXPECT_GT(Rendered(chat, ChatDialect::kV4).specials.size(), 60000u);
}

TEST(ChatRender, NullContentsAndEmptyToolListsAreAsIfAbsent) {
  const Chat bare = CheckpointChatOf(
      R"({"messages": [{"role": "system"}, {"role": "user"}, {"role": "assistant"},
          {"role": "user"}]})");
  const Chat nulls = CheckpointChatOf(
      R"({"messages": [{"role": "system", "content": null, "tools": []}, {"role": "user",
          "content": null}, {"role": "assistant", "content": null, "reasoning_content": null,
          "tool_calls": null}, {"role": "user", "content": null, "tools": null}], "effort": null,
          "mode": null, "drop_thinking": null})");
  EXPECT_EQ(Rendered(nulls).text, Rendered(bare).text);
}

TEST(ChatRender, EveryEffortFromOneToAHundredIsStated) {
  Chat chat = ChatOf(R"({"messages": [{"role": "user", "content": "Q"}]})");
  for (const EncodingProfile profile : {EncodingProfile::kRecipe, EncodingProfile::kCheckpoint}) {
    chat.profile = profile;
    for (const int effort : {1, 37, 75, 100}) {
      chat.reasoning_effort = effort;
      EXPECT_THAT(Rendered(chat).text,
                  HasSubstr("Reasoning Effort: " + std::to_string(effort) + " (range 1-100"));
    }
    for (const int effort : {-1, 0, 101}) {
      chat.reasoning_effort = effort;
      EXPECT_EQ(Refusal(chat).field, "reasoning_effort");
    }
  }
  chat.thinking = false;  // then it is of no account
  EXPECT_TRUE(RenderChat(chat, ChatDialect::kV41).has_value());
}

TEST(ChatRender, EffortsBetweenTheNamesOfThePrecedingGenerationTakeTheTextBelow) {
  Chat chat = ChatOf(R"({"messages": []})");
  const auto text = [&](int effort) {
    chat.reasoning_effort = effort;
    return Rendered(chat, ChatDialect::kV4).text;
  };
  EXPECT_EQ(text(1), text(74));
  EXPECT_EQ(text(75), text(99));
  EXPECT_NE(text(74), text(75));
  EXPECT_NE(text(99), text(100));
}

Start StartOf(const std::string& conversation, ChatDialect dialect = ChatDialect::kV41) {
  return Rendered(ChatOf(conversation), dialect).parser.start;
}

TEST(ChatRender, TheParserStartsWhereThePromptEnds) {
  const std::string tools = R"("tools": [{"name": "f"}])";
  for (const ChatDialect dialect : {ChatDialect::kV41, ChatDialect::kV4}) {
    const std::string user = R"({"messages": [{"role": "user", "content": "Q"}], )";
    EXPECT_EQ(StartOf(user + R"("thinking": true})", dialect), Start::kReasoning);
    EXPECT_EQ(StartOf(user + R"("thinking": false})", dialect), Start::kContent);
    EXPECT_EQ(StartOf(user + R"("tool_choice": "required", )" + tools + "}", dialect),
              Start::kToolCalls);
    EXPECT_EQ(StartOf(user + R"("tool_choice": "required"})", dialect), Start::kReasoning);
    const auto continued = [&](const std::string& answer, bool thinking) {
      return StartOf(R"({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant",
                         "prefix": true, )" +
                         answer + R"(}], "thinking": )" + (thinking ? "true}" : "false}"),
                     dialect);
    };
    EXPECT_EQ(continued(R"("content": "A")", true), Start::kContentContinuation);
    EXPECT_EQ(continued(R"("content": "A", "reasoning_content": "R")", true),
              Start::kContentContinuation);
    EXPECT_EQ(continued(R"("content": "", "reasoning_content": "R")", true),
              Start::kReasoningContinuation);
    EXPECT_EQ(continued(R"("content": "")", true), Start::kReasoning);
    EXPECT_EQ(continued(R"("content": "A")", false), Start::kContent);
    EXPECT_EQ(continued(R"("content": "")", false), Start::kContent);
  }
  const auto checkpoint_start = [](const std::string& line) {
    return Rendered(CheckpointChatOf(line)).parser.start;
  };
  const std::string question = R"({"messages": [{"role": "user", "content": "Q")";
  EXPECT_EQ(checkpoint_start(question + "}]}"), Start::kReasoning);
  EXPECT_EQ(checkpoint_start(question + R"(}], "mode": "chat"})"), Start::kContent);
  EXPECT_EQ(checkpoint_start(question + R"(, "task": "title"}]})"), Start::kContent);
  EXPECT_EQ(checkpoint_start(question + R"(, "task": "action"}]})"), Start::kContent);
  const std::string answer = R"(}, {"role": "assistant", "content": "A", "wo_eos": true}])";
  EXPECT_EQ(checkpoint_start(question + answer + "}"), Start::kContentContinuation);
  EXPECT_EQ(checkpoint_start(question + answer + R"(, "mode": "chat"})"), Start::kContent);
}

TEST(ChatRender, TheParserLooksForCallsAndJsonThatThePromptAskedFor) {
  const std::string user = R"({"messages": [{"role": "user", "content": "Q"}], )";
  const auto parser = [&](const std::string& rest) {
    return Rendered(ChatOf(user + rest + "}")).parser;
  };
  EXPECT_TRUE(parser(R"("tools": [{"name": "f"}])").tools);
  EXPECT_TRUE(parser(R"("tools": [{"name": "f", "defer_loading": true}])").tools);
  EXPECT_FALSE(parser(R"("tools": [])").tools);
  EXPECT_FALSE(parser(R"("tools": [{"name": "f"}], "tool_choice": "none")").tools);
  EXPECT_TRUE(parser(R"("response_format": "json_object")").json);
  EXPECT_FALSE(parser(R"("response_schema": {})").json);
  EXPECT_FALSE(parser(R"("response_regex": "a")").json);
  const ChatPrompt checkpoint = Rendered(CheckpointChatOf(
      R"({"messages": [{"role": "system", "tools": [{"function": {"name": "f"}}],
          "response_format": {"type":"json_object"}}]})"));
  EXPECT_TRUE(checkpoint.parser.tools);
  EXPECT_TRUE(checkpoint.parser.json);
}

TEST(ChatRender, StrictToolsAreShownRebuiltByTheRecipeProfileOnly) {
  Chat chat = ChatOf(R"({"messages": [{"role": "user", "content": "Q"}]})");
  Tool& tool = chat.tools.emplace_back();
  tool.name = "f";
  tool.function = R"({"name":"f","strict":true,"parameters":{"n":1}})";
  tool.recipe_parameters = R"({"n":2})";
  tool.strict = true;
  EXPECT_THAT(
      Rendered(chat).text,
      HasSubstr("\n{\"name\": \"f\", \"description\": \"\", \"parameters\": {\"n\": 2}}\n"));
  chat.profile = EncodingProfile::kCheckpoint;
  EXPECT_THAT(Rendered(chat).text,
              HasSubstr("\n{\"name\": \"f\", \"strict\": true, \"parameters\": {\"n\": 1}}\n"));
}

TEST(ChatRender, ImagesAreListedInTheOrderOfThePrompt) {
  Chat chat = ChatOf(
      R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "",
          "tool_calls": [{"id": "1", "name": "f", "arguments": "{}"}, {"id": "2", "name": "f",
          "arguments": "{}"}]}, {"role": "tool", "tool_call_id": "2", "content": ""},
          {"role": "tool", "tool_call_id": "1", "content": ""}]})");
  const auto set_image = [&](size_t message, const std::string& url) {
    chat.messages[message].content.image_offsets = {0};
    chat.messages[message].content.images.resize(1);
    chat.messages[message].content.images[0].url = url;
  };
  set_image(0, "first");
  set_image(2, "third");
  set_image(3, "second");
  for (const EncodingProfile profile : {EncodingProfile::kRecipe, EncodingProfile::kCheckpoint}) {
    chat.profile = profile;
    std::vector<std::string> urls;
    for (const ImageSource& image : Rendered(chat).images) urls.push_back(image.url);
    EXPECT_THAT(urls, ElementsAre("first", "second", "third"));
  }
}

TEST(ChatRender, RefusesWithTheFieldAtFault) {
  const auto refused_field = [](const std::function<void(Chat&)>& spoil) {
    Chat chat = ChatOf(R"({"messages": [{"role": "system", "content": "S"},
                           {"role": "user", "content": "é"},
                           {"role": "assistant", "content": "A"}]})");
    spoil(chat);
    return Refusal(chat).field;
  };
  const auto add_image = [](Content& content, size_t offset) {
    content.image_offsets.push_back(offset);
    content.images.emplace_back();
  };
  EXPECT_EQ(refused_field([](Chat& c) { c.messages[1].content.text = "a\xFF"; }),
            "messages[1].content");
  EXPECT_EQ(refused_field([](Chat& c) { c.messages[2].reasoning_content = "\xC3"; }),
            "messages[2].reasoning_content");
  EXPECT_EQ(refused_field([](Chat& c) {
              c.messages[2].tool_calls = {{"", "\xFF", ""}};
            }),
            "messages[2].tool_calls[0].name");
  EXPECT_EQ(refused_field([](Chat& c) {
              c.messages[2].tool_calls = {{"", "", "\xFF"}};
            }),
            "messages[2].tool_calls[0].arguments");
  EXPECT_EQ(refused_field([](Chat& c) {
              c.messages[1].tool_calls = {{"", "f", "{}"}};
            }),
            "messages[1].tool_calls");
  EXPECT_EQ(refused_field([](Chat& c) { c.messages[1].prefix = true; }), "messages[1].prefix");
  EXPECT_EQ(refused_field([](Chat& c) { c.messages[1].task = "title"; }), "messages[1].task");
  EXPECT_EQ(refused_field([](Chat& c) { c.messages[0].response_format = "{}"; }),
            "messages[0].response_format");
  EXPECT_EQ(refused_field([](Chat& c) { c.messages[1].tools.resize(1); }), "messages[1].tools");
  EXPECT_EQ(refused_field([](Chat& c) {
              c.profile = EncodingProfile::kCheckpoint;
              c.messages[1].task = "poem";
            }),
            "messages[1].task");
  EXPECT_EQ(refused_field([&](Chat& c) { add_image(c.messages[2].content, 0); }),
            "messages[2].content");
  EXPECT_EQ(refused_field([&](Chat& c) { add_image(c.messages[0].content, 2); }),
            "messages[0].content");
  EXPECT_EQ(refused_field([&](Chat& c) { add_image(c.messages[1].content, 1); }),
            "messages[1].content");
  EXPECT_EQ(refused_field([](Chat& c) { c.messages[0].content.image_offsets = {0}; }),
            "messages[0].content");
  EXPECT_THAT(Refusal([] {
                Chat chat;
                chat.tools.resize(1);
                chat.tools[0].function = "[]";
                return chat;
              }())
                  .message,
              HasSubstr("tools[0].function is not a JSON object"));
  Chat empty;
  empty.profile = EncodingProfile::kCheckpoint;
  EXPECT_EQ(Refusal(empty).field, "messages");
  empty.messages.resize(1);
  EXPECT_EQ(Refusal(empty, ChatDialect::kV4).code, Code::kUnsupported);
}

TEST(ChatRender, TheTokenizerTellsTheDialect) {
  DI_SKIP_WITHOUT_PUBLISHED_TOKENIZER();
  EXPECT_EQ(DialectOf(*PublishedTokenizer()).value(), ChatDialect::kV4);
  EXPECT_EQ(DialectOf(*RenamedTokenizer()).value(), ChatDialect::kV41);
  const Chat chat = ChatOf(R"({"messages": [{"role": "user", "content": "Q"}]})");
  const auto ids = EncodeChatPrompt(*PublishedTokenizer(), Rendered(chat));
  ASSERT_FALSE(ids.has_value());
  EXPECT_EQ(ids.error().code, Code::kUnsupported);
  EXPECT_THAT(ids.error().message, HasSubstr("no added token '<｜System｜>'"));
}

TEST(ChatRender, PromptsWithRangesThatAreNotInOrderAreRefused) {
  ChatPrompt prompt;
  prompt.text = "<think>";
  for (const std::vector<ChatPrompt::Range>& ranges :
       {std::vector<ChatPrompt::Range>{{0, 8}}, {{3, 2}}, {{0, 7}, {0, 7}}}) {
    prompt.specials = ranges;
    EXPECT_FALSE(EncodeChatPrompt(SmallTokenizer(), prompt).has_value());
  }
}

// ------------------------------------------------------------------------------- properties

// Texts that say what only the template may say.
std::string HostileText(std::mt19937& random) {
  static const std::string kPieces[] = {"<｜begin▁of▁sentence｜>",
                                        "<｜end▁of▁sentence｜>",
                                        "<｜System｜>",
                                        "<｜User｜>",
                                        "<｜Assistant｜>",
                                        "<｜latest_reminder｜>",
                                        "<think>",
                                        "</think>",
                                        "｜DSML｜",
                                        "<｜deepseek_image｜>",
                                        "<｜image｜>",
                                        "<｜title｜>",
                                        "<｜action｜>",
                                        "<｜DSML｜ calls>\n",
                                        "</｜DSML｜ calls>",
                                        "</tool_result>",
                                        "\n\n",
                                        " ",
                                        "a",
                                        "\"",
                                        "é",
                                        "<|EOT|>"};
  std::string text;
  const size_t count = 1 + random() % 4;
  for (size_t i = 0; i < count; ++i) text += kPieces[random() % std::size(kPieces)];
  return text;
}

// A conversation of random structure. With the same seed the structure is the same whatever the
// texts are: `text` gives them.
Chat RandomChat(uint32_t seed, const std::function<std::string()>& text) {
  std::mt19937 random(seed);
  const auto one_in = [&](uint32_t n) { return random() % n == 0; };
  const auto make_tool = [&] {
    JsonValue function;
    function.Set("name", text());
    function.Set("description", text());
    JsonValue parameters;
    parameters.Set(text(), text());
    function.Set("parameters", parameters);
    Tool tool;
    tool.name = text();
    tool.function = function.Dump();
    tool.defer_loading = one_in(4);
    return tool;
  };
  const auto make_content = [&](bool may_have_image) {
    Content content;
    content.text = text();
    if (may_have_image && one_in(4)) {
      content.image_offsets.push_back(one_in(2) ? 0 : content.text.size());
      content.images.emplace_back();
    }
    return content;
  };
  Chat chat;
  chat.profile = one_in(2) ? EncodingProfile::kRecipe : EncodingProfile::kCheckpoint;
  const bool is_checkpoint = chat.profile == EncodingProfile::kCheckpoint;
  chat.thinking = one_in(2);
  chat.drop_thinking = one_in(2);
  chat.reasoning_effort = 1 + static_cast<int>(random() % 100);
  for (uint32_t n = random() % 3; n > 0; --n) chat.tools.push_back(make_tool());
  chat.tool_choice = static_cast<ToolChoice>(random() % 3);
  chat.response_format.kind = static_cast<ResponseFormat::Kind>(random() % 4);
  chat.response_format.schema = JsonQuoted(text());
  for (uint32_t n = 1 + random() % 6; n > 0; --n) {
    Message& message = chat.messages.emplace_back();
    message.role = static_cast<Role>(random() % 5);
    const bool is_assistant = message.role == Role::kAssistant;
    message.content = make_content(!is_assistant && message.role != Role::kLatestReminder);
    if (is_assistant && one_in(2)) message.reasoning_content = text();
    if (is_assistant && one_in(4)) message.prefix = true;
    for (uint32_t calls = is_assistant ? random() % 3 : 0; calls > 0; --calls) {
      JsonValue arguments;
      arguments.Set(text(), text());
      arguments.Set("n", 1.5);
      message.tool_calls.push_back(
          {std::to_string(random() % 3), text(), one_in(4) ? text() : arguments.Dump()});
    }
    if (message.role == Role::kTool && !one_in(4)) {
      message.tool_call_id = std::to_string(random() % 4);
    }
    if (message.role == Role::kSystem && one_in(4)) message.tools.push_back(make_tool());
    if (is_checkpoint && one_in(8)) message.task = one_in(2) ? "title" : "action";
    if (is_checkpoint && one_in(8)) message.response_format = JsonQuoted(text());
    if (is_checkpoint && message.role == Role::kUser && one_in(3)) {
      for (uint32_t blocks = 1 + random() % 3; blocks > 0; --blocks) {
        ContentBlock& block = message.blocks.emplace_back();
        block.kind = static_cast<ContentBlock::Kind>(random() % 3);
        block.content = make_content(block.kind != ContentBlock::Kind::kUnsupported);
        if (block.kind == ContentBlock::Kind::kToolResult) block.tool_call_id = "1";
      }
    }
  }
  return chat;
}

std::vector<std::string> Markers(const ChatPrompt& prompt) {
  std::vector<std::string> markers;
  for (const ChatPrompt::Range& range : prompt.specials)
    markers.push_back(prompt.text.substr(range.begin, range.end - range.begin));
  return markers;
}

RC_GTEST_PROP(ChatRender, WhatTextsSpellNeverChangesTheSpecialTokens, (uint32_t seed)) {
  std::mt19937 texts(seed);
  const Chat hostile = RandomChat(seed, [&] { return HostileText(texts); });
  const Chat harmless = RandomChat(seed, [] { return std::string("a"); });
  for (const ChatDialect dialect : {ChatDialect::kV41, ChatDialect::kV4}) {
    if (dialect == ChatDialect::kV4 && hostile.profile == EncodingProfile::kCheckpoint) continue;
    const auto with = RenderChat(hostile, dialect);
    const auto without = RenderChat(harmless, dialect);
    RC_ASSERT(with.has_value() && without.has_value());
    RC_ASSERT(Markers(*with) == Markers(*without));
    RC_ASSERT(with->images.size() == without->images.size());

    const Tokenizer* tokenizer =
        dialect == ChatDialect::kV41 ? RenamedTokenizer() : PublishedTokenizer();
    if (tokenizer == nullptr) continue;
    const auto ids = EncodeChatPrompt(*tokenizer, *with);
    RC_ASSERT(ids.has_value());
    std::vector<std::string> added;
    for (const int32_t id : *ids) {
      const std::string_view bytes = tokenizer->TokenBytes(id);
      if (tokenizer->IdOf(bytes) == id) added.emplace_back(bytes);
    }
    RC_ASSERT(added == Markers(*with));
    RC_ASSERT(tokenizer->Decode(*ids) == with->text);
  }
}

RC_GTEST_PROP(ChatRender, RenderingIsAFunctionOfTheConversation, (uint32_t seed)) {
  std::mt19937 texts(seed);
  const Chat chat = RandomChat(seed, [&] { return HostileText(texts); });
  const auto once = RenderChat(chat, ChatDialect::kV41);
  const auto twice = RenderChat(chat, ChatDialect::kV41);
  RC_ASSERT(once.has_value() && twice.has_value());
  RC_ASSERT(once->text == twice->text);
  RC_ASSERT(once->specials == twice->specials);
  RC_ASSERT(once->parser.start == twice->parser.start);
}

RC_GTEST_PROP(ChatRender, SpecialsAreInOrderAndWithinThePrompt, (uint32_t seed)) {
  // Texts of arbitrary bytes too: refused or rendered, never more than the prompt.
  std::mt19937 texts(seed);
  const Chat chat = RandomChat(seed, [&] {
    std::string text = HostileText(texts);
    if (texts() % 16 == 0) text += static_cast<char>(texts() % 256);
    if (texts() % 8 == 0) text.clear();
    return text;
  });
  const auto prompt = RenderChat(chat, ChatDialect::kV41);
  if (!prompt.has_value()) {
    RC_ASSERT(!prompt.error().message.empty());
    return;
  }
  size_t at = 0;
  size_t num_images = 0;
  for (const ChatPrompt::Range& range : prompt->specials) {
    RC_ASSERT(range.begin >= at && range.end > range.begin && range.end <= prompt->text.size());
    at = range.end;
  }
  for (const std::string& marker : Markers(*prompt)) num_images += marker == "<｜deepseek_image｜>";
  RC_ASSERT(num_images == prompt->images.size());
}

}  // namespace
}  // namespace deepinfer
