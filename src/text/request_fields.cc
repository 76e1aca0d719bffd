#include "text/request_fields.h"

#include <fmt/core.h>

#include <utility>

#include "base/quoted.h"

namespace deepinfer {

std::string FieldPath(const std::string& path, std::string_view key) {
  return path.empty() ? std::string(key) : fmt::format("{}.{}", path, key);
}

std::string ElementPath(const std::string& path, size_t index) {
  return fmt::format("{}[{}]", path, index);
}

void RequestReader::Malformed(const std::string& path, std::string_view what) {
  if (malformed()) return;
  problem_ =
      RequestProblem{true, path, fmt::format("{} {}.", path.empty() ? "the body" : path, what)};
}

void RequestReader::Refuse(const std::string& path, std::string_view what) {
  if (problem_.has_value()) return;
  problem_ = RequestProblem{false, path, fmt::format("{} {}.", path, what)};
}

void RequestReader::Adopt(const RequestReader& other) {
  if (other.problem_.has_value() && (!problem_.has_value() || other.malformed()) && !malformed())
    problem_ = other.problem_;
}

bool RequestReader::IsObject(const JsonValue& value, const std::string& path) {
  if (value.if_object() != nullptr) return true;
  Malformed(path, "must be an object");
  return false;
}

const JsonValue* RequestReader::Required(const JsonValue& object, const std::string& path,
                                         std::string_view key) {
  const JsonValue* value = object.Find(key);
  if (value == nullptr) Malformed(FieldPath(path, key), "is missing");
  return value;
}

namespace {

// Null for absent and for null.
const JsonValue* Given(const JsonValue& object, std::string_view key) {
  const JsonValue* value = object.Find(key);
  return value == nullptr || value->is_null() ? nullptr : value;
}

}  // namespace

std::optional<bool> RequestReader::Bool(const JsonValue& object, const std::string& path,
                                        std::string_view key) {
  const JsonValue* value = Given(object, key);
  if (value == nullptr) return std::nullopt;
  if (const bool* flag = value->if_bool()) return *flag;
  Malformed(FieldPath(path, key), "must be true or false");
  return std::nullopt;
}

std::optional<std::string> RequestReader::String(const JsonValue& object, const std::string& path,
                                                 std::string_view key) {
  const JsonValue* value = Given(object, key);
  if (value == nullptr) return std::nullopt;
  if (const std::string* text = value->if_string()) return *text;
  Malformed(FieldPath(path, key), "must be a string");
  return std::nullopt;
}

std::optional<uint64_t> RequestReader::Unsigned(const JsonValue& object, const std::string& path,
                                                std::string_view key, uint64_t max) {
  const JsonValue* value = Given(object, key);
  if (value == nullptr) return std::nullopt;
  if (const int64_t* number = value->if_int64()) {
    if (*number >= 0 && static_cast<uint64_t>(*number) <= max)
      return static_cast<uint64_t>(*number);
  } else if (const uint64_t* large = value->if_uint64()) {
    if (*large <= max) return *large;
  }
  Malformed(FieldPath(path, key), fmt::format("must be an integer of 0 ... {}", max));
  return std::nullopt;
}

std::optional<float> RequestReader::Float(const JsonValue& object, const std::string& path,
                                          std::string_view key) {
  const JsonValue* value = Given(object, key);
  if (value == nullptr) return std::nullopt;
  if (value->is_number()) return static_cast<float>(value->AsDouble());
  Malformed(FieldPath(path, key), "must be a number");
  return std::nullopt;
}

const JsonValue* RequestReader::Object(const JsonValue& object, const std::string& path,
                                       std::string_view key) {
  const JsonValue* value = Given(object, key);
  if (value == nullptr) return nullptr;
  return IsObject(*value, FieldPath(path, key)) ? value : nullptr;
}

const JsonValue::Array* RequestReader::Array(const JsonValue& object, const std::string& path,
                                             std::string_view key) {
  const JsonValue* value = Given(object, key);
  if (value == nullptr) return nullptr;
  if (value->if_array() == nullptr) Malformed(FieldPath(path, key), "must be a list");
  return value->if_array();
}

std::string RequestReader::RequiredString(const JsonValue& object, const std::string& path,
                                          std::string_view key) {
  const JsonValue* value = Required(object, path, key);
  if (value == nullptr) return {};
  if (const std::string* text = value->if_string()) return *text;
  Malformed(FieldPath(path, key), "must be a string");
  return {};
}

const JsonValue* RequestReader::RequiredObject(const JsonValue& object, const std::string& path,
                                               std::string_view key) {
  const JsonValue* value = Required(object, path, key);
  if (value == nullptr) return nullptr;
  return IsObject(*value, FieldPath(path, key)) ? value : nullptr;
}

const JsonValue::Array* RequestReader::RequiredArray(const JsonValue& object,
                                                     const std::string& path,
                                                     std::string_view key) {
  const JsonValue* value = Required(object, path, key);
  if (value == nullptr) return nullptr;
  if (value->if_array() == nullptr) Malformed(FieldPath(path, key), "must be a list");
  return value->if_array();
}

}  // namespace deepinfer
