#include "text/incremental_decoder.h"

#include "base/utf8.h"

namespace deepinfer {

std::string IncrementalDecoder::Push(int32_t id) {
  std::string text;
  Push(id, &text);
  return text;
}

void IncrementalDecoder::Push(int32_t id, std::string* text) {
  const std::string_view bytes = tokenizer_->TokenBytes(id);
  if (held_.empty()) {
    // The usual case, without a copy of the token.
    held_ = bytes.substr(AppendDecidedUtf8(bytes, text));
    return;
  }
  held_ += bytes;
  held_.erase(0, AppendDecidedUtf8(held_, text));
}

std::string IncrementalDecoder::Flush() {
  std::string text;
  AppendLossyUtf8(held_, &text);
  held_.clear();
  return text;
}

}  // namespace deepinfer
