// Reading the fields of a request's body. Whatever is wrong becomes the reader's problem, of which
// the first is kept (but a wrong shape counts before a value that is not allowed); reading goes on
// with a default, so that the code that converts a request need not ask after every field.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/json_value.h"
#include "text/chat_request.h"

namespace deepinfer {

class RequestReader {
 public:
  const std::optional<RequestProblem>& problem() const {
    return problem_;
  }
  // Once the shape is wrong, nothing can change the answer.
  bool malformed() const {
    return problem_.has_value() && problem_->malformed;
  }

  // "`path` `what`."
  void Malformed(const std::string& path, std::string_view what);
  void Refuse(const std::string& path, std::string_view what);
  // What another reader has found.
  void Adopt(const RequestReader& other);

  // Members of `object`, whose path is `path` (empty: the body). Absent or null: nullopt or null.
  std::optional<bool> Bool(const JsonValue& object, const std::string& path, std::string_view key);
  std::optional<std::string> String(const JsonValue& object, const std::string& path,
                                    std::string_view key);
  std::optional<uint64_t> Unsigned(const JsonValue& object, const std::string& path,
                                   std::string_view key, uint64_t max);
  // Rounded to 32 bits.
  std::optional<float> Float(const JsonValue& object, const std::string& path,
                             std::string_view key);
  const JsonValue* Object(const JsonValue& object, const std::string& path, std::string_view key);
  const JsonValue::Array* Array(const JsonValue& object, const std::string& path,
                                std::string_view key);

  // The same for members that must be there and must not be null.
  std::string RequiredString(const JsonValue& object, const std::string& path,
                             std::string_view key);
  const JsonValue* RequiredObject(const JsonValue& object, const std::string& path,
                                  std::string_view key);
  const JsonValue::Array* RequiredArray(const JsonValue& object, const std::string& path,
                                        std::string_view key);
  // Must be there, may be null.
  const JsonValue* Required(const JsonValue& object, const std::string& path, std::string_view key);
  // Whether `value` is an object.
  bool IsObject(const JsonValue& value, const std::string& path);

 private:
  std::optional<RequestProblem> problem_;
};

// "messages" and 3 give "messages[3]"; "a" and "b" give "a.b".
std::string FieldPath(const std::string& path, std::string_view key);
std::string ElementPath(const std::string& path, size_t index);

}  // namespace deepinfer
