#include "apps/answer_line.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "base/quoted.h"
#include "text/output_parser.h"

namespace deepinfer {
namespace {

struct AnswerLine {
  std::optional<std::string> text;  // this or `ids`
  std::optional<std::vector<int64_t>> ids;
  OutputParserOptions parser;
  OutputEnd finish = OutputEnd::kStop;
  std::optional<std::vector<int64_t>> cuts;  // bytes of the text, or places among the ids
};

// ---- Reading a line.

std::string Shown(const JsonValue& value) {
  if (value.if_object() != nullptr) return "an object";
  if (value.if_array() != nullptr) return "a list";
  if (const std::string* text = value.if_string(); text != nullptr) return Quoted(*text, 60);
  return value.DumpCompact();
}

tl::unexpected<Error> Mismatch(const std::string& field, const JsonValue& value,
                               std::string_view allowed) {
  return Fail(Code::kInvalidArgument,
              fmt::format("{} is {}; allowed is {}.", field, Shown(value), allowed), field);
}

Status ReadString(const std::string& field, const JsonValue& value, std::string* out) {
  const std::string* const text = value.if_string();
  if (text == nullptr) return Mismatch(field, value, "a string");
  *out = *text;
  return {};
}

Status ReadBool(const std::string& field, const JsonValue& value, bool* out) {
  const bool* const given = value.if_bool();
  if (given == nullptr) return Mismatch(field, value, "true or false");
  *out = *given;
  return {};
}

template <class T>
using Named = std::pair<std::string_view, T>;

template <class T>
Status ReadOneOf(const std::string& field, const JsonValue& value,
                 std::initializer_list<Named<T>> names, T* out) {
  std::string allowed;
  for (const auto& [name, meaning] : names) {
    if (value.if_string() != nullptr && *value.if_string() == name) {
      *out = meaning;
      return {};
    }
    allowed += (allowed.empty() ? "" : " or ") + std::string(name);
  }
  return Mismatch(field, value, allowed);
}

Status ReadIntegers(const std::string& field, const JsonValue& value, std::vector<int64_t>* out) {
  if (value.if_array() == nullptr) return Mismatch(field, value, "a list of integers");
  for (const JsonValue& item : *value.if_array()) {
    if (item.if_int64() == nullptr)
      return Mismatch(fmt::format("{}[{}]", field, out->size()), item, "an integer");
    out->push_back(*item.if_int64());
  }
  return {};
}

Status ReadStops(const std::string& field, const JsonValue& value, std::vector<std::string>* out) {
  if (value.if_array() == nullptr) return Mismatch(field, value, "a list of strings");
  for (const JsonValue& item : *value.if_array()) {
    const std::string name = fmt::format("{}[{}]", field, out->size());
    DI_RETURN_IF_ERROR(ReadString(name, item, &out->emplace_back()));
    if (out->back().empty()) return Mismatch(name, item, "a string that is not empty");
  }
  return {};
}

// read(key, field, value) returns false for a field that it does not know.
template <class Read>
Status ReadFields(const std::string& path, const JsonValue::Object& object, std::string_view known,
                  Read read) {
  for (const auto& [key, value] : object) {
    const std::string field = path.empty() ? key : path + "." + key;
    DI_ASSIGN_OR_RETURN(const bool is_known, read(key, field, value));
    if (is_known) continue;
    return Fail(Code::kInvalidArgument,
                fmt::format("{} is not a known field; known are {}.", Quoted(field), known), field);
  }
  return {};
}

Status ReadParser(const std::string& path, const JsonValue& value, OutputParserOptions* parser) {
  using Start = OutputParserOptions::Start;
  if (value.if_object() == nullptr) return Mismatch(path, value, "an object");
  return ReadFields(
      path, *value.if_object(), "start, tools, json, stop and unclosed_reasoning_is_content",
      [&](const std::string& key, const std::string& field,
          const JsonValue& given) -> Result<bool> {
        if (key == "start") {
          DI_RETURN_IF_ERROR(
              ReadOneOf<Start>(field, given,
                               {{"content", Start::kContent},
                                {"reasoning", Start::kReasoning},
                                {"reasoning_continuation", Start::kReasoningContinuation},
                                {"content_continuation", Start::kContentContinuation},
                                {"tool_calls", Start::kToolCalls}},
                               &parser->start));
        } else if (key == "tools") {
          DI_RETURN_IF_ERROR(ReadBool(field, given, &parser->tools));
        } else if (key == "json") {
          DI_RETURN_IF_ERROR(ReadBool(field, given, &parser->json));
        } else if (key == "stop") {
          DI_RETURN_IF_ERROR(ReadStops(field, given, &parser->stop));
        } else if (key == "unclosed_reasoning_is_content") {
          DI_RETURN_IF_ERROR(ReadBool(field, given, &parser->unclosed_reasoning_is_content));
        } else {
          return false;
        }
        return true;
      });
}

Status CheckAnswerLine(const AnswerLine& line) {
  if (line.text.has_value() == line.ids.has_value()) {
    return Fail(Code::kInvalidArgument,
                line.ids.has_value() ? "text and ids are both given; give one of them."
                                     : "text is missing; give one of text and ids.",
                line.ids.has_value() ? "ids" : "text");
  }
  if (!line.cuts.has_value()) return {};
  const auto size = static_cast<int64_t>(line.text ? line.text->size() : line.ids->size());
  int64_t last = 0;
  for (size_t i = 0; i < line.cuts->size(); ++i) {
    const int64_t cut = (*line.cuts)[i];
    const std::string field = fmt::format("cuts[{}]", i);
    if (cut < last || cut > size) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("{} is {}; allowed is {} ... {}, in ascending order.", field, cut,
                              last, size),
                  field);
    }
    last = cut;
  }
  return {};
}

// What recorded answers carry besides; it is not read.
bool IsOfRecordedAnswers(std::string_view key) {
  static constexpr std::array<std::string_view, 7> kFields = {
      "kind", "toolkit", "recommended", "final", "chunkings", "byte_cuts", "tokens"};
  return std::find(kFields.begin(), kFields.end(), key) != kFields.end();
}

Result<AnswerLine> ReadAnswerLine(const JsonValue& json) {
  AnswerLine line;
  const Status fields = ReadFields(
      "", *json.if_object(), "id, text, ids, parser, finish and cuts",
      [&](const std::string& key, const std::string& field,
          const JsonValue& value) -> Result<bool> {
        if (key == "text") {
          DI_RETURN_IF_ERROR(ReadString(field, value, &line.text.emplace()));
        } else if (key == "ids") {
          DI_RETURN_IF_ERROR(ReadIntegers(field, value, &line.ids.emplace()));
        } else if (key == "parser") {
          DI_RETURN_IF_ERROR(ReadParser(field, value, &line.parser));
        } else if (key == "finish") {
          DI_RETURN_IF_ERROR(ReadOneOf<OutputEnd>(field, value,
                                                  {{"stop", OutputEnd::kStop},
                                                   {"length", OutputEnd::kLength},
                                                   {"content_filter", OutputEnd::kContentFilter}},
                                                  &line.finish));
        } else if (key == "cuts") {
          DI_RETURN_IF_ERROR(ReadIntegers(field, value, &line.cuts.emplace()));
        } else {
          return key == "id" || IsOfRecordedAnswers(key);
        }
        return true;
      });
  DI_RETURN_IF_ERROR(fields);
  DI_RETURN_IF_ERROR(CheckAnswerLine(line));
  return line;
}

Status CheckTokenIds(const std::vector<int64_t>& ids, const Tokenizer& tokenizer) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < tokenizer.vocab_size()) continue;
    const std::string field = fmt::format("ids[{}]", i);
    return Fail(Code::kInvalidArgument,
                fmt::format("{} is {}; ids of this tokenizer are 0 ... {}.", field, ids[i],
                            tokenizer.vocab_size() - 1),
                field);
  }
  return {};
}

// ---- Writing a line.

JsonValue EventJson(int64_t chunk, const OutputEvent& event) {
  JsonValue::Array json = {chunk};
  if (const auto* reasoning = std::get_if<ReasoningEvent>(&event)) {
    json.insert(json.end(), {"r", reasoning->text});
  } else if (const auto* content = std::get_if<ContentEvent>(&event)) {
    json.insert(json.end(), {"c", content->text});
  } else if (const auto* call = std::get_if<ToolCallEvent>(&event)) {
    json.insert(json.end(), {"n", call->index, call->name});
  } else if (const auto* arguments = std::get_if<ArgumentsEvent>(&event)) {
    json.insert(json.end(), {"a", arguments->index, arguments->text});
  }
  return json;
}

std::string MessageLine(const JsonValue& id, const ParsedMessage& message, OutputEnd end,
                        bool cut_call, std::optional<JsonValue::Array> events) {
  JsonValue json;
  json.Set("id", id);
  json.Set("reasoning", message.reasoning_content);
  json.Set("content", message.content);
  JsonValue::Array calls;
  for (const ToolCall& call : message.tool_calls)
    calls.push_back(JsonValue::Array{call.name, call.arguments});
  json.Set("calls", std::move(calls));
  json.Set("finish_reason", std::string(OutputEndName(end)));
  if (cut_call) json.Set("cut_call", true);
  if (events.has_value()) json.Set("events", std::move(*events));
  return json.DumpCompact();
}

}  // namespace

Result<std::string> ParseAnswerLine(const JsonValue& json, bool toolkit_policy,
                                    const Tokenizer* tokenizer) {
  DI_ASSIGN_OR_RETURN(const AnswerLine line, ReadAnswerLine(json));
  if (line.ids.has_value()) {
    if (tokenizer == nullptr) {
      return Fail(Code::kInvalidArgument,
                  "ids need a tokenizer; give --model or --tokenizer, or text instead.", "ids");
    }
    DI_RETURN_IF_ERROR(CheckTokenIds(*line.ids, *tokenizer));
  }
  OutputParserOptions parser_options = line.parser;
  parser_options.policy = toolkit_policy ? OutputParserOptions::Policy::kToolkit
                                         : OutputParserOptions::Policy::kRecommended;
  OutputParser parser(std::move(parser_options), tokenizer);
  MessageBuilder builder;
  JsonValue::Array shown;
  std::vector<OutputEvent> events;
  int64_t chunk = 0;
  const auto end_chunk = [&] {
    for (const OutputEvent& event : events) {
      builder.Add(event);
      if (line.cuts.has_value()) shown.push_back(EventJson(chunk, event));
    }
    events.clear();
    ++chunk;
  };
  std::vector<int64_t> ends = line.cuts.value_or(std::vector<int64_t>());
  ends.push_back(static_cast<int64_t>(line.text ? line.text->size() : line.ids->size()));
  size_t begin = 0;
  for (const int64_t cut : ends) {
    const auto end = static_cast<size_t>(cut);
    if (line.text.has_value()) {
      parser.Push(std::string_view(*line.text).substr(begin, end - begin), &events);
    } else {
      for (size_t i = begin; i < end; ++i)
        parser.PushToken(static_cast<int32_t>((*line.ids)[i]), &events);
    }
    begin = end;
    end_chunk();
  }
  const OutputEnd end = parser.Finish(line.finish, &events);
  end_chunk();
  std::optional<JsonValue::Array> shown_events;
  if (line.cuts.has_value()) shown_events = std::move(shown);
  return MessageLine(*json.Find("id"), builder.message(), end, parser.cut_call(),
                     std::move(shown_events));
}

}  // namespace deepinfer
