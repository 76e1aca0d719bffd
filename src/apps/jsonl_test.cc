#include "apps/jsonl.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace deepinfer {
namespace {

using ::testing::HasSubstr;

class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& content = {}) {
    static int count = 0;
    path = std::filesystem::temp_directory_path() /
           fmt::format("deepinfer_jsonl_{}_{}", ::getpid(), count++);
    std::ofstream(path, std::ios::binary) << content;
  }
  ~TemporaryFile() {
    std::filesystem::remove(path);
  }
  std::string Content() const {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::filesystem::path path;
};

std::vector<InputLine> ReadAll(const std::string& content, size_t max_line_bytes = 100) {
  const TemporaryFile file(content);
  Result<LineReader> reader = LineReader::Open(file.path, max_line_bytes);
  std::vector<InputLine> lines;
  for (;;) {
    Result<std::optional<InputLine>> line = reader->Next();
    if (!line->has_value()) return lines;
    lines.push_back(**line);
  }
}

TEST(LineReader, SkipsBlankLinesAndTakesEitherLineEnd) {
  const std::vector<InputLine> lines = ReadAll("one\r\n\n \t\r\ntwo\n\r\nthree");
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0].text, "one");
  EXPECT_EQ(lines[1].text, "two");
  EXPECT_EQ(lines[1].number, 4);
  EXPECT_EQ(lines[2].text, "three");
  EXPECT_EQ(lines[2].number, 6);
  EXPECT_TRUE(ReadAll("").empty());
  EXPECT_TRUE(ReadAll("\n\n").empty());
}

TEST(LineReader, ALineThatIsTooLongHarmsNoOther) {
  const std::vector<InputLine> lines =
      ReadAll(std::string(101, 'x') + "\n" + std::string(100, 'y') + "\n");
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_TRUE(lines[0].too_long);
  EXPECT_FALSE(lines[1].too_long);
  EXPECT_EQ(lines[1].text.size(), 100u);
}

TEST(LineReader, APipeIsReadyWhenAWholeLineIsThereOrItsEnd) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  Result<LineReader> reader =
      LineReader::Open(fmt::format("/proc/self/fd/{}", ends[0]), /*max_line_bytes=*/100'000);
  ASSERT_TRUE(reader.has_value());
  EXPECT_FALSE(reader->is_regular());
  EXPECT_FALSE(reader->Rewind().has_value());
  const auto write = [&](std::string_view text) {
    ASSERT_EQ(::write(ends[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
  };
  EXPECT_FALSE(*reader->Ready());
  write("on");
  EXPECT_FALSE(*reader->Ready());
  write("e\n \n\nt");
  EXPECT_TRUE(*reader->Ready());
  EXPECT_TRUE(*reader->Ready());
  EXPECT_EQ((*reader->Next())->text, "one");
  EXPECT_FALSE(*reader->Ready());
  write("wo\nthree");
  EXPECT_TRUE(*reader->Ready());
  const std::optional<InputLine> two = *reader->Next();
  EXPECT_EQ(two->text, "two");
  EXPECT_EQ(two->number, 4);
  EXPECT_FALSE(*reader->Ready());
  ::close(ends[1]);
  EXPECT_TRUE(*reader->Ready());
  EXPECT_EQ((*reader->Next())->text, "three");
  EXPECT_TRUE(*reader->Ready());
  EXPECT_FALSE((*reader->Next()).has_value());
  ::close(ends[0]);
}

TEST(LineReader, AFileIsReadAgainFromWhereReadingBegan) {
  std::string content = "\n";
  for (int i = 0; i < 50'000; ++i) content += std::to_string(i) + "\n";  // more than one buffer
  const TemporaryFile file(content);
  Result<LineReader> reader = LineReader::Open(file.path);
  ASSERT_TRUE(reader->is_regular());
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 50'000; ++i) {
      const std::optional<InputLine> line = *reader->Next();
      ASSERT_EQ(line->text, std::to_string(i));
      ASSERT_EQ(line->number, i + 2);
    }
    EXPECT_FALSE((*reader->Next()).has_value());
    EXPECT_TRUE(reader->Rewind().has_value());
  }
}

TEST(LineReader, MissingFilesAndDirectoriesAreExplained) {
  EXPECT_EQ(LineReader::Open("/nonexistent/x.jsonl").error().code, Code::kNotFound);
  EXPECT_THAT(LineReader::Open("/tmp").error().message, HasSubstr("is a directory"));
}

TEST(ParseGenerateLine, ReadsEveryField) {
  const auto parsed = ParseGenerateLine(
      R"({"id": "a", "prompt": "x\u00e9", "sampling_params": {"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1,
      "presence_penalty": 1, "frequency_penalty": -1.5, "repetition_penalty": 1.1, "logit_bias": {"7": -100, "8": 2.5},
      "allowed_token_ids": [1, 2], "bad_words": ["no"], "bad_words_token_ids": [[1, 2], [3]], "min_tokens": 1, "max_tokens": 9,
      "stop": ["end"], "stop_token_ids": [4], "include_stop_str_in_output": true, "ignore_eos": true, "n": 2, "logprobs": null,
      "prompt_logprobs": 3, "logprobs_mode": "processed", "seq_seed": 18446744073709551615, "skip_special_tokens": false}})");
  ASSERT_TRUE(parsed.value.has_value()) << parsed.value.error().message;
  EXPECT_EQ(parsed.id, (LineId{"a", false}));
  EXPECT_EQ(std::get<std::string>(parsed.value->prompt), "xé");
  const SamplingParams& p = parsed.value->sampling_params;
  EXPECT_EQ(p.temperature, 0.0);
  EXPECT_EQ(p.top_k, 5);
  EXPECT_EQ(p.top_p, 0.5);
  EXPECT_EQ(p.min_p, 0.1);
  EXPECT_EQ(p.presence_penalty, 1.0);
  EXPECT_EQ(p.frequency_penalty, -1.5);
  EXPECT_EQ(p.repetition_penalty, 1.1);
  EXPECT_EQ(p.logit_bias, (std::map<int64_t, double>{{7, -100.0}, {8, 2.5}}));
  EXPECT_EQ(*p.allowed_token_ids, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(p.bad_words, (std::vector<std::string>{"no"}));
  EXPECT_EQ(p.bad_words_token_ids, (std::vector<std::vector<int64_t>>{{1, 2}, {3}}));
  EXPECT_EQ(p.min_tokens, 1);
  EXPECT_EQ(p.max_tokens, 9);
  EXPECT_EQ(p.stop, (std::vector<std::string>{"end"}));
  EXPECT_EQ(p.stop_token_ids, (std::vector<int64_t>{4}));
  EXPECT_TRUE(p.include_stop_str_in_output);
  EXPECT_TRUE(p.ignore_eos);
  EXPECT_EQ(p.n, 2);
  EXPECT_FALSE(p.logprobs.has_value());
  EXPECT_EQ(p.prompt_logprobs, 3);
  EXPECT_EQ(p.logprobs_mode, LogprobsMode::kProcessed);
  EXPECT_EQ(p.seq_seed, 18446744073709551615u);
  EXPECT_FALSE(p.skip_special_tokens);
}

TEST(ParseGenerateLine, ReadsIdsMessagesAndIntegerIds) {
  const auto ids = ParseGenerateLine(
      R"({"prompt_token_ids": [0, 5], "id": -3, "sampling_params": {"seed": -1}})");
  ASSERT_TRUE(ids.value.has_value());
  EXPECT_EQ(ids.id, (LineId{"-3", true}));
  EXPECT_EQ(std::get<std::vector<int64_t>>(ids.value->prompt), (std::vector<int64_t>{0, 5}));
  EXPECT_EQ(ids.value->sampling_params.seq_seed, ~uint64_t{0});
  const auto chat = ParseGenerateLine(
      R"({"id": "c", "thinking_mode": "chat", "reasoning_effort": "max", "messages": [{"role": "user", "content": "hi"},
      {"role": "assistant", "content": "yes", "reasoning_content": "hm"}, {"role": "user", "content": ""}]})");
  ASSERT_TRUE(chat.value.has_value()) << chat.value.error().message;
  const Chat& conversation = std::get<Chat>(chat.value->prompt);
  ASSERT_EQ(conversation.messages.size(), 3u);
  EXPECT_EQ(conversation.messages[1].reasoning_content, "hm");
  EXPECT_FALSE(conversation.thinking);
  EXPECT_EQ(conversation.reasoning_effort, 100);
}

TEST(ParseGenerateLine, T052ReasoningOfAHistoryHasTwoNames) {
  const auto messages = [](const std::string& fields) {
    return ParseGenerateLine(
               R"({"id":"a","messages":[{"role":"user","content":"q"},{"role":"assistant","content":"y")" +
               fields + R"(},{"role":"user","content":"z"}]})")
        .value;
  };
  for (const char* name : {"reasoning", "reasoning_content"}) {
    const auto request = messages(fmt::format(R"(,"{}":"hm")", name));
    ASSERT_TRUE(request.has_value()) << request.error().message;
    EXPECT_EQ(std::get<Chat>(request->prompt).messages[1].reasoning_content, "hm") << name;
  }
  EXPECT_TRUE(messages(R"(,"reasoning":null,"reasoning_content":"hm")").has_value());
  const auto both = messages(R"(,"reasoning":"hm","reasoning_content":"hm")");
  ASSERT_FALSE(both.has_value());
  EXPECT_EQ(both.error().field, "messages[1].reasoning");
}

TEST(ParseGenerateLine, MembersOfAConversationWithoutEffectAreRefusedByName) {
  const std::string user = R"({"id":"a","messages":[{"role":"user","content":"json"}],)";
  const std::pair<std::string, const char*> cases[] = {
      {user + R"("tools":[{"type":"function","function":{"name":"f","parameter":{}}}]})",
       "tools[0].function.parameter"},
      {user + R"("tools":[{"type":"function","strct":1,"function":{"name":"f"}}]})",
       "tools[0].strct"},
      {user + R"("tools":[{"type":"function","function":{"name":"f"}}],)" +
           R"("tool_choice":{"type":"function","function":{"name":"f","x":1}}})",
       "tool_choice.function.x"},
      {user + R"("tool_choice":"required"})", "tool_choice"},
      {user + R"("response_format":{"type":"json_object","x":1}})", "response_format.x"},
      {user + R"("thinking":{"type":"enabled","budget_tokens":9}})", "thinking.budget_tokens"},
      {user + R"("response_format":{"type":"json_object"},"sampling_params":{"guided_regex":"a"}})",
       "response_format"},
      {R"({"id":"a","messages":[{"role":"user","content":"x","prefix":true}]})",
       "messages[0].prefix"},
      {R"({"id":"a","messages":[{"role":"user","content":[{"type":"text","text":"x","y":1}]}]})",
       "messages[0].content[0].y"},
      {R"({"id":"a","messages":[{"role":"user","content":"x","y":1}]})", "messages[0].y"},
  };
  for (const auto& [line, field] : cases) {
    const auto parsed = ParseGenerateLine(line);
    ASSERT_FALSE(parsed.value.has_value()) << line;
    EXPECT_EQ(parsed.value.error().field, field) << parsed.value.error().message;
  }
}

TEST(ParseGenerateLine, DefaultsHoldUntilTheLineSaysOtherwise) {
  const SamplingParams defaults = *ParseSamplingParams(R"({"temperature": 0.5, "max_tokens": 7})");
  const auto parsed = ParseGenerateLine(
      R"({"id":"a","prompt":"x","sampling_params":{"temperature":0.25}})", defaults);
  EXPECT_EQ(parsed.value->sampling_params.temperature, 0.25);
  EXPECT_EQ(parsed.value->sampling_params.max_tokens, 7);
}

struct BadLine {
  const char* line;
  const char* field;
  const char* says;
  bool has_id = true;
};

TEST(ParseGenerateLine, EachFaultNamesItsField) {
  const BadLine cases[] = {
      {R"({"id":"a","prompt":"x","sampling_params":{"temperature":NaN}})",
       "sampling_params.temperature", "'NaN'; allowed is a number"},
      {R"({"id":"a","prompt":"x","sampling_params":{"temperature":-Infinity}})",
       "sampling_params.temperature", "Infinity"},
      {R"({"id":"a","prompt":"x","sampling_params":{"temperature":1e999}})",
       "sampling_params.temperature", "1e999"},
      {R"({"id":"a","prompt":"x","sampling_params":{"temperature":"hot"}})",
       "sampling_params.temperature", "a number"},
      {R"({"sampling_params":{"temperature":-1},"id":"a","prompt":"x"})",
       "sampling_params.temperature", "-1"},
      {R"({"id":"a","prompt":"x","sampling_params":{"top_k":0}})", "sampling_params.top_k",
       "1 ... 2147483647"},
      {R"({"id":"a","prompt":"x","sampling_params":{"top_k":5.0}})", "sampling_params.top_k",
       "'5.0'; allowed is an integer"},
      {R"({"id":"a","prompt":"x","sampling_params":{"top_k":99999999999999999999}})",
       "sampling_params.top_k", "an integer"},
      {R"({"id":"a","prompt":"x","sampling_params":{"ignore_eos":1}})",
       "sampling_params.ignore_eos", "true or false"},
      {R"({"id":"a","prompt":"x","sampling_params":{"stop":"end"}})", "sampling_params.stop",
       "a list"},
      {R"({"id":"a","prompt":"x","sampling_params":{"stop":["a",5]}})", "sampling_params.stop[1]",
       "a string"},
      {R"({"id":"a","prompt":"x","sampling_params":{"logit_bias":{"abc":1}}})",
       "sampling_params.logit_bias.abc", "keys are token ids"},
      {R"({"id":"a","prompt":"x","sampling_params":{"logit_bias":{"7":1e9}}})",
       "sampling_params.logit_bias[7]", "-100 to 100"},
      {R"({"id":"a","prompt":"x","sampling_params":{"seed":1,"seq_seed":2}})",
       "sampling_params.seq_seed", "same parameter"},
      {R"({"id":"a","prompt":"x","sampling_params":{"temprature":1}})",
       "sampling_params.temprature", "not a known field; known are temperature"},
      {R"({"id":"a","prompt":"x","sampling_params":[]})", "sampling_params",
       "a list; allowed is an object"},
      {R"({"id":"a","prompt":"x","sampling_params":null})", "sampling_params", "an object"},
      {R"({"id":"a","promt":"x"})", "promt", "not a known field"},
      {R"({"id":"a"})", "prompt", "is missing"},
      {R"({"id":"a","prompt":5})", "prompt", "'5'; allowed is a string"},
      {R"({"id":"a","prompt":null})", "prompt", "null"},
      {R"({"id":"a","prompt":"x","prompt_token_ids":[1]})", "prompt_token_ids", "both given"},
      {R"({"id":"a","prompt":"x","prompt":"y"})", "prompt", "given twice"},
      {R"({"id":"a","prompt_token_ids":[1,"2"]})", "prompt_token_ids[1]", "an integer"},
      {R"({"id":"a","prompt_token_ids":[[1]]})", "prompt_token_ids[0]",
       "a list; allowed is an integer"},
      {R"({"id":"a","prompt_token_ids":"1"})", "prompt_token_ids", "a list"},
      {R"({"id":"a","messages":"hi"})", "messages", "must be a list"},
      {R"({"id":"a","messages":[{"role":"user"}]})", "messages[0].content", "is missing"},
      {R"({"id":"a","messages":[{"role":"user","content":["x"]}]})", "messages[0].content[0]",
       "must be an object"},
      {R"({"id":"a","messages":[{"role":"user","content":"x","nick":"y"}]})", "messages[0].nick",
       "these are role"},
      {R"({"id":"a","prompt":"x","thinking_mode":"chat"})", "thinking_mode", "without messages"},
      {R"({"id":"a","messages":[],"reasoning_effort":0})", "reasoning_effort", "1 ... 100"},
      {"{\"id\":\"a\",\"prompt\":\"x\xff\"}", "prompt", "not UTF-8 at byte 21"},
      {"{\"id\":\"a\",\"sampling_params\":{\"n\":1,\"stop\":[\"a\",\"b\xc3\"]},\"prompt\":\"x\"}",
       "sampling_params.stop[1]", "not UTF-8"},
      {"{\"prompt\":\"\\\"\xed\xa0\x80\",\"id\":\"a\"}", "prompt", "not UTF-8"},
      {R"({"prompt":"x"})", "id", "id is missing", false},
      {R"({"id":"","prompt":"x"})", "id", "0 bytes", false},
      {R"({"id":null,"prompt":"x"})", "id", "allowed is a string or an integer", false},
      {R"({"id":1.5,"prompt":"x"})", "id", "an integer", false},
      {R"({"id":"a","prompt":"x"} {})", "", "goes on after"},
      {R"({"id":"a","prompt":"x"} trailing)", "", "not valid JSON", false},
      {R"({"id":"a","prompt":"x")", "", "not valid JSON", false},
      {R"({"id":"a","prompt":"x)", "", "", false},
      {R"({"id":"a","prompt":"\ud800"})", "prompt", "surrogate pair"},
      {R"(["id"])", "", "not a JSON object", false},
      {R"(hello)", "", "", false},
      {R"(5)", "", "", false},
  };
  for (const BadLine& c : cases) {
    const auto parsed = ParseGenerateLine(c.line);
    ASSERT_FALSE(parsed.value.has_value()) << c.line;
    EXPECT_EQ(parsed.value.error().field, c.field) << c.line << "\n"
                                                   << parsed.value.error().message;
    EXPECT_THAT(parsed.value.error().message, HasSubstr(c.says)) << c.line;
    EXPECT_EQ(parsed.id.has_value(), c.has_id) << c.line;
    EXPECT_EQ(parsed.value.error().code, Code::kInvalidArgument);
  }
}

TEST(ParseGenerateLine, AllProblemsOfALineAreInItsMessage) {
  const auto parsed =
      ParseGenerateLine(R"({"id":"a","prompt":5,"extra":1,"sampling_params":{"n":"x"}})");
  const std::string& message = parsed.value.error().message;
  EXPECT_THAT(message, HasSubstr("prompt is '5'"));
  EXPECT_THAT(message, HasSubstr("'extra' is not a known field"));
  EXPECT_THAT(message, HasSubstr("sampling_params.n is '\"x\"'"));
}

TEST(ParseSamplingParams, SaysWhatIsWrongOnce) {
  EXPECT_EQ(ParseSamplingParams("[]").error().message,
            "sampling_params is a list; allowed is an object.");
  EXPECT_THAT(ParseSamplingParams("{} {}").error().message, HasSubstr("goes on after"));
  const std::string broken = ParseSamplingParams("{").error().message;
  EXPECT_THAT(broken, HasSubstr("is not valid JSON"));
  EXPECT_EQ(broken.find(".."), std::string::npos) << broken;
  EXPECT_EQ(broken.back(), '.');
}

TEST(ParseGenerateLine, DeepNestingIsAnError) {
  const std::string deep =
      R"({"id":"a","prompt":)" + std::string(100'000, '[') + std::string(100'000, ']') + "}";
  EXPECT_FALSE(ParseGenerateLine(deep).value.has_value());
}

TEST(ParseOtherLines, ReadTheirFieldsAndNothingElse) {
  EXPECT_EQ(ParseTextLine(R"({"id":1,"text":""})").value->text, "");
  EXPECT_EQ(ParseTextLine(R"({"id":1,"txt":""})").value.error().field, "txt");
  EXPECT_EQ(ParseIdsLine(R"({"id":1,"ids":[]})").value->ids.size(), 0u);
  EXPECT_EQ(ParseIdsLine(R"({"id":1})").value.error().field, "ids");
  const auto logits = ParseLogitsLine(R"({"id":"p","token_ids":[1,2,3],"chunks":[2,1]})");
  EXPECT_EQ(logits.value->chunks, (std::vector<int64_t>{2, 1}));
  EXPECT_TRUE(ParseLogitsLine(R"({"id":"p","token_ids":[1]})").value->chunks.empty());
  EXPECT_EQ(ParseLogitsLine(R"({"id":"p","ids":[4,5]})").value->token_ids,
            (std::vector<int64_t>{4, 5}));
  EXPECT_THAT(ParseLogitsLine(R"({"id":"p","ids":[4],"token_ids":[4]})").value.error().message,
              HasSubstr("give one of them"));
  EXPECT_EQ(ParseLogitsLine(R"({"id":"p","token_ids":[]})").value.error().field, "token_ids");
  EXPECT_EQ(ParseLogitsLine(R"({"id":"p","token_ids":[1,2],"chunks":[1]})").value.error().field,
            "chunks");
  EXPECT_EQ(ParseLogitsLine(R"({"id":"p","token_ids":[1,2],"chunks":[1,2]})").value.error().field,
            "chunks[1]");
  EXPECT_EQ(ParseLogitsLine(R"({"id":"p","token_ids":[1,2],"chunks":[0,2]})").value.error().field,
            "chunks[0]");
  EXPECT_EQ(ParseLogitsLine(R"({"id":"p","token_ids":[1,2],"chunks":[]})").value.error().field,
            "chunks");
}

TEST(IdRegister, RefusesARepeatedIdAndTellsWhereItWas) {
  IdRegister ids;
  EXPECT_TRUE(ids.Add({"7", false}, 1).has_value());
  EXPECT_TRUE(ids.Add({"7", true}, 2).has_value());  // the number and the text are different ids
  const Status again = ids.Add({"7", false}, 5);
  ASSERT_FALSE(again.has_value());
  EXPECT_EQ(again.error().field, "id");
  EXPECT_THAT(again.error().message, HasSubstr("line 1"));
}

TEST(IdRegister, KeepsManyIdsApart) {
  IdRegister ids;
  for (int64_t i = 1; i <= 20'000; ++i)
    ASSERT_TRUE(ids.Add({std::to_string(i), i % 2 == 0}, i).has_value()) << i;
  for (int64_t i = 1; i <= 20'000; i += 7) {
    const Status again = ids.Add({std::to_string(i), i % 2 == 0}, 30'000);
    ASSERT_FALSE(again.has_value()) << i;
    EXPECT_THAT(again.error().message, HasSubstr(fmt::format("in line {} already", i)));
  }
}

TEST(OutputLine, WithoutTimingsHasNothingThatDiffersBetweenRuns) {
  RequestOutput output;
  output.timings.total_seconds = 0.5;
  output.usage = {.prompt_tokens = 3, .cached_tokens = 0, .completion_tokens = 2, .preemptions = 1};
  EXPECT_EQ(
      OutputLine({"7", true}, output, false),
      R"({"id":7,"outputs":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}})");
  EXPECT_THAT(OutputLine({"7", true}, output), HasSubstr(R"("total_seconds":0.5)"));
  EXPECT_THAT(OutputLine({"7", true}, output), HasSubstr(R"("preemptions":1)"));
}

TEST(OrderedWriter, WritesInOrderAsSoonAsPossible) {
  const TemporaryFile file;
  Result<OrderedWriter> writer = OrderedWriter::Create(file.path);
  ASSERT_TRUE(writer.has_value());
  EXPECT_TRUE(writer->Put(1, "b").has_value());
  EXPECT_EQ(writer->waiting_bytes(), 1u);
  EXPECT_EQ(file.Content(), "");
  EXPECT_TRUE(writer->Put(0, "a").has_value());
  EXPECT_EQ(file.Content(), "a\nb\n");
  EXPECT_EQ(writer->waiting_bytes(), 0u);
  EXPECT_TRUE(writer->Put(4, "e").has_value());
  EXPECT_TRUE(writer->Put(3, "d").has_value());
  EXPECT_TRUE(writer->Finish().has_value());
  EXPECT_EQ(file.Content(), "a\nb\nd\ne\n");
}

TEST(OrderedWriter, AFullDiskIsAnError) {
  Result<OrderedWriter> writer = OrderedWriter::Create("/dev/full");
  ASSERT_TRUE(writer.has_value());
  EXPECT_EQ(writer->Put(0, "a").error().code, Code::kResourceExhausted);
}

TEST(OutputLines, AreJsonWithTheDocumentedFields) {
  RequestOutput output;
  output.prompt_token_ids = {0, 5};
  CompletionOutput completion;
  completion.text = "é\n";
  completion.token_ids = {7, 1};
  completion.finish_reason = FinishReason::kStop;
  completion.stop_reason = int64_t{1};
  completion.seq_seed = ~uint64_t{0};
  completion.logprobs = {{-0.5f, 1, {{7, -0.5f}, {9, -1.0f}}},
                         {-9999.0f, 3, {{8, -0.25f}, {9, -2.0f}}}};
  completion.cumulative_logprob = -9999.5;
  output.outputs = {completion};
  output.prompt_logprobs = {{-2.0f, 4, {}}};
  output.usage = {.prompt_tokens = 2, .cached_tokens = 1, .completion_tokens = 2, .preemptions = 1};
  const auto json = nlohmann::json::parse(OutputLine({"12", true}, output));
  EXPECT_EQ(json["id"], 12);
  const auto& first = json["outputs"][0];
  EXPECT_EQ(first["text"], "é\n");
  EXPECT_EQ(first["token_ids"], (std::vector<int>{7, 1}));
  EXPECT_EQ(first["finish_reason"], "stop");
  EXPECT_EQ(first["stop_reason"], 1);
  EXPECT_EQ(first["seq_seed"], ~uint64_t{0});
  EXPECT_EQ(first["token_logprobs"], (std::vector<double>{-0.5, -9999}));
  EXPECT_EQ(first["top_token_ids"][1], (std::vector<int>{8, 9}));
  EXPECT_EQ(first["top_logprobs"][0], (std::vector<double>{-0.5, -1}));
  EXPECT_EQ(first["ranks"], (std::vector<int>{1, 3}));
  EXPECT_EQ(json["prompt_logprobs"], (std::vector<double>{-2}));
  EXPECT_FALSE(json.contains("prompt_top_logprobs"));
  EXPECT_EQ(json["usage"]["total_tokens"], 4);
  EXPECT_EQ(json["usage"]["cached_tokens"], 1);
  EXPECT_TRUE(json["timings"].contains("first_token_seconds"));
}

TEST(OutputLines, T052AnAnswerIsAMessageThatCanBeSentBack) {
  RequestOutput output;
  CompletionOutput& completion = output.outputs.emplace_back();
  completion.finish_reason = FinishReason::kToolCalls;
  completion.stop_reason = int64_t{1};
  completion.text = "Hi.";
  ParsedMessage& message = completion.message.emplace();
  message.content = "Hi.";
  message.reasoning_content = "hm";
  ToolCall& call = message.tool_calls.emplace_back();
  call.id = "call_00_x";
  call.name = "f";
  call.arguments = R"({"a": 1})";
  const auto json = nlohmann::json::parse(OutputLine({"12", true}, output));
  EXPECT_EQ(json["outputs"][0]["finish_reason"], "tool_calls");
  EXPECT_EQ(
      json["outputs"][0]["message"],
      nlohmann::json::parse(
          R"({"role":"assistant","content":"Hi.","reasoning_content":"hm","tool_calls":[{"id":"call_00_x","type":"function",
             "function":{"name":"f","arguments":"{\"a\": 1}"}}]})"));
  message = {};
  const auto plain = nlohmann::json::parse(OutputLine({"12", true}, output));
  EXPECT_EQ(plain["outputs"][0]["message"],
            nlohmann::json::parse(R"({"role":"assistant","content":""})"));
}

TEST(OutputLines, ErrorsNameCodeFieldAndLine) {
  const auto json = nlohmann::json::parse(
      ErrorLine(std::nullopt, 7, Error{Code::kInvalidArgument, "bad \xff byte", "prompt"}));
  EXPECT_TRUE(json["id"].is_null());
  EXPECT_EQ(json["line"], 7);
  EXPECT_EQ(json["error"]["code"], "invalid_argument");
  EXPECT_EQ(json["error"]["field"], "prompt");
}

}  // namespace
}  // namespace deepinfer
