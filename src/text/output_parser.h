// What the model writes becomes an answer: reasoning, content and tool calls, piece by piece. A
// pure function of the options and the bytes (or ids) that were pushed: how they are cut into
// pieces changes when an event comes, never the result. Nothing is taken back, nothing of the
// markup is passed on, nothing else is lost. docs/answers.md has the rules of both policies.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/error.h"
#include "deepinfer/chat.h"
#include "deepinfer/request_output.h"
#include "text/tokenizer.h"

namespace deepinfer {

struct OutputParserOptions {
  enum class Start : uint8_t {
    kContent,
    kReasoning,
    kReasoningContinuation,  // the prompt ends inside of reasoning
    kContentContinuation,    // the prompt ends inside of the content
    kToolCalls,              // the prompt ends inside of a block of calls
  };
  // How markup that is not quite right is read.
  enum class Policy : uint8_t {
    // Repaired where that is safe; a call is reported when it is complete. Of bytes, a call whose
    // headers are not of the described form is read as by the other policy.
    kRecommended,
    kToolkit,  // exactly as the vendor's toolkit: its streaming machine
  };
  Start start = Start::kContent;
  bool tools = false;             // calls are looked for; off: markup is text
  bool json = false;              // the content is the JSON in the answer
  std::vector<std::string> stop;  // count in content only
  Policy policy = Policy::kRecommended;
  // When the answer ends by itself without an end of reasoning, all of it becomes content.
  // Reasoning then comes as one event, when it ends: nothing is taken back.
  bool unclosed_reasoning_is_content = false;
};

struct ReasoningEvent {
  std::string text;
};
struct ContentEvent {
  std::string text;
};
struct ToolCallEvent {  // a call begins: its name is complete
  int64_t index = 0;
  std::string name;
};
struct ArgumentsEvent {
  int64_t index = 0;
  std::string text;  // a piece of the arguments' JSON text
};
using OutputEvent = std::variant<ReasoningEvent, ContentEvent, ToolCallEvent, ArgumentsEvent>;

enum class OutputEnd : uint8_t { kStop, kLength, kContentFilter, kToolCalls };
// "stop", "length", "content_filter", "tool_calls".
std::string_view OutputEndName(OutputEnd end);

class OutputParser {
 public:
  // With a tokenizer, which must outlive the parser, ids can be pushed.
  explicit OutputParser(OutputParserOptions options, const Tokenizer* tokenizer = nullptr);
  OutputParser(OutputParser&&) noexcept;
  OutputParser& operator=(OutputParser&&) noexcept;
  ~OutputParser();

  // Appends the events that are decided now. Bytes need not be whole characters. Nothing happens
  // after a stop string.
  void Push(std::string_view bytes, std::vector<OutputEvent>* events);
  // The same for ids, of which only the special tokens' own can be markup: the characters of a
  // marker that come from ordinary tokens are text. End-of-turn ids are not to be pushed. An answer
  // is pushed as bytes or as ids; bytes between ids count as ordinary tokens.
  void PushToken(int32_t id, std::vector<OutputEvent>* events);
  // Off: stop strings that are completed from now on are content like any other.
  void set_may_stop(bool may_stop);
  // The end of the answer, which `backend_end` ended (not kToolCalls): releases what was held back.
  // The truthful reason: kToolCalls only if a call is reported and the answer was not cut.
  OutputEnd Finish(OutputEnd backend_end, std::vector<OutputEvent>* events);

  // The stop string that ended the answer.
  const std::optional<std::string>& stop_string() const;
  // Whether the next byte is part of the reasoning section. (A grammar begins where it ends.)
  bool in_reasoning() const;
  // A call was cut by the end of the answer and is not reported (recommended policy).
  bool cut_call() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Joins events to the message that they spell.
class MessageBuilder {
 public:
  void Add(const OutputEvent& event);
  const ParsedMessage& message() const {
    return message_;
  }

 private:
  ParsedMessage message_;
};

}  // namespace deepinfer
