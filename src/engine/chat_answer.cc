#include "engine/chat_answer.h"

#include <fmt/format.h>

#include <utility>

#include "base/sha256.h"

namespace deepinfer {
namespace {

OutputParserOptions WithStop(OutputParserOptions options, const SamplingParams& params) {
  options.stop = params.stop;
  return options;
}

// call_NN_ and, if the answer has no reasoning, ET_; then 20 letters or digits and 4 digits. The
// vendor's servers read from the mark whether a history must bring reasoning back.
std::string CallId(uint64_t seed, size_t index, bool has_reasoning) {
  constexpr std::string_view kLetters =
      "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  const Sha256::Digest hash = Sha256::Of(fmt::format("tool call {} of completion {}", index, seed));
  std::string id = fmt::format("call_{:02}_{}", index, has_reasoning ? "" : "ET_");
  for (size_t i = 0; i < 20; ++i) id += kLetters[hash[i] % kLetters.size()];
  for (size_t i = 20; i < 24; ++i) id += static_cast<char>('0' + hash[i] % 10);
  return id;
}

}  // namespace

ChatAnswer::ChatAnswer(const Tokenizer& tokenizer, const SamplingParams& params,
                       OutputParserOptions options, uint64_t seed)
    : tokenizer_(tokenizer),
      params_(params),
      parser_(WithStop(std::move(options), params), &tokenizer),
      seed_(seed) {}

void ChatAnswer::Take(std::string* content, std::string* reasoning) {
  for (const OutputEvent& event : events_) {
    message_.Add(event);
    if (const auto* text = std::get_if<ContentEvent>(&event)) *content += text->text;
    if (const auto* text = std::get_if<ReasoningEvent>(&event)) *reasoning += text->text;
  }
  events_.clear();
}

void ChatAnswer::Push(int32_t token_id, bool may_stop, std::string* content,
                      std::string* reasoning) {
  if (params_.skip_special_tokens && tokenizer_.is_special(token_id)) return;
  parser_.set_may_stop(may_stop);
  parser_.PushToken(token_id, &events_);
  if (parser_.stop_string().has_value() && params_.include_stop_str_in_output)
    events_.push_back(ContentEvent{*parser_.stop_string()});
  Take(content, reasoning);
}

FinishReason ChatAnswer::Finish(FinishReason reason, std::string* content, std::string* reasoning) {
  // Only an answer that its model ended is whole.
  const OutputEnd end = parser_.Finish(
      reason == FinishReason::kStop ? OutputEnd::kStop : OutputEnd::kLength, &events_);
  Take(content, reasoning);
  return reason == FinishReason::kStop && end == OutputEnd::kToolCalls ? FinishReason::kToolCalls
                                                                       : reason;
}

ParsedMessage ChatAnswer::TakeMessage() {
  ParsedMessage message = message_.message();
  for (size_t i = 0; i < message.tool_calls.size(); ++i)
    message.tool_calls[i].id = CallId(seed_, i, !message.reasoning_content.empty());
  return message;
}

}  // namespace deepinfer
