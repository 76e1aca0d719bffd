#include "engine/completion_text.h"

#include <utility>

#include "base/check.h"

namespace deepinfer {

CompletionText::CompletionText(const Tokenizer& tokenizer, const SamplingParams& params)
    : tokenizer_(tokenizer), params_(params), decoder_(tokenizer), scanner_(params.stop) {}

void CompletionText::Push(int32_t token_id, bool may_stop, std::string* text) {
  DI_CHECK(!stop_string_.has_value());
  if (params_.skip_special_tokens && tokenizer_.is_special(token_id)) return;
  if (params_.stop.empty()) {
    decoder_.Push(token_id, text);
    return;
  }
  const size_t before = held_.size();
  decoder_.Push(token_id, &held_);
  const std::optional<StopScanner::Match> match =
      scanner_.Push(std::string_view(held_).substr(before), may_stop);
  size_t decided = held_.size() - scanner_.held();
  if (match.has_value()) {
    stop_string_ = params_.stop[match->stop];
    decided = before + match->end;
    if (!params_.include_stop_str_in_output) decided -= stop_string_->size();
  }
  text->append(held_, 0, decided);
  held_.erase(0, decided);
}

std::string CompletionText::Finish() {
  if (stop_string_.has_value()) return {};
  return std::exchange(held_, {}) + decoder_.Flush();
}

}  // namespace deepinfer
