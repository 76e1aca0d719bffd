// JSON as prompts spell it. Both profiles write what Python's json.dumps(value, ensure_ascii=False)
// writes; they differ in what is read. The recipe profile reads 64-bit numbers (JsonValue), the
// checkpoint profile is Python and keeps integers of any size, NaN and infinities.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/json_value.h"
#include "deepinfer/chat.h"

namespace deepinfer {

// JsonValue::Dump, except that kV4 writes small doubles as the toolkit did then: "0.00001", "1e-7".
std::string DumpForPrompt(const JsonValue& value, ChatDialect dialect);

// The text of a JSON value as Python reads and writes it again. Errors: kInvalidArgument for what
// is not JSON in UTF-8 (but NaN, Infinity and -Infinity are allowed), lone surrogate escapes, and
// more than JsonValue::kMaxDepth levels.
Result<std::string> PythonJson(std::string_view text);

// A member of an object.
struct JsonMemberText {
  std::string key;
  bool is_string = false;
  std::string value;  // of a string: its characters; else PythonJson
  friend bool operator==(const JsonMemberText&, const JsonMemberText&) = default;
};
// The members of a JSON object in order; of a key that occurs twice the last value wins, at the
// place of the first. Errors: as PythonJson, and if the text is no object.
Result<std::vector<JsonMemberText>> PythonJsonMembers(std::string_view text);

// The elements of a JSON array, each as PythonJson. Errors: as PythonJson, and if the text is no
// array.
Result<std::vector<std::string>> PythonJsonElements(std::string_view text);

}  // namespace deepinfer
