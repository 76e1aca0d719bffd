#include "text/chat_render.h"

#include <optional>
#include <utility>

#include "base/utf8.h"
#include "text/chat_render_profiles.h"
#include "text/chat_template.h"

namespace deepinfer {
namespace {

Status RequireUtf8(std::string_view text, const std::string& field) {
  const std::optional<size_t> offset = FindInvalidUtf8(text);
  if (!offset.has_value()) return {};
  return Fail(
      Code::kInvalidArgument,
      fmt::format(
          "{} is not valid UTF-8: the byte 0x{:02X} at offset {} does not belong to a character.",
          field, static_cast<uint8_t>(text[*offset]), *offset),
      field);
}

Status CheckContent(const Content& content, bool may_have_images, const std::string& field) {
  DI_RETURN_IF_ERROR(RequireUtf8(content.text, field));
  if (content.images.size() < content.image_offsets.size()) {
    return Fail(Code::kInvalidArgument,
                fmt::format("{} has {} images, but {} places for images.", field,
                            content.images.size(), content.image_offsets.size()),
                field);
  }
  if (!content.images.empty() && !may_have_images) {
    return Fail(Code::kInvalidArgument,
                fmt::format("{} has an image; images are allowed in system, user and tool messages "
                            "only.",
                            field),
                field);
  }
  size_t least = 0;
  for (const size_t offset : content.image_offsets) {
    const bool is_within = offset >= least && offset <= content.text.size();
    // A continuation byte: the image would cut a character.
    if (!is_within || (offset < content.text.size() &&
                       (static_cast<uint8_t>(content.text[offset]) & 0xC0) == 0x80)) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("An image of {} is placed at byte {}; places must be ascending, "
                              "between characters and within the {} bytes of text.",
                              field, offset, content.text.size()),
                  field);
    }
    least = offset;
  }
  return {};
}

Status CheckTools(const std::vector<Tool>& tools, const std::string& field) {
  for (size_t i = 0; i < tools.size(); ++i) {
    const std::string path = fmt::format("{}[{}]", field, i);
    DI_RETURN_IF_ERROR(RequireUtf8(tools[i].name, path + ".name"));
    DI_RETURN_IF_ERROR(RequireUtf8(tools[i].function, path + ".function"));
    DI_RETURN_IF_ERROR(RequireUtf8(tools[i].recipe_parameters, path + ".recipe_parameters"));
  }
  return {};
}

// `member` is allowed in messages of another role only.
tl::unexpected<Error> WrongRole(const std::string& field, std::string_view member,
                                std::string_view allowed) {
  return Fail(
      Code::kInvalidArgument,
      fmt::format("{}.{} is set; it is allowed in {} messages only.", field, member, allowed),
      fmt::format("{}.{}", field, member));
}

// `member` has no meaning in the recipe profile.
tl::unexpected<Error> OnlyCheckpoint(const std::string& field, std::string_view member) {
  return Fail(Code::kInvalidArgument,
              fmt::format("{}.{} is set; the recipe profile does not know it, the checkpoint "
                          "profile does.",
                          field, member),
              fmt::format("{}.{}", field, member));
}

Status CheckMessage(const Message& message, EncodingProfile profile, const std::string& field) {
  const bool is_assistant = message.role == Role::kAssistant;
  const bool may_have_images = !is_assistant && message.role != Role::kLatestReminder;
  DI_RETURN_IF_ERROR(CheckContent(message.content, may_have_images, field + ".content"));
  for (size_t i = 0; i < message.blocks.size(); ++i) {
    DI_RETURN_IF_ERROR(CheckContent(message.blocks[i].content, may_have_images,
                                    fmt::format("{}.content[{}]", field, i)));
  }
  DI_RETURN_IF_ERROR(
      RequireUtf8(message.reasoning_content.value_or(""), field + ".reasoning_content"));
  for (size_t i = 0; i < message.tool_calls.size(); ++i) {
    const std::string path = fmt::format("{}.tool_calls[{}]", field, i);
    DI_RETURN_IF_ERROR(RequireUtf8(message.tool_calls[i].name, path + ".name"));
    DI_RETURN_IF_ERROR(RequireUtf8(message.tool_calls[i].arguments, path + ".arguments"));
  }
  DI_RETURN_IF_ERROR(CheckTools(message.tools, field + ".tools"));
  if (message.prefix && !is_assistant) return WrongRole(field, "prefix", "assistant");
  if (!message.tool_calls.empty() && !is_assistant) {
    return WrongRole(field, "tool_calls", "assistant");
  }
  if (profile == EncodingProfile::kRecipe) {
    if (!message.tools.empty() && message.role != Role::kSystem) {
      return WrongRole(field, "tools", "system");
    }
    if (message.task.has_value()) return OnlyCheckpoint(field, "task");
    if (message.response_format.has_value()) return OnlyCheckpoint(field, "response_format");
  }
  if (message.task.has_value() && TaskMarker(*message.task).empty()) {
    std::string shown;
    AppendLossyUtf8(std::string_view(*message.task).substr(0, 60), &shown);
    return Fail(Code::kInvalidArgument,
                fmt::format("{}.task is '{}'; it must be 'action', 'query', 'authority', 'domain', "
                            "'title' or 'read_url'.",
                            field, shown),
                field + ".task");
  }
  return {};
}

Status CheckChat(const Chat& chat) {
  if (chat.thinking && (chat.reasoning_effort < 1 || chat.reasoning_effort > 100)) {
    return Fail(Code::kInvalidArgument,
                fmt::format("reasoning_effort is {}; it must be an integer from 1 to 100.",
                            chat.reasoning_effort),
                "reasoning_effort");
  }
  for (size_t i = 0; i < chat.messages.size(); ++i) {
    DI_RETURN_IF_ERROR(
        CheckMessage(chat.messages[i], chat.profile, fmt::format("messages[{}]", i)));
  }
  return CheckTools(chat.tools, "tools");
}

// The markers without which no chat prompt can be encoded; kSystemMarker is beside them.
constexpr std::string_view kCommonMarkers[] = {kBosMarker,       kEosMarker,        kUserMarker,
                                               kAssistantMarker, kThinkBeginMarker, kThinkEndMarker,
                                               kDsmlMarker};

tl::unexpected<Error> MissingMarker(std::string_view marker) {
  return Fail(Code::kUnsupported,
              fmt::format("The tokenizer has no added token '{}', which chat prompts of this model "
                          "need; the tokenizer belongs to another model.",
                          marker));
}

}  // namespace

Result<ChatPrompt> RenderChat(const Chat& chat, ChatDialect dialect) {
  DI_RETURN_IF_ERROR(CheckChat(chat));
  if (chat.profile == EncodingProfile::kRecipe) {
    return dialect == ChatDialect::kV41 ? RenderRecipeV41(chat) : RenderRecipeV4(chat);
  }
  if (dialect != ChatDialect::kV41) {
    return Fail(Code::kUnsupported,
                "The tokenizer is of the preceding model generation (it has no token "
                "'<｜System｜>'), which the checkpoint profile does not know; the recipe profile "
                "does.");
  }
  return RenderCheckpointV41(chat);
}

Result<std::vector<int32_t>> EncodeChatPrompt(const Tokenizer& tokenizer,
                                              const ChatPrompt& prompt) {
  const std::string_view text = prompt.text;
  constexpr EncodeOptions kPlain{.parse_special = false, .add_bos = false};
  std::vector<int32_t> ids;
  size_t at = 0;
  for (const ChatPrompt::Range& range : prompt.specials) {
    if (range.begin < at || range.end < range.begin || range.end > text.size()) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("A special token of the prompt is at bytes {} to {}; the ranges must "
                              "be in order and within the {} bytes of text.",
                              range.begin, range.end, text.size()),
                  "specials");
    }
    DI_RETURN_IF_ERROR(tokenizer.EncodeTo(text.substr(at, range.begin - at), kPlain, &ids));
    const std::string_view marker = text.substr(range.begin, range.end - range.begin);
    const std::optional<int32_t> id = tokenizer.IdOf(marker);
    if (!id.has_value()) return MissingMarker(marker);
    ids.push_back(*id);
    at = range.end;
  }
  DI_RETURN_IF_ERROR(tokenizer.EncodeTo(text.substr(at), kPlain, &ids));
  return ids;
}

Result<ChatDialect> DialectOf(const Tokenizer& tokenizer) {
  for (const std::string_view marker : kCommonMarkers) {
    if (!tokenizer.IdOf(marker).has_value()) return MissingMarker(marker);
  }
  return tokenizer.IdOf(kSystemMarker).has_value() ? ChatDialect::kV41 : ChatDialect::kV4;
}

}  // namespace deepinfer
