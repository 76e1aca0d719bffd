#include "text/output_parser.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "text/text_test_data.h"

namespace deepinfer {
namespace {

using nlohmann::json;
using Policy = OutputParserOptions::Policy;
using Start = OutputParserOptions::Start;

Start StartNamed(const std::string& name) {
  if (name == "reasoning") return Start::kReasoning;
  if (name == "reasoning_continuation") return Start::kReasoningContinuation;
  if (name == "content_continuation") return Start::kContentContinuation;
  if (name == "tool_calls") return Start::kToolCalls;
  EXPECT_EQ(name, "content");
  return Start::kContent;
}

OutputEnd EndNamed(const std::string& name) {
  for (const OutputEnd end : {OutputEnd::kLength, OutputEnd::kContentFilter, OutputEnd::kToolCalls})
    if (OutputEndName(end) == name) return end;
  EXPECT_EQ(name, "stop");
  return OutputEnd::kStop;
}

struct Case {
  std::string id;
  std::string text;
  OutputParserOptions options;
  OutputEnd finish = OutputEnd::kStop;
  json recorded;  // the whole line
};

std::vector<Case> RecordedCases(const std::string& name) {
  std::vector<Case> cases;
  for (const json& line : ReadCases("encoding/" + name)) {
    Case c;
    c.id = line["id"];
    c.text = line["text"];
    const json& parser = line["parser"];
    c.options.start = StartNamed(parser["start"]);
    c.options.tools = parser["tools"];
    c.options.json = parser["json"];
    c.options.stop = parser["stop"].get<std::vector<std::string>>();
    c.finish = EndNamed(line["finish"]);
    c.recorded = line;
    cases.push_back(std::move(c));
  }
  return cases;
}

// What is expected of a policy. The recorded lines have the vendor's result, and that of the
// recommended policy where it differs.
json Expected(const Case& c, Policy policy) {
  const char* const vendor = c.recorded.contains("toolkit") ? "toolkit" : "final";
  return policy == Policy::kRecommended && c.recorded.contains("recommended")
             ? c.recorded["recommended"]
             : c.recorded[vendor];
}

std::string WithSpacesJoined(const std::string& text) {
  std::string joined;
  for (const char c : text)
    if (c != ' ' || joined.empty() || joined.back() != ' ') joined += c;
  return joined;
}

json MessageJson(const ParsedMessage& message, OutputEnd end) {
  json calls = json::array();
  for (const ToolCall& call : message.tool_calls)
    calls.push_back(json::array({call.name, call.arguments}));
  return {{"reasoning", message.reasoning_content},
          {"content", message.content},
          {"calls", calls},
          {"finish_reason", OutputEndName(end)}};
}

void JoinSpaces(json* message) {
  (*message)["content"] = WithSpacesJoined((*message)["content"]);
}

struct Parsed {
  json message;
  std::vector<std::vector<OutputEvent>> events;  // of each piece; the last: of the end
  bool cut_call = false;
  std::optional<std::string> stop_string;
};

Parsed Close(OutputParser* parser, Parsed parsed, OutputEnd finish) {
  const OutputEnd end = parser->Finish(finish, &parsed.events.emplace_back());
  MessageBuilder builder;
  for (const auto& piece : parsed.events)
    for (const OutputEvent& event : piece) builder.Add(event);
  parsed.message = MessageJson(builder.message(), end);
  parsed.cut_call = parser->cut_call();
  parsed.stop_string = parser->stop_string();
  return parsed;
}

// `cuts`: ascending offsets.
Parsed Parse(const OutputParserOptions& options, std::string_view text, OutputEnd finish,
             const std::vector<size_t>& cuts = {}) {
  OutputParser parser(options);
  Parsed parsed;
  size_t begin = 0;
  for (const size_t cut : cuts) {
    parser.Push(text.substr(begin, cut - begin), &parsed.events.emplace_back());
    begin = cut;
  }
  parser.Push(text.substr(begin), &parsed.events.emplace_back());
  return Close(&parser, std::move(parsed), finish);
}

Parsed ParseIds(const OutputParserOptions& options, const Tokenizer& tokenizer,
                const std::vector<int32_t>& ids, OutputEnd finish) {
  OutputParser parser(options, &tokenizer);
  Parsed parsed;
  for (const int32_t id : ids) parser.PushToken(id, &parsed.events.emplace_back());
  return Close(&parser, std::move(parsed), finish);
}

std::vector<size_t> EveryByte(size_t size) {
  std::vector<size_t> cuts;
  for (size_t i = 1; i < size; ++i) cuts.push_back(i);
  return cuts;
}

std::vector<size_t> CutsOf(const json& cuts) {
  return cuts.get<std::vector<size_t>>();
}

// What events have said up to some moment, as one text per stream.
std::map<std::string, std::string> Said(const Parsed& parsed, size_t num_pieces) {
  std::map<std::string, std::string> said;
  for (size_t i = 0; i < std::min(num_pieces, parsed.events.size()); ++i) {
    for (const OutputEvent& event : parsed.events[i]) {
      if (const auto* reasoning = std::get_if<ReasoningEvent>(&event)) {
        said["r"] += reasoning->text;
      } else if (const auto* content = std::get_if<ContentEvent>(&event)) {
        said["c"] += content->text;
      } else if (const auto* call = std::get_if<ToolCallEvent>(&event)) {
        said["n"] += std::to_string(call->index) + ":" + call->name + "\n";
      } else if (const auto* arguments = std::get_if<ArgumentsEvent>(&event)) {
        said["a" + std::to_string(arguments->index)] += arguments->text;
      }
    }
  }
  said["c"] = WithSpacesJoined(said["c"]);
  return said;
}

std::map<std::string, std::string> Said(const json& events, size_t num_pieces) {
  std::map<std::string, std::string> said;
  for (const json& event : events) {
    if (event[0].get<size_t>() >= num_pieces) continue;
    const std::string kind = event[1];
    if (kind == "n") {
      said["n"] += std::to_string(event[2].get<int>()) + ":" + event[3].get<std::string>() + "\n";
    } else if (kind == "a") {
      said["a" + std::to_string(event[2].get<int>())] += event[3].get<std::string>();
    } else {
      said[kind] += event[2].get<std::string>();
    }
  }
  said["c"] = WithSpacesJoined(said["c"]);
  return said;
}

// A space that may or may not have been said already does not count.
bool IsPrefix(const std::map<std::string, std::string>& said,
              const std::map<std::string, std::string>& of) {
  return std::all_of(said.begin(), said.end(), [&](const auto& stream) {
    const auto whole = of.find(stream.first);
    return stream.second.empty() || (whole != of.end() && whole->second.starts_with(stream.second));
  });
}

void ExpectMessage(json parsed, json expected, const std::string& where) {
  JoinSpaces(&parsed);
  JoinSpaces(&expected);
  EXPECT_EQ(parsed, expected) << where;
}

const char* NameOf(Policy policy) {
  return policy == Policy::kToolkit ? " toolkit" : " recommended";
}

// Recorded answers with headers that are not of the described form. As text they are read as the
// vendor reads them; as ids under the recommended policy, as they are meant: the arguments would be
// no JSON, have parts of the markup in them, or lose a value.
std::optional<json> CallsOfOddMarkup(const Case& c) {
  if (c.recorded["kind"] != "odd_markup") return std::nullopt;
  const auto has = [&](const char* text) { return c.text.find(text) != std::string::npos; };
  const auto one = [](const char* arguments) {
    return json::array({json::array({"f", arguments})});
  };
  if (has(R"(invoke name="")")) return json::array();
  if (has(R"(string="maybe")")) return one(R"({"a": "b"})");
  if (has(R"(name="a">)")) return one(R"({"a": "b"})");
  if (has(R"(parameter  name)")) return one(R"({"a": "b"})");
  if (has(R"(two words)")) return one(R"({"two words": "b"})");
  if (has(R"(q"q)")) return one(R"({"q\"q": "b"})");
  return std::nullopt;
}

json ExpectedOfIds(const Case& c, Policy policy) {
  json expected = Expected(c, policy);
  const std::optional<json> odd = CallsOfOddMarkup(c);
  if (policy == Policy::kRecommended && odd.has_value()) {
    EXPECT_FALSE(c.recorded.contains("recommended")) << c.id;
    expected["calls"] = *odd;
    if (odd->empty()) expected["finish_reason"] = "stop";
  }
  return expected;
}

TEST(OutputParserTest, RecordedAnswersAreParsedAtOnceAndByteByByte) {
  for (const char* file : {"parse.jsonl", "stream.jsonl", "worked_examples.jsonl"}) {
    for (Case& c : RecordedCases(file)) {
      for (const Policy policy : {Policy::kToolkit, Policy::kRecommended}) {
        c.options.policy = policy;
        const std::string where = c.id + NameOf(policy);
        const Parsed whole = Parse(c.options, c.text, c.finish);
        ExpectMessage(whole.message, Expected(c, policy), where);
        EXPECT_EQ(Parse(c.options, c.text, c.finish, EveryByte(c.text.size())).message,
                  whole.message)
            << where << " byte by byte";
      }
    }
  }
}

TEST(OutputParserTest, RecordedStreamsSayWhatIsDecidedAndNoMore) {
  for (Case& c : RecordedCases("stream.jsonl")) {
    c.options.policy = Policy::kToolkit;
    for (const json& chunking : c.recorded["chunkings"]) {
      const Parsed parsed = Parse(c.options, c.text, c.finish, CutsOf(chunking["cuts"]));
      ExpectMessage(parsed.message, c.recorded["final"], c.id);
      const json& late = chunking.contains("toolkit") ? chunking["toolkit"] : chunking["earliest"];
      for (size_t n = 1; n <= parsed.events.size(); ++n) {
        const std::string where = c.id + chunking["cuts"].dump() + " piece " + std::to_string(n);
        EXPECT_TRUE(IsPrefix(Said(parsed, n), Said(chunking["earliest"], n))) << where;
        EXPECT_TRUE(IsPrefix(Said(late, n), Said(parsed, n))) << where;
      }
    }
  }
}

TEST(OutputParserTest, RecordedCutsDoNotChangeTheMessage) {
  for (Case& c : RecordedCases("stream.jsonl")) {
    for (const Policy policy : {Policy::kToolkit, Policy::kRecommended}) {
      c.options.policy = policy;
      const json whole = Parse(c.options, c.text, c.finish).message;
      const auto check = [&](const json& cuts) {
        EXPECT_EQ(Parse(c.options, c.text, c.finish, CutsOf(cuts)).message, whole)
            << c.id << NameOf(policy) << cuts;
      };
      check(c.recorded["byte_cuts"]);
      for (const json& chunking : c.recorded["chunkings"]) check(chunking["cuts"]);
    }
  }
}

TEST(OutputParserTest, WorkedExamplesAreTheSameAtEveryTwoWaySplit) {
  for (Case& c : RecordedCases("worked_examples.jsonl")) {
    for (const Policy policy : {Policy::kToolkit, Policy::kRecommended}) {
      c.options.policy = policy;
      for (size_t cut = 0; cut <= c.text.size(); ++cut) {
        EXPECT_EQ(Parse(c.options, c.text, c.finish, {cut}).message, Expected(c, policy))
            << c.id << NameOf(policy) << " at " << cut;
      }
    }
  }
}

TEST(OutputParserTest, RecordedTokensGiveTheRecordedMessages) {
  DI_SKIP_WITHOUT_PUBLISHED_TOKENIZER();
  for (Case& c : RecordedCases("stream.jsonl")) {
    const json& tokens = c.recorded["tokens"];
    if (tokens.is_null()) continue;
    const auto ids = tokens["ids"].get<std::vector<int32_t>>();
    for (const Policy policy : {Policy::kToolkit, Policy::kRecommended}) {
      c.options.policy = policy;
      const Parsed parsed = ParseIds(c.options, *RenamedTokenizer(), ids, c.finish);
      ExpectMessage(parsed.message, ExpectedOfIds(c, policy), c.id + NameOf(policy));
      if (policy == Policy::kRecommended) continue;
      for (size_t n = 1; n <= parsed.events.size(); ++n) {
        EXPECT_TRUE(IsPrefix(Said(tokens["toolkit"], n), Said(parsed, n))) << c.id << " " << n;
      }
    }
  }
}

TEST(OutputParserTest, RecordedAnswersAreTheSameAsTokensButForOddHeaders) {
  DI_SKIP_WITHOUT_PUBLISHED_TOKENIZER();
  for (const char* file : {"parse.jsonl", "worked_examples.jsonl"}) {
    for (Case& c : RecordedCases(file)) {
      const auto ids = RenamedTokenizer()->Encode(c.text);
      ASSERT_TRUE(ids.has_value());
      for (const Policy policy : {Policy::kToolkit, Policy::kRecommended}) {
        c.options.policy = policy;
        ExpectMessage(ParseIds(c.options, *RenamedTokenizer(), *ids, c.finish).message,
                      ExpectedOfIds(c, policy), c.id + NameOf(policy));
      }
    }
  }
}

}  // namespace
}  // namespace deepinfer
