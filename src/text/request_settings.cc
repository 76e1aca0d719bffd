#include "text/request_settings.h"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/quoted.h"
#include "text/json_schema_shape.h"

namespace deepinfer {
namespace {

constexpr uint64_t kMaxUint8 = std::numeric_limits<uint8_t>::max();
constexpr uint64_t kMaxUint32 = std::numeric_limits<uint32_t>::max();
constexpr float kMinTopPOfThinking = 0.95F;

}  // namespace

std::optional<int> ReasoningEffortByName(std::string_view name) {
  if (name == "none") return 0;
  if (name == "minimal" || name == "low") return 50;
  if (name == "medium" || name == "high" || name == "xhigh") return 75;
  if (name == "max" || name == "ultra") return 100;
  return std::nullopt;
}

void ReadModel(const JsonValue& body, const ConversionOptions& options, RequestReader* reader,
               ConvertedRequest* request) {
  request->model = reader->RequiredString(body, "", "model");
  const std::vector<std::string>& names = options.model_names;
  if (names.empty() || std::find(names.begin(), names.end(), request->model) != names.end()) return;
  std::string allowed;
  for (const std::string& name : names) allowed += (allowed.empty() ? "" : ", ") + name;
  reader->Refuse("model",
                 fmt::format("is {}; known models are {}", Quoted(request->model), allowed));
}

std::optional<bool> ReadThinkingSwitch(const JsonValue& body, RequestReader* reader) {
  const JsonValue* thinking = reader->Object(body, "", "thinking");
  if (thinking == nullptr) return std::nullopt;
  const std::string type = reader->RequiredString(*thinking, "thinking", "type");
  if (type == "disabled") return false;
  if (type == "enabled" || type == "adaptive") return true;
  reader->Malformed("thinking.type",
                    fmt::format("is {}; it must be enabled, adaptive or disabled", Quoted(type)));
  return std::nullopt;
}

std::optional<int> ReadEffort(const JsonValue& object, const std::string& path,
                              std::string_view key, RequestReader* reader) {
  const JsonValue* value = object.Find(key);
  if (value == nullptr || value->is_null()) return std::nullopt;
  if (const std::string* name = value->if_string()) {
    const std::optional<int> effort = ReasoningEffortByName(*name);
    if (effort.has_value()) return effort;
  } else if (const int64_t* number = value->if_int64()) {
    if (*number >= 1 && *number <= 100) return static_cast<int>(*number);
  }
  reader->Malformed(FieldPath(path, key),
                    "must be none, minimal, low, medium, high, xhigh, ultra, max or an integer of "
                    "1 ... 100");
  return std::nullopt;
}

void SetThinking(std::optional<bool> thinking, std::optional<int> effort,
                 const ConversionOptions& options, Chat* chat) {
  const bool effort_is_none = effort.has_value() && *effort == 0;
  if (thinking.has_value()) {
    chat->thinking = *thinking;
  } else if (effort.has_value()) {
    chat->thinking = !effort_is_none;
  } else {
    chat->thinking = options.default_thinking;
  }
  if (effort.has_value() && !effort_is_none) chat->reasoning_effort = *effort;
}

void ReadSampling(const JsonValue& body, const ConversionOptions& options, RequestReader* reader,
                  ConvertedRequest* request) {
  const float temperature = reader->Float(body, "", "temperature").value_or(1.0F);
  if (!(temperature >= 0 && temperature <= 2))
    reader->Refuse("temperature", fmt::format("is {}; it must be 0 ... 2", temperature));
  const float top_p = reader->Float(body, "", "top_p").value_or(1.0F);
  if (!(top_p > 0 && top_p <= 1))
    reader->Refuse("top_p", fmt::format("is {}; it must be above 0 and at most 1", top_p));
  if (options.dialect == ChatDialect::kV4) {
    request->temperature = request->chat.thinking ? 1.0F : temperature;
    request->top_p = request->chat.thinking ? 1.0F : top_p;
  } else {
    request->temperature = request->chat.thinking ? 1.0F : temperature;
    request->top_p = request->chat.thinking ? std::max(top_p, kMinTopPOfThinking) : 1.0F;
  }
}

void ReadTopLogprobs(const JsonValue& body, RequestReader* reader, ConvertedRequest* request) {
  const std::optional<uint64_t> number = reader->Unsigned(body, "", "top_logprobs", kMaxUint8);
  if (!number.has_value()) return;
  request->top_logprobs = static_cast<int64_t>(*number);
  if (*number > 20)
    reader->Refuse("top_logprobs", fmt::format("is {}; it must be 0 ... 20", *number));
}

void ReadMaxTokens(const JsonValue& body, std::string_view key, bool lower,
                   const ConversionOptions& options, RequestReader* reader,
                   ConvertedRequest* request) {
  const std::optional<uint64_t> given = reader->Unsigned(body, "", key, kMaxUint32);
  if (!given.has_value()) return;
  const int64_t bound = request->chat.thinking ? options.thinking_max_tokens_upper_bound
                                               : options.non_thinking_max_tokens_upper_bound;
  int64_t max_tokens = static_cast<int64_t>(*given);
  if (lower) max_tokens = std::min(max_tokens, bound);
  if (max_tokens < 1 || max_tokens > bound)
    reader->Refuse(std::string(key), fmt::format("is {}; it must be 1 ... {}", *given, bound));
  request->max_tokens = max_tokens;
}

void ReadStop(const JsonValue& body, std::string_view key, bool may_be_string,
              RequestReader* reader, ConvertedRequest* request) {
  const JsonValue* stop = body.Find(key);
  if (stop == nullptr || stop->is_null()) return;
  const std::string path(key);
  constexpr size_t kMaxStops = 16;
  if (const std::string* text = stop->if_string(); text != nullptr && may_be_string) {
    request->stop = {*text};
  } else if (const JsonValue::Array* texts = stop->if_array()) {
    for (size_t i = 0; i < texts->size(); ++i) {
      const std::string* one = (*texts)[i].if_string();
      if (one == nullptr) {
        reader->Malformed(ElementPath(path, i), "must be a string");
        return;
      }
      request->stop.push_back(*one);
    }
  } else {
    reader->Malformed(path, may_be_string ? "must be a string or a list" : "must be a list");
  }
  if (request->stop.size() > kMaxStops)
    reader->Refuse(path, fmt::format("has {} strings; at most {} are allowed", request->stop.size(),
                                     kMaxStops));
  for (size_t i = 0; i < request->stop.size(); ++i) {
    if (request->stop[i].empty())
      reader->Refuse(stop->if_string() != nullptr ? path : ElementPath(path, i),
                     "must not be empty");
  }
}

void ReadResponseSchema(const JsonValue& object, const std::string& path, RequestReader* reader,
                        ConvertedRequest* request) {
  const JsonValue* schema = reader->Required(object, path, "schema");
  const bool strict = reader->Bool(object, path, "strict").value_or(false);
  if (schema == nullptr) return;
  const std::string field = FieldPath(path, "schema");
  OutputConstraint constraint;
  if (strict) {
    const Result<JsonValue> rebuilt = StrictSchema(*schema);
    if (!rebuilt.has_value()) {
      reader->Refuse(field, fmt::format("cannot be made strict: {}",
                                        WithoutFullStop(rebuilt.error().message)));
      return;
    }
    if (rebuilt->Find("properties")->if_object()->empty())
      reader->Refuse(field, "is an object without properties, which a strict schema may not have");
    constraint.schema = rebuilt->DumpCompact();
  } else {
    const Status shape = CheckJsonSchemaShape(*schema);
    if (!shape.has_value()) {
      reader->Refuse(field, fmt::format("is not a valid JSON schema: {}",
                                        WithoutFullStop(shape.error().message)));
    }
    constraint.schema = schema->DumpCompact();
  }
  request->constraint = std::move(constraint);
  request->chat.response_format = {ResponseFormat::Kind::kJsonSchema, schema->Dump()};
}

void SetTools(RequestTools* tools, const RequestedChoice& choice, const std::string& format_field,
              RequestReader* reader, ConvertedRequest* request) {
  request->chat.tool_choice = tools->Choose(choice, request->chat.thinking);
  request->chat.tools = tools->tools();
  if (!tools->visible()) return;
  if (!format_field.empty() && tools->tools().front().strict)
    reader->Refuse(format_field, "cannot be combined with strict tools");
  request->constraint = OutputConstraint{request->chat.tool_choice == ToolChoice::kRequired
                                             ? OutputConstraint::Kind::kToolCallRequired
                                             : OutputConstraint::Kind::kToolCall,
                                         tools->ConstraintJson()};
}

void CheckReasoningGiven(const Chat& chat, const std::string& field,
                         const ConversionOptions& options, RequestReader* reader) {
  if (!options.require_reasoning_content || !chat.thinking) return;
  // Ids of answers that had no reasoning: "call_", two characters, "_ET_".
  const auto had_none = [](const ToolCall& call) {
    return call.id.size() >= 11 && call.id.starts_with("call_") && call.id.substr(7, 4) == "_ET_";
  };
  for (auto message = chat.messages.rbegin(); message != chat.messages.rend(); ++message) {
    if (message->role == Role::kUser) return;
    if (message->role != Role::kAssistant || message->reasoning_content.has_value()) continue;
    const std::vector<ToolCall>& calls = message->tool_calls;
    if (calls.empty() ? chat.tools.empty() : std::any_of(calls.begin(), calls.end(), had_none))
      continue;
    reader->Refuse(field,
                   "have an answer without its reasoning after the last user message; in thinking "
                   "mode it must be passed back");
  }
}

}  // namespace deepinfer
