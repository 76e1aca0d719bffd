// The recipe profile for this model: every assistant turn has its own header, reasoning of earlier
// turns is shown only if the conversation has tools.
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "text/chat_render_profiles.h"
#include "text/chat_template.h"
#include "text/tool_call_block.h"
#include "text/tool_result_order.h"

namespace deepinfer {
namespace {

constexpr ChatDialect kDialect = ChatDialect::kV41;
constexpr EncodingProfile kProfile = EncodingProfile::kRecipe;

bool IsUserLike(const Message& message) {
  return message.role == Role::kUser || message.role == Role::kTool;
}

// Puts the results within each user turn into the order of the latest calls before the turn.
// Results of unknown calls come first, those without an id stay where they are.
void SortToolResults(std::vector<const Message*>* messages) {
  std::optional<CallPositions> positions;  // of the latest calls
  for (size_t begin = 0; begin < messages->size();) {
    const Message& first = *(*messages)[begin];
    if (first.role == Role::kAssistant && !first.tool_calls.empty()) {
      positions.emplace(first.tool_calls, CallPositions::Repeated::kFirst);
    }
    if (!IsUserLike(first)) {
      ++begin;
      continue;
    }
    size_t end = begin;
    std::vector<size_t> places;
    for (; end < messages->size() && IsUserLike(*(*messages)[end]); ++end) {
      if ((*messages)[end]->tool_call_id.has_value()) places.push_back(end);
    }
    if (positions.has_value() && places.size() > 1) {
      SortAtPlaces(messages, places,
                   [&](const Message* result) { return positions->Of(*result->tool_call_id, 0); });
    }
    begin = end;
  }
}

class RecipeRenderer {
 public:
  explicit RecipeRenderer(const Chat& chat)
      : chat_(chat), tools_(VisibleTools(chat)), prompt_(TemplateOf(kDialect).image_marker) {}

  Result<ChatPrompt> Render() {
    DI_ASSIGN_OR_RETURN(format_block_, FormatBlock(chat_.response_format, kDialect));
    CollectMessages();
    prompt_.Special(kBosMarker);
    if (!messages_.empty() && (chat_.thinking || messages_[0]->role == Role::kSystem)) {
      prompt_.Special(kSystemMarker);
      if (chat_.thinking) prompt_.Text(EffortText(kDialect, chat_.reasoning_effort));
    }
    for (size_t i = 0; i < messages_.size(); ++i) DI_RETURN_IF_ERROR(AppendMessage(i));

    std::optional<OutputParserOptions::Start> continued;
    if (!messages_.empty() && messages_.back()->prefix) continued = continued_start_;
    return WithAnswerBegun(chat_, kDialect, !tools_.empty(), continued, &prompt_);
  }

 private:
  // Tools and formats stand in a system turn at the beginning, which they bring with them.
  void CollectMessages() {
    const bool needs_system = !tools_.empty() || !format_block_.empty();
    if (needs_system && (chat_.messages.empty() || chat_.messages[0].role != Role::kSystem)) {
      messages_.push_back(&EmptySystemMessage());
      inserted_ = 1;
    }
    for (const Message& message : chat_.messages) messages_.push_back(&message);
    SortToolResults(&messages_);
  }

  Status AppendMessage(size_t i) {
    const Message& message = *messages_[i];
    const Message* previous = i > 0 ? messages_[i - 1] : nullptr;
    switch (message.role) {
      case Role::kSystem:
        return AppendSystem(i);
      case Role::kUser:
      case Role::kTool:
        if (previous != nullptr && IsUserLike(*previous)) {
          prompt_.Text(kPartSeparator);
        } else {
          prompt_.Special(kUserMarker);
        }
        if (message.role == Role::kTool) prompt_.Text(kToolResultBegin);
        prompt_.Add(message.content);
        if (message.role == Role::kTool) prompt_.Text(kToolResultEnd);
        return {};
      case Role::kLatestReminder:
        // The toolkit shows the first one of a run only.
        if (previous != nullptr && previous->role == Role::kLatestReminder) return {};
        prompt_.Special(kReminderMarker);
        prompt_.Add(message.content);
        return {};
      case Role::kAssistant:
        AppendAssistant(message, i);
        return {};
    }
    return {};
  }

  Status AppendSystem(size_t i) {
    const Message& message = *messages_[i];
    if (i > 0) prompt_.Special(kSystemMarker);
    prompt_.Add(message.content);
    if (i == 0) {
      if (!tools_.empty()) {
        DI_ASSIGN_OR_RETURN(const std::vector<std::string> lines,
                            RecipeToolLines(tools_, false, kDialect, "tools"));
        AppendToolBlock(lines, kDialect, &prompt_);
      }
      prompt_.Text(format_block_);
    }
    if (!message.tools.empty()) {
      std::vector<const Tool*> late_tools;
      for (const Tool& tool : message.tools) late_tools.push_back(&tool);
      DI_ASSIGN_OR_RETURN(const std::vector<std::string> lines,
                          RecipeToolLines(late_tools, true, kDialect,
                                          fmt::format("messages[{}].tools", i - inserted_)));
      prompt_.Text(kPartSeparator);
      prompt_.Text(kUpdatedToolsHeading);
      for (size_t line = 0; line < lines.size(); ++line) {
        if (line > 0) prompt_.Text("\n");
        prompt_.Text(lines[line]);
      }
    }
    return {};
  }

  void AppendAssistant(const Message& message, size_t i) {
    // A continued turn shows its reasoning without tools too, but not as the first message.
    const bool shows_reasoning = chat_.thinking && (!tools_.empty() || (message.prefix && i > 0));
    const bool is_empty = message.content.text.empty() && message.tool_calls.empty();
    const std::string reasoning = message.reasoning_content.value_or("");
    const bool stays_in_reasoning = shows_reasoning && message.prefix && is_empty;
    prompt_.Special(kAssistantMarker);
    if (shows_reasoning) {
      prompt_.Special(kThinkBeginMarker);
      prompt_.Text(reasoning);
    }
    if (!stays_in_reasoning) prompt_.Special(kThinkEndMarker);
    prompt_.Add(message.content);
    if (!message.tool_calls.empty()) {
      AppendToolCallBlock(message.tool_calls, kProfile, kDialect, &prompt_);
    }
    if (!message.prefix) {
      prompt_.Special(kEosMarker);
      return;
    }
    using Start = OutputParserOptions::Start;
    if (stays_in_reasoning) {
      continued_start_ = reasoning.empty() ? Start::kReasoning : Start::kReasoningContinuation;
    } else {
      continued_start_ =
          chat_.thinking && !is_empty ? Start::kContentContinuation : Start::kContent;
    }
  }

  const Chat& chat_;
  std::vector<const Tool*> tools_;
  std::string format_block_;
  std::vector<const Message*> messages_;
  size_t inserted_ = 0;  // messages before the caller's own
  OutputParserOptions::Start continued_start_ = OutputParserOptions::Start::kContent;
  PromptBuilder prompt_;
};

}  // namespace

Result<ChatPrompt> RenderRecipeV41(const Chat& chat) {
  return RecipeRenderer(chat).Render();
}

}  // namespace deepinfer
