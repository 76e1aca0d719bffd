// Requests of the three server protocols become a conversation and the options beside it: OpenAI
// Chat Completions and Responses, and Anthropic-style Messages. The rules are those of the vendor's
// toolkit (docs/chat.md): what is not allowed is refused with a sentence, unknown top-level fields
// are ignored. Pure functions of the body.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/json_value.h"
#include "deepinfer/chat.h"

namespace deepinfer {

enum class ChatApi : uint8_t { kChatCompletions, kMessages, kResponses };

struct ConversionOptions {
  // The names that a request may give its model; empty: any.
  std::vector<std::string> model_names = {"DeepSeek-V4-Pro", "DeepSeek-V4.1-Flash"};
  // The profile of the chat. The recipe profile leaves empty system messages of Chat Completions
  // out; the checkpoint profile has no such rule.
  EncodingProfile profile = EncodingProfile::kRecipe;
  // Whose sampling rules count. kV41: thinking mode has temperature 1 and top_p from 0.95; else
  // top_p is 1. kV4: thinking mode has 1 and 1; else both are the request's.
  ChatDialect dialect = ChatDialect::kV41;
  bool default_thinking = true;
  // In thinking mode an assistant turn after the last user message that has calls, or any if there
  // are tools, is refused without its reasoning (unless its call ids begin with call_NN_ET_).
  bool require_reasoning_content = false;
  // Server-side web search tools: dropped, or refused.
  bool responses_web_search_refused = false;
  bool messages_web_search_refused = true;
  int64_t thinking_max_tokens_upper_bound = 393216;
  int64_t non_thinking_max_tokens_upper_bound = 393216;
};

// What a constrained decoder is asked for.
struct OutputConstraint {
  enum class Kind : uint8_t { kJson, kRegex, kToolCall, kToolCallRequired };
  Kind kind = Kind::kJson;
  // JSON schema (compact; empty: any JSON object), pattern, or a compact JSON list of function
  // tools.
  std::string schema;
};

struct ConvertedRequest {
  std::string model;
  Chat chat;
  std::vector<std::string> stop;
  bool stream = false;
  std::optional<int64_t> max_tokens;
  float temperature = 1.0F;
  float top_p = 1.0F;
  bool logprobs = false;
  std::optional<int64_t> top_logprobs;
  std::optional<int64_t> seed;
  std::optional<OutputConstraint> constraint;
  // Responses: function name -> (namespace, name).
  std::map<std::string, std::pair<std::string, std::string>> namespaces;
};

// What a server answers with status 400.
struct RequestProblem {
  bool malformed = false;  // the body has the wrong shape; else a value is not allowed
  std::string field;       // path in the body: "messages[1].tool_call_id"
  std::string message;     // a sentence
};

tl::expected<ConvertedRequest, RequestProblem> ConvertRequest(ChatApi api, const JsonValue& body,
                                                              const ConversionOptions& options);

// The same from the text of the body. In the checkpoint profile tools of Chat Completions keep all
// digits of their integers, which JsonValue does not. A body that is no JSON is malformed.
tl::expected<ConvertedRequest, RequestProblem> ConvertRequestText(ChatApi api,
                                                                  std::string_view body,
                                                                  const ConversionOptions& options);

// low 50; medium, high, xhigh 75; max, ultra 100; minimal as low; "none" is 0 (thinking off).
// Nullopt for other names.
std::optional<int> ReasoningEffortByName(std::string_view name);

// `strict`: the schema is rebuilt as the toolkit does. Errors: kInvalidArgument with the JSON path.
Result<JsonValue> StrictSchema(const JsonValue& schema);

}  // namespace deepinfer
