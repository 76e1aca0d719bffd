#include "text/incremental_decoder.h"

#include "text/utf8.h"

namespace deepinfer {

std::string IncrementalDecoder::Push(int32_t id) {
  std::string text;
  Push(id, &text);
  return text;
}

void IncrementalDecoder::Push(int32_t id, std::string* text) {
  held_ += tokenizer_->TokenBytes(id);
  held_.erase(0, AppendDecidedUtf8(held_, text));
}

std::string IncrementalDecoder::Flush() {
  std::string text;
  AppendLossyUtf8(held_, &text);
  held_.clear();
  return text;
}

}  // namespace deepinfer
