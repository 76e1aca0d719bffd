#include "base/json_value.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <optional>
#include <system_error>

#include "base/check.h"
#include "base/utf8.h"

namespace deepinfer {
namespace {

bool IsDigit(char c) {
  return c >= '0' && c <= '9';
}

// Bytes that end a run of a string's characters: the quote, the escape and control characters.
constexpr std::array<bool, 256> kEndsRun = [] {
  std::array<bool, 256> ends{};
  for (size_t i = 0; i < 0x20; ++i) ends[i] = true;
  ends['"'] = true;
  ends['\\'] = true;
  return ends;
}();

void AppendCodePoint(uint32_t code_point, std::string* out) {
  if (code_point < 0x80) {
    *out += static_cast<char>(code_point);
  } else if (code_point < 0x800) {
    *out += static_cast<char>(0xC0 | code_point >> 6);
    *out += static_cast<char>(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    *out += static_cast<char>(0xE0 | code_point >> 12);
    *out += static_cast<char>(0x80 | (code_point >> 6 & 0x3F));
    *out += static_cast<char>(0x80 | (code_point & 0x3F));
  } else {
    *out += static_cast<char>(0xF0 | code_point >> 18);
    *out += static_cast<char>(0x80 | (code_point >> 12 & 0x3F));
    *out += static_cast<char>(0x80 | (code_point >> 6 & 0x3F));
    *out += static_cast<char>(0x80 | (code_point & 0x3F));
  }
}

// A number of JSON's grammar as a double. Nullopt if it overflows; what is too small is zero.
std::optional<double> ParseDouble(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size()) {
    if (std::isinf(value)) return std::nullopt;
    return value;
  }
  // Out of range, at which end is for the decimal exponent to say: that of the first digit that is
  // not zero. Exponents of the text are cut where they decide by themselves.
  constexpr int64_t kHugeExponent = int64_t{1} << 40;
  const size_t mantissa_end = std::min(text.find_first_of("eE"), text.size());
  int64_t exponent = 0;
  if (mantissa_end < text.size()) {
    size_t i = mantissa_end + 1;
    const bool negative = text[i] == '-';
    if (text[i] == '-' || text[i] == '+') ++i;
    for (; i < text.size(); ++i)
      exponent = std::min(exponent * 10 + (text[i] - '0'), kHugeExponent);
    if (negative) exponent = -exponent;
  }
  const std::string_view mantissa = text.substr(0, mantissa_end);
  const size_t point = std::min(mantissa.find('.'), mantissa.size());
  const size_t first = mantissa.find_first_of("123456789");
  if (first != mantissa.npos) {
    exponent +=
        first < point ? static_cast<int64_t>(point - first) : -static_cast<int64_t>(first - point);
    if (exponent > 0) return std::nullopt;
  }
  return text[0] == '-' ? -0.0 : 0.0;
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Result<JsonValue> Parse() {
    JsonValue value;
    DI_RETURN_IF_ERROR(ParseValue(0, &value));
    SkipSpace();
    if (at_ < text_.size()) return Wrong("expected the end of the text");
    return value;
  }

 private:
  tl::unexpected<Error> Wrong(std::string_view what) const {
    return Fail(Code::kInvalidArgument, fmt::format("Not valid JSON: {} at byte {}.", what, at_));
  }

  void SkipSpace() {
    while (at_ < text_.size() &&
           (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r')) {
      ++at_;
    }
  }
  // The next character after white space; 0 at the end (a zero byte is nowhere valid either).
  char Peek() {
    SkipSpace();
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  // `depth` is the number of arrays and objects around the value.
  Status ParseValue(int depth, JsonValue* out) {
    const char c = Peek();
    switch (c) {
      case '{':
      case '[':
        if (depth == JsonValue::kMaxDepth)
          return Wrong(fmt::format("more than {} levels of nesting", JsonValue::kMaxDepth));
        return c == '{' ? ParseObject(depth, out) : ParseArray(depth, out);
      case '"': {
        std::string text;
        DI_RETURN_IF_ERROR(ParseString(&text));
        *out = std::move(text);
        return {};
      }
      case 't':
        return ParseWord("true", true, out);
      case 'f':
        return ParseWord("false", false, out);
      case 'n':
        return ParseWord("null", nullptr, out);
      default:
        if (c == '-' || IsDigit(c)) return ParseNumber(out);
        return Wrong(at_ < text_.size() ? "expected a value"
                                        : "the text ends where a value belongs");
    }
  }

  Status ParseWord(std::string_view word, JsonValue value, JsonValue* out) {
    if (text_.substr(at_, word.size()) != word) return Wrong("expected a value");
    at_ += word.size();
    *out = std::move(value);
    return {};
  }

  Status ParseArray(int depth, JsonValue* out) {
    ++at_;
    JsonValue::Array items;
    if (Peek() == ']') {
      ++at_;
    } else {
      for (;;) {
        DI_RETURN_IF_ERROR(ParseValue(depth + 1, &items.emplace_back()));
        const char c = Peek();
        if (c != ',' && c != ']') return Wrong("expected ',' or ']'");
        ++at_;
        if (c == ']') break;
      }
    }
    *out = std::move(items);
    return {};
  }

  Status ParseObject(int depth, JsonValue* out) {
    ++at_;
    JsonValue::Object members;
    if (Peek() == '}') {
      ++at_;
    } else {
      for (;;) {
        if (Peek() != '"') return Wrong("expected a key");
        auto& [key, value] = members.emplace_back();
        DI_RETURN_IF_ERROR(ParseString(&key));
        if (Peek() != ':') return Wrong("expected ':'");
        ++at_;
        DI_RETURN_IF_ERROR(ParseValue(depth + 1, &value));
        const char c = Peek();
        if (c != ',' && c != '}') return Wrong("expected ',' or '}'");
        ++at_;
        if (c == '}') break;
      }
    }
    MakeKeysUnique(&members);
    *out = std::move(members);
    return {};
  }

  // The last value wins, at the place of the first. By sorting, so that no choice of keys makes it
  // slow.
  static void MakeKeysUnique(JsonValue::Object* members) {
    constexpr size_t kFew = 12;
    JsonValue::Object& all = *members;
    if (all.size() <= kFew) {
      for (size_t i = 1; i < all.size(); ++i) {
        for (size_t j = 0; j < i; ++j) {
          if (all[i].first != all[j].first) continue;
          all[j].second = std::move(all[i].second);
          all.erase(all.begin() + static_cast<std::ptrdiff_t>(i));
          --i;
          break;
        }
      }
      return;
    }
    std::vector<size_t> order(all.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [&all](size_t a, size_t b) {
      const int compared = all[a].first.compare(all[b].first);
      return compared != 0 ? compared < 0 : a < b;
    });
    std::vector<bool> repeated;
    for (size_t begin = 0; begin < order.size();) {
      size_t end = begin + 1;
      while (end < order.size() && all[order[end]].first == all[order[begin]].first) ++end;
      if (end - begin > 1) {
        repeated.resize(all.size());
        all[order[begin]].second = std::move(all[order[end - 1]].second);
        for (size_t i = begin + 1; i < end; ++i) repeated[order[i]] = true;
      }
      begin = end;
    }
    if (repeated.empty()) return;
    size_t kept = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      if (repeated[i]) continue;
      if (kept != i) all[kept] = std::move(all[i]);
      ++kept;
    }
    all.resize(kept);
  }

  Status ParseString(std::string* out) {
    ++at_;
    for (;;) {
      const size_t begin = at_;
      while (at_ < text_.size() && !kEndsRun[static_cast<uint8_t>(text_[at_])]) ++at_;
      out->append(text_, begin, at_ - begin);
      if (at_ == text_.size()) return Wrong("the text ends inside of a string");
      if (text_[at_] == '"') {
        ++at_;
        return {};
      }
      if (text_[at_] != '\\') return Wrong("a control character in a string");
      DI_RETURN_IF_ERROR(ParseEscape(out));
    }
  }

  Status ParseEscape(std::string* out) {
    const char c = at_ + 1 < text_.size() ? text_[at_ + 1] : '\0';
    if (c == 'u') return ParseUnicodeEscape(out);
    constexpr std::string_view kEscapes = "\"\\/bfnrt";
    constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
    const size_t which = kEscapes.find(c);
    if (c == '\0' || which == kEscapes.npos) return Wrong("an unknown escape");
    *out += kMeanings[which];
    at_ += 2;
    return {};
  }

  Status ParseUnicodeEscape(std::string* out) {
    const std::optional<uint32_t> unit = CodeUnit(at_);
    if (!unit.has_value()) return Wrong("'\\u' without four hexadecimal digits");
    if (*unit < 0xD800 || *unit > 0xDFFF) {
      AppendCodePoint(*unit, out);
      at_ += 6;
      return {};
    }
    const std::optional<uint32_t> low = *unit < 0xDC00 ? CodeUnit(at_ + 6) : std::nullopt;
    if (!low.has_value() || *low < 0xDC00 || *low > 0xDFFF)
      return Wrong("half of a surrogate pair alone");
    AppendCodePoint(0x10000 + ((*unit - 0xD800) << 10) + (*low - 0xDC00), out);
    at_ += 12;
    return {};
  }

  // The value of "\uXXXX" at `at`.
  std::optional<uint32_t> CodeUnit(size_t at) const {
    if (at > text_.size() || text_.size() - at < 6 || text_[at] != '\\' || text_[at + 1] != 'u')
      return std::nullopt;
    uint32_t unit = 0;
    const char* const begin = text_.data() + at + 2;
    const auto [end, error] = std::from_chars(begin, begin + 4, unit, 16);
    if (error != std::errc() || end != begin + 4) return std::nullopt;
    return unit;
  }

  Status ParseNumber(JsonValue* out) {
    const size_t begin = at_;
    const auto skip_digits = [this] {
      const size_t first = at_;
      while (at_ < text_.size() && IsDigit(text_[at_])) ++at_;
      return at_ > first;
    };
    if (text_[at_] == '-') ++at_;
    const size_t first_digit = at_;
    if (!skip_digits()) return Wrong("expected a digit");
    if (text_[first_digit] == '0' && at_ > first_digit + 1) {
      at_ = first_digit + 1;
      return Wrong("a digit after a leading zero");
    }
    bool is_integer = true;
    if (at_ < text_.size() && text_[at_] == '.') {
      ++at_;
      is_integer = false;
      if (!skip_digits()) return Wrong("expected a digit");
    }
    if (at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
      ++at_;
      is_integer = false;
      if (at_ < text_.size() && (text_[at_] == '+' || text_[at_] == '-')) ++at_;
      if (!skip_digits()) return Wrong("expected a digit");
    }
    const std::string_view number = text_.substr(begin, at_ - begin);
    if (is_integer && number != "-0") {
      const char* const end = number.data() + number.size();
      if (int64_t value = 0; std::from_chars(number.data(), end, value).ec == std::errc()) {
        *out = value;
        return {};
      }
      if (uint64_t value = 0;
          number[0] != '-' && std::from_chars(number.data(), end, value).ec == std::errc()) {
        *out = value;
        return {};
      }
    }
    const std::optional<double> value = ParseDouble(number);
    if (!value.has_value()) {
      at_ = begin;
      return Wrong("a number that is too large");
    }
    *out = *value;
    return {};
  }

  std::string_view text_;
  size_t at_ = 0;
};

struct Format {
  std::string_view item_separator;
  std::string_view key_separator;
  int min_decimal_exponent;  // smaller numbers are written with an exponent
  int min_exponent_digits;
};
constexpr Format kPython = {", ", ": ", -4, 2};
constexpr Format kCompact = {",", ":", -5, 1};

// The shortest decimal that is read back as the same double.
void AppendDouble(double value, const Format& format, std::string* out) {
  if (std::isnan(value)) {
    *out += "NaN";
    return;
  }
  if (std::isinf(value)) {
    *out += value < 0 ? "-Infinity" : "Infinity";
    return;
  }
  // "-d.ddde-xxx"
  char buffer[40];
  const char* const end =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific).ptr;
  const char* at = buffer;
  if (*at == '-') *out += *at++;
  std::string digits;
  for (; *at != 'e'; ++at) {
    if (*at != '.') digits += *at;
  }
  ++at;
  int exponent = 0;
  std::from_chars(*at == '+' ? at + 1 : at, end, exponent);
  if (exponent < format.min_decimal_exponent || exponent >= 16) {
    *out += digits[0];
    if (digits.size() > 1) {
      *out += '.';
      out->append(digits, 1);
    }
    *out += fmt::format("e{}{:0{}}", exponent < 0 ? '-' : '+', std::abs(exponent),
                        format.min_exponent_digits);
    return;
  }
  if (exponent < 0) {
    *out += "0.";
    out->append(static_cast<size_t>(-exponent - 1), '0');
    *out += digits;
    return;
  }
  const size_t whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) {
    digits.append(whole - digits.size(), '0');
    *out += digits + ".0";
  } else {
    out->append(digits, 0, whole);
    *out += '.';
    out->append(digits, whole);
  }
}

void AppendString(std::string_view text, std::string* out) {
  *out += '"';
  AppendJsonEscaped(text, out);
  *out += '"';
}

// Recursion is as deep as the value.
void Append(const JsonValue& value, const Format& format, std::string* out) {
  if (const bool* flag = value.if_bool()) {
    *out += *flag ? "true" : "false";
  } else if (const int64_t* integer = value.if_int64()) {
    fmt::format_to(std::back_inserter(*out), "{}", *integer);
  } else if (const uint64_t* large = value.if_uint64()) {
    fmt::format_to(std::back_inserter(*out), "{}", *large);
  } else if (const double* number = value.if_double()) {
    AppendDouble(*number, format, out);
  } else if (const std::string* text = value.if_string()) {
    AppendString(*text, out);
  } else if (const JsonValue::Array* items = value.if_array()) {
    *out += '[';
    for (size_t i = 0; i < items->size(); ++i) {
      if (i > 0) *out += format.item_separator;
      Append((*items)[i], format, out);
    }
    *out += ']';
  } else if (const JsonValue::Object* members = value.if_object()) {
    *out += '{';
    for (size_t i = 0; i < members->size(); ++i) {
      if (i > 0) *out += format.item_separator;
      AppendString((*members)[i].first, out);
      *out += format.key_separator;
      Append((*members)[i].second, format, out);
    }
    *out += '}';
  } else {
    *out += "null";
  }
}

}  // namespace

JsonValue::JsonValue(uint64_t value) {
  if (value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    value_ = static_cast<int64_t>(value);
  } else {
    value_ = value;
  }
}

Result<JsonValue> JsonValue::Parse(std::string_view text) {
  if (FindInvalidUtf8(text).has_value())
    return Fail(Code::kInvalidArgument, "Not valid JSON: the text is not UTF-8.");
  return Parser(text).Parse();
}

double JsonValue::AsDouble() const {
  if (const int64_t* integer = if_int64()) return static_cast<double>(*integer);
  if (const uint64_t* large = if_uint64()) return static_cast<double>(*large);
  if (const double* number = if_double()) return *number;
  return 0;
}

const JsonValue* JsonValue::Find(std::string_view key) const {
  const Object* members = if_object();
  if (members == nullptr) return nullptr;
  for (const Member& member : *members) {
    if (member.first == key) return &member.second;
  }
  return nullptr;
}

void JsonValue::Set(std::string_view key, JsonValue value) {
  if (is_null()) value_ = Object();
  Object* members = if_object();
  DI_CHECK(members != nullptr);
  for (Member& member : *members) {
    if (member.first != key) continue;
    member.second = std::move(value);
    return;
  }
  members->emplace_back(std::string(key), std::move(value));
}

std::string JsonValue::Dump() const {
  std::string out;
  Append(*this, kPython, &out);
  return out;
}

std::string JsonValue::DumpCompact() const {
  std::string out;
  Append(*this, kCompact, &out);
  return out;
}

std::string JsonQuoted(std::string_view text) {
  std::string out;
  AppendString(text, &out);
  return out;
}

void AppendJsonEscaped(std::string_view text, std::string* out) {
  size_t begin = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const uint8_t byte = static_cast<uint8_t>(text[i]);
    if (!kEndsRun[byte]) continue;
    out->append(text, begin, i - begin);
    begin = i + 1;
    switch (byte) {
      case '"':
        *out += "\\\"";
        break;
      case '\\':
        *out += "\\\\";
        break;
      case '\n':
        *out += "\\n";
        break;
      case '\r':
        *out += "\\r";
        break;
      case '\t':
        *out += "\\t";
        break;
      case '\b':
        *out += "\\b";
        break;
      case '\f':
        *out += "\\f";
        break;
      default:
        fmt::format_to(std::back_inserter(*out), "\\u{:04x}", byte);
    }
  }
  out->append(text, begin);
}

}  // namespace deepinfer
