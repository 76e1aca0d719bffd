// The literal parts of chat prompts: markers, and the blocks of the two dialects. Every byte here
// is what the model was trained on. Not for deciding what goes into a prompt (chat_render_*.cc).
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "deepinfer/chat.h"

namespace deepinfer {

inline constexpr std::string_view kBosMarker = "<｜begin▁of▁sentence｜>";
inline constexpr std::string_view kEosMarker = "<｜end▁of▁sentence｜>";
inline constexpr std::string_view kSystemMarker = "<｜System｜>";  // kV41 only
inline constexpr std::string_view kUserMarker = "<｜User｜>";
inline constexpr std::string_view kAssistantMarker = "<｜Assistant｜>";
inline constexpr std::string_view kReminderMarker = "<｜latest_reminder｜>";
inline constexpr std::string_view kThinkBeginMarker = "<think>";
inline constexpr std::string_view kThinkEndMarker = "</think>";
inline constexpr std::string_view kDsmlMarker = "｜DSML｜";  // within angle brackets that are text

// Between the parts of a turn.
inline constexpr std::string_view kPartSeparator = "\n\n";
// Around the result of a tool. Text, not tokens.
inline constexpr std::string_view kToolResultBegin = "<tool_result>";
inline constexpr std::string_view kToolResultEnd = "</tool_result>";

// What differs between the dialects.
struct ChatTemplate {
  std::string_view image_marker;
  // The names of tags, as they stand after kDsmlMarker.
  std::string_view calls_tag;
  std::string_view invoke_tag;
  std::string_view parameter_tag;
  // Whether a call without arguments has an empty line between its tags.
  bool empty_line_for_no_arguments;
};

const ChatTemplate& TemplateOf(ChatDialect dialect);

// What a thinking prompt begins with; may be empty. Of kV41 it belongs into a system turn.
std::string EffortText(ChatDialect dialect, int effort);

// The list of tools, one line of JSON each, with the instructions around them. A Literal of
// PromptBuilder up to the schemas, which are the callers' text, and from there on.
struct ToolBlock {
  std::string before_schemas;
  std::string_view after_schemas;
};
ToolBlock ToolBlockOf(ChatDialect dialect);
// In front of tools that arrive later.
inline constexpr std::string_view kUpdatedToolsHeading = "### Updated Tool Schemas\n\n";

// In front of a schema, or of {"type": "json_object"}.
inline constexpr std::string_view kResponseFormatHeading =
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n";
inline constexpr std::string_view kJsonObjectFormat = "{\"type\": \"json_object\"}";
// The whole block of JSON mode in kV4.
inline constexpr std::string_view kV4JsonObjectBlock =
    "You are a helpful assistant designed to output JSON.\n"
    "## Response Format:\n\nReply with JSON object ONLY.";

// The marker of a quick-instruction task ("title": "<｜title｜>"); empty for unknown names.
std::string_view TaskMarker(std::string_view task);
inline constexpr std::string_view kActionTask = "action";

}  // namespace deepinfer
