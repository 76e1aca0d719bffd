// The checkpoint profile: the rules of the encoder that was published with the checkpoint. Headers
// of assistant turns stand behind the turns that ask for an answer; reasoning before the last such
// turn is left out unless tools are declared.
#include <cstddef>
#include <optional>

#include "base/json_value.h"
#include "text/chat_render_profiles.h"
#include "text/chat_template.h"
#include "text/prompt_json.h"
#include "text/tool_call_block.h"
#include "text/tool_result_order.h"

namespace deepinfer {
namespace {

constexpr ChatDialect kDialect = ChatDialect::kV41;
constexpr EncodingProfile kProfile = EncodingProfile::kCheckpoint;

// A part of a user turn.
struct Part {
  ContentBlock::Kind kind;
  const Content* content;
  const std::optional<std::string>* tool_call_id;
};

struct Turn {
  const Message* message;   // the first one, if messages were joined
  size_t index;             // of the message in the conversation, for errors
  std::vector<Part> parts;  // of user turns
  Role role() const {
    return message->role == Role::kTool ? Role::kUser : message->role;
  }
};

void AppendParts(const Message& message, std::vector<Part>* parts) {
  if (message.role == Role::kTool) {
    parts->push_back({ContentBlock::Kind::kToolResult, &message.content, &message.tool_call_id});
  } else if (message.blocks.empty()) {
    parts->push_back({ContentBlock::Kind::kText, &message.content, nullptr});
  } else {
    for (const ContentBlock& block : message.blocks) {
      parts->push_back({block.kind, &block.content, &block.tool_call_id});
    }
  }
}

// Results and user messages join the user turn before them, unless that one is a task and a user
// message follows.
std::vector<Turn> JoinTurns(const std::vector<Message>& messages) {
  std::vector<Turn> turns;
  for (size_t i = 0; i < messages.size(); ++i) {
    const Message& message = messages[i];
    const bool is_user = message.role == Role::kUser;
    const bool is_result = message.role == Role::kTool;
    if (is_user || is_result) {
      const bool joins = !turns.empty() && turns.back().role() == Role::kUser &&
                         (is_result || !turns.back().message->task.has_value());
      if (!joins) turns.push_back({&message, i, {}});
      AppendParts(message, &turns.back().parts);
    } else {
      turns.push_back({&message, i, {}});
    }
  }
  return turns;
}

// Puts the results within each user turn into the order of the latest calls before it. Results of
// unknown calls, or of none, come first.
void SortToolResults(std::vector<Turn>* turns) {
  std::optional<CallPositions> positions;
  for (Turn& turn : *turns) {
    const std::vector<ToolCall>& calls = turn.message->tool_calls;
    if (turn.role() == Role::kAssistant && !calls.empty()) {
      positions.emplace(calls, CallPositions::Repeated::kLast);
    }
    std::vector<size_t> places;
    for (size_t i = 0; i < turn.parts.size(); ++i) {
      if (turn.parts[i].kind == ContentBlock::Kind::kToolResult) places.push_back(i);
    }
    if (!positions.has_value() || places.size() < 2) continue;
    SortAtPlaces(&turn.parts, places, [&](const Part& part) -> size_t {
      // Calls without an id are no calls to be found.
      const std::string_view id = part.tool_call_id->has_value()
                                      ? std::string_view(**part.tool_call_id)
                                      : std::string_view();
      return id.empty() ? 0 : positions->Of(id, 0);
    });
  }
}

class CheckpointRenderer {
 public:
  explicit CheckpointRenderer(const Chat& chat)
      : chat_(chat), tools_(VisibleTools(chat)), prompt_(TemplateOf(kDialect).image_marker) {}

  Result<ChatPrompt> Render() {
    if (chat_.messages.empty()) {
      return Fail(Code::kInvalidArgument, "messages is empty; at least one message is needed.",
                  "messages");
    }
    DI_ASSIGN_OR_RETURN(format_block_, FormatBlock(chat_.response_format, kDialect));
    turns_ = JoinTurns(chat_.messages);
    // What the conversation as a whole has stands in a system turn at the beginning.
    if ((!tools_.empty() || !format_block_.empty()) && turns_[0].role() != Role::kSystem) {
      turns_.insert(turns_.begin(), Turn{&EmptySystemMessage(), 0, {}});
    }
    SortToolResults(&turns_);
    bool has_tools = !tools_.empty();
    for (const Message& message : chat_.messages) has_tools = has_tools || !message.tools.empty();
    drops_ = chat_.drop_thinking && !has_tools;
    for (size_t i = 0; i < turns_.size(); ++i) {
      if (IsAsking(i)) last_asking_ = i;
    }

    prompt_.Special(kBosMarker);
    if (chat_.thinking || turns_[0].role() == Role::kSystem) prompt_.Special(kSystemMarker);
    if (chat_.thinking) prompt_.Text(EffortText(kDialect, chat_.reasoning_effort));
    for (size_t i = 0; i < turns_.size(); ++i) {
      DI_RETURN_IF_ERROR(AppendTurn(i));
      AppendHeaderAfter(i);
    }
    if (chat_.tool_choice == ToolChoice::kRequired && !tools_.empty()) {
      AppendToolCallBlockBegin(kDialect, &prompt_);
      start_ = OutputParserOptions::Start::kToolCalls;
    }
    ChatPrompt prompt = prompt_.Take();
    prompt.parser.start = start_;
    prompt.parser.tools = has_listed_tools_;
    prompt.parser.json =
        is_json_ || chat_.response_format.kind == ResponseFormat::Kind::kJsonObject;
    return prompt;
  }

 private:
  // Whether an answer to the turn may follow. System turns after the first turn ask too.
  bool IsAsking(size_t i) const {
    return turns_[i].role() == Role::kUser || (turns_[i].role() == Role::kSystem && i > 0);
  }
  // Whether a header behind turn i opens reasoning. An answer after it is beyond the turn.
  bool OpensReasoning(size_t i) const {
    return chat_.thinking && (!drops_ || !last_asking_.has_value() || i >= *last_asking_);
  }

  Status AppendTurn(size_t i) {
    const Turn& turn = turns_[i];
    switch (turn.role()) {
      case Role::kSystem:
        return AppendSystem(i);
      case Role::kUser:
      case Role::kTool:
        AppendUser(turn);
        return {};
      case Role::kLatestReminder:
        prompt_.Special(kReminderMarker);
        prompt_.Add(turn.message->content);
        return {};
      case Role::kAssistant:
        AppendAssistant(i);
        return {};
    }
    return {};
  }

  Status AppendSystem(size_t i) {
    const Message& message = *turns_[i].message;
    const std::string field = fmt::format("messages[{}]", turns_[i].index);
    if (i > 0) prompt_.Special(kSystemMarker);
    prompt_.Add(message.content);
    std::vector<std::string> lines;
    if (i == 0) {
      for (size_t tool = 0; tool < tools_.size(); ++tool) {
        DI_RETURN_IF_ERROR(
            AppendToolLine(*tools_[tool], fmt::format("tools[{}].function", tool), &lines));
      }
    }
    for (size_t tool = 0; tool < message.tools.size(); ++tool) {
      DI_RETURN_IF_ERROR(AppendToolLine(message.tools[tool],
                                        fmt::format("{}.tools[{}].function", field, tool), &lines));
    }
    if (!lines.empty()) {
      AppendToolBlock(lines, kDialect, &prompt_);
      has_listed_tools_ = true;
    }
    if (i == 0) prompt_.Text(format_block_);
    if (message.response_format.has_value()) {
      Result<std::string> format = PythonJson(*message.response_format);
      if (!format.has_value()) return WithContext(format.error(), field + ".response_format");
      prompt_.Text(kPartSeparator);
      prompt_.Text(kResponseFormatHeading);
      prompt_.Text(*format);
      is_json_ = is_json_ || *format == kJsonObjectFormat;
    }
    return {};
  }

  static Status AppendToolLine(const Tool& tool, const std::string& field,
                               std::vector<std::string>* lines) {
    Result<std::string> line = PythonJson(tool.function);
    if (!line.has_value()) return WithContext(line.error(), field);
    lines->push_back(*std::move(line));
    return {};
  }

  void AppendUser(const Turn& turn) {
    prompt_.Special(kUserMarker);
    for (size_t i = 0; i < turn.parts.size(); ++i) {
      const Part& part = turn.parts[i];
      if (i > 0) prompt_.Text(kPartSeparator);
      switch (part.kind) {
        case ContentBlock::Kind::kText:
          prompt_.Add(*part.content);
          break;
        case ContentBlock::Kind::kToolResult:
          prompt_.Text(kToolResultBegin);
          prompt_.Add(*part.content);
          prompt_.Text(kToolResultEnd);
          break;
        case ContentBlock::Kind::kUnsupported:
          prompt_.Text("[Unsupported ");
          prompt_.Text(part.content->text);
          prompt_.Text("]");
          break;
      }
    }
  }

  void AppendAssistant(size_t i) {
    const Message& message = *turns_[i].message;
    const bool answers_task = i > 0 && turns_[i - 1].message->task.has_value();
    const bool shows_reasoning = chat_.thinking && !answers_task &&
                                 (!drops_ || !last_asking_.has_value() || i > *last_asking_);
    if (shows_reasoning) {
      prompt_.Text(message.reasoning_content.value_or(""));
      prompt_.Special(kThinkEndMarker);
    }
    prompt_.Add(message.content);
    if (!message.tool_calls.empty()) {
      AppendToolCallBlock(message.tool_calls, kProfile, kDialect, &prompt_);
    }
    if (!message.prefix) prompt_.Special(kEosMarker);
    const bool has_content = !message.content.text.empty() || !message.tool_calls.empty();
    start_ = message.prefix && shows_reasoning && has_content
                 ? OutputParserOptions::Start::kContentContinuation
                 : OutputParserOptions::Start::kContent;
  }

  void AppendHeaderAfter(size_t i) {
    if (i + 1 < turns_.size() && turns_[i + 1].role() != Role::kAssistant &&
        turns_[i + 1].role() != Role::kLatestReminder) {
      return;
    }
    const std::optional<std::string>& task = turns_[i].message->task;
    if (task.has_value()) {
      if (*task == kActionTask) {
        prompt_.Special(kAssistantMarker);
        prompt_.Special(chat_.thinking ? kThinkBeginMarker : kThinkEndMarker);
      }
      prompt_.Special(TaskMarker(*task));
      start_ = OutputParserOptions::Start::kContent;
    } else if (IsAsking(i)) {
      prompt_.Special(kAssistantMarker);
      prompt_.Special(OpensReasoning(i) ? kThinkBeginMarker : kThinkEndMarker);
      start_ = OpensReasoning(i) ? OutputParserOptions::Start::kReasoning
                                 : OutputParserOptions::Start::kContent;
    }
  }

  const Chat& chat_;
  std::vector<const Tool*> tools_;
  std::string format_block_;
  std::vector<Turn> turns_;
  std::optional<size_t> last_asking_;
  bool drops_ = false;
  bool has_listed_tools_ = false;
  bool is_json_ = false;
  OutputParserOptions::Start start_ = OutputParserOptions::Start::kContent;  // after the last turn
  PromptBuilder prompt_;
};

}  // namespace

Result<ChatPrompt> RenderCheckpointV41(const Chat& chat) {
  return CheckpointRenderer(chat).Render();
}

}  // namespace deepinfer
