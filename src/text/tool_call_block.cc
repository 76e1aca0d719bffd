#include "text/tool_call_block.h"

#include <optional>
#include <utility>

#include "base/json_value.h"
#include "text/chat_template.h"
#include "text/prompt_json.h"

namespace deepinfer {
namespace {

std::optional<std::vector<CallArgument>> RecipeArguments(std::string_view text,
                                                         ChatDialect dialect) {
  Result<JsonValue> value = JsonValue::Parse(text);
  if (!value.has_value() || value->if_object() == nullptr) return std::nullopt;
  std::vector<CallArgument> arguments;
  for (auto& [name, member] : *value->if_object()) {
    const std::string* string = member.if_string();
    std::string shown = string != nullptr ? *string : DumpForPrompt(member, dialect);
    arguments.push_back({std::move(name), string != nullptr, std::move(shown)});
  }
  return arguments;
}

std::optional<std::vector<CallArgument>> CheckpointArguments(std::string_view text) {
  Result<std::vector<JsonMemberText>> members = PythonJsonMembers(text);
  if (!members.has_value()) {
    const Result<JsonValue> wrapped = JsonValue::Parse(text);
    if (!wrapped.has_value() || wrapped->if_string() == nullptr) return std::nullopt;
    members = PythonJsonMembers(*wrapped->if_string());
    if (!members.has_value()) return std::nullopt;
  }
  std::vector<CallArgument> arguments;
  for (JsonMemberText& member : *members) {
    arguments.push_back({std::move(member.key), member.is_string, std::move(member.value)});
  }
  return arguments;
}

// "<" or "</", the marker, and what follows it.
void AppendTag(std::string_view opening, std::string_view tag, PromptBuilder* prompt) {
  prompt->Text(opening);
  prompt->Special(kDsmlMarker);
  prompt->Text(tag);
}

void AppendCall(const ToolCall& call, EncodingProfile profile, ChatDialect dialect,
                PromptBuilder* prompt) {
  const ChatTemplate& names = TemplateOf(dialect);
  AppendTag("<", names.invoke_tag, prompt);
  prompt->Text(" name=\"");
  prompt->Text(call.name);
  prompt->Text("\">\n");
  const std::vector<CallArgument> arguments = CallArguments(call.arguments, profile, dialect);
  for (const CallArgument& argument : arguments) {
    AppendTag("<", names.parameter_tag, prompt);
    prompt->Text(" name=\"");
    prompt->Text(argument.name);
    prompt->Text(argument.is_string ? "\" string=\"true\">" : "\" string=\"false\">");
    prompt->Text(argument.value);
    AppendTag("</", names.parameter_tag, prompt);
    prompt->Text(">\n");
  }
  if (arguments.empty() && names.empty_line_for_no_arguments) prompt->Text("\n");
  AppendTag("</", names.invoke_tag, prompt);
  prompt->Text(">\n");
}

}  // namespace

std::vector<CallArgument> CallArguments(std::string_view arguments, EncodingProfile profile,
                                        ChatDialect dialect) {
  std::optional<std::vector<CallArgument>> members = profile == EncodingProfile::kRecipe
                                                         ? RecipeArguments(arguments, dialect)
                                                         : CheckpointArguments(arguments);
  if (members.has_value()) return *std::move(members);
  std::vector<CallArgument> whole(1);
  whole[0] = {.name = "arguments", .is_string = true, .value = std::string(arguments)};
  return whole;
}

void AppendToolCallBlockBegin(ChatDialect dialect, PromptBuilder* prompt) {
  prompt->Text(kPartSeparator);
  AppendTag("<", TemplateOf(dialect).calls_tag, prompt);
  prompt->Text(">\n");
}

void AppendToolCallBlock(const std::vector<ToolCall>& calls, EncodingProfile profile,
                         ChatDialect dialect, PromptBuilder* prompt) {
  AppendToolCallBlockBegin(dialect, prompt);
  for (const ToolCall& call : calls) AppendCall(call, profile, dialect, prompt);
  AppendTag("</", TemplateOf(dialect).calls_tag, prompt);
  prompt->Text(">");
}

}  // namespace deepinfer
