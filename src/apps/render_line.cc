#include "apps/render_line.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/chat_line.h"
#include "base/json_value.h"
#include "base/quoted.h"
#include "deepinfer/chat.h"
#include "text/chat_render.h"
#include "text/chat_request.h"
#include "text/conversation_json.h"
#include "text/prompt_json.h"

namespace deepinfer {
namespace {

Result<bool> IsReject(const std::string& key, const JsonValue& value, std::string_view other) {
  const std::string* word = value.if_string();
  if (word != nullptr && (*word == "reject" || *word == other)) return *word == "reject";
  return Fail(Code::kInvalidArgument,
              fmt::format("options.{} is {}; allowed are \"{}\" and \"reject\".", key,
                          Quoted(value.DumpCompact(), 60), other),
              "options." + key);
}

Result<ConversionOptions> ReadOptions(const JsonValue& line) {
  ConversionOptions options;
  const JsonValue* given = line.Find("options");
  if (given == nullptr || given->is_null()) return options;
  if (given->if_object() == nullptr)
    return Fail(Code::kInvalidArgument, "options must be an object.", "options");
  for (const auto& [key, value] : *given->if_object()) {
    if (key == "reasoning_content_behavior") {
      DI_ASSIGN_OR_RETURN(options.require_reasoning_content, IsReject(key, value, "fill_empty"));
    } else if (key == "messages_web_search") {
      DI_ASSIGN_OR_RETURN(options.messages_web_search_refused, IsReject(key, value, "drop"));
    } else if (key == "responses_web_search") {
      DI_ASSIGN_OR_RETURN(options.responses_web_search_refused, IsReject(key, value, "drop"));
    } else if (key == "default_thinking_mode" && value.if_bool() != nullptr) {
      options.default_thinking = *value.if_bool();
    } else {
      return Fail(Code::kInvalidArgument,
                  fmt::format("options.{} is unknown or has a wrong type; known are "
                              "reasoning_content_behavior, messages_web_search, "
                              "responses_web_search and default_thinking_mode.",
                              key),
                  "options." + key);
    }
  }
  return options;
}

Result<ChatApi> ReadApi(const JsonValue& line) {
  const JsonValue* api = line.Find("api");
  if (api == nullptr) return ChatApi::kChatCompletions;
  const std::string name = api->if_string() != nullptr ? *api->if_string() : "";
  if (name == "chat_completions") return ChatApi::kChatCompletions;
  if (name == "messages") return ChatApi::kMessages;
  if (name == "responses") return ChatApi::kResponses;
  return Fail(Code::kInvalidArgument,
              fmt::format("api is {}; allowed are \"chat_completions\", \"messages\" and "
                          "\"responses\".",
                          Quoted(api->DumpCompact(), 60)),
              "api");
}

// A line's conversation, and what else its request says.
struct Input {
  Chat chat;
  std::optional<ConvertedRequest> request;  // without its chat
  ChatApi api = ChatApi::kChatCompletions;
};

Result<Input> ReadRequest(const JsonValue& line, std::string_view text, EncodingProfile profile,
                          ChatDialect dialect) {
  DI_ASSIGN_OR_RETURN(const ChatApi api, ReadApi(line));
  DI_ASSIGN_OR_RETURN(ConversionOptions options, ReadOptions(line));
  options.profile = profile;
  options.dialect = dialect;
  // The text of the request, in which numbers have all their digits.
  std::string body;
  DI_ASSIGN_OR_RETURN(std::vector<JsonMemberText> members, PythonJsonMembers(text));
  for (JsonMemberText& member : members) {
    if (member.key != "request") continue;
    body = member.is_string ? JsonQuoted(member.value) : std::move(member.value);
  }
  auto converted = ConvertRequestText(api, body, options);
  if (!converted.has_value()) {
    RequestProblem& problem = converted.error();
    return Fail(Code::kInvalidArgument, std::move(problem.message),
                problem.field.empty() ? "request" : "request." + problem.field);
  }
  Input input;
  input.chat = std::move(converted->chat);
  input.request = *std::move(converted);
  input.api = api;
  return input;
}

// Whether a line with messages is one of `generate`, by a field that only those have.
bool IsGenerateLine(const JsonValue& line) {
  return std::any_of(line.if_object()->begin(), line.if_object()->end(),
                     [](const JsonValue::Member& member) {
                       return IsChatField(member.first) && member.first != "messages" &&
                              member.first != "drop_thinking";
                     });
}

Result<Input> ReadInput(const JsonValue& line, std::string_view text, EncodingProfile profile,
                        ChatDialect dialect) {
  constexpr std::array<std::string_view, 3> kForms = {"request", "conversation", "messages"};
  std::string_view form;
  for (const std::string_view one : kForms) {
    if (line.Find(one) == nullptr) continue;
    if (!form.empty())
      return Fail(Code::kInvalidArgument, fmt::format("{} and {} exclude each other.", form, one),
                  std::string(one));
    form = one;
  }
  if (form == "request") return ReadRequest(line, text, profile, dialect);
  Input input;
  if (form == "conversation") {
    DI_ASSIGN_OR_RETURN(input.chat, ChatFromConversation(*line.Find("conversation")));
    input.chat.profile = profile;
  } else if (form == "messages" && IsGenerateLine(line)) {
    JsonValue fields = JsonValue::Object{};
    for (const auto& [key, value] : *line.if_object()) {
      if (IsChatField(key)) fields.Set(key, value);
    }
    if (fields.Find("encoding_profile") == nullptr && profile == EncodingProfile::kCheckpoint)
      fields.Set("encoding_profile", "checkpoint");
    DI_ASSIGN_OR_RETURN(input.chat, ChatFromLine(fields));
  } else if (form == "messages") {
    DI_ASSIGN_OR_RETURN(input.chat, ChatFromCheckpointLine(text));
  } else {
    return Fail(Code::kInvalidArgument, "The line needs a request, a conversation or messages.");
  }
  return input;
}

JsonValue OrNull(const std::optional<int64_t>& number) {
  return number.has_value() ? JsonValue(*number) : JsonValue();
}

JsonValue ParserJson(const OutputParserOptions& parser, const std::vector<std::string>& stop) {
  constexpr std::array<const char*, 5> kStarts = {"content", "reasoning", "reasoning_continuation",
                                                  "content_continuation", "tool_calls"};
  JsonValue json;
  json.Set("start", kStarts[static_cast<size_t>(parser.start)]);
  json.Set("tools", parser.tools);
  json.Set("json", parser.json);
  json.Set("stop", JsonValue::Array(stop.begin(), stop.end()));
  return json;
}

// The shortest decimal that is the same number of 32 bits, so that 0.3 is written as 0.3.
JsonValue ShortNumber(float value) {
  Result<JsonValue> number = JsonValue::Parse(fmt::format("{}", value));
  return JsonValue(number.has_value() ? number->AsDouble() : static_cast<double>(value));
}

// `has_seed`: the protocol has one.
JsonValue SamplingJson(const ConvertedRequest& request, bool has_seed) {
  constexpr std::array<const char*, 4> kKinds = {"json", "regex", "tool_call",
                                                 "tool_call_required"};
  JsonValue json;
  json.Set("max_tokens", OrNull(request.max_tokens));
  json.Set("temperature", ShortNumber(request.temperature));
  json.Set("top_p", ShortNumber(request.top_p));
  json.Set("logprobs", request.logprobs);
  json.Set("top_logprobs", OrNull(request.top_logprobs));
  if (has_seed) json.Set("seed", OrNull(request.seed));
  JsonValue constraint;
  if (request.constraint.has_value())
    constraint = JsonValue::Array{kKinds[static_cast<size_t>(request.constraint->kind)],
                                  request.constraint->schema};
  json.Set("constraint", std::move(constraint));
  return json;
}

void AddNamespaces(const ConvertedRequest& request, JsonValue* out) {
  if (request.namespaces.empty()) return;
  JsonValue::Object namespaces;
  for (const auto& [name, parts] : request.namespaces)
    namespaces.emplace_back(name, JsonValue::Array{parts.first, parts.second});
  out->Set("namespaces", std::move(namespaces));
}

}  // namespace

LineRenderer::LineRenderer(EncodingProfile profile, ChatDialect dialect,
                           std::optional<Tokenizer> tokenizer)
    : profile_(profile), dialect_(dialect), tokenizer_(std::move(tokenizer)) {}

Result<LineRenderer> LineRenderer::Create(std::string_view profile, std::string_view dialect,
                                          std::optional<Tokenizer> tokenizer) {
  ChatDialect spoken = dialect == "v4" ? ChatDialect::kV4 : ChatDialect::kV41;
  if (dialect.empty() && tokenizer.has_value()) {
    DI_ASSIGN_OR_RETURN(spoken, DialectOf(*tokenizer));
  }
  return LineRenderer(
      profile == "checkpoint" ? EncodingProfile::kCheckpoint : EncodingProfile::kRecipe, spoken,
      std::move(tokenizer));
}

Result<std::string> LineRenderer::Render(const JsonLine& json_line) const {
  const JsonValue& line = json_line.value;
  DI_ASSIGN_OR_RETURN(const Input input, ReadInput(line, json_line.text, profile_, dialect_));
  DI_ASSIGN_OR_RETURN(const ChatPrompt prompt, RenderChat(input.chat, dialect_));
  JsonValue out;
  out.Set("id", *line.Find("id"));
  out.Set("prompt", prompt.text);
  JsonValue::Array specials;
  for (const ChatPrompt::Range& range : prompt.specials) {
    specials.push_back(
        JsonValue::Array{static_cast<int64_t>(range.begin), static_cast<int64_t>(range.end)});
  }
  out.Set("special", std::move(specials));
  if (tokenizer_.has_value()) {
    DI_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, EncodeChatPrompt(*tokenizer_, prompt));
    out.Set("ids", JsonValue::Array(ids.begin(), ids.end()));
  }
  out.Set("images", static_cast<int64_t>(prompt.images.size()));
  out.Set("parser",
          ParserJson(prompt.parser,
                     input.request.has_value() ? input.request->stop : std::vector<std::string>()));
  if (input.request.has_value()) {
    out.Set("sampling", SamplingJson(*input.request, input.api == ChatApi::kChatCompletions));
    AddNamespaces(*input.request, &out);
  }
  return out.Dump();
}

}  // namespace deepinfer
