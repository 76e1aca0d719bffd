#include "text/prompt_json.h"

#include <cstddef>
#include <unordered_map>
#include <utility>

namespace deepinfer {
namespace {

// "1.5e-05" -> "0.000015", "1e-07" -> "1e-7".
std::string V4Double(std::string text) {
  const size_t exponent = text.find("e-0");
  if (exponent == std::string::npos) return text;
  if (text.substr(exponent) != "e-05") return text.erase(exponent + 2, 1);
  std::string digits = text.substr(0, exponent);
  const bool negative = digits[0] == '-';
  if (negative) digits.erase(0, 1);
  if (digits.size() > 1) digits.erase(1, 1);  // the point
  return (negative ? "-0.0000" : "0.0000") + digits;
}

void AppendV4(const JsonValue& value, std::string* out) {
  if (const JsonValue::Array* array = value.if_array()) {
    *out += '[';
    for (size_t i = 0; i < array->size(); ++i) {
      if (i > 0) *out += ", ";
      AppendV4((*array)[i], out);
    }
    *out += ']';
  } else if (const JsonValue::Object* object = value.if_object()) {
    *out += '{';
    for (size_t i = 0; i < object->size(); ++i) {
      if (i > 0) *out += ", ";
      *out += JsonQuoted((*object)[i].first);
      *out += ": ";
      AppendV4((*object)[i].second, out);
    }
    *out += '}';
  } else if (value.if_double() != nullptr) {
    *out += V4Double(value.Dump());
  } else {
    *out += value.Dump();
  }
}

class PythonJsonReader {
 public:
  explicit PythonJsonReader(std::string_view text) : text_(text) {}

  Result<std::string> ReadDocument() {
    std::string out;
    DI_RETURN_IF_ERROR(ReadValue(0, &out));
    DI_RETURN_IF_ERROR(RequireEnd());
    return out;
  }

  Result<std::vector<JsonMemberText>> ReadObjectDocument() {
    std::vector<JsonMemberText> members;
    DI_RETURN_IF_ERROR(ReadObject(0, &members));
    DI_RETURN_IF_ERROR(RequireEnd());
    return members;
  }

  Result<std::vector<std::string>> ReadArrayDocument() {
    std::vector<std::string> elements;
    DI_RETURN_IF_ERROR(ReadArray(0, &elements));
    DI_RETURN_IF_ERROR(RequireEnd());
    return elements;
  }

 private:
  tl::unexpected<Error> Wrong(std::string_view expected) const {
    return Fail(Code::kInvalidArgument,
                fmt::format("The text is not JSON: {} is expected at byte {}.", expected, at_));
  }

  void SkipSpace() {
    while (at_ < text_.size() && std::string_view(" \t\n\r").find(text_[at_]) != text_.npos) ++at_;
  }
  bool Take(char c) {
    SkipSpace();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  Status RequireEnd() {
    SkipSpace();
    if (at_ < text_.size()) return Wrong("the end");
    return {};
  }

  Result<std::string> ReadString() {
    SkipSpace();
    const size_t begin = at_;
    if (at_ >= text_.size() || text_[at_] != '"') return Wrong("a string");
    ++at_;
    while (at_ < text_.size() && text_[at_] != '"') at_ += text_[at_] == '\\' ? 2 : 1;
    if (at_ >= text_.size()) return Wrong("the end of a string");
    ++at_;
    DI_ASSIGN_OR_RETURN(const JsonValue value, JsonValue::Parse(text_.substr(begin, at_ - begin)));
    return *value.if_string();
  }

  static bool IsInteger(std::string_view token) {
    if (token.starts_with('-')) token.remove_prefix(1);
    if (token.empty() || (token.size() > 1 && token[0] == '0')) return false;
    return token.find_first_not_of("0123456789") == token.npos;
  }

  // Numbers and the words.
  Status ReadScalar(std::string* out) {
    size_t end = at_;
    while (end < text_.size() &&
           (text_[end] == '-' || text_[end] == '+' || text_[end] == '.' ||
            (text_[end] >= '0' && text_[end] <= '9') || (text_[end] >= 'a' && text_[end] <= 'z') ||
            (text_[end] >= 'A' && text_[end] <= 'Z'))) {
      ++end;
    }
    const std::string_view token = text_.substr(at_, end - at_);
    if (token == "NaN" || token == "Infinity" || token == "-Infinity") {
      *out += token;
    } else if (IsInteger(token)) {
      *out += token == "-0" ? "0" : token;
    } else {
      const Result<JsonValue> value = JsonValue::Parse(token);
      if (!value.has_value()) return Wrong("a value");
      *out += value->Dump();
    }
    at_ = end;
    return {};
  }

  Status ReadArray(int depth, std::vector<std::string>* elements) {
    if (!Take('[')) return Wrong("'['");
    if (Take(']')) return {};
    do {
      DI_RETURN_IF_ERROR(ReadValue(depth + 1, &elements->emplace_back()));
    } while (Take(','));
    if (!Take(']')) return Wrong("',' or ']'");
    return {};
  }

  Status ReadObject(int depth, std::vector<JsonMemberText>* members) {
    if (!Take('{')) return Wrong("'{'");
    if (Take('}')) return {};
    std::unordered_map<std::string, size_t> places;
    do {
      JsonMemberText member;
      DI_ASSIGN_OR_RETURN(member.key, ReadString());
      if (!Take(':')) return Wrong("':'");
      SkipSpace();
      if (at_ < text_.size() && text_[at_] == '"') {
        member.is_string = true;
        DI_ASSIGN_OR_RETURN(member.value, ReadString());
      } else {
        DI_RETURN_IF_ERROR(ReadValue(depth + 1, &member.value));
      }
      const auto [place, is_new] = places.emplace(member.key, members->size());
      if (is_new) {
        members->push_back(std::move(member));
      } else {
        (*members)[place->second] = std::move(member);
      }
    } while (Take(','));
    if (!Take('}')) return Wrong("',' or '}'");
    return {};
  }

  Status ReadValue(int depth, std::string* out) {
    if (depth > JsonValue::kMaxDepth) {
      return Fail(
          Code::kInvalidArgument,
          fmt::format("The JSON text is nested deeper than {} levels.", JsonValue::kMaxDepth));
    }
    SkipSpace();
    if (at_ >= text_.size()) return Wrong("a value");
    switch (text_[at_]) {
      case '"': {
        DI_ASSIGN_OR_RETURN(const std::string text, ReadString());
        *out += JsonQuoted(text);
        return {};
      }
      case '[': {
        std::vector<std::string> elements;
        DI_RETURN_IF_ERROR(ReadArray(depth, &elements));
        *out += '[';
        std::string_view separator;
        for (const std::string& element : elements) {
          *out += separator;
          *out += element;
          separator = ", ";
        }
        *out += ']';
        return {};
      }
      case '{': {
        std::vector<JsonMemberText> members;
        DI_RETURN_IF_ERROR(ReadObject(depth, &members));
        *out += '{';
        std::string_view separator;
        for (const JsonMemberText& member : members) {
          *out += separator;
          *out += JsonQuoted(member.key);
          *out += ": ";
          *out += member.is_string ? JsonQuoted(member.value) : member.value;
          separator = ", ";
        }
        *out += '}';
        return {};
      }
      default:
        return ReadScalar(out);
    }
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

std::string DumpForPrompt(const JsonValue& value, ChatDialect dialect) {
  if (dialect == ChatDialect::kV41) return value.Dump();
  std::string out;
  AppendV4(value, &out);
  return out;
}

Result<std::string> PythonJson(std::string_view text) {
  return PythonJsonReader(text).ReadDocument();
}

Result<std::vector<JsonMemberText>> PythonJsonMembers(std::string_view text) {
  return PythonJsonReader(text).ReadObjectDocument();
}

Result<std::vector<std::string>> PythonJsonElements(std::string_view text) {
  return PythonJsonReader(text).ReadArrayDocument();
}

}  // namespace deepinfer
