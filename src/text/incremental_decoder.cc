#include "text/incremental_decoder.h"

#include "text/utf8.h"

namespace deepinfer {

std::string IncrementalDecoder::Push(int32_t id) {
  held_ += tokenizer_->TokenBytes(id);
  std::string text;
  held_.erase(0, AppendDecidedUtf8(held_, &text));
  return text;
}

std::string IncrementalDecoder::Flush() {
  std::string text;
  AppendLossyUtf8(held_, &text);
  held_.clear();
  return text;
}

}  // namespace deepinfer
