// The parser of answers: whatever the bytes and the cuts are, the events are whole characters,
// calls are numbered in order, and the result is that of one piece.
// The first bytes choose the options and the size of the pieces.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "base/utf8.h"
#include "text/output_parser.h"
#include "text/tokenizer.h"

namespace {

using deepinfer::OutputEnd;
using deepinfer::OutputEvent;
using deepinfer::OutputParser;
using deepinfer::OutputParserOptions;

void Require(bool condition) {
  if (!condition) std::abort();
}

const deepinfer::Tokenizer& TheTokenizer() {
  static const auto tokenizer =
      deepinfer::Tokenizer::Load(DI_TEST_DATA_DIR "/tokenizer/small_tokenizer.json").value();
  return tokenizer;
}

struct Answer {
  deepinfer::ParsedMessage message;
  OutputEnd end = OutputEnd::kStop;
  bool cut_call = false;
  std::optional<std::string> stop_string;
};

class Collector {
 public:
  void Take(std::vector<OutputEvent>* events) {
    for (const OutputEvent& event : *events) {
      builder_.Add(event);
      if (const auto* reasoning = std::get_if<deepinfer::ReasoningEvent>(&event)) {
        CheckText(reasoning->text);
      } else if (const auto* content = std::get_if<deepinfer::ContentEvent>(&event)) {
        CheckText(content->text);
      } else if (const auto* call = std::get_if<deepinfer::ToolCallEvent>(&event)) {
        Require(call->index == num_calls_++);
      } else if (const auto* arguments = std::get_if<deepinfer::ArgumentsEvent>(&event)) {
        CheckText(arguments->text);
        Require(arguments->index == num_calls_ - 1);
      }
    }
    events->clear();
  }

  Answer Finish(OutputParser* parser, OutputEnd end) {
    std::vector<OutputEvent> events;
    Answer answer;
    answer.end = parser->Finish(end, &events);
    Take(&events);
    answer.message = builder_.message();
    answer.cut_call = parser->cut_call();
    answer.stop_string = parser->stop_string();
    Require(answer.end != OutputEnd::kToolCalls || !answer.message.tool_calls.empty());
    return answer;
  }

 private:
  static void CheckText(const std::string& text) {
    Require(!text.empty() && !deepinfer::FindInvalidUtf8(text).has_value());
  }

  deepinfer::MessageBuilder builder_;
  int64_t num_calls_ = 0;
};

Answer Parse(const OutputParserOptions& options, std::string_view text, size_t piece,
             OutputEnd end) {
  OutputParser parser(options);
  Collector collector;
  std::vector<OutputEvent> events;
  for (size_t at = 0; at < text.size(); at += piece) {
    parser.Push(text.substr(at, piece), &events);
    collector.Take(&events);
  }
  return collector.Finish(&parser, end);
}

void RequireEqual(const Answer& a, const Answer& b) {
  Require(a.message.reasoning_content == b.message.reasoning_content);
  Require(a.message.content == b.message.content);
  Require(a.message.tool_calls.size() == b.message.tool_calls.size());
  for (size_t i = 0; i < a.message.tool_calls.size(); ++i) {
    Require(a.message.tool_calls[i].name == b.message.tool_calls[i].name);
    Require(a.message.tool_calls[i].arguments == b.message.tool_calls[i].arguments);
  }
  Require(a.end == b.end && a.cut_call == b.cut_call && a.stop_string == b.stop_string);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 3) return 0;
  OutputParserOptions options;
  options.start = static_cast<OutputParserOptions::Start>(data[0] % 5);
  options.tools = (data[1] & 1) == 0;
  options.json = (data[1] & 2) != 0;
  options.policy = (data[1] & 4) != 0 ? OutputParserOptions::Policy::kToolkit
                                      : OutputParserOptions::Policy::kRecommended;
  options.unclosed_reasoning_is_content = (data[1] & 8) != 0;
  if ((data[1] & 16) != 0) options.stop = {"END", "\n\n", "\xEF\xBD\x9C", "aab", ""};
  const OutputEnd end = (data[1] & 32) != 0 ? OutputEnd::kLength : OutputEnd::kStop;
  const size_t piece = data[2] % 16 + 1;
  // A copy of exactly this size, so that a read beyond the text is a read beyond an allocation.
  const std::vector<char> copy(data + 3, data + size);
  const std::string_view text(copy.data(), copy.size());
  const Answer whole = Parse(options, text, text.size() + 1, end);
  RequireEqual(Parse(options, text, piece, end), whole);
  RequireEqual(Parse(options, text, 1, end), whole);

  // The same bytes as ids of a vocabulary of 512: never a crash, well-formed events, and no call
  // without a name where headers are repaired.
  OutputParser parser(options, &TheTokenizer());
  Collector collector;
  std::vector<OutputEvent> events;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    parser.PushToken((static_cast<uint8_t>(text[i]) << 8 | static_cast<uint8_t>(text[i + 1])) % 520,
                     &events);
    collector.Take(&events);
  }
  const Answer of_ids = collector.Finish(&parser, end);
  if (options.policy == OutputParserOptions::Policy::kRecommended) {
    for (const deepinfer::ToolCall& call : of_ids.message.tool_calls) Require(!call.name.empty());
  }
  return 0;
}
