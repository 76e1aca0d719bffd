#include "text/chat_prompt.h"

#include <utility>

#include "text/utf8.h"

namespace deepinfer::basic_chat {
namespace {

constexpr std::string_view kBosMarker = "<｜begin▁of▁sentence｜>";
constexpr std::string_view kEosMarker = "<｜end▁of▁sentence｜>";
constexpr std::string_view kSystemMarker = "<｜System｜>";
constexpr std::string_view kUserMarker = "<｜User｜>";
constexpr std::string_view kAssistantMarker = "<｜Assistant｜>";
constexpr std::string_view kThinkBeginMarker = "<think>";
constexpr std::string_view kThinkEndMarker = "</think>";
constexpr std::string_view kTurnSeparator = "\n\n";

enum class Role { kSystem, kUser, kAssistant };

struct Turn {
  Role role;
  std::string content;
  std::string reasoning;
};

Result<Role> ParseRole(std::string_view name, size_t message) {
  if (name == "system") return Role::kSystem;
  if (name == "user") return Role::kUser;
  if (name == "assistant") return Role::kAssistant;
  std::string field = fmt::format("messages[{}].role", message);
  for (const std::string_view known : {"tool", "latest_reminder", "developer"}) {
    if (name == known) {
      return Fail(Code::kUnsupported,
                  fmt::format("{} is '{}', which is not supported here; it must be 'system', "
                              "'user' or 'assistant'.",
                              field, name),
                  field);
    }
  }
  std::string shown;
  AppendLossyUtf8(name.substr(0, 60), &shown);
  return Fail(Code::kInvalidArgument,
              fmt::format("{} is '{}'; it must be 'system', 'user' or 'assistant'.", field, shown),
              field);
}

Status RequireUtf8(std::string_view text, size_t message, std::string_view member) {
  const std::optional<size_t> offset = FindInvalidUtf8(text);
  if (!offset.has_value()) return {};
  std::string field = fmt::format("messages[{}].{}", message, member);
  return Fail(
      Code::kInvalidArgument,
      fmt::format(
          "{} is not valid UTF-8: the byte 0x{:02X} at offset {} does not belong to a character.",
          field, static_cast<uint8_t>(text[*offset]), *offset),
      field);
}

// Validates the messages and joins user messages that follow one another into one turn.
Result<std::vector<Turn>> CollectTurns(std::span<const ChatMessage> messages) {
  std::vector<Turn> turns;
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    DI_ASSIGN_OR_RETURN(const Role role, ParseRole(message.role, i));
    DI_RETURN_IF_ERROR(RequireUtf8(message.content, i, "content"));
    const std::string reasoning = message.reasoning_content.value_or("");
    DI_RETURN_IF_ERROR(RequireUtf8(reasoning, i, "reasoning_content"));
    if (role == Role::kUser && !turns.empty() && turns.back().role == Role::kUser) {
      turns.back().content.append(kTurnSeparator).append(message.content);
    } else {
      turns.push_back(Turn{role, message.content, reasoning});
    }
  }
  return turns;
}

class PromptBuilder {
 public:
  void Special(std::string_view marker) {
    prompt_.specials.push_back({prompt_.text.size(), prompt_.text.size() + marker.size()});
    prompt_.text += marker;
  }
  void Text(std::string_view text) {
    prompt_.text += text;
  }
  ChatPrompt Take() {
    return std::move(prompt_);
  }

 private:
  ChatPrompt prompt_;
};

}  // namespace

Result<ThinkingMode> ParseThinkingMode(std::string_view name) {
  if (name == "chat") return ThinkingMode::kChat;
  if (name == "thinking") return ThinkingMode::kThinking;
  std::string shown;
  AppendLossyUtf8(name.substr(0, 60), &shown);
  return Fail(Code::kInvalidArgument,
              fmt::format("The thinking mode is '{}'; it must be 'chat' or 'thinking'.", shown),
              "thinking_mode");
}

Result<int> ParseReasoningEffort(std::string_view name) {
  if (name == "low") return kEffortLow;
  if (name == "high") return kEffortHigh;
  if (name == "max") return kEffortMax;
  std::string shown;
  AppendLossyUtf8(name.substr(0, 60), &shown);
  return Fail(
      Code::kInvalidArgument,
      fmt::format(
          "reasoning_effort is '{}'; it must be 'low', 'high', 'max' or an integer from 1 to 100.",
          shown),
      "reasoning_effort");
}

Result<ChatPrompt> RenderChat(std::span<const ChatMessage> messages, const ChatOptions& options) {
  if (messages.empty()) {
    return Fail(Code::kInvalidArgument, "messages is empty; at least one message is needed.",
                "messages");
  }
  if (options.reasoning_effort < 1 || options.reasoning_effort > 100) {
    return Fail(Code::kInvalidArgument,
                fmt::format("reasoning_effort is {}; it must be an integer from 1 to 100.",
                            options.reasoning_effort),
                "reasoning_effort");
  }
  DI_ASSIGN_OR_RETURN(const std::vector<Turn> turns, CollectTurns(messages));

  // A system turn after the first message asks for an answer, like a user turn.
  const auto is_asking = [&](size_t i) {
    return turns[i].role == Role::kUser || (turns[i].role == Role::kSystem && i > 0);
  };
  const bool thinking = options.mode == ThinkingMode::kThinking;
  std::optional<size_t> last_asking;
  for (size_t i = 0; i < turns.size(); ++i) {
    if (is_asking(i)) last_asking = i;
  }
  // Whether reasoning is shown from turn i on: in the opening that follows an asking turn i, or in
  // an assistant turn i.
  const auto shows_reasoning = [&](size_t i) {
    return thinking && (!options.drop_thinking || !last_asking.has_value() || i >= *last_asking);
  };

  PromptBuilder prompt;
  prompt.Special(kBosMarker);
  if (thinking || turns[0].role == Role::kSystem) prompt.Special(kSystemMarker);
  if (thinking) {
    prompt.Text(
        fmt::format("Reasoning Effort: {} (range 1-100, the higher the value, the more thorough "
                    "the reasoning)\n\n",
                    options.reasoning_effort));
  }
  for (size_t i = 0; i < turns.size(); ++i) {
    const Turn& turn = turns[i];
    switch (turn.role) {
      case Role::kSystem:
        if (i > 0) prompt.Special(kSystemMarker);
        prompt.Text(turn.content);
        break;
      case Role::kUser:
        prompt.Special(kUserMarker);
        prompt.Text(turn.content);
        break;
      case Role::kAssistant:
        if (shows_reasoning(i)) {
          prompt.Text(turn.reasoning);
          prompt.Special(kThinkEndMarker);
        }
        prompt.Text(turn.content);
        prompt.Special(kEosMarker);
        break;
    }
    const bool answer_follows = i + 1 == turns.size() || turns[i + 1].role == Role::kAssistant;
    if (answer_follows && is_asking(i)) {
      prompt.Special(kAssistantMarker);
      prompt.Special(shows_reasoning(i) ? kThinkBeginMarker : kThinkEndMarker);
    }
  }
  return prompt.Take();
}

Result<std::vector<int32_t>> EncodeChatPrompt(const Tokenizer& tokenizer,
                                              const ChatPrompt& prompt) {
  const std::string_view text = prompt.text;
  constexpr EncodeOptions kPlain{.parse_special = false, .add_bos = false};
  std::vector<int32_t> ids;
  size_t at = 0;
  for (const ChatPrompt::Range& range : prompt.specials) {
    DI_RETURN_IF_ERROR(tokenizer.EncodeTo(text.substr(at, range.begin - at), kPlain, &ids));
    const std::string_view marker = text.substr(range.begin, range.end - range.begin);
    const std::optional<int32_t> id = tokenizer.IdOf(marker);
    if (!id.has_value()) {
      return Fail(
          Code::kUnsupported,
          fmt::format(
              "The tokenizer has no added token '{}', which chat prompts of this model need; the "
              "tokenizer belongs to another model.",
              marker));
    }
    ids.push_back(*id);
    at = range.end;
  }
  DI_RETURN_IF_ERROR(tokenizer.EncodeTo(text.substr(at), kPlain, &ids));
  return ids;
}

Result<std::vector<int32_t>> EncodeChat(const Tokenizer& tokenizer,
                                        std::span<const ChatMessage> messages,
                                        const ChatOptions& options) {
  DI_ASSIGN_OR_RETURN(const ChatPrompt prompt, RenderChat(messages, options));
  return EncodeChatPrompt(tokenizer, prompt);
}

}  // namespace deepinfer::basic_chat
