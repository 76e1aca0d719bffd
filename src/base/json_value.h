// A JSON document as a value: key order kept, numbers of 64 bits. What requests, tool schemas and
// call arguments are read into, and written back from byte for byte. Not for large files or for
// lines whose fields are known beforehand (apps/jsonl.h is faster and names every mistake).
//
// Reading: integers within -2^63 ... 2^64-1 are exact, others and all with a fraction or an
// exponent become doubles ("-0" is the double -0.0); of a key that occurs twice the last value
// wins, at the place of the first. Refused: anything that is not JSON in UTF-8, NaN and infinities,
// numbers that overflow a double, lone surrogate escapes, more than 127 levels of nesting.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"

namespace deepinfer {

class JsonValue {
 public:
  using Array = std::vector<JsonValue>;
  using Member = std::pair<std::string, JsonValue>;
  using Object = std::vector<Member>;  // in order; keys are unique

  static constexpr int kMaxDepth = 127;

  JsonValue() = default;  // null
  JsonValue(std::nullptr_t) {}
  JsonValue(bool value) : value_(value) {}
  JsonValue(int value) : value_(int64_t{value}) {}
  JsonValue(int64_t value) : value_(value) {}
  JsonValue(uint64_t value);  // an int64_t where it fits
  JsonValue(double value) : value_(value) {}
  JsonValue(const char* value) : value_(std::string(value)) {}
  JsonValue(std::string value) : value_(std::move(value)) {}
  JsonValue(Array value) : value_(std::move(value)) {}
  JsonValue(Object value) : value_(std::move(value)) {}

  // Errors: kInvalidArgument with the byte offset where that is known.
  static Result<JsonValue> Parse(std::string_view text);

  bool is_null() const {
    return std::holds_alternative<std::monostate>(value_);
  }
  // Null when the value is of another kind.
  const bool* if_bool() const {
    return std::get_if<bool>(&value_);
  }
  const std::string* if_string() const {
    return std::get_if<std::string>(&value_);
  }
  const Array* if_array() const {
    return std::get_if<Array>(&value_);
  }
  const Object* if_object() const {
    return std::get_if<Object>(&value_);
  }
  Array* if_array() {
    return std::get_if<Array>(&value_);
  }
  Object* if_object() {
    return std::get_if<Object>(&value_);
  }
  const int64_t* if_int64() const {
    return std::get_if<int64_t>(&value_);
  }
  const uint64_t* if_uint64() const {  // only above the range of int64_t
    return std::get_if<uint64_t>(&value_);
  }
  const double* if_double() const {
    return std::get_if<double>(&value_);
  }
  bool is_number() const {
    return if_int64() != nullptr || if_uint64() != nullptr || if_double() != nullptr;
  }
  // Of any number; 0 for other kinds.
  double AsDouble() const;

  // A member of an object; null if there is none, or if this is no object.
  const JsonValue* Find(std::string_view key) const;
  // Adds or replaces a member; a null value becomes an object first.
  void Set(std::string_view key, JsonValue value);

  // What Python's json.dumps(value, ensure_ascii=False) writes: ", " and ": ", shortest doubles
  // with ".0" or an exponent of at least two digits, only '"', '\' and control characters escaped.
  std::string Dump() const;
  // The same without any white space, and exponents without padding: "1e-7", from
  // 1e-6 down and 1e+16 up.
  std::string DumpCompact() const;

  friend bool operator==(const JsonValue&, const JsonValue&) = default;

 private:
  std::variant<std::monostate, bool, int64_t, uint64_t, double, std::string, Array, Object> value_;
};

// A JSON string literal, quotes included, escaped as Dump does.
std::string JsonQuoted(std::string_view text);
// Appends the literal's inside, without the quotes.
void AppendJsonEscaped(std::string_view text, std::string* out);

}  // namespace deepinfer
