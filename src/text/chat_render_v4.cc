// The recipe profile for the preceding model generation: system messages are gathered at the
// beginning without a token of their own; calls and their results are put into the order of ids.
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>

#include "text/chat_render_profiles.h"
#include "text/chat_template.h"
#include "text/tool_call_block.h"
#include "text/tool_result_order.h"

namespace deepinfer {
namespace {

constexpr ChatDialect kDialect = ChatDialect::kV4;
constexpr EncodingProfile kProfile = EncodingProfile::kRecipe;

bool IsEmpty(const Content& content) {
  return content.text.empty() && content.images.empty();
}

// The messages of the turns: system messages are elsewhere. Behind an assistant turn with n calls,
// of the next n messages (user messages in a row count as one) the results come first, in the order
// of their ids; results without an id come before those. Nothing is sorted if there are fewer than
// n. The turns are found before anything has moved.
std::vector<const Message*> SortedTurns(const std::vector<Message>& messages) {
  std::vector<std::vector<const Message*>> groups;
  for (const Message& message : messages) {
    if (message.role == Role::kSystem) continue;
    const bool joins = message.role == Role::kUser && !groups.empty() &&
                       groups.back().front()->role == Role::kUser;
    if (!joins) groups.emplace_back();
    groups.back().push_back(&message);
  }
  std::vector<size_t> num_calls;
  for (const auto& group : groups) num_calls.push_back(group.front()->tool_calls.size());
  for (size_t i = 0; i < num_calls.size(); ++i) {
    if (num_calls[i] > groups.size() - 1 - i) continue;
    std::vector<size_t> places(num_calls[i]);
    std::iota(places.begin(), places.end(), i + 1);
    SortAtPlaces(&groups, places, [](const std::vector<const Message*>& group) {
      const Message& message = *group.front();
      const bool is_result = message.role == Role::kTool;
      std::optional<std::string_view> id;
      if (is_result && message.tool_call_id.has_value()) id = *message.tool_call_id;
      return std::pair(!is_result, id);
    });
  }
  std::vector<const Message*> turns;
  for (const auto& group : groups) {
    const size_t num_before = turns.size();
    for (const Message* message : group) {
      if (!IsEmpty(message->content)) turns.push_back(message);
    }
    if (turns.size() == num_before) turns.push_back(group.front());
  }
  return turns;
}

// Calls are shown in the order of their ids too.
std::vector<ToolCall> SortedCalls(std::vector<ToolCall> calls) {
  std::stable_sort(calls.begin(), calls.end(),
                   [](const ToolCall& a, const ToolCall& b) { return a.id < b.id; });
  return calls;
}

class RecipeV4Renderer {
 public:
  explicit RecipeV4Renderer(const Chat& chat)
      : chat_(chat), tools_(VisibleTools(chat)), prompt_(TemplateOf(kDialect).image_marker) {}

  Result<ChatPrompt> Render() {
    prompt_.Special(kBosMarker);
    if (chat_.thinking) prompt_.Text(EffortText(kDialect, chat_.reasoning_effort));
    AppendSystemTexts();
    if (!tools_.empty()) {
      DI_ASSIGN_OR_RETURN(const std::vector<std::string> lines,
                          RecipeToolLines(tools_, false, kDialect, "tools"));
      AppendToolBlock(lines, kDialect, &prompt_);
    }
    DI_ASSIGN_OR_RETURN(const std::string format_block,
                        FormatBlock(chat_.response_format, kDialect));
    prompt_.Text(format_block);

    const std::vector<const Message*> turns = SortedTurns(chat_.messages);
    for (size_t i = 0; i < turns.size(); ++i) {
      AppendTurn(*turns[i], i > 0 ? turns[i - 1] : nullptr, i + 1 == turns.size());
    }

    std::optional<OutputParserOptions::Start> continued;
    if (!turns.empty() && turns.back()->prefix) continued = continued_start_;
    return WithAnswerBegun(chat_, kDialect, !tools_.empty(), continued, &prompt_);
  }

 private:
  void AppendSystemTexts() {
    bool is_first = true;
    for (const Message& message : chat_.messages) {
      if (message.role != Role::kSystem || IsEmpty(message.content)) continue;
      if (!is_first) prompt_.Text(kPartSeparator);
      prompt_.Add(message.content);
      is_first = false;
    }
  }

  void AppendTurn(const Message& message, const Message* previous, bool is_last) {
    const auto follows = [&](Role role) { return previous != nullptr && previous->role == role; };
    switch (message.role) {
      case Role::kSystem:
        break;  // at the beginning already
      case Role::kUser:
        if (follows(Role::kUser) || follows(Role::kTool)) {
          prompt_.Text(kPartSeparator);
        } else {
          prompt_.Special(kUserMarker);
        }
        prompt_.Add(message.content);
        break;
      case Role::kTool:
        // A result after the text of a user opens a turn again.
        if (follows(Role::kTool)) {
          prompt_.Text(kPartSeparator);
        } else {
          prompt_.Special(kUserMarker);
        }
        prompt_.Text(kToolResultBegin);
        prompt_.Add(message.content);
        prompt_.Text(kToolResultEnd);
        break;
      case Role::kLatestReminder:
        prompt_.Special(kReminderMarker);
        prompt_.Add(message.content);
        break;
      case Role::kAssistant:
        AppendAssistant(message, is_last);
        break;
    }
  }

  void AppendAssistant(const Message& message, bool is_last) {
    // A turn that stays open without content goes on inside of the reasoning.
    const bool stays_in_reasoning =
        message.prefix && chat_.thinking && message.content.text.empty();
    const bool shows_reasoning =
        (message.reasoning_content.has_value() && (message.prefix || !tools_.empty())) ||
        stays_in_reasoning;
    const std::string reasoning = message.reasoning_content.value_or("");
    prompt_.Special(kAssistantMarker);
    if (shows_reasoning) {
      prompt_.Special(kThinkBeginMarker);
      prompt_.Text(reasoning);
    }
    if (!stays_in_reasoning) prompt_.Special(kThinkEndMarker);
    prompt_.Add(message.content);
    if (!message.tool_calls.empty()) {
      AppendToolCallBlock(SortedCalls(message.tool_calls), kProfile, kDialect, &prompt_);
    }
    if (!message.prefix || !is_last) {
      prompt_.Special(kEosMarker);
      return;
    }
    using Start = OutputParserOptions::Start;
    if (stays_in_reasoning) {
      continued_start_ = reasoning.empty() ? Start::kReasoning : Start::kReasoningContinuation;
    } else {
      continued_start_ = chat_.thinking ? Start::kContentContinuation : Start::kContent;
    }
  }

  const Chat& chat_;
  std::vector<const Tool*> tools_;
  OutputParserOptions::Start continued_start_ = OutputParserOptions::Start::kContent;
  PromptBuilder prompt_;
};

}  // namespace

Result<ChatPrompt> RenderRecipeV4(const Chat& chat) {
  return RecipeV4Renderer(chat).Render();
}

}  // namespace deepinfer
