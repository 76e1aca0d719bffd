// What a request gives back. Part of the public interface.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "deepinfer/chat.h"
#include "deepinfer/error.h"

namespace deepinfer {

enum class FinishReason : uint8_t {
  kNone,       // still running; seen in stream events only
  kStop,       // an end token or a stop string; CompletionOutput::stop_reason tells which
  kLength,     // max_tokens or the context limit
  kAbort,      // the caller asked to stop
  kError,      // CompletionOutput::error tells why
  kDeadline,   // Request::timeout_seconds has passed; what there is of the output is reported
  kToolCalls,  // as kStop, and the answer of a conversation has calls
};

// "stop", "length", "abort", "error", "deadline", "tool_calls"; "" for kNone.
std::string_view FinishReasonName(FinishReason reason);

// Log-probabilities are natural logarithms; what is impossible is reported as kLogprobFloor, never
// as an infinity.
inline constexpr float kLogprobFloor = -9999.0f;

struct TokenLogprob {
  int32_t token_id = 0;
  float logprob = 0;
};

// One token's log-probability and its most likely alternatives, most likely first, equals by
// ascending id.
struct TokenLogprobs {
  float logprob = 0;  // of the token itself
  int64_t rank = 0;   // 1 + the number of tokens that were strictly more likely
  std::vector<TokenLogprob>
      top;  // as many as asked for; contains the token itself only when it is among them
};

struct CompletionOutput {
  int64_t index = 0;  // 0 ... n-1
  // Always valid UTF-8. The answer to a conversation: its content, without reasoning and calls.
  std::string text;
  std::optional<ParsedMessage> message;  // the answer to a conversation
  std::vector<int32_t> token_ids;        // end tokens included
  FinishReason finish_reason = FinishReason::kNone;
  // The stop string or the end token's id; empty unless finish_reason is kStop or kToolCalls.
  std::variant<std::monostate, std::string, int64_t> stop_reason;
  uint64_t seq_seed = 0;                // reproduces this completion
  std::vector<TokenLogprobs> logprobs;  // one per token id, or empty when not asked for
  double cumulative_logprob = 0;        // sum over the output tokens; 0 when not asked for
  std::optional<Error> error;           // present when finish_reason is kError
};

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;      // of the prompt, taken from the prefix cache
  int64_t completion_tokens = 0;  // over all completions
  int64_t preemptions = 0;        // how often a completion had to give its cache memory up
};

// Seconds of wall time, measured from the moment the request was handed in.
struct Timings {
  double queue_seconds = 0;        // until the first of its rows ran
  double first_token_seconds = 0;  // until its first output token
  double total_seconds = 0;        // until it ended
};

struct RequestOutput {
  std::string id;
  // A request that could not start: nothing else but the id is filled.
  std::optional<Error> error;
  std::vector<CompletionOutput> outputs;  // by index
  // Entry i belongs to prompt token i + 1 (the first token has no distribution); empty when not
  // asked for.
  std::vector<TokenLogprobs> prompt_logprobs;
  std::vector<int32_t> prompt_token_ids;
  Usage usage;
  Timings timings;
};

}  // namespace deepinfer
