#include "apps/chat_line.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "base/quoted.h"
#include "text/chat_request.h"
#include "text/conversation_json.h"

namespace deepinfer {
namespace {

constexpr std::array<std::string_view, 9> kFields = {
    "messages",     "tools",         "tool_choice",      "response_format",
    "thinking",     "thinking_mode", "reasoning_effort", "encoding_profile",
    "drop_thinking"};

// What a message may hold. Logs of other services carry more, which counts only if it says
// something.
constexpr std::array<std::string_view, 8> kMessageFields = {
    "role",   "content", "reasoning_content", "tool_calls", "tool_call_id",
    "prefix", "name",    "reasoning"};
// The checkpoint's own message format has more, and its own name for a prefix.
constexpr std::array<std::string_view, 4> kCheckpointMessageFields = {"tools", "response_format",
                                                                      "task", "wo_eos"};

tl::unexpected<Error> Problem(std::string field, std::string message) {
  return tl::unexpected<Error>(Error{Code::kInvalidArgument, std::move(message), std::move(field)});
}

template <class Names>
bool Contains(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool SaysNothing(const JsonValue& value) {
  return value.is_null() || (value.if_array() != nullptr && value.if_array()->empty());
}

// Refuses members of an object that have no effect; `known` is a list for people, too.
Status CheckMembers(const JsonValue* value, const std::string& path,
                    std::initializer_list<std::string_view> known) {
  if (value == nullptr || value->if_object() == nullptr) return {};
  for (const auto& [key, member] : *value->if_object()) {
    if (Contains(known, key) || SaysNothing(member)) continue;
    std::string names;
    for (const std::string_view name : known)
      names += (names.empty() ? "" : ", ") + std::string(name);
    const std::string field = path + "." + key;
    return Problem(field,
                   fmt::format("{} has no effect here; {} may have {}.", field, path, names));
  }
  return {};
}

// check(item, its path) for every item of a list.
Status ForEachItem(const JsonValue* list, const std::string& path,
                   Status (*check)(const JsonValue& item, const std::string& path)) {
  if (list == nullptr || list->if_array() == nullptr) return {};
  for (size_t i = 0; i < list->if_array()->size(); ++i)
    DI_RETURN_IF_ERROR(check((*list->if_array())[i], fmt::format("{}[{}]", path, i)));
  return {};
}

Status CheckTool(const JsonValue& tool, const std::string& path) {
  DI_RETURN_IF_ERROR(CheckMembers(&tool, path, {"type", "function", "defer_loading"}));
  return CheckMembers(tool.Find("function"), path + ".function",
                      {"name", "description", "parameters", "strict", "defer_loading"});
}

Status CheckPart(const JsonValue& part, const std::string& path) {
  return CheckMembers(&part, path, {"type", "text", "image_url", "file", "file_data"});
}

Status CheckCall(const JsonValue& call, const std::string& path) {
  DI_RETURN_IF_ERROR(CheckMembers(&call, path, {"id", "type", "index", "function"}));
  return CheckMembers(call.Find("function"), path + ".function", {"name", "arguments"});
}

Status CheckMessage(const JsonValue& message, const std::string& path) {
  const JsonValue* role = message.Find("role");
  constexpr std::pair<const char*, const char*> kOnly[] = {{"reasoning_content", "assistant"},
                                                           {"tool_calls", "assistant"},
                                                           {"prefix", "assistant"},
                                                           {"tool_call_id", "tool"}};
  for (const auto& [member, owner] : kOnly) {
    if (role == nullptr || *role == JsonValue(owner) || message.Find(member) == nullptr) continue;
    const std::string field = path + "." + member;
    return Problem(field, fmt::format("{} has no effect; only messages of the role {} have it.",
                                      field, owner));
  }
  DI_RETURN_IF_ERROR(ForEachItem(message.Find("content"), path + ".content", CheckPart));
  return ForEachItem(message.Find("tool_calls"), path + ".tool_calls", CheckCall);
}

// What a server ignores, a line must not say.
Status CheckRecipeFields(const JsonValue& fields) {
  DI_RETURN_IF_ERROR(CheckMembers(fields.Find("thinking"), "thinking", {"type"}));
  const JsonValue* choice = fields.Find("tool_choice");
  DI_RETURN_IF_ERROR(CheckMembers(choice, "tool_choice", {"type", "function"}));
  if (choice != nullptr)
    DI_RETURN_IF_ERROR(CheckMembers(choice->Find("function"), "tool_choice.function", {"name"}));
  const JsonValue* format = fields.Find("response_format");
  DI_RETURN_IF_ERROR(CheckMembers(format, "response_format", {"type", "json_schema", "regex"}));
  if (format != nullptr) {
    DI_RETURN_IF_ERROR(CheckMembers(format->Find("json_schema"), "response_format.json_schema",
                                    {"name", "description", "schema", "strict"}));
  }
  DI_RETURN_IF_ERROR(ForEachItem(fields.Find("tools"), "tools", CheckTool));
  return ForEachItem(fields.Find("messages"), "messages", CheckMessage);
}

// Refuses fields without effect, and gives reasoning its name: some servers call it "reasoning".
Status NormalizeMessages(bool checkpoint, JsonValue* messages) {
  JsonValue::Array* list = messages->if_array();
  if (list == nullptr) return {};  // the conversion says what is wrong
  for (size_t i = 0; i < list->size(); ++i) {
    JsonValue::Object* message = (*list)[i].if_object();
    if (message == nullptr) continue;
    std::erase_if(*message, [](const JsonValue::Member& member) {
      return member.first != "content" && member.first != "role" && SaysNothing(member.second) &&
             member.first != "tool_calls";
    });
    const bool has_reasoning_content = (*list)[i].Find("reasoning_content") != nullptr;
    for (JsonValue::Member& member : *message) {
      const std::string field = fmt::format("messages[{}].{}", i, member.first);
      if (checkpoint && Contains(kCheckpointMessageFields, member.first)) continue;
      if (!Contains(kMessageFields, member.first)) {
        return Problem(
            field,
            fmt::format("{} is no field of a message; these are role, content, "
                        "reasoning_content, tool_calls, tool_call_id, prefix and name{}.",
                        field, checkpoint ? ", tools, response_format, task and wo_eos" : ""));
      }
      if (checkpoint && member.first == "prefix") member.first = "wo_eos";
      // Some servers' name for what this model calls system.
      if (member.first == "role" && member.second == JsonValue("developer"))
        member.second = JsonValue("system");
      if (member.first != "reasoning") continue;
      if (has_reasoning_content) {
        return Problem(field, fmt::format("{} and reasoning_content are both given; they are the "
                                          "same field.",
                                          field));
      }
      member.first = "reasoning_content";
    }
  }
  return {};
}

// thinking_mode is a short form of thinking.
Status ApplyThinkingMode(JsonValue* fields) {
  const JsonValue* mode = fields->Find("thinking_mode");
  if (mode == nullptr) return {};
  const std::string* name = mode->if_string();
  if (name == nullptr || (*name != "thinking" && *name != "chat")) {
    return Problem("thinking_mode",
                   fmt::format("thinking_mode is {}; allowed are \"thinking\" and \"chat\".",
                               Quoted(mode->DumpCompact())));
  }
  if (fields->Find("thinking") != nullptr) {
    return Problem("thinking_mode",
                   "thinking_mode and thinking are both given; they say the same, give one.");
  }
  fields->Set("thinking", JsonValue::Object{{"type", *name == "chat" ? "disabled" : "enabled"}});
  return {};
}

JsonValue Without(const JsonValue& fields, std::initializer_list<std::string_view> names) {
  JsonValue::Object kept;
  for (const JsonValue::Member& member : *fields.if_object()) {
    if (std::find(names.begin(), names.end(), member.first) == names.end()) kept.push_back(member);
  }
  return kept;
}

Result<Chat> RecipeChat(const JsonValue& fields) {
  if (fields.Find("drop_thinking") != nullptr) {
    return Problem("drop_thinking",
                   "drop_thinking is given; it has a meaning with encoding_profile \"checkpoint\" "
                   "only.");
  }
  const JsonValue* choice = fields.Find("tool_choice");
  const JsonValue* tools = fields.Find("tools");
  if (choice != nullptr && *choice != JsonValue("auto") && *choice != JsonValue("none") &&
      (tools == nullptr || SaysNothing(*tools))) {
    return Problem("tool_choice", fmt::format("tool_choice is {}, but there are no tools.",
                                              Quoted(choice->DumpCompact())));
  }
  JsonValue body = Without(fields, {"thinking_mode", "encoding_profile"});
  body.Set("model", "any");
  ConversionOptions options;
  options.model_names.clear();
  tl::expected<ConvertedRequest, RequestProblem> converted =
      ConvertRequest(ChatApi::kChatCompletions, body, options);
  if (!converted.has_value())
    return Problem(std::move(converted.error().field), std::move(converted.error().message));
  return std::move(converted->chat);
}

// The request's tools and response format belong to the first message, which is a system message.
void AttachToFirstMessage(const JsonValue& fields, JsonValue::Array* messages) {
  JsonValue attached;
  for (const char* name : {"tools", "response_format"}) {
    if (const JsonValue* value = fields.Find(name); value != nullptr) attached.Set(name, *value);
  }
  if (attached.is_null()) return;
  const JsonValue* role = messages->empty() ? nullptr : messages->front().Find("role");
  if (role == nullptr || *role != JsonValue("system"))
    messages->insert(messages->begin(), JsonValue::Object{{"role", "system"}, {"content", ""}});
  for (JsonValue::Member& member : *attached.if_object())
    messages->front().Set(member.first, std::move(member.second));
}

Result<Chat> CheckpointChat(const JsonValue& fields) {
  if (fields.Find("tool_choice") != nullptr) {
    return Problem("tool_choice",
                   "tool_choice is given; it has a meaning with encoding_profile \"recipe\" only.");
  }
  JsonValue line;
  JsonValue messages = *fields.Find("messages");
  if (messages.if_array() != nullptr) AttachToFirstMessage(fields, messages.if_array());
  line.Set("messages", std::move(messages));
  const JsonValue* thinking = fields.Find("thinking");
  const JsonValue* type = thinking != nullptr ? thinking->Find("type") : nullptr;
  if (thinking != nullptr &&
      (type == nullptr || type->if_string() == nullptr ||
       (*type->if_string() != "enabled" && *type->if_string() != "disabled"))) {
    return Problem("thinking",
                   fmt::format("thinking is {}; allowed are {{\"type\": \"enabled\"}} and "
                               "{{\"type\": \"disabled\"}}.",
                               Quoted(thinking->DumpCompact())));
  }
  line.Set("mode", type != nullptr && *type->if_string() == "disabled" ? "chat" : "thinking");
  if (const JsonValue* effort = fields.Find("reasoning_effort"); effort != nullptr)
    line.Set("effort", *effort);
  if (const JsonValue* drop = fields.Find("drop_thinking"); drop != nullptr)
    line.Set("drop_thinking", *drop);
  Result<Chat> read = ChatFromCheckpointMessages(line);
  if (!read.has_value() && read.error().field == "effort") read.error().field = "reasoning_effort";
  return read;
}

}  // namespace

bool IsChatField(std::string_view name) {
  return Contains(kFields, name);
}

Result<Chat> ChatFromLine(const JsonValue& fields) {
  JsonValue chat = fields;
  std::string profile = "recipe";
  if (const JsonValue* value = chat.Find("encoding_profile"); value != nullptr) {
    const std::string* name = value->if_string();
    if (name == nullptr || (*name != "recipe" && *name != "checkpoint")) {
      return Problem("encoding_profile",
                     fmt::format("encoding_profile is {}; allowed are \"recipe\" and "
                                 "\"checkpoint\".",
                                 Quoted(value->DumpCompact())));
    }
    profile = *name;
  }
  DI_RETURN_IF_ERROR(ApplyThinkingMode(&chat));
  const bool checkpoint = profile == "checkpoint";
  JsonValue messages = *chat.Find("messages");
  DI_RETURN_IF_ERROR(NormalizeMessages(checkpoint, &messages));
  chat.Set("messages", std::move(messages));
  if (checkpoint) return CheckpointChat(chat);
  DI_RETURN_IF_ERROR(CheckRecipeFields(chat));
  return RecipeChat(chat);
}

}  // namespace deepinfer
