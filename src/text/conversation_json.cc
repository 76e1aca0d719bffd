#include "text/conversation_json.h"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "text/chat_template.h"
#include "text/prompt_json.h"

namespace deepinfer {
namespace {

constexpr std::string_view kImageToken = "<｜deepseek_image｜>";
constexpr std::string_view kAsciiImageToken = "<|deepseek_image|>";

tl::unexpected<Error> NotA(const std::string& field, std::string_view what) {
  return Fail(Code::kInvalidArgument, fmt::format("{} must be {}.", field, what), field);
}

// Members of an object by name; null counts as absent everywhere.
const JsonValue* FindMember(const JsonValue& object, std::string_view key) {
  const JsonValue* member = object.Find(key);
  return member == nullptr || member->is_null() ? nullptr : member;
}

Result<std::optional<std::string>> OptionalString(const JsonValue& object, std::string_view key,
                                                  const std::string& path) {
  const JsonValue* member = FindMember(object, key);
  if (member == nullptr) return std::optional<std::string>();
  if (member->if_string() == nullptr) return NotA(fmt::format("{}.{}", path, key), "a string");
  return std::optional<std::string>(*member->if_string());
}

Result<bool> BoolOr(const JsonValue& object, std::string_view key, bool fallback,
                    const std::string& path) {
  const JsonValue* member = FindMember(object, key);
  if (member == nullptr) return fallback;
  if (member->if_bool() == nullptr) return NotA(fmt::format("{}{}", path, key), "true or false");
  return *member->if_bool();
}

// An absent list is empty.
Result<const JsonValue::Array*> ListOf(const JsonValue& object, std::string_view key,
                                       const std::string& path) {
  static const JsonValue::Array kNone;
  const JsonValue* member = FindMember(object, key);
  if (member == nullptr) return &kNone;
  if (member->if_array() == nullptr) return NotA(fmt::format("{}{}", path, key), "a list");
  return member->if_array();
}

Result<Role> ReadRole(const JsonValue& message, const std::string& path) {
  DI_ASSIGN_OR_RETURN(const std::optional<std::string> name, OptionalString(message, "role", path));
  if (name == "system") return Role::kSystem;
  if (name == "user") return Role::kUser;
  if (name == "assistant") return Role::kAssistant;
  if (name == "tool") return Role::kTool;
  if (name == "latest_reminder") return Role::kLatestReminder;
  return NotA(path + ".role", "'system', 'user', 'assistant', 'tool' or 'latest_reminder'");
}

Result<const JsonValue::Array*> RequireMessages(const JsonValue& object) {
  const JsonValue* messages = object.Find("messages");
  if (messages == nullptr || messages->if_array() == nullptr) return NotA("messages", "a list");
  return messages->if_array();
}

Status RequireObject(const JsonValue& value, const std::string& field) {
  if (value.if_object() == nullptr) return NotA(field, "an object");
  return {};
}

Result<ToolCall> ReadToolCall(const JsonValue& call, const JsonValue& function,
                              const std::string& path) {
  DI_RETURN_IF_ERROR(RequireObject(call, path));
  DI_RETURN_IF_ERROR(RequireObject(function, path + ".function"));
  DI_ASSIGN_OR_RETURN(const std::optional<std::string> id, OptionalString(call, "id", path));
  DI_ASSIGN_OR_RETURN(const std::optional<std::string> name,
                      OptionalString(function, "name", path));
  DI_ASSIGN_OR_RETURN(const std::optional<std::string> arguments,
                      OptionalString(function, "arguments", path));
  if (!name.has_value()) return NotA(path + ".name", "a string");
  if (!arguments.has_value()) return NotA(path + ".arguments", "a string");
  return ToolCall{.id = id.value_or(""), .name = *name, .arguments = *arguments};
}

// ------------------------------------------------------------------ the toolkit's conversations

Result<std::vector<Tool>> ReadToolDefinitions(const JsonValue& owner, const std::string& path) {
  DI_ASSIGN_OR_RETURN(const JsonValue::Array* list, ListOf(owner, "tools", path));
  std::vector<Tool> tools;
  for (size_t i = 0; i < list->size(); ++i) {
    const JsonValue& definition = (*list)[i];
    const std::string field = fmt::format("{}tools[{}]", path, i);
    DI_RETURN_IF_ERROR(RequireObject(definition, field));
    DI_ASSIGN_OR_RETURN(const std::optional<std::string> name,
                        OptionalString(definition, "name", field));
    if (!name.has_value()) return NotA(field + ".name", "a string");
    DI_ASSIGN_OR_RETURN(const std::optional<std::string> description,
                        OptionalString(definition, "description", field));
    JsonValue function;
    function.Set("name", *name);
    function.Set("description", description.value_or(""));
    // A tool without parameters has null here; only requests give it an empty object.
    const JsonValue* parameters = definition.Find("parameters");
    function.Set("parameters", parameters == nullptr ? JsonValue() : *parameters);
    Tool tool;
    tool.name = *name;
    tool.function = function.Dump();
    DI_ASSIGN_OR_RETURN(tool.defer_loading,
                        BoolOr(definition, "defer_loading", false, field + "."));
    tools.push_back(std::move(tool));
  }
  return tools;
}

// The first `num_images` image tokens that the text spells become images; where there are fewer,
// the other images have no place.
Content ContentWithPlaceholders(std::string_view text, int64_t num_images) {
  Content content;
  for (int64_t i = 0; i < num_images; ++i) {
    const size_t at = text.find(kImageToken);
    if (at == text.npos) break;
    content.text += text.substr(0, at);
    content.image_offsets.push_back(content.text.size());
    content.images.emplace_back();
    text.remove_prefix(at + kImageToken.size());
  }
  content.images.resize(static_cast<size_t>(num_images));
  content.text += text;
  return content;
}

Result<Message> ReadConversationMessage(const JsonValue& source, const std::string& path) {
  DI_RETURN_IF_ERROR(RequireObject(source, path));
  Message message;
  DI_ASSIGN_OR_RETURN(message.role, ReadRole(source, path));
  DI_ASSIGN_OR_RETURN(const std::optional<std::string> text,
                      OptionalString(source, "content", path));
  int64_t num_images = 0;
  if (const JsonValue* images = FindMember(source, "images")) {
    constexpr int64_t kMaxImages = 10'000;
    if (images->if_int64() == nullptr || *images->if_int64() < 0 ||
        *images->if_int64() > kMaxImages) {
      return NotA(path + ".images", fmt::format("an integer of 0 ... {}", kMaxImages));
    }
    num_images = *images->if_int64();
  }
  message.content = ContentWithPlaceholders(text.value_or(""), num_images);
  DI_ASSIGN_OR_RETURN(message.reasoning_content, OptionalString(source, "reasoning_content", path));
  DI_ASSIGN_OR_RETURN(message.tool_call_id, OptionalString(source, "tool_call_id", path));
  DI_ASSIGN_OR_RETURN(message.prefix, BoolOr(source, "prefix", false, path + "."));
  DI_ASSIGN_OR_RETURN(message.tools, ReadToolDefinitions(source, path + "."));
  DI_ASSIGN_OR_RETURN(const JsonValue::Array* calls, ListOf(source, "tool_calls", path + "."));
  for (size_t i = 0; i < calls->size(); ++i) {
    DI_ASSIGN_OR_RETURN(ToolCall call, ReadToolCall((*calls)[i], (*calls)[i],
                                                    fmt::format("{}.tool_calls[{}]", path, i)));
    message.tool_calls.push_back(std::move(call));
  }
  return message;
}

Status ReadResponseFormat(const JsonValue& conversation, ResponseFormat* format) {
  DI_ASSIGN_OR_RETURN(const std::optional<std::string> kind,
                      OptionalString(conversation, "response_format", "conversation"));
  DI_ASSIGN_OR_RETURN(const std::optional<std::string> regex,
                      OptionalString(conversation, "response_regex", "conversation"));
  const JsonValue* schema = FindMember(conversation, "response_schema");
  if (kind.has_value() && *kind != "text" && *kind != "json_object") {
    return NotA("response_format", "'text' or 'json_object'");
  }
  if ((kind == "json_object") + regex.has_value() + (schema != nullptr) > 1) {
    return Fail(Code::kInvalidArgument,
                "Only one of response_format 'json_object', response_schema and response_regex may "
                "be given.",
                "response_format");
  }
  if (kind == "json_object") format->kind = ResponseFormat::Kind::kJsonObject;
  if (regex.has_value()) {
    *format = {.kind = ResponseFormat::Kind::kRegex, .schema = *regex};
  }
  if (schema != nullptr) {
    *format = {.kind = ResponseFormat::Kind::kJsonSchema, .schema = schema->Dump()};
  }
  return {};
}

Result<ToolChoice> ReadToolChoice(const JsonValue& conversation) {
  DI_ASSIGN_OR_RETURN(const std::optional<std::string> name,
                      OptionalString(conversation, "tool_choice", "conversation"));
  if (!name.has_value() || name == "auto") return ToolChoice::kAuto;
  if (name == "none") return ToolChoice::kNone;
  if (name == "required") return ToolChoice::kRequired;
  return NotA("tool_choice", "'auto', 'none' or 'required'");
}

// Names or an integer. Booleans, fractions and digits in quotes are no integers.
Result<int> ReadEffort(const JsonValue& object, std::string_view key, bool with_xhigh) {
  const JsonValue* effort = FindMember(object, key);
  if (effort == nullptr) return Chat().reasoning_effort;
  if (const std::string* name = effort->if_string()) {
    if (*name == "low") return 50;
    if (*name == "high" || (with_xhigh && *name == "xhigh")) return 75;
    if (*name == "max") return 100;
  } else if (const int64_t* number = effort->if_int64()) {
    if (*number >= 1 && *number <= 100) return static_cast<int>(*number);
  }
  return NotA(std::string(key), with_xhigh
                                    ? "an integer from 1 to 100, 'low', 'high', 'xhigh' or 'max'"
                                    : "an integer from 1 to 100, 'low', 'high' or 'max'");
}

// ------------------------------------------------------------------ the checkpoint's messages

std::string WithoutImageTokens(std::string_view text) {
  std::string out;
  for (size_t at = text.find(kImageToken); at != text.npos; at = text.find(kImageToken)) {
    out.append(text.substr(0, at)).append(kAsciiImageToken);
    text.remove_prefix(at + kImageToken.size());
  }
  return out.append(text);
}

// A block's type, or what stands in for it.
std::string TypeOf(const JsonValue& block) {
  const JsonValue* type = FindMember(block, "type");
  return type != nullptr && type->if_string() != nullptr ? *type->if_string() : "unknown";
}

bool IsImage(std::string_view type) {
  return type == "image" || type == "image_url";
}

// {"type": "image_url", "image_url": {"url": ...}} or {"type": "image", "source": {...}}, where the
// source is a URL or data in base64. What is not understood stays empty: the prompt needs no more
// than the place.
ImageSource ReadImage(const JsonValue& block, std::string path) {
  ImageSource image;
  image.path = std::move(path);
  const auto string_of = [](const JsonValue* owner, std::string_view key) -> std::string {
    const JsonValue* member = owner == nullptr ? nullptr : FindMember(*owner, key);
    return member == nullptr || member->if_string() == nullptr ? "" : *member->if_string();
  };
  const JsonValue* link = FindMember(block, "image_url");
  const JsonValue* source = FindMember(block, "source");
  if (link != nullptr && link->if_string() != nullptr) {
    image.url = *link->if_string();
  } else if (link != nullptr) {
    image.url = string_of(link, "url");
    const std::string detail = string_of(link, "detail");
    if (!detail.empty()) image.detail = detail;
  } else if (source != nullptr && FindMember(*source, "data") != nullptr) {
    image.url = fmt::format("data:{};base64,{}", string_of(source, "media_type"),
                            string_of(source, "data"));
  } else if (source != nullptr) {
    image.url = string_of(source, "url");
  } else {
    image.url = string_of(&block, "url");
  }
  return image;
}

// Joins parts by blank lines.
class ContentJoiner {
 public:
  void AddText(std::string_view text) {
    Separate();
    content_.text += text;
  }
  void AddImage(ImageSource image) {
    Separate();
    content_.image_offsets.push_back(content_.text.size());
    content_.images.push_back(std::move(image));
  }
  Content Take() {
    return std::move(content_);
  }

 private:
  void Separate() {
    if (!is_first_) content_.text += kPartSeparator;
    is_first_ = false;
  }
  bool is_first_ = true;
  Content content_;
};

Result<std::string> TextOf(const JsonValue& block, const std::string& path) {
  DI_ASSIGN_OR_RETURN(const std::optional<std::string> text, OptionalString(block, "text", path));
  return WithoutImageTokens(text.value_or(""));
}

// A string, null, or a list of text and image blocks. Of other blocks the type is shown, or
// nothing.
Result<Content> ReadJoinedContent(const JsonValue* source, bool shows_unsupported,
                                  const std::string& path) {
  Content content;
  if (source == nullptr) return content;
  if (source->if_string() != nullptr) {
    content.text = WithoutImageTokens(*source->if_string());
    return content;
  }
  if (source->if_array() == nullptr) return NotA(path, "a string, null or a list of blocks");
  ContentJoiner joiner;
  for (size_t i = 0; i < source->if_array()->size(); ++i) {
    const JsonValue& block = (*source->if_array())[i];
    const std::string block_path = fmt::format("{}[{}]", path, i);
    DI_RETURN_IF_ERROR(RequireObject(block, block_path));
    const std::string type = TypeOf(block);
    if (type == "text") {
      DI_ASSIGN_OR_RETURN(const std::string text, TextOf(block, block_path));
      joiner.AddText(text);
    } else if (IsImage(type)) {
      joiner.AddImage(ReadImage(block, block_path));
    } else if (shows_unsupported) {
      joiner.AddText(fmt::format("[Unsupported {}]", type));
    }
  }
  return joiner.Take();
}

Result<ContentBlock> ReadUserBlock(const JsonValue& block, const std::string& path) {
  DI_RETURN_IF_ERROR(RequireObject(block, path));
  const std::string type = TypeOf(block);
  ContentBlock read;
  if (type == "text") {
    DI_ASSIGN_OR_RETURN(read.content.text, TextOf(block, path));
  } else if (IsImage(type)) {
    read.content.image_offsets.push_back(0);
    read.content.images.push_back(ReadImage(block, path));
  } else if (type == "tool_result") {
    read.kind = ContentBlock::Kind::kToolResult;
    DI_ASSIGN_OR_RETURN(read.tool_call_id, OptionalString(block, "tool_use_id", path));
    DI_ASSIGN_OR_RETURN(read.content,
                        ReadJoinedContent(FindMember(block, "content"), true, path + ".content"));
  } else {
    read.kind = ContentBlock::Kind::kUnsupported;
    read.content.text = type;
  }
  return read;
}

Status ReadCheckpointContent(const JsonValue& source, const std::string& path, Message* message) {
  const JsonValue* content = FindMember(source, "content");
  if (message->role == Role::kUser && content != nullptr && content->if_array() != nullptr) {
    for (size_t i = 0; i < content->if_array()->size(); ++i) {
      DI_ASSIGN_OR_RETURN(
          ContentBlock block,
          ReadUserBlock((*content->if_array())[i], fmt::format("{}.content[{}]", path, i)));
      message->blocks.push_back(std::move(block));
    }
    return {};
  }
  DI_ASSIGN_OR_RETURN(message->content, ReadJoinedContent(content, false, path + ".content"));
  return {};
}

Result<std::vector<Tool>> ReadTools(const JsonValue& message, const std::string& path) {
  DI_ASSIGN_OR_RETURN(const JsonValue::Array* list, ListOf(message, "tools", path + "."));
  std::vector<Tool> tools;
  for (size_t i = 0; i < list->size(); ++i) {
    const std::string field = fmt::format("{}.tools[{}].function", path, i);
    const JsonValue* function = (*list)[i].Find("function");
    if (function == nullptr || function->if_object() == nullptr) return NotA(field, "an object");
    DI_ASSIGN_OR_RETURN(const std::optional<std::string> name,
                        OptionalString(*function, "name", field));
    Tool& tool = tools.emplace_back();
    tool.name = name.value_or("");
    tool.function = function->Dump();
  }
  return tools;
}

Result<Message> ReadCheckpointMessage(const JsonValue& source, const std::string& path) {
  DI_RETURN_IF_ERROR(RequireObject(source, path));
  Message message;
  DI_ASSIGN_OR_RETURN(message.role, ReadRole(source, path));
  DI_RETURN_IF_ERROR(ReadCheckpointContent(source, path, &message));
  DI_ASSIGN_OR_RETURN(message.reasoning_content, OptionalString(source, "reasoning_content", path));
  if (message.reasoning_content.has_value()) {
    message.reasoning_content = WithoutImageTokens(*message.reasoning_content);
  }
  DI_ASSIGN_OR_RETURN(message.tool_call_id, OptionalString(source, "tool_call_id", path));
  DI_ASSIGN_OR_RETURN(message.prefix, BoolOr(source, "wo_eos", false, path + "."));
  DI_ASSIGN_OR_RETURN(message.task, OptionalString(source, "task", path));
  DI_ASSIGN_OR_RETURN(message.tools, ReadTools(source, path));
  if (const JsonValue* format = FindMember(source, "response_format")) {
    message.response_format = format->Dump();
  }
  DI_ASSIGN_OR_RETURN(const JsonValue::Array* calls, ListOf(source, "tool_calls", path + "."));
  for (size_t i = 0; i < calls->size(); ++i) {
    const std::string field = fmt::format("{}.tool_calls[{}]", path, i);
    const JsonValue* function = (*calls)[i].Find("function");
    if (function == nullptr) return NotA(field + ".function", "an object");
    DI_ASSIGN_OR_RETURN(ToolCall call, ReadToolCall((*calls)[i], *function, field));
    message.tool_calls.push_back(std::move(call));
  }
  return message;
}

// The text of a member that is known to be there.
std::string MemberText(std::string_view object, std::string_view key) {
  const Result<std::vector<JsonMemberText>> members = PythonJsonMembers(object);
  if (!members.has_value()) return {};
  for (const JsonMemberText& member : *members) {
    if (member.key == key) return member.is_string ? JsonQuoted(member.value) : member.value;
  }
  return {};
}

}  // namespace

Result<Chat> ChatFromConversation(const JsonValue& conversation) {
  DI_RETURN_IF_ERROR(RequireObject(conversation, "conversation"));
  Chat chat;
  DI_ASSIGN_OR_RETURN(const JsonValue::Array* messages, RequireMessages(conversation));
  for (size_t i = 0; i < messages->size(); ++i) {
    DI_ASSIGN_OR_RETURN(Message message,
                        ReadConversationMessage((*messages)[i], fmt::format("messages[{}]", i)));
    chat.messages.push_back(std::move(message));
  }
  DI_ASSIGN_OR_RETURN(chat.thinking, BoolOr(conversation, "thinking", true, ""));
  DI_ASSIGN_OR_RETURN(chat.tools, ReadToolDefinitions(conversation, ""));
  DI_ASSIGN_OR_RETURN(chat.tool_choice, ReadToolChoice(conversation));
  DI_ASSIGN_OR_RETURN(chat.reasoning_effort, ReadEffort(conversation, "reasoning_effort", true));
  DI_RETURN_IF_ERROR(ReadResponseFormat(conversation, &chat.response_format));
  return chat;
}

Result<Chat> ChatFromCheckpointMessages(const JsonValue& line) {
  DI_RETURN_IF_ERROR(RequireObject(line, "conversation"));
  Chat chat;
  chat.profile = EncodingProfile::kCheckpoint;
  DI_ASSIGN_OR_RETURN(const JsonValue::Array* messages, RequireMessages(line));
  for (size_t i = 0; i < messages->size(); ++i) {
    DI_ASSIGN_OR_RETURN(Message message,
                        ReadCheckpointMessage((*messages)[i], fmt::format("messages[{}]", i)));
    chat.messages.push_back(std::move(message));
  }
  const JsonValue* mode = FindMember(line, "mode");
  if (mode != nullptr && *mode != JsonValue("thinking") && *mode != JsonValue("chat")) {
    return NotA("mode", "'thinking' or 'chat'");
  }
  chat.thinking = mode == nullptr || *mode == JsonValue("thinking");
  DI_ASSIGN_OR_RETURN(chat.reasoning_effort, ReadEffort(line, "effort", false));
  DI_ASSIGN_OR_RETURN(chat.drop_thinking, BoolOr(line, "drop_thinking", true, ""));
  return chat;
}

Result<Chat> ChatFromCheckpointLine(std::string_view line) {
  DI_ASSIGN_OR_RETURN(const JsonValue value, JsonValue::Parse(line));
  DI_ASSIGN_OR_RETURN(Chat chat, ChatFromCheckpointMessages(value));
  // Once more for what is shown as it stands.
  DI_ASSIGN_OR_RETURN(const std::vector<std::string> messages,
                      PythonJsonElements(MemberText(line, "messages")));
  for (size_t i = 0; i < chat.messages.size(); ++i) {
    Message& message = chat.messages[i];
    if (message.response_format.has_value()) {
      message.response_format = MemberText(messages[i], "response_format");
    }
    if (message.tools.empty()) continue;
    DI_ASSIGN_OR_RETURN(const std::vector<std::string> tools,
                        PythonJsonElements(MemberText(messages[i], "tools")));
    for (size_t tool = 0; tool < tools.size(); ++tool) {
      message.tools[tool].function = MemberText(tools[tool], "function");
    }
  }
  return chat;
}

}  // namespace deepinfer
