// What the renderers share: tools and response formats.
#include <cstddef>

#include "base/json_value.h"
#include "text/chat_render_profiles.h"
#include "text/chat_template.h"
#include "text/prompt_json.h"
#include "text/tool_call_block.h"

namespace deepinfer {
namespace {

// {"name": ..., "description": ..., "parameters": ...}, whatever else the function holds.
Result<std::string> RecipeToolLine(const Tool& tool, ChatDialect dialect,
                                   const std::string& field) {
  Result<JsonValue> function = JsonValue::Parse(tool.function);
  if (!function.has_value()) return WithContext(function.error(), field);
  if (function->if_object() == nullptr) {
    return Fail(Code::kInvalidArgument, fmt::format("{} is not a JSON object.", field), field);
  }
  JsonValue shown;
  shown.Set("name", tool.name);
  const JsonValue* description = function->Find("description");
  shown.Set("description",
            description == nullptr || description->is_null() ? JsonValue("") : *description);
  if (!tool.recipe_parameters.empty()) {
    Result<JsonValue> parameters = JsonValue::Parse(tool.recipe_parameters);
    if (!parameters.has_value()) return WithContext(parameters.error(), field);
    shown.Set("parameters", *std::move(parameters));
  } else {
    const JsonValue* parameters = function->Find("parameters");
    shown.Set("parameters", parameters == nullptr ? JsonValue(JsonValue::Object()) : *parameters);
  }
  return DumpForPrompt(shown, dialect);
}

}  // namespace

std::vector<const Tool*> VisibleTools(const Chat& chat) {
  std::vector<const Tool*> tools;
  if (chat.tool_choice == ToolChoice::kNone) return tools;
  for (const Tool& tool : chat.tools) tools.push_back(&tool);
  return tools;
}

const Message& EmptySystemMessage() {
  static const Message kMessage = [] {
    Message message;
    message.role = Role::kSystem;
    return message;
  }();
  return kMessage;
}

ChatPrompt WithAnswerBegun(const Chat& chat, ChatDialect dialect, bool has_tools,
                           std::optional<OutputParserOptions::Start> continued,
                           PromptBuilder* prompt) {
  OutputParserOptions::Start start = OutputParserOptions::Start::kContent;
  if (continued.has_value()) {
    start = *continued;
  } else {
    prompt->Special(kAssistantMarker);
    prompt->Special(chat.thinking ? kThinkBeginMarker : kThinkEndMarker);
    if (chat.thinking) start = OutputParserOptions::Start::kReasoning;
  }
  if (chat.tool_choice == ToolChoice::kRequired && has_tools) {
    AppendToolCallBlockBegin(dialect, prompt);
    start = OutputParserOptions::Start::kToolCalls;
  }
  ChatPrompt result = prompt->Take();
  result.parser.start = start;
  result.parser.tools = has_tools;
  result.parser.json = chat.response_format.kind == ResponseFormat::Kind::kJsonObject;
  return result;
}

void AppendToolBlock(const std::vector<std::string>& lines, ChatDialect dialect,
                     PromptBuilder* prompt) {
  const ToolBlock block = ToolBlockOf(dialect);
  prompt->Text(kPartSeparator);
  prompt->Literal(block.before_schemas);
  for (const std::string& line : lines) {
    prompt->Text(line);
    prompt->Text("\n");
  }
  // A list without lines is an empty line to this model, and nothing to the one before it.
  if (lines.empty() && dialect == ChatDialect::kV41) prompt->Text("\n");
  prompt->Text(block.after_schemas);
}

Result<std::string> FormatBlock(const ResponseFormat& format, ChatDialect dialect) {
  std::string block;
  switch (format.kind) {
    case ResponseFormat::Kind::kText:
    case ResponseFormat::Kind::kRegex:
      break;
    case ResponseFormat::Kind::kJsonObject:
      block.append(kPartSeparator);
      if (dialect == ChatDialect::kV41) {
        block.append(kResponseFormatHeading).append(kJsonObjectFormat);
      } else {
        block.append(kV4JsonObjectBlock);
      }
      break;
    case ResponseFormat::Kind::kJsonSchema: {
      const Result<JsonValue> schema = JsonValue::Parse(format.schema);
      if (!schema.has_value()) return WithContext(schema.error(), "response_format");
      block.append(kPartSeparator)
          .append(kResponseFormatHeading)
          .append(DumpForPrompt(*schema, dialect));
      break;
    }
  }
  return block;
}

Result<std::vector<std::string>> RecipeToolLines(const std::vector<const Tool*>& tools,
                                                 bool with_deferred, ChatDialect dialect,
                                                 const std::string& field) {
  std::vector<std::string> lines;
  for (size_t i = 0; i < tools.size(); ++i) {
    if (tools[i]->defer_loading && !with_deferred) continue;
    DI_ASSIGN_OR_RETURN(std::string line, RecipeToolLine(*tools[i], dialect,
                                                         fmt::format("{}[{}].function", field, i)));
    lines.push_back(std::move(line));
  }
  return lines;
}

}  // namespace deepinfer
