#include "text/chat_template.h"

#include <fmt/format.h>

namespace deepinfer {

const ChatTemplate& TemplateOf(ChatDialect dialect) {
  static constexpr ChatTemplate kTemplateV41 = {
      .image_marker = "<｜deepseek_image｜>",
      .calls_tag = " calls",
      .invoke_tag = " invoke",
      .parameter_tag = " parameter",
      .empty_line_for_no_arguments = true,
  };
  static constexpr ChatTemplate kTemplateV4 = {
      .image_marker = "<｜image｜>",
      .calls_tag = "tool_calls",
      .invoke_tag = "invoke",
      .parameter_tag = "parameter",
      .empty_line_for_no_arguments = false,
  };
  return dialect == ChatDialect::kV41 ? kTemplateV41 : kTemplateV4;
}

std::string EffortText(ChatDialect dialect, int effort) {
  if (dialect == ChatDialect::kV41) {
    return fmt::format(
        "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the "
        "reasoning)\n\n",
        effort);
  }
  if (effort >= 100) {
    return "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
           "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: "
           "exhaustively decompose the problem into its most fundamental components, trace every "
           "causal chain to its root, and resolve the underlying cause rather than any surface "
           "symptom.\n"
           "Do not stop reasoning until you have independently verified the solution from multiple "
           "angles and are certain that no assumption remains unchecked and no error remains "
           "undiscovered.\n\n";
  }
  if (effort >= 75) {
    return "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
           "You MUST be very thorough in your thinking and comprehensively decompose the problem "
           "to "
           "resolve the root cause, rigorously stress-testing your logic against all potential "
           "paths, edge cases, and adversarial scenarios.\n"
           "Explicitly write out your entire deliberation process, documenting every intermediate "
           "step, considered alternative, and rejected hypothesis to ensure absolutely no "
           "assumption is left unchecked.\n\n";
  }
  return "";
}

ToolBlock ToolBlockOf(ChatDialect dialect) {
  const ChatTemplate& names = TemplateOf(dialect);
  return ToolBlock{
      .before_schemas = fmt::format(
          R"(## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{0}{1}>" block like the following:

<{0}{1}>
<{0}{2} name="$TOOL_NAME">
<{0}{3} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{0}{3}>
...
</{0}{2}>
<{0}{2} name="$TOOL_NAME2">
...
</{0}{2}>
</{0}{1}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

)",
          kDsmlMarker, names.calls_tag, names.invoke_tag, names.parameter_tag),
      .after_schemas =
          "\nYou MUST strictly follow the above defined tool name and parameter schemas to "
          "invoke "
          "tool calls.\n",
  };
}

std::string_view TaskMarker(std::string_view task) {
  struct Entry {
    std::string_view task;
    std::string_view marker;
  };
  static constexpr Entry kEntries[] = {
      {kActionTask, "<｜action｜>"}, {"query", "<｜query｜>"}, {"authority", "<｜authority｜>"},
      {"domain", "<｜domain｜>"},    {"title", "<｜title｜>"}, {"read_url", "<｜read_url｜>"},
  };
  for (const Entry& entry : kEntries) {
    if (entry.task == task) return entry.marker;
  }
  return {};
}

}  // namespace deepinfer
