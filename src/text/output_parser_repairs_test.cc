// What the recommended policy makes of markup that is not quite right, and what both policies
// promise for any input.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <time.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/sanitizer_for_test.h"
#include "base/utf8.h"
#include "text/json_text.h"
#include "text/output_parser.h"
#include "text/text_test_data.h"

namespace deepinfer {
namespace {

using Policy = OutputParserOptions::Policy;
using Start = OutputParserOptions::Start;
using Calls = std::vector<std::pair<std::string, std::string>>;

struct Answer {
  std::string reasoning;
  std::string content;
  Calls calls;
  OutputEnd end = OutputEnd::kStop;
  bool cut_call = false;
  std::optional<std::string> stop_string;

  friend bool operator==(const Answer&, const Answer&) = default;
};

std::ostream& operator<<(std::ostream& out, const Answer& answer) {
  out << "reasoning '" << answer.reasoning << "' content '" << answer.content << "' calls";
  for (const auto& [name, arguments] : answer.calls) out << " " << name << arguments;
  return out << " " << OutputEndName(answer.end) << (answer.cut_call ? " cut" : "");
}

// Collects events and checks what holds for all of them: whole characters only, in order.
class Collector {
 public:
  void Take(std::vector<OutputEvent>* events) {
    for (const OutputEvent& event : *events) {
      builder_.Add(event);
      if (const auto* reasoning = std::get_if<ReasoningEvent>(&event)) {
        CheckText(reasoning->text);
        EXPECT_FALSE(content_began_);
      } else if (const auto* content = std::get_if<ContentEvent>(&event)) {
        CheckText(content->text);
        content_began_ = true;
        EXPECT_EQ(num_calls_, 0);
      } else if (const auto* call = std::get_if<ToolCallEvent>(&event)) {
        EXPECT_EQ(call->index, num_calls_++);
        content_began_ = true;
      } else if (const auto* arguments = std::get_if<ArgumentsEvent>(&event)) {
        CheckText(arguments->text);
        EXPECT_EQ(arguments->index, num_calls_ - 1);
      }
    }
    events->clear();
  }

  Answer Finish(OutputParser* parser, OutputEnd backend_end) {
    std::vector<OutputEvent> events;
    Answer answer;
    answer.end = parser->Finish(backend_end, &events);
    Take(&events);
    answer.reasoning = builder_.message().reasoning_content;
    answer.content = builder_.message().content;
    for (const ToolCall& call : builder_.message().tool_calls)
      answer.calls.emplace_back(call.name, call.arguments);
    answer.cut_call = parser->cut_call();
    answer.stop_string = parser->stop_string();
    EXPECT_FALSE(answer.end == OutputEnd::kToolCalls && answer.calls.empty());
    return answer;
  }

 private:
  static void CheckText(const std::string& text) {
    EXPECT_FALSE(text.empty());
    EXPECT_FALSE(FindInvalidUtf8(text).has_value()) << text;
  }

  MessageBuilder builder_;
  bool content_began_ = false;
  int64_t num_calls_ = 0;
};

OutputParserOptions Options(Start start = Start::kContent) {
  OutputParserOptions options;
  options.start = start;
  options.tools = true;
  return options;
}

Answer ParseInPieces(const OutputParserOptions& options, std::string_view text, size_t piece,
                     OutputEnd end = OutputEnd::kStop) {
  OutputParser parser(options);
  Collector collector;
  std::vector<OutputEvent> events;
  for (size_t at = 0; at < text.size(); at += piece) {
    parser.Push(text.substr(at, piece), &events);
    collector.Take(&events);
  }
  return collector.Finish(&parser, end);
}

// The answer at once, which has to be the same byte by byte and at every cut.
Answer Parse(const OutputParserOptions& options, std::string_view text,
             OutputEnd end = OutputEnd::kStop) {
  const Answer answer = ParseInPieces(options, text, std::string_view::npos / 2, end);
  EXPECT_EQ(ParseInPieces(options, text, 1, end), answer) << text;
  if (text.size() > 1000) return answer;
  for (size_t cut = 1; cut < text.size(); ++cut) {
    OutputParser parser(options);
    Collector collector;
    std::vector<OutputEvent> events;
    for (const std::string_view piece : {text.substr(0, cut), text.substr(cut)}) {
      parser.Push(piece, &events);
      collector.Take(&events);
    }
    EXPECT_EQ(collector.Finish(&parser, end), answer) << text << " cut at " << cut;
  }
  return answer;
}

// "@" stands for the marker.
std::string Markup(std::string text) {
  for (size_t at = 0; (at = text.find('@', at)) != std::string::npos;)
    text.replace(at, 1, "｜DSML｜");
  return text;
}

Answer ParseMarkup(const std::string& text, OutputEnd end = OutputEnd::kStop,
                   Start start = Start::kContent) {
  return Parse(Options(start), Markup(text), end);
}

// The calls in a block with this inside.
Calls CallsIn(const std::string& inside, OutputEnd end = OutputEnd::kStop) {
  return ParseMarkup("<@ calls>\n" + inside + "</@ calls>", end).calls;
}

// The arguments of the only call.
std::string ArgumentsIn(const std::string& inside) {
  const Calls calls = CallsIn("<@ invoke name=\"f\">" + inside + "</@ invoke>\n");
  EXPECT_EQ(calls.size(), 1u) << inside;
  if (calls.size() != 1) return "";
  EXPECT_EQ(calls[0].first, "f");
  return calls[0].second;
}

constexpr char kA[] = "<@ parameter name=\"a\" string=\"true\">1</@ parameter>\n";

TEST(OutputParserRepairsTest, OpenersAreAcceptedInEverySpelling) {
  for (const std::string opener :
       {"<@ calls>\n", "<@calls>", "<@tool_calls>\n", "<@ tool_calls>\n", "<@function_calls>\n",
        "<@ function_calls>", "<@ tool_ccalls>\n", "<@>", ""}) {
    const Answer answer =
        ParseMarkup("Hi.\n\n" + opener + "<@ invoke name=\"f\">\n" + kA + "</@ invoke>\n");
    EXPECT_EQ(answer.calls, (Calls{{"f", R"({"a": "1"})"}})) << opener;
    EXPECT_EQ(answer.content, "Hi.") << opener;
    EXPECT_EQ(answer.end, OutputEnd::kToolCalls);
  }
}

// The notation of this model has a space behind the marker; the one before had none, and another
// name for the block.
TEST(OutputParserRepairsTest, T039BothGenerationsNotationsGiveTheSameCalls) {
  const auto notation = [](const std::string& block, const std::string& space) {
    const std::string at = "@" + space;
    return "Hi.\n\n<" + at + block + ">\n<" + at + "invoke name=\"f\">\n<" + at +
           "parameter name=\"a\" string=\"true\">1</" + at + "parameter>\n<" + at +
           "parameter name=\"b\" string=\"false\">[2]</" + at + "parameter>\n</" + at +
           "invoke>\n<" + at + "invoke name=\"g\">\n</" + at + "invoke>\n</" + at + block + ">";
  };
  for (const std::string& text : {notation("calls", " "), notation("tool_calls", "")}) {
    const Answer answer = ParseMarkup(text);
    EXPECT_EQ(answer.calls, (Calls{{"f", R"({"a": "1", "b": [2]})"}, {"g", "{}"}})) << text;
    EXPECT_EQ(answer.content, "Hi.");
    EXPECT_EQ(answer.end, OutputEnd::kToolCalls);
  }
}

TEST(OutputParserRepairsTest, RepeatedAndOrphanClosersAreAbsorbed) {
  const std::string call = std::string("<@ invoke name=\"f\">\n") + kA + "</@ invoke>\n";
  for (const std::string tail : {"</@ calls>", "</@ calls></@ calls>", "</@ calls>\n</@tool_calls>",
                                 "</@ invoke></@ calls>", "</@ calls></think>", "</@ calls>text"}) {
    const Answer answer = ParseMarkup("Hi.\n\n<@ calls>\n" + call + tail);
    EXPECT_EQ(answer.calls, (Calls{{"f", R"({"a": "1"})"}})) << tail;
    EXPECT_EQ(answer.content, "Hi.") << tail;
  }
  // Also without any block.
  EXPECT_EQ(ParseMarkup("Hi.\n</@ calls>\nMore").content, "Hi.\nMore");
  EXPECT_EQ(ParseMarkup("Hi.</@tool_calls>").content, "Hi.");
  EXPECT_EQ(ParseMarkup("Hi.</@ cal").content, "Hi.");
  EXPECT_EQ(ParseMarkup("Hi.</@ call us").content, "Hi. call us");
  EXPECT_EQ(ParseMarkup("a</@ calls>b</think>c", OutputEnd::kStop, Start::kReasoning).reasoning,
            "ab");
}

TEST(OutputParserRepairsTest, RepeatedClosersOfAParameterKeepWhatFollows) {
  const std::string b = "<@ parameter name=\"b\" string=\"false\">2</@ parameter>\n";
  EXPECT_EQ(ArgumentsIn(kA + std::string("</@ parameter>\n") + b), R"({"a": "1", "b": 2})");
}

TEST(OutputParserRepairsTest, AClosingTagOfAParameterWithAnyCharacterMissingStillCloses) {
  const std::vector<std::string> characters = {"<", "/", "｜", "D", "S", "M", "L", "｜", " ", "p",
                                               "a", "r", "a",  "m", "e", "t", "e", "r",  ">"};
  for (size_t missing = 0; missing < characters.size(); ++missing) {
    std::string closer;
    for (size_t i = 0; i < characters.size(); ++i)
      if (i != missing) closer += characters[i];
    for (const std::string next :
         {"<@ parameter name=\"b\" string=\"true\">2</@ parameter>\n", ""}) {
      const std::string arguments =
          ArgumentsIn("<@ parameter name=\"a\" string=\"true\">1" + closer + "\n" + next);
      EXPECT_EQ(arguments, next.empty() ? R"({"a": "1"})" : R"({"a": "1", "b": "2"})") << closer;
    }
  }
}

TEST(OutputParserRepairsTest, MisspeltClosersOfACallAndABlockStillClose) {
  for (const std::string closer : {"</@ invoke>", "</@invoke>", "</@ invok>", "</@ foo>", "</@>",
                                   "<@ invoke>", "@ invoke>", "/@ invoke>", ""}) {
    const Calls calls = CallsIn("<@ invoke name=\"f\">\n" + std::string(kA) + closer +
                                "\n<@ invoke name=\"g\">\n</@ invoke>\n");
    EXPECT_EQ(calls, (Calls{{"f", R"({"a": "1"})"}, {"g", "{}"}})) << closer;
  }
}

TEST(OutputParserRepairsTest, WhatIsNotClosedIsClosedByWhatFollows) {
  const std::string open = "<@ parameter name=\"a\" string=\"true\">1";
  EXPECT_EQ(CallsIn("<@ invoke name=\"f\">\n" + open + "</@ invoke>"),
            (Calls{{"f", R"({"a": "1"})"}}));
  EXPECT_EQ(CallsIn("<@ invoke name=\"f\">\n" + open), (Calls{{"f", R"({"a": "1"})"}}));
  EXPECT_EQ(CallsIn("<@ invoke name=\"f\">\n" + open + "\n<@ invoke name=\"g\">"),
            (Calls{{"f", R"({"a": "1\n"})"}, {"g", "{}"}}));
}

// Headers that are not of the described form, and what the vendor makes of a call with them.
TEST(OutputParserRepairsTest, InTextACallWithAnOddHeaderIsReadAsTheVendorReadsIt) {
  const auto with_header = [](const std::string& header) {
    return CallsIn("<@ invoke name=\"f\">\n<@ parameter" + header +
                   "v</@ parameter>\n</@ invoke>\n");
  };
  const auto f = [](const std::string& arguments) { return Calls{{"f", arguments}}; };
  EXPECT_EQ(with_header(R"( name="a>b" string="true">)"), f(R"({"a>b": "v"})"));  // as described
  EXPECT_EQ(with_header(R"( name="two words" string="true">)"), f(R"({"two: "v"})"));
  EXPECT_EQ(with_header(R"( name="q"q" string="true">)"), f(R"({"q"q": "v"})"));
  EXPECT_EQ(with_header(R"( name="a\b" string="true">)"), f(R"({"a\b": "v"})"));
  EXPECT_EQ(with_header(R"( name="a" type="x" string="true">)"), f(R"({"a": "v"})"));
  EXPECT_EQ(with_header(R"( type="x" name="a" string="true">)"), f("{}"));
  EXPECT_EQ(with_header(R"( name="a" string="true" type="x">)"), f(R"({"a": )"));
  EXPECT_EQ(with_header(R"(  name="a" string="true">)"), f("{}"));
  EXPECT_EQ(with_header(R"( name="a">)"), f(Markup(R"({"a">v</@: )")));
  EXPECT_EQ(with_header(R"( name="a" string="maybe">)"), f(R"({"a": )"));
  EXPECT_EQ(with_header(R"( name="a" string="true")"), f(R"({"a": )"));
  const auto with_name = [](const std::string& header) {
    return CallsIn("<@ invoke" + header + "\n" + kA + "</@ invoke>");
  };
  EXPECT_EQ(with_name(R"( name="">)"), (Calls{{"", R"({"a": "1"})"}}));
  EXPECT_EQ(with_name(R"( name="f" id="3">)"), f(R"({"a": "1"})"));
  EXPECT_EQ(with_name(R"(  name="f">)"), Calls());
  EXPECT_EQ(with_name(R"( id="3" name="f">)"), Calls());
}

TEST(OutputParserRepairsTest, WhatTheVendorReadsIsOneCallAndRepairsGoOnBehindIt) {
  const std::string odd = "<@ invoke name=\"f\"><@ parameter name=\"b c\" string=\"true\">2";
  // The first call is not closed, the second lacks the end of a parameter.
  const std::string next =
      "<@ invoke name=\"g\"><@ parameter name=\"a\" string=\"true\">1</@ invoke>";
  EXPECT_EQ(CallsIn(odd + "</@ parameter></@ invoke>" + next),
            (Calls{{"f", R"({"b: "2"})"}, {"g", R"({"a": "1"})"}}));
  // What the vendor takes for the end of the call ends it: here, the second closing tag.
  EXPECT_EQ(CallsIn("<@ invoke name=\"f\">" + std::string(kA) + "</@ parameter>" +
                    "<@ parameter name=\"b c\" string=\"true\">2</@ parameter></@ invoke>" + next),
            (Calls{{"f", R"({"a": "1"})"}, {"g", R"({"a": "1"})"}}));
  // A block that ends in place of the call.
  const Answer answer = ParseMarkup("<@ calls>" + odd + "</@ parameter></@ calls>" + next);
  EXPECT_EQ(answer.calls, (Calls{{"f", R"({"b: "2"})"}}));
}

TEST(OutputParserRepairsTest, WhatTheVendorReadsIsReportedWholeOrNotAtAll) {
  const std::string text = Markup(
      "<@ calls>\n<@ invoke name=\"f\">\n<@ parameter name=\"b c\" string=\"true\">2</@ "
      "parameter>\n</@ invoke>");
  const size_t complete = text.size() - std::string_view(" invoke>").size();
  const size_t begins = text.find("name=");
  for (size_t size = 0; size <= text.size(); ++size) {
    const Answer answer = Parse(Options(), text.substr(0, size), OutputEnd::kLength);
    EXPECT_EQ(answer.calls, size >= complete ? Calls({{"f", R"({"b: "2"})"}}) : Calls()) << size;
    EXPECT_EQ(answer.cut_call, size >= begins + 5 && size < complete) << size;
  }
}

TEST(OutputParserRepairsTest, ValuesThatAreNoJsonAreStrings) {
  const auto value = [](const std::string& text) {
    return ArgumentsIn("<@ parameter name=\"a\" string=\"false\">" + text + "</@ parameter>");
  };
  EXPECT_EQ(value("two"), R"({"a": "two"})");
  EXPECT_EQ(value(""), R"({"a": ""})");
  EXPECT_EQ(value("{\"x\": 1"), R"({"a": "{\"x\": 1"})");
  EXPECT_EQ(value("[1,]"), R"({"a": "[1,]"})");
  EXPECT_EQ(value("NaN"), R"({"a": "NaN"})");
  EXPECT_EQ(value(" 2.50\n"), R"({"a": 2.50})");
  EXPECT_EQ(value("123456789012345678901234567890"), R"({"a": 123456789012345678901234567890})");
}

TEST(OutputParserRepairsTest, OfAParameterThatIsGivenTwiceTheLastCounts) {
  const auto parameter = [](const std::string& key, const std::string& value) {
    return "<@ parameter name=\"" + key + "\" string=\"true\">" + value + "</@ parameter>\n";
  };
  EXPECT_EQ(ArgumentsIn(parameter("a", "1") + parameter("b", "2") + parameter("a", "3")),
            R"({"a": "3", "b": "2"})");
}

TEST(OutputParserRepairsTest, AnObjectInPlaceOfParametersIsUsed) {
  EXPECT_EQ(ArgumentsIn("\n{\"a\": [1, 2]}\n"), R"({"a": [1, 2]})");
  // Broken, it is still what the model wrote, for the client to see.
  EXPECT_EQ(ArgumentsIn("{\"a\": [1, 2}"), R"({"a": [1, 2})");
  EXPECT_EQ(ArgumentsIn("\nnothing\n"), "{}");
}

TEST(OutputParserRepairsTest, ProtocolTextInAnArgumentIsText) {
  const std::string value = "a</think>b<think></invoke><parameter name=\"x\">｜DSML｜ <｜DSML";
  EXPECT_EQ(ArgumentsIn("<@ parameter name=\"a\" string=\"true\">" + value + "</@ parameter>"),
            "{\"a\": \"a</think>b<think></invoke><parameter name=\\\"x\\\">｜DSML｜ <｜DSML\"}");
}

TEST(OutputParserRepairsTest, ACallThatTheLimitCutsIsNotReported) {
  const std::string first = Markup("<@ calls>\n<@ invoke name=\"f\">\n" + std::string(kA) + "</@");
  const std::string whole = first + Markup(" invoke>\n</@ calls>");
  for (size_t size = 0; size <= whole.size(); ++size) {
    const std::string text = whole.substr(0, size);
    for (const OutputEnd end : {OutputEnd::kLength, OutputEnd::kContentFilter}) {
      const Answer answer = Parse(Options(), text, end);
      EXPECT_EQ(answer.end, end);
      const bool complete = size >= first.size();
      EXPECT_EQ(answer.calls, complete ? Calls({{"f", R"({"a": "1"})"}}) : Calls()) << text;
      const size_t begins = text.find("name=");
      EXPECT_EQ(answer.cut_call, begins != std::string::npos && !complete) << text;
    }
    // When the model ends there by itself, the call counts from the end of its last parameter on.
    const Answer stopped = Parse(Options(), text, OutputEnd::kStop);
    EXPECT_EQ(stopped.end, stopped.calls.empty() ? OutputEnd::kStop : OutputEnd::kToolCalls);
    if (!stopped.calls.empty()) {
      EXPECT_TRUE(IsJson(stopped.calls[0].second)) << text;
    }
  }
}

TEST(OutputParserRepairsTest, FinishedCallsAreReportedAlsoIfTheNextIsCut) {
  const Answer answer =
      ParseMarkup("<@ calls>\n<@ invoke name=\"f\">\n</@ invoke>\n<@ invoke name=\"g\">\n<@ param",
                  OutputEnd::kLength);
  EXPECT_EQ(answer.calls, (Calls{{"f", "{}"}}));
  EXPECT_TRUE(answer.cut_call);
  EXPECT_EQ(answer.end, OutputEnd::kLength);
}

TEST(OutputParserRepairsTest, ABlockWithoutCallsIsNeitherContentNorACall) {
  for (const std::string block : {"<@ calls>\n</@ calls>", "<@ calls>\nnonsense\n</@ calls>",
                                  "<@ calls>", "<@ invoke name=\"", "<@ invoke name=\"f"}) {
    const Answer answer = ParseMarkup("Hi.\n\n" + block);
    EXPECT_EQ(answer.content, "Hi.") << block;
    EXPECT_EQ(answer.calls, Calls()) << block;
    EXPECT_EQ(answer.end, OutputEnd::kStop) << block;
  }
}

TEST(OutputParserRepairsTest, ACallBeginsBeforeReasoningIsClosed) {
  const std::string block = "\n\n<@ calls>\n<@ invoke name=\"f\">\n</@ invoke>\n</@ calls>";
  for (const std::string tail : {"", "</think>", "</think>\n\nDone."}) {
    const Answer answer = ParseMarkup("Hm." + block + tail, OutputEnd::kStop, Start::kReasoning);
    EXPECT_EQ(answer.reasoning, "Hm.");
    EXPECT_EQ(answer.content, "");
    EXPECT_EQ(answer.calls, (Calls{{"f", "{}"}}));
  }
}

TEST(OutputParserTest, StopStringsCountInContentOnly) {
  OutputParserOptions options = Options(Start::kReasoning);
  options.stop = {"aab", "zz"};
  const Answer answer = Parse(options, "zz aab</think>x aaab zz");
  EXPECT_EQ(answer.reasoning, "zz aab");
  EXPECT_EQ(answer.content, "x a");
  EXPECT_EQ(answer.stop_string, "aab");
  EXPECT_EQ(answer.end, OutputEnd::kStop);
  EXPECT_EQ(Parse(options, "aab", OutputEnd::kLength).end, OutputEnd::kLength);
  EXPECT_EQ(Parse(options, "</think>aab", OutputEnd::kLength).end, OutputEnd::kStop);
}

TEST(OutputParserTest, NothingHappensAfterAStopString) {
  OutputParserOptions options = Options();
  options.stop = {"END"};
  OutputParser parser(options);
  std::vector<OutputEvent> events;
  parser.Push("a ENDb", &events);
  EXPECT_EQ(parser.stop_string(), "END");
  const size_t size = events.size();
  parser.Push(Markup("<@ calls>\n<@ invoke name=\"f\">\n</@ invoke>"), &events);
  EXPECT_EQ(parser.Finish(OutputEnd::kLength, &events), OutputEnd::kStop);
  EXPECT_EQ(events.size(), size);
}

TEST(OutputParserTest, TextThatEndsLikeAMarkerIsReleasedAtTheEnd) {
  for (const std::string marker : {"</think>", "<｜DSML｜", "```json\n", "END"}) {
    for (size_t size = 1; size < marker.size(); ++size) {
      const std::string part = marker.substr(0, size);
      if (FindInvalidUtf8(part).has_value()) continue;
      OutputParserOptions options = Options();
      options.stop = {"END"};
      EXPECT_EQ(Parse(options, "2 " + part).content, "2 " + part);
      EXPECT_EQ(Parse(options, "2\n" + part + " 3").content, "2\n" + part + " 3");
    }
  }
}

TEST(OutputParserTest, EventsCarryWholeCharactersAndBadBytesAreReplaced) {
  EXPECT_EQ(Parse(Options(), "a😀é中").content, "a😀é中");
  EXPECT_EQ(Parse(Options(), "a\xF0\x9F\x98").content, "a\xEF\xBF\xBD");
  EXPECT_EQ(Parse(Options(), "a\xF0\x9F\x98z\xFF<").content, "a\xEF\xBF\xBDz\xEF\xBF\xBD<");
  EXPECT_EQ(Parse(Options(), "\xE7\xBB</think>b").content,
            "\xEF\xBF\xBD"
            "b");
  // A part of a character waits for the rest.
  OutputParser parser(Options());
  std::vector<OutputEvent> events;
  parser.Push("\xF0\x9F", &events);
  EXPECT_TRUE(events.empty());
  parser.Push("\x98\x80", &events);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(std::get<ContentEvent>(events[0]).text, "😀");
}

TEST(OutputParserTest, WhereReasoningEndsIsKnownAtOnce) {
  OutputParser parser(Options(Start::kReasoning));
  EXPECT_TRUE(parser.in_reasoning());
  std::vector<OutputEvent> events;
  parser.Push("a</think", &events);
  EXPECT_TRUE(parser.in_reasoning());
  parser.Push(">", &events);
  EXPECT_FALSE(parser.in_reasoning());
  EXPECT_FALSE(OutputParser(Options()).in_reasoning());
  EXPECT_TRUE(OutputParser(Options(Start::kReasoningContinuation)).in_reasoning());
}

TEST(OutputParserTest, ReasoningThatIsNeverClosedCanBecomeContent) {
  OutputParserOptions options = Options(Start::kReasoning);
  EXPECT_EQ(Parse(options, "Good morning!").reasoning, "Good morning!");
  options.unclosed_reasoning_is_content = true;
  EXPECT_EQ(Parse(options, "Good morning!").content, "Good morning!");
  EXPECT_EQ(Parse(options, "Good morning!").reasoning, "");
  EXPECT_EQ(Parse(options, "Good morning!", OutputEnd::kLength).reasoning, "Good morning!");
  EXPECT_EQ(Parse(options, "Hm.\n</think>Yes").reasoning, "Hm.");
  const Answer call =
      Parse(options, Markup("Hm.\n\n<@ calls>\n<@ invoke name=\"f\">\n</@ invoke>\n"));
  EXPECT_EQ(call.reasoning, "Hm.");
  EXPECT_EQ(call.calls.size(), 1u);
}

TEST(OutputParserTest, AnEmptyAnswerIsEmpty) {
  for (const Start start : {Start::kContent, Start::kReasoning, Start::kToolCalls})
    EXPECT_EQ(Parse(Options(start), ""), Answer());
}

// ---- Ids.

int32_t IdOf(std::string_view name) {
  return RenamedTokenizer()->IdOf(name).value();
}

// "@" is the special token; everything else is ordinary text, spelt markers too.
std::vector<int32_t> Ids(const std::string& text) {
  std::vector<int32_t> ids;
  EncodeOptions options;
  options.parse_special = false;
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t end = std::min(text.find('@', begin), text.size());
    const auto piece =
        RenamedTokenizer()->Encode(std::string_view(text).substr(begin, end - begin), options);
    ids.insert(ids.end(), piece->begin(), piece->end());
    if (end < text.size()) ids.push_back(IdOf("｜DSML｜"));
    begin = end + 1;
  }
  return ids;
}

Answer ParseIds(const OutputParserOptions& options, const std::vector<int32_t>& ids) {
  OutputParser parser(options, RenamedTokenizer());
  Collector collector;
  std::vector<OutputEvent> events;
  for (const int32_t id : ids) {
    parser.PushToken(id, &events);
    collector.Take(&events);
  }
  return collector.Finish(&parser, OutputEnd::kStop);
}

TEST(OutputParserTokensTest, SpeltMarkersAreTextAndTokensAreMarkup) {
  DI_SKIP_WITHOUT_PUBLISHED_TOKENIZER();
  const std::string quoted = "Use `<｜DSML｜ calls>` and </think>.";
  EXPECT_EQ(ParseIds(Options(), Ids(quoted)).content, quoted);
  EXPECT_EQ(ParseIds(Options(Start::kReasoning), Ids(quoted)).reasoning, quoted);
  // Arguments may hold every marker.
  const std::string value = "</｜DSML｜ parameter>\n<｜DSML｜ invoke name=\"g\"></｜DSML｜ calls>";
  const Answer answer = ParseIds(
      Options(), Ids("<@ calls>\n<@ invoke name=\"f\">\n<@ parameter name=\"a\" string=\"true\">" +
                     value + "</@ parameter>\n</@ invoke>\n</@ calls>"));
  ASSERT_EQ(answer.calls.size(), 1u);
  EXPECT_EQ(nlohmann::json::parse(answer.calls[0].second), (nlohmann::json{{"a", value}}));
}

Calls CallsInIds(const std::string& inside) {
  return ParseIds(Options(), Ids("<@ calls>\n" + inside + "</@ calls>")).calls;
}

TEST(OutputParserTokensTest, HeadersAreReadAsTheyAreMeant) {
  DI_SKIP_WITHOUT_PUBLISHED_TOKENIZER();
  const auto with_header = [](const std::string& header) {
    const Calls calls = CallsInIds("<@ invoke name=\"f\">\n<@ parameter" + header +
                                   "v</@ parameter>\n</@ invoke>\n");
    return calls.size() == 1 && calls[0].first == "f" ? calls[0].second : "none";
  };
  EXPECT_EQ(with_header(R"( name="two words" string="true">)"), R"({"two words": "v"})");
  EXPECT_EQ(with_header(R"( name="q"q" string="true">)"), R"({"q\"q": "v"})");
  EXPECT_EQ(with_header(R"( name="a>b" string="true">)"), R"({"a>b": "v"})");
  EXPECT_EQ(with_header(R"( name="a" type="x" string="true">)"), R"({"a": "v"})");
  EXPECT_EQ(with_header(R"( type="x" name="a" string="true">)"), R"({"a": "v"})");
  EXPECT_EQ(with_header(R"( name="a" string="true" type="x">)"), R"({"a": "v"})");
  EXPECT_EQ(with_header(R"(  name="a" string="true">)"), R"({"a": "v"})");
  EXPECT_EQ(with_header(R"( name="a">)"), R"({"a": "v"})");
  EXPECT_EQ(with_header(R"( name="a" string="maybe">)"), R"({"a": "v"})");
  EXPECT_EQ(with_header(R"( name="a" string="true")"), R"({"a": "v"})");
  EXPECT_EQ(with_header(R"( name="a>)"), R"({"a": "v"})");
  // An attribute whose name merely ends like another is another.
  EXPECT_EQ(with_header(R"( rename="b" name="a" string="true">)"), R"({"a": "v"})");
  // Names of calls.
  const auto name_in = [](const std::string& header) {
    const Calls calls = CallsInIds("<@ invoke" + header + "\n" + kA + "</@ invoke>");
    return calls.size() == 1 && calls[0].second == R"({"a": "1"})" ? calls[0].first : "none";
  };
  EXPECT_EQ(name_in(R"( name="f g">)"), "f g");
  EXPECT_EQ(name_in(R"( name="f" id="3">)"), "f");
  EXPECT_EQ(name_in(R"( id="3" name="f">)"), "f");
  EXPECT_EQ(name_in(R"( name="f>)"), "f");
  EXPECT_EQ(name_in(R"( name="f")"), "f");
  EXPECT_EQ(name_in(R"(  name="f">)"), "f");
  EXPECT_EQ(name_in(R"( rename="g" name="f">)"), "f");
}

TEST(OutputParserTokensTest, ACallWithoutNameIsNoCall) {
  DI_SKIP_WITHOUT_PUBLISHED_TOKENIZER();
  const Answer answer = ParseIds(Options(), Ids("<@ calls>\n<@ invoke name=\"\">\n" +
                                                std::string(kA) + "</@ invoke>\n</@ calls>"));
  EXPECT_EQ(answer.calls, Calls());
  EXPECT_EQ(answer.end, OutputEnd::kStop);
}

TEST(OutputParserTokensTest, StopStringsSeeTheSpellingOfTokens) {
  DI_SKIP_WITHOUT_PUBLISHED_TOKENIZER();
  OutputParserOptions options = Options();
  options.stop = {"</think>"};
  EXPECT_EQ(ParseIds(options, {IdOf("</think>")}).stop_string, "</think>");
  EXPECT_EQ(ParseIds(options, Ids("a</think>b")).content, "a");
}

TEST(OutputParserTokensTest, TheMarkerTokenIsNeverText) {
  DI_SKIP_WITHOUT_PUBLISHED_TOKENIZER();
  for (const std::string text :
       {"a@", "a@b", "a <@ b", "a</@b", "a/@b", "{\"a\": \"@\"}", "@@", "<@@", "a\n</@ calls>b"}) {
    for (const bool json : {false, true}) {
      for (const Start start : {Start::kContent, Start::kReasoning}) {
        OutputParserOptions options = Options(start);
        options.json = json;
        const Answer answer = ParseIds(options, Ids(text));
        EXPECT_EQ((answer.content + answer.reasoning).find("DSML"), std::string::npos) << answer;
      }
    }
  }
}

TEST(OutputParserTokensTest, WithoutToolsTheMarkerIsPlainText) {
  DI_SKIP_WITHOUT_PUBLISHED_TOKENIZER();
  EXPECT_EQ(ParseIds(OutputParserOptions(), Ids("<@ calls>")).content, "<｜DSML｜ calls>");
}

TEST(OutputParserTokensTest, CharactersThatTokensCutAreWhole) {
  DI_SKIP_WITHOUT_PUBLISHED_TOKENIZER();
  const std::string text = "👍🏽🧑‍🚀 é中";
  EXPECT_EQ(ParseIds(Options(), Ids(text)).content, text);
  std::vector<int32_t> cut = Ids("😀👍🏽");
  cut.pop_back();
  cut.push_back(IdOf("</think>"));
  EXPECT_FALSE(FindInvalidUtf8(ParseIds(Options(), cut).content).has_value());
}

// ---- Any input.

const std::vector<std::string>& SoupParts() {
  static const std::vector<std::string> parts = {"<",
                                                 "</",
                                                 "/",
                                                 ">",
                                                 "\n",
                                                 "\n\n",
                                                 " ",
                                                 "\"",
                                                 "@",
                                                 "<@",
                                                 "</@",
                                                 "<@ ",
                                                 " calls>",
                                                 " invoke",
                                                 " name=\"",
                                                 " parameter",
                                                 " parameter name=\"",
                                                 "f\">\n",
                                                 "\" string=\"true\">",
                                                 "\" string=\"false\">",
                                                 "v",
                                                 "{",
                                                 "}",
                                                 "[1]",
                                                 "</think>",
                                                 "<think>",
                                                 "END",
                                                 "EN",
                                                 "```json\n",
                                                 "\n```",
                                                 "｜",
                                                 "é",
                                                 "😀",
                                                 "\xF0\x9F",
                                                 "\x98",
                                                 "\xFF",
                                                 "\\",
                                                 "</@ parameter>",
                                                 "</@ invoke>",
                                                 "</@ calls>",
                                                 "<@ invoke name=\"f\">\n",
                                                 "<@ parameter name=\"a\" string=\"true\">",
                                                 "<@ parameter name=\"b\" string=\"false\">",
                                                 "<@ parameter name=\"b c\" string=\"true\">",
                                                 "<@ parameter  name=\"b\" string=\"true\">",
                                                 "<@ invoke name=\"\">",
                                                 "invoke name=\""};
  return parts;
}

OutputParserOptions AnyOptions() {
  OutputParserOptions options;
  options.start = static_cast<Start>(*rc::gen::inRange(0, 5));
  options.tools = *rc::gen::weightedElement<bool>({{4, true}, {1, false}});
  options.json = *rc::gen::weightedElement<bool>({{1, true}, {3, false}});
  options.policy = *rc::gen::element(Policy::kRecommended, Policy::kToolkit);
  options.unclosed_reasoning_is_content = *rc::gen::arbitrary<bool>();
  options.stop = *rc::gen::elementOf(
      std::vector<std::vector<std::string>>{{}, {"END"}, {"\n\n", "EN"}, {"｜"}});
  return options;
}

std::vector<std::string> AnySoup() {
  std::vector<std::string> soup;
  for (const int part : *rc::gen::container<std::vector<int>>(
           rc::gen::inRange(0, static_cast<int>(SoupParts().size()))))
    soup.push_back(SoupParts()[static_cast<size_t>(part)]);
  return soup;
}

RC_GTEST_PROP(OutputParserSoupTest, CutsChangeNothing, ()) {
  const OutputParserOptions options = AnyOptions();
  std::string text;
  for (const std::string& part : AnySoup()) text += Markup(part);
  const OutputEnd end = *rc::gen::element(OutputEnd::kStop, OutputEnd::kLength);
  const Answer whole = ParseInPieces(options, text, text.size() + 1, end);
  RC_ASSERT(ParseInPieces(options, text, 1, end) == whole);
  RC_ASSERT(ParseInPieces(options, text, *rc::gen::inRange<size_t>(2, 9), end) == whole);
}

// Calls that need no repair, but may have any headers.
RC_GTEST_PROP(OutputParserSoupTest, InTextThePoliciesDifferInRepairsOnly, ()) {
  static const std::vector<std::string> kNames = {
      " name=\"f\">", " name=\"\">",   " name=\"f g\" id=\"3\">\n", "  name=\"f\">",
      " name=\"f>\n", " name=\"f\"\n", " id=\"3\" name=\"f\">",
  };
  static const std::vector<std::string> kHeaders = {
      " name=\"K\" string=\"true\">",
      " name=\"K\" string=\"true\">",
      " name=\"K\" string=\"false\">",
      "  name=\"K\" string=\"true\">",
      " name=\"K x\" string=\"true\">",
      " name=\"K\"x\" string=\"true\">",
      " name=\"K\\x\" string=\"false\">",
      " name=\"K\" string=\"maybe\">",
      " name=\"K\">",
      " name=\"K>",
      " name=\"K\" string=\"true\"",
      " name=\"K\" type=\"x\" string=\"true\">",
      " name=\"K\" string=\"true\" type=\"x\">",
      " type=\"x\" name=\"K\" string=\"true\">",
      " string=\"true\" name=\"K\">",
  };
  std::string text = "<@ calls>\n";
  const int num_calls = *rc::gen::inRange(1, 4);
  for (int call = 0; call < num_calls; ++call) {
    text += "<@ invoke" + *rc::gen::elementOf(kNames);
    const int num_parameters = *rc::gen::inRange(0, 4);
    for (int i = 0; i < num_parameters; ++i) {
      std::string header = *rc::gen::elementOf(kHeaders);
      header.replace(header.find('K'), 1, std::string(1, static_cast<char>('a' + i)));
      text += "<@ parameter" + header + "1</@ parameter>\n";
    }
    text += "</@ invoke>\n";
  }
  text += "</@ calls>";
  OutputParserOptions options = Options();
  const Answer recommended = ParseInPieces(options, Markup(text), *rc::gen::inRange<size_t>(1, 99));
  options.policy = Policy::kToolkit;
  RC_ASSERT(recommended == ParseInPieces(options, Markup(text), text.size() * 9));
}

RC_GTEST_PROP(OutputParserSoupTest, TheMarkerTokenNeverLeaksAndCallsAreWhole, ()) {
  if (RenamedTokenizer() == nullptr) return;
  OutputParserOptions options = AnyOptions();
  options.tools = true;
  options.policy = Policy::kRecommended;
  std::string text;
  for (const std::string& part : AnySoup())
    if (!FindInvalidUtf8(part).has_value() && part != "｜") text += part;
  const Answer answer = ParseIds(options, Ids(text));
  RC_ASSERT((answer.content + answer.reasoning).find("DSML") == std::string::npos);
  for (const auto& [name, arguments] : answer.calls) {
    RC_ASSERT(!name.empty());
    // An object that the model wrote itself may be broken.
    RC_ASSERT(IsJson(arguments) || text.find('{') != std::string::npos);
  }
}

TEST(OutputParserSoupTest, TimeIsLinearInWhateverInput) {
  const auto seconds = [] {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
  };
  const std::string call = Markup("<@ calls>\n<@ invoke name=\"f\">\n");
  const std::string value = call + Markup("<@ parameter name=\"a\" string=\"true\">");
  const std::pair<std::string, std::string> inputs[] = {
      {"", "\n"},
      {"", "<"},
      {"", "a"},
      {"", Markup("<@ ").substr(0, 12)},
      {"", Markup("</@ x")},
      {call, "parameter nam"},
      {call, "\n"},
      {call, "{ "},
      {call, Markup("<@ parameter name=\"a\">")},
      {call + Markup("<@ parameter name="), "\" a=\"b"},
      {call + Markup("<@ parameter name="), ">"},
      {call, Markup("<@ parameter name=\"a b\" string=\"true\">1</@ parameter>")},
      {call, Markup("</@ x><@ parameter name=\"a b\" string=\"true\"><@ invoke name=\"f\">")},
      {Markup("<@ calls>"), Markup("<@ invoke name=\"\"></@ invoke>")},
      {value, "<"},
      {value, Markup("<@")},
      {value, Markup("@ parameter")},
      {call, Markup("<@ parameter name=\"k\" string=\"false\">[[[[</@ parameter>")},
      {Markup("<@ calls>"), Markup("<@ invoke name=\"f\"></@ invoke>")},
      {Markup("<@ calls>"), "invoke name="},
      {Markup("<@ invoke name=\""), "name=\"x"},
  };
  constexpr size_t kBytes = size_t{1} << 20;
  OutputParserOptions options = Options();
  options.stop = {std::string(1000, 'a') + "b"};
  for (const auto& [begin, repeated] : inputs) {
    std::string text = begin;
    while (text.size() < kBytes) text += repeated;
    for (const Policy policy : {Policy::kRecommended, Policy::kToolkit}) {
      options.policy = policy;
      for (const size_t piece : {size_t{1}, size_t{4096}}) {
        const double start = seconds();
        ParseInPieces(options, text, piece);
        // A thousand nanoseconds a byte; linear work takes tens.
        EXPECT_LT(seconds() - start, kHasSanitizer ? 20.0 : 1.0)
            << begin << repeated << " in pieces of " << piece;
      }
    }
  }
}

}  // namespace
}  // namespace deepinfer
