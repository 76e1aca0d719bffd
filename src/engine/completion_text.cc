#include "engine/completion_text.h"

#include <utility>

#include "base/check.h"

namespace deepinfer {

CompletionText::CompletionText(const Tokenizer& tokenizer, const SamplingParams& params)
    : tokenizer_(tokenizer), params_(params), decoder_(tokenizer), scanner_(params.stop) {}

std::string CompletionText::Push(int32_t token_id, bool may_stop) {
  DI_CHECK(!stop_string_.has_value());
  if (params_.skip_special_tokens && tokenizer_.is_special(token_id)) return {};
  const std::string piece = decoder_.Push(token_id);
  const std::optional<StopScanner::Match> match = scanner_.Push(piece, may_stop);
  std::string text = std::exchange(held_, {});
  if (match.has_value()) {
    stop_string_ = params_.stop[match->stop];
    text.append(piece, 0, match->end);
    if (!params_.include_stop_str_in_output) text.resize(text.size() - stop_string_->size());
    return text;
  }
  text += piece;
  held_ = text.substr(text.size() - scanner_.held());
  text.resize(text.size() - held_.size());
  return text;
}

std::string CompletionText::Finish() {
  if (stop_string_.has_value()) return {};
  return std::exchange(held_, {}) + decoder_.Flush();
}

}  // namespace deepinfer
