// A place in a text that is being read: what the readers of patterns and of rules share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace deepinfer {

class TextCursor {
 protected:
  explicit TextCursor(std::string_view text) : text_(text) {}

  bool AtEnd() const {
    return offset_ >= text_.size();
  }
  // NUL behind the end.
  char Peek(size_t ahead = 0) const {
    return offset_ + ahead < text_.size() ? text_[offset_ + ahead] : '\0';
  }
  bool Take(std::string_view token) {
    if (text_.substr(offset_, token.size()) != token) return false;
    offset_ += token.size();
    return true;
  }
  // Decimal digits; large numbers are cut to some above all that is allowed.
  std::optional<int64_t> Number() {
    int64_t value = 0;
    const size_t start = offset_;
    while (Peek() >= '0' && Peek() <= '9') {
      value = std::min<int64_t>(value * 10 + (Peek() - '0'), int64_t{1} << 40);
      ++offset_;
    }
    if (offset_ == start) return std::nullopt;
    return value;
  }

  const std::string_view text_;
  size_t offset_ = 0;
};

}  // namespace deepinfer
