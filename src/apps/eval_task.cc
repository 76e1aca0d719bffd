#include "apps/eval_task.h"

#include <fmt/core.h>
#include <simdjson.h>

#include <algorithm>
#include <iterator>
#include <unordered_set>
#include <utility>

#include "apps/chat_line.h"
#include "apps/json_line.h"
#include "base/quoted.h"

namespace deepinfer {
namespace {

// What stands for the document in texts of a task.
constexpr std::string_view kPlaceholder = "{document}";
constexpr size_t kMaxNameBytes = 256;

constexpr std::string_view kTaskFields[] = {"skill", "context", "document", "expected", "scorer"};
constexpr std::string_view kPromptFields[] = {"id", "prompt", "prompt_token_ids",
                                              "sampling_params"};

template <size_t N>
bool IsOneOf(const std::string_view (&names)[N], std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

tl::unexpected<Error> Wrong(std::string field, std::string message) {
  return Fail(Code::kInvalidArgument, std::move(message), std::move(field));
}

// A field that is given twice would be ignored once.
Status CheckDistinct(const simdjson::dom::element& value, const std::string& path) {
  simdjson::dom::array array;
  if (value.get(array) == simdjson::SUCCESS) {
    size_t index = 0;
    for (const simdjson::dom::element& item : array)
      DI_RETURN_IF_ERROR(CheckDistinct(item, fmt::format("{}[{}]", path, index++)));
  }
  simdjson::dom::object object;
  if (value.get(object) != simdjson::SUCCESS) return {};
  std::unordered_set<std::string_view> keys;
  for (const auto& [key, member] : object) {
    const std::string field = path.empty() ? std::string(key) : fmt::format("{}.{}", path, key);
    if (!keys.insert(key).second) return Wrong(field, fmt::format("{} is given twice.", field));
    DI_RETURN_IF_ERROR(CheckDistinct(member, field));
  }
  return {};
}

// A text that can be shown in a table.
Status ReadName(const JsonValue& line, const char* field, std::string* out) {
  const JsonValue* value = line.Find(field);
  if (value == nullptr) return Wrong(field, fmt::format("{} is missing.", field));
  const std::string* text = value->if_string();
  const bool fits =
      text != nullptr && !text->empty() && text->size() <= kMaxNameBytes &&
      std::none_of(text->begin(), text->end(), [](unsigned char c) { return c < 0x20; });
  if (!fits) {
    return Wrong(field, fmt::format("{} is {}; allowed is a string of 1 ... {} bytes on one line.",
                                    field, Quoted(value->DumpCompact(), 60), kMaxNameBytes));
  }
  *out = *text;
  return {};
}

Status CheckFields(const JsonValue& line) {
  for (const JsonValue::Member& member : *line.if_object()) {
    const std::string& name = member.first;
    if (IsOneOf(kTaskFields, name) || IsOneOf(kPromptFields, name) || IsChatField(name)) continue;
    return Wrong(name, fmt::format("{} is not a known field; known are id, skill, prompt, "
                                   "prompt_token_ids, messages and the fields beside it, context, "
                                   "document, expected, scorer and sampling_params.",
                                   Quoted(name, 60)));
  }
  return {};
}

// Replaces every placeholder; returns how many there were.
int64_t Insert(const std::string& document, std::string* text) {
  int64_t count = 0;
  for (size_t at = text->find(kPlaceholder); at != std::string::npos;
       at = text->find(kPlaceholder, at)) {
    text->replace(at, kPlaceholder.size(), document);
    at += document.size();
    ++count;
  }
  return count;
}

int64_t InsertIntoContent(const std::string& document, JsonValue* message) {
  const JsonValue* content = message->Find("content");
  if (content == nullptr || content->if_string() == nullptr) return 0;
  std::string text = *content->if_string();
  const int64_t count = Insert(document, &text);
  if (count > 0) message->Set("content", std::move(text));
  return count;
}

// The line that `generate` reads: without what only tasks have, and with `thinking` in its words.
JsonValue GenerateLine(const JsonValue& line) {
  JsonValue request = JsonValue::Object{};
  for (const JsonValue::Member& member : *line.if_object()) {
    if (IsOneOf(kTaskFields, member.first)) continue;
    const bool* thinking = member.first == "thinking" ? member.second.if_bool() : nullptr;
    if (thinking != nullptr) {
      request.Set("thinking", JsonValue::Object{{"type", *thinking ? "enabled" : "disabled"}});
    } else {
      request.Set(member.first, member.second);
    }
  }
  return request;
}

Status ReadContext(const JsonValue& line, std::optional<int64_t>* context) {
  const JsonValue* value = line.Find("context");
  if (value == nullptr || value->is_null()) return {};
  const int64_t* tokens = value->if_int64();
  if (tokens == nullptr || *tokens < 0) {
    return Wrong("context", fmt::format("context is {}; allowed is an integer of at least 0.",
                                        Quoted(value->DumpCompact(), 60)));
  }
  *context = *tokens;
  return {};
}

}  // namespace

Status EvalTaskReader::AddDocument(const JsonValue& line) {
  std::string name;
  DI_RETURN_IF_ERROR(ReadName(line, "document", &name));
  const std::string* text = line.Find("text")->if_string();
  if (text == nullptr) return Wrong("text", "text of a document must be a string.");
  if (line.if_object()->size() != 2)
    return Wrong("document",
                 "a line with a document's text has the fields document and text only.");
  if (!documents_.emplace(name, *text).second)
    return Wrong("document", fmt::format("document {} is there already.", Quoted(name)));
  return {};
}

Status EvalTaskReader::InsertDocument(const std::string& name, JsonValue* line) const {
  const auto entry = documents_.find(name);
  if (entry == documents_.end()) {
    return Wrong("document",
                 fmt::format("document {} is in no earlier line of this file.", Quoted(name)));
  }
  int64_t count = 0;
  if (const JsonValue* prompt = line->Find("prompt");
      prompt != nullptr && prompt->if_string() != nullptr) {
    std::string text = *prompt->if_string();
    count += Insert(entry->second, &text);
    line->Set("prompt", std::move(text));
  }
  if (const JsonValue* messages = line->Find("messages");
      messages != nullptr && messages->if_array() != nullptr) {
    JsonValue::Array changed = *messages->if_array();
    for (JsonValue& message : changed) count += InsertIntoContent(entry->second, &message);
    line->Set("messages", std::move(changed));
  }
  if (count == 0) {
    return Wrong("document",
                 fmt::format("document is given, but no text of the prompt has {}.", kPlaceholder));
  }
  return {};
}

Result<std::unique_ptr<EvalTask>> EvalTaskReader::Read(std::string_view text, int64_t number,
                                                       std::optional<LineId>* id) {
  Result<JsonValue> parsed = JsonValue::Parse(text);
  if (!parsed.has_value()) {
    parsed.error().message = "the line is not valid JSON: " + parsed.error().message;
    return tl::unexpected<Error>(std::move(parsed.error()));
  }
  simdjson::dom::parser parser;
  simdjson::dom::element element;
  if (parser.parse(text).get(element) == simdjson::SUCCESS)
    DI_RETURN_IF_ERROR(CheckDistinct(element, ""));
  if (parsed->Find("text") != nullptr) {
    DI_RETURN_IF_ERROR(AddDocument(*parsed));
    return nullptr;
  }
  ParsedLine<JsonLine> with_id = ParseJsonLine(text);
  *id = with_id.id;
  if (!with_id.value.has_value()) return tl::unexpected<Error>(std::move(with_id.value.error()));
  JsonValue& line = with_id.value->value;
  DI_RETURN_IF_ERROR(ids_.Add(**id, number));
  DI_RETURN_IF_ERROR(CheckFields(line));
  auto task = std::make_unique<EvalTask>();
  DI_RETURN_IF_ERROR(ReadName(line, "skill", &task->skill));
  DI_RETURN_IF_ERROR(ReadContext(line, &task->context));
  DI_RETURN_IF_ERROR(ReadName(line, "scorer", &task->scorer_name));
  const JsonValue* expected = line.Find("expected");
  if (expected == nullptr) return Wrong("expected", "expected is missing.");
  task->expected = *expected;
  DI_ASSIGN_OR_RETURN(task->scorer, MakeScorer(task->scorer_name, *expected));
  if (line.Find("document") != nullptr) {
    std::string name;
    DI_RETURN_IF_ERROR(ReadName(line, "document", &name));
    DI_RETURN_IF_ERROR(InsertDocument(name, &line));
  }
  ParsedLine<Request> request = ParseGenerateLine(GenerateLine(line).DumpCompact(), defaults_);
  if (!request.value.has_value()) return tl::unexpected<Error>(std::move(request.value.error()));
  task->request = std::move(*request.value);
  if (task->request.sampling_params.n != 1) {
    return Wrong("sampling_params.n", fmt::format("sampling_params.n is {}; a task has one answer.",
                                                  task->request.sampling_params.n));
  }
  return task;
}

}  // namespace deepinfer
