#include "deepinfer/sampling_params.h"

#include <fmt/core.h>

#include <cmath>
#include <limits>
#include <utility>

#include "deepinfer/request_output.h"

namespace deepinfer {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxTopLogprobs = 1000;
constexpr int64_t kMaxCompletions = 1024;
constexpr size_t kMaxStopStrings = 64;
constexpr size_t kMaxStopBytes = 1024;
constexpr size_t kMaxIds = 1024;       // stop_token_ids, logit_bias
constexpr size_t kMaxBadWords = 1024;  // texts and sequences, each
constexpr size_t kMaxBadWordLength = 1024;
constexpr size_t kMaxSchemaBytes = size_t{1} << 20;  // of choices, together
constexpr size_t kMaxChoices = 4096;
constexpr int64_t kMaxWhitespace = 64;
constexpr size_t kMaxTriggerIds = 1024;

class Problems {
 public:
  explicit Problems(int64_t vocab_size) : vocab_size_(vocab_size) {}

  void Add(const std::string& field, std::string message) {
    errors_.push_back(Error{Code::kInvalidArgument, std::move(message), field});
  }

  // A number that must satisfy `allowed`; NaN satisfies nothing.
  void Number(const std::string& field, double value, bool allowed, const char* range) {
    if (!allowed) Add(field, fmt::format("{} is {}; allowed is a number {}.", field, value, range));
  }

  void Integer(const std::string& field, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high)
      Add(field, fmt::format("{} is {}; allowed are {} ... {}.", field, value, low, high));
  }

  void Count(const std::string& field, size_t count, size_t low, size_t high) {
    if (count < low || count > high) {
      Add(field, fmt::format("{} has {} entries; allowed are {} ... {}.", field, count, low, high));
    }
  }

  void TokenId(const std::string& field, int64_t id) {
    const int64_t limit = vocab_size_ > 0 ? vocab_size_ : kMaxInt;
    if (id >= 0 && id < limit) return;
    Add(field, vocab_size_ > 0 ? fmt::format("{} is {}; token ids of this model are 0 ... {}.",
                                             field, id, vocab_size_ - 1)
                               : fmt::format("{} is {}; token ids are not negative.", field, id));
  }

  std::vector<Error> Take() {
    return std::move(errors_);
  }

 private:
  int64_t vocab_size_;
  std::vector<Error> errors_;
};

void CheckStructuredOutput(const StructuredOutput& output, Problems& problems) {
  using Kind = StructuredOutput::Kind;
  const std::string schema = "structured_output.schema";
  const std::string choices = "structured_output.choices";
  switch (output.kind) {
    case Kind::kJsonSchema:
    case Kind::kRegex:
    case Kind::kEbnf:
    case Kind::kStructuralTag:
    case Kind::kToolCalls:
      if (output.schema.empty()) problems.Add(schema, schema + " is empty.");
      break;
    case Kind::kJsonObject:
    case Kind::kChoice:
      if (!output.schema.empty()) {
        problems.Add(schema, fmt::format("{} is given, but structured_output.kind has no use for "
                                         "it.",
                                         schema));
      }
      break;
    default:
      problems.Add("structured_output.kind",
                   fmt::format("structured_output.kind is {}; allowed are the named kinds.",
                               static_cast<int>(output.kind)));
      break;
  }
  if (output.schema.size() > kMaxSchemaBytes) {
    problems.Add(schema, fmt::format("{} has {} bytes; allowed are at most {}.", schema,
                                     output.schema.size(), kMaxSchemaBytes));
  }
  if (output.kind == Kind::kChoice) {
    problems.Count(choices, output.choices.size(), 1, kMaxChoices);
    size_t bytes = 0;
    for (size_t i = 0; i < output.choices.size(); ++i) {
      bytes += output.choices[i].size();
      if (!output.choices[i].empty()) continue;
      const std::string field = fmt::format("{}[{}]", choices, i);
      problems.Add(field, field + " is empty.");
    }
    if (bytes > kMaxSchemaBytes) {
      problems.Add(choices, fmt::format("{} have {} bytes together; allowed are at most {}.",
                                        choices, bytes, kMaxSchemaBytes));
    }
  } else if (!output.choices.empty()) {
    problems.Add(choices, choices + " are given, but structured_output.kind has no use for them.");
  }
  problems.Integer("structured_output.max_whitespace", output.max_whitespace, 0, kMaxWhitespace);
  const std::string trigger = "structured_output.trigger_token_ids";
  problems.Count(trigger, output.trigger_token_ids.size(), 0, kMaxTriggerIds);
  for (size_t i = 0; i < output.trigger_token_ids.size(); ++i)
    problems.TokenId(fmt::format("{}[{}]", trigger, i), output.trigger_token_ids[i]);
  if (!output.bound_token_id.has_value()) return;
  const std::string bound = "structured_output.bound_token_id";
  problems.TokenId(bound, *output.bound_token_id);
  if (output.trigger_token_ids.empty()) {
    problems.Add(bound, fmt::format("{} is {}, but there is no {} whose rest it could force.",
                                    bound, *output.bound_token_id, trigger));
  }
}

}  // namespace

std::string_view FinishReasonName(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return "";
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kAbort:
      return "abort";
    case FinishReason::kError:
      return "error";
    case FinishReason::kDeadline:
      return "deadline";
    case FinishReason::kToolCalls:
      return "tool_calls";
  }
  return "";
}

std::vector<Error> SamplingParams::Validate(int64_t vocab_size) const {
  Problems problems(vocab_size);
  problems.Number("temperature", temperature, temperature >= 0 && temperature <= 100,
                  "from 0 (greedy) to 100");
  if (top_k != -1 && (top_k < 1 || top_k > kMaxInt)) {
    problems.Add("top_k", fmt::format("top_k is {}; allowed are -1 (all tokens) and 1 ... {}.",
                                      top_k, kMaxInt));
  }
  problems.Number("top_p", top_p, top_p > 0 && top_p <= 1, "above 0, up to 1 (all tokens)");
  problems.Number("min_p", min_p, min_p >= 0 && min_p <= 1, "from 0 (all tokens) to 1");
  problems.Number("presence_penalty", presence_penalty, std::fabs(presence_penalty) <= 2,
                  "from -2 to 2");
  problems.Number("frequency_penalty", frequency_penalty, std::fabs(frequency_penalty) <= 2,
                  "from -2 to 2");
  problems.Number("repetition_penalty", repetition_penalty,
                  repetition_penalty >= 0.01 && repetition_penalty <= 10,
                  "from 0.01 to 10 (1 is neutral)");
  problems.Count("logit_bias", logit_bias.size(), 0, kMaxIds);
  for (const auto& [id, bias] : logit_bias) {
    const std::string field = fmt::format("logit_bias[{}]", id);
    if (id < 0 || id >= (vocab_size > 0 ? vocab_size : kMaxInt)) {
      problems.Add(
          field,
          vocab_size > 0
              ? fmt::format("logit_bias names token {}; token ids of this model are 0 ... {}.", id,
                            vocab_size - 1)
              : fmt::format("logit_bias names token {}; token ids are not negative.", id));
    }
    problems.Number(field, bias, std::fabs(bias) <= 100, "from -100 to 100");
  }
  if (allowed_token_ids.has_value()) {
    if (allowed_token_ids->empty()) {
      problems.Add(
          "allowed_token_ids",
          "allowed_token_ids is empty, so no token could be drawn; leave it out to allow all.");
    }
    for (size_t i = 0; i < allowed_token_ids->size(); ++i) {
      problems.TokenId(fmt::format("allowed_token_ids[{}]", i), (*allowed_token_ids)[i]);
    }
  }
  problems.Count("bad_words", bad_words.size(), 0, kMaxBadWords);
  for (size_t i = 0; i < bad_words.size(); ++i) {
    if (bad_words[i].empty() || bad_words[i].size() > kMaxBadWordLength) {
      problems.Add(fmt::format("bad_words[{}]", i),
                   fmt::format("bad_words[{}] has {} bytes; allowed are 1 ... {}.", i,
                               bad_words[i].size(), kMaxBadWordLength));
    }
  }
  problems.Count("bad_words_token_ids", bad_words_token_ids.size(), 0, kMaxBadWords);
  for (size_t i = 0; i < bad_words_token_ids.size(); ++i) {
    const std::string field = fmt::format("bad_words_token_ids[{}]", i);
    problems.Count(field, bad_words_token_ids[i].size(), 1, kMaxBadWordLength);
    for (size_t j = 0; j < bad_words_token_ids[i].size(); ++j) {
      problems.TokenId(fmt::format("{}[{}]", field, j), bad_words_token_ids[i][j]);
    }
  }
  if (structured_output.has_value()) CheckStructuredOutput(*structured_output, problems);
  problems.Integer("min_tokens", min_tokens, 0, kMaxInt);
  if (max_tokens.has_value()) {
    problems.Integer("max_tokens", *max_tokens, 0, kMaxInt);
    if (*max_tokens >= 0 && min_tokens > *max_tokens) {
      problems.Add("min_tokens",
                   fmt::format("min_tokens is {}; allowed is at most max_tokens, which is {}.",
                               min_tokens, *max_tokens));
    }
  }
  problems.Count("stop", stop.size(), 0, kMaxStopStrings);
  for (size_t i = 0; i < stop.size(); ++i) {
    if (stop[i].empty() || stop[i].size() > kMaxStopBytes) {
      problems.Add(fmt::format("stop[{}]", i),
                   fmt::format("stop[{}] has {} bytes; allowed are 1 ... {}.", i, stop[i].size(),
                               kMaxStopBytes));
    }
  }
  problems.Count("stop_token_ids", stop_token_ids.size(), 0, kMaxIds);
  for (size_t i = 0; i < stop_token_ids.size(); ++i) {
    problems.TokenId(fmt::format("stop_token_ids[{}]", i), stop_token_ids[i]);
  }
  problems.Integer("n", n, 1, kMaxCompletions);
  if (logprobs.has_value()) problems.Integer("logprobs", *logprobs, 0, kMaxTopLogprobs);
  if (prompt_logprobs.has_value())
    problems.Integer("prompt_logprobs", *prompt_logprobs, 0, kMaxTopLogprobs);
  return problems.Take();
}

}  // namespace deepinfer
