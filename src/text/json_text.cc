#include "text/json_text.h"

#include <vector>

namespace deepinfer {
namespace {

bool IsDigit(char c) {
  return c >= '0' && c <= '9';
}
bool IsHexDigit(char c) {
  return IsDigit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

class JsonChecker {
 public:
  explicit JsonChecker(std::string_view text) : text_(text) {}

  bool Check() {
    std::vector<bool> objects;  // of the open containers: whether it is an object
    for (;;) {
      // A value begins here.
      SkipSpace();
      if (Take('{')) {
        SkipSpace();
        if (!Take('}')) {
          objects.push_back(true);
          if (!Key()) return false;
          continue;
        }
      } else if (Take('[')) {
        SkipSpace();
        if (!Take(']')) {
          objects.push_back(false);
          continue;
        }
      } else if (!Scalar()) {
        return false;
      }
      // A value has ended.
      for (;;) {
        SkipSpace();
        if (objects.empty()) return at_ == text_.size();
        if (Take(',')) {
          if (objects.back() && !Key()) return false;
          break;
        }
        if (!Take(objects.back() ? '}' : ']')) return false;
        objects.pop_back();
      }
    }
  }

 private:
  bool Take(char c) {
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  bool TakeWord(std::string_view word) {
    if (!text_.substr(at_).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }
  void SkipSpace() {
    while (at_ < text_.size() && kJsonSpace.find(text_[at_]) != std::string_view::npos) ++at_;
  }
  bool Key() {
    SkipSpace();
    if (!String()) return false;
    SkipSpace();
    return Take(':');
  }
  bool Scalar() {
    if (at_ == text_.size()) return false;
    if (text_[at_] == '"') return String();
    return TakeWord("true") || TakeWord("false") || TakeWord("null") || Number();
  }
  bool String() {
    if (!Take('"')) return false;
    while (at_ < text_.size()) {
      const char c = text_[at_++];
      if (c == '"') return true;
      if (static_cast<unsigned char>(c) < 0x20) return false;
      if (c == '\\' && !Escape()) return false;
    }
    return false;
  }
  bool Escape() {
    if (!Take('u')) {
      if (at_ == text_.size()) return false;
      return std::string_view("\"\\/bfnrt").find(text_[at_++]) != std::string_view::npos;
    }
    for (int i = 0; i < 4; ++i) {
      if (at_ == text_.size() || !IsHexDigit(text_[at_++])) return false;
    }
    return true;
  }
  bool Digits() {
    const size_t begin = at_;
    while (at_ < text_.size() && IsDigit(text_[at_])) ++at_;
    return at_ > begin;
  }
  bool Number() {
    Take('-');
    if (!Take('0') && !Digits()) return false;
    if (Take('.') && !Digits()) return false;
    if (Take('e') || Take('E')) {
      if (!Take('+')) Take('-');
      return Digits();
    }
    return true;
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

bool IsJson(std::string_view text) {
  return JsonChecker(text).Check();
}

std::string_view TrimJsonSpace(std::string_view text) {
  const size_t begin = text.find_first_not_of(kJsonSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kJsonSpace) + 1 - begin);
}

}  // namespace deepinfer
