#include "engine/resolve_request.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "base/json_value.h"
#include "base/utf8.h"
#include "text/chat_render.h"
#include "text/chat_template.h"

namespace deepinfer {
namespace {

tl::unexpected<Error> WithField(Error error, std::string field) {
  if (error.field.empty()) error.field = std::move(field);
  return tl::unexpected<Error>(std::move(error));
}

Result<std::vector<int32_t>> ResolveText(const std::string& text, const Tokenizer& tokenizer) {
  if (text.empty())
    return Fail(Code::kInvalidArgument, "prompt is empty; at least one character is needed.",
                "prompt");
  Result<std::vector<int32_t>> ids = tokenizer.Encode(text);
  if (!ids.has_value()) return WithField(std::move(ids.error()), "prompt");
  const std::optional<int32_t> bos = tokenizer.bos_id();
  if (bos.has_value() && (ids->empty() || ids->front() != *bos)) ids->insert(ids->begin(), *bos);
  return ids;
}

Result<std::vector<int32_t>> ResolveIds(const std::vector<int64_t>& ids, int64_t vocab_size) {
  if (ids.empty()) {
    return Fail(Code::kInvalidArgument, "prompt_token_ids is empty; at least one token is needed.",
                "prompt_token_ids");
  }
  std::vector<int32_t> tokens;
  tokens.reserve(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocab_size) {
      const std::string field = fmt::format("prompt_token_ids[{}]", i);
      return Fail(Code::kInvalidArgument,
                  fmt::format("{} is {}; token ids of this model are 0 ... {}.", field, ids[i],
                              vocab_size - 1),
                  field);
    }
    tokens.push_back(static_cast<int32_t>(ids[i]));
  }
  return tokens;
}

Status CheckText(std::string_view text, const std::string& field) {
  const std::optional<size_t> bad = FindInvalidUtf8(text);
  if (!bad.has_value()) return {};
  return Fail(Code::kInvalidArgument,
              fmt::format("{} is not UTF-8 at byte {}; only UTF-8 text can match.", field, *bad),
              field);
}

Status CheckTexts(const std::vector<std::string>& texts, const char* field) {
  for (size_t i = 0; i < texts.size(); ++i)
    DI_RETURN_IF_ERROR(CheckText(texts[i], fmt::format("{}[{}]", field, i)));
  return {};
}

// The fields that decide when a request runs.
Status CheckServiceFields(const Request& request) {
  constexpr int64_t kMaxPriority = 1'000'000;
  constexpr size_t kMaxNameBytes = 256;
  if (request.priority < -kMaxPriority || request.priority > kMaxPriority) {
    return Fail(Code::kInvalidArgument,
                fmt::format("priority is {}; allowed are {} ... {}.", request.priority,
                            -kMaxPriority, kMaxPriority),
                "priority");
  }
  if (request.timeout_seconds.has_value() && !(*request.timeout_seconds > 0.0)) {
    return Fail(
        Code::kInvalidArgument,
        fmt::format("timeout_seconds is {}; it must be more than 0.", *request.timeout_seconds),
        "timeout_seconds");
  }
  for (const auto& [text, field] :
       {std::pair{&request.user_id, "user_id"}, std::pair{&request.cache_salt, "cache_salt"}}) {
    if (text->size() <= kMaxNameBytes) continue;
    return Fail(
        Code::kInvalidArgument,
        fmt::format("{} has {} bytes; allowed are at most {}.", field, text->size(), kMaxNameBytes),
        field);
  }
  return {};
}

// Each forbidden text at the beginning of a word and inside of one.
Status ResolveBadWords(const SamplingParams& params, const Tokenizer& tokenizer,
                       std::vector<std::vector<int32_t>>* words) {
  for (const std::vector<int64_t>& ids : params.bad_words_token_ids)
    words->emplace_back(ids.begin(), ids.end());
  for (size_t i = 0; i < params.bad_words.size(); ++i) {
    for (const char* space : {"", " "}) {
      Result<std::vector<int32_t>> ids = tokenizer.Encode(space + params.bad_words[i]);
      if (!ids.has_value())
        return WithField(std::move(ids.error()), fmt::format("bad_words[{}]", i));
      if (!ids->empty()) words->push_back(std::move(*ids));
    }
  }
  return {};
}

// What a conversation's response format asks of the output; nullopt: nothing.
std::optional<StructuredOutput> FormatOf(const ResponseFormat& format) {
  StructuredOutput output;
  switch (format.kind) {
    case ResponseFormat::Kind::kText:
      return std::nullopt;
    case ResponseFormat::Kind::kJsonObject:
      output.kind = StructuredOutput::Kind::kJsonObject;
      break;
    case ResponseFormat::Kind::kJsonSchema:
      output.kind = StructuredOutput::Kind::kJsonSchema;
      break;
    case ResponseFormat::Kind::kRegex:
      output.kind = StructuredOutput::Kind::kRegex;
      break;
  }
  output.schema = format.schema;
  return output;
}

// The functions of a conversation's tools as a JSON list.
Result<std::string> ToolsJson(const std::vector<Tool>& tools) {
  JsonValue::Array list;
  for (const Tool& tool : tools) {
    DI_ASSIGN_OR_RETURN(JsonValue function, JsonValue::Parse(tool.function));
    if (!tool.recipe_parameters.empty()) {
      DI_ASSIGN_OR_RETURN(JsonValue parameters, JsonValue::Parse(tool.recipe_parameters));
      function.Set("parameters", std::move(parameters));
    }
    list.push_back(JsonValue::Object{{"type", "function"}, {"function", std::move(function)}});
  }
  return JsonValue(std::move(list)).DumpCompact();
}

// Calls that the prompt forces, and those of strict tools, follow the tools' schemas.
Result<std::optional<StructuredOutput>> CallsOf(const Chat& chat, const Tokenizer& tokenizer,
                                                ChatDialect dialect) {
  const bool forced = chat.tool_choice == ToolChoice::kRequired;
  const bool strict = chat.tool_choice == ToolChoice::kAuto &&
                      std::any_of(chat.tools.begin(), chat.tools.end(),
                                  [](const Tool& tool) { return tool.strict; });
  if (chat.tools.empty() || (!forced && !strict)) return std::optional<StructuredOutput>();
  StructuredOutput calls;
  calls.kind = StructuredOutput::Kind::kToolCalls;
  DI_ASSIGN_OR_RETURN(calls.schema, ToolsJson(chat.tools));
  calls.dialect = dialect;
  calls.inside_block = forced;
  if (!forced) {
    const std::optional<int32_t> marker = tokenizer.IdOf(kDsmlMarker);
    if (!marker.has_value()) {
      return Fail(Code::kUnsupported, "the tokenizer has no token '｜DSML｜' for calls of tools.",
                  "tools");
    }
    calls.trigger_token_ids = {*marker};
  }
  return std::optional<StructuredOutput>(std::move(calls));
}

// The constraint of a conversation's answer: the request's own, the response format's or that of
// its calls. It begins where the reasoning ends.
Status ConstrainAnswer(const Chat& chat, const Tokenizer& tokenizer, ChatDialect dialect,
                       OutputParserOptions::Start start, EngineRequest* resolved) {
  std::optional<StructuredOutput>* const output = &resolved->params.structured_output;
  std::optional<StructuredOutput> format = FormatOf(chat.response_format);
  const bool has_tools = !chat.tools.empty() && chat.tool_choice != ToolChoice::kNone;
  if (format.has_value() && output->has_value()) {
    return Fail(Code::kInvalidArgument,
                "response_format and a structured output of the sampling parameters are both "
                "given; an output follows one description.",
                "response_format");
  }
  if (output->has_value() && has_tools && chat.tool_choice == ToolChoice::kRequired) {
    return Fail(Code::kInvalidArgument,
                "tool_choice forces a call, and the sampling parameters describe another "
                "structured output; give one of them.",
                "tool_choice");
  }
  // With tools the model may call instead of answering, so the format cannot be enforced.
  if (format.has_value() && !has_tools) {
    if (!chat.messages.empty() && chat.messages.back().prefix) {
      return Fail(Code::kInvalidArgument,
                  "response_format is given, and the last message is the beginning of the answer; "
                  "a format cannot be enforced from the middle of an answer.",
                  "response_format");
    }
    *output = std::move(format);
    resolved->constraint_field = "response_format";
  }
  if (!output->has_value()) {
    DI_ASSIGN_OR_RETURN(*output, CallsOf(chat, tokenizer, dialect));
    resolved->constraint_field = "tools";
    return {};
  }
  if (!(*output)->trigger_token_ids.empty()) return {};
  const bool reasons = start == OutputParserOptions::Start::kReasoning ||
                       start == OutputParserOptions::Start::kReasoningContinuation;
  if (!reasons) return {};
  const std::optional<int32_t> end = tokenizer.IdOf(kThinkEndMarker);
  DI_CHECK(end.has_value());  // the prompt has been encoded
  (*output)->trigger_token_ids = {*end};
  return {};
}

Status ResolveChat(const Chat& chat, const Tokenizer& tokenizer, EngineRequest* resolved) {
  DI_ASSIGN_OR_RETURN(const ChatDialect dialect, DialectOf(tokenizer));
  DI_ASSIGN_OR_RETURN(const ChatPrompt prompt, RenderChat(chat, dialect));
  if (!prompt.images.empty()) {
    return Fail(
        Code::kUnsupported,
        fmt::format("images in the conversation: {}; only text can be run.", prompt.images.size()),
        "messages");
  }
  DI_ASSIGN_OR_RETURN(resolved->prompt, EncodeChatPrompt(tokenizer, prompt));
  resolved->answer = prompt.parser;
  return ConstrainAnswer(chat, tokenizer, dialect, prompt.parser.start, resolved);
}

Status ResolvePrompt(const Request& request, const Tokenizer& tokenizer, int64_t vocab_size,
                     EngineRequest* resolved) {
  if (const auto* text = std::get_if<std::string>(&request.prompt)) {
    DI_ASSIGN_OR_RETURN(resolved->prompt, ResolveText(*text, tokenizer));
    return {};
  }
  if (const auto* ids = std::get_if<std::vector<int64_t>>(&request.prompt)) {
    DI_ASSIGN_OR_RETURN(resolved->prompt, ResolveIds(*ids, vocab_size));
    return {};
  }
  Status chat = ResolveChat(std::get<Chat>(request.prompt), tokenizer, resolved);
  if (!chat.has_value()) return WithField(std::move(chat.error()), "messages");
  return {};
}

}  // namespace

std::vector<int32_t> EndOfTurnIds(const Tokenizer& tokenizer, int64_t eos_id, int64_t vocab_size) {
  std::vector<int32_t> ids = {static_cast<int32_t>(eos_id)};
  const auto add = [&](std::optional<int32_t> id) {
    if (id.has_value() && *id < vocab_size && std::find(ids.begin(), ids.end(), *id) == ids.end())
      ids.push_back(*id);
  };
  add(tokenizer.bos_id());
  for (const char* opening : {"<｜System｜>", "<｜User｜>", "<｜Assistant｜>"})
    add(tokenizer.IdOf(opening));
  return ids;
}

Result<EngineRequest> ResolveRequest(const Request& request, const Tokenizer& tokenizer,
                                     int64_t vocab_size,
                                     const std::function<uint64_t()>& fresh_seed) {
  const SamplingParams& params = request.sampling_params;
  if (const std::vector<Error> problems = params.Validate(vocab_size); !problems.empty()) {
    return tl::unexpected<Error>(Joined(problems));
  }
  DI_RETURN_IF_ERROR(CheckTexts(params.stop, "stop"));
  if (params.structured_output.has_value()) {
    DI_RETURN_IF_ERROR(CheckText(params.structured_output->schema, "structured_output.schema"));
    DI_RETURN_IF_ERROR(CheckTexts(params.structured_output->choices, "structured_output.choices"));
  }
  DI_RETURN_IF_ERROR(CheckServiceFields(request));
  EngineRequest resolved;
  resolved.id = request.id;
  resolved.params = params;
  DI_RETURN_IF_ERROR(ResolveBadWords(params, tokenizer, &resolved.bad_words));
  DI_RETURN_IF_ERROR(ResolvePrompt(request, tokenizer, vocab_size, &resolved));
  resolved.user_id = request.user_id;
  resolved.priority = static_cast<int32_t>(request.priority);
  if (request.timeout_seconds.has_value()) resolved.timeout_seconds = *request.timeout_seconds;
  resolved.cache_salt = request.cache_salt;
  resolved.seed = params.seq_seed.has_value() ? *params.seq_seed : fresh_seed();
  return resolved;
}

}  // namespace deepinfer
