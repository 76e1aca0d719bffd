// Whether a text is JSON, by the grammar alone: nothing is converted, so numbers may have any size
// and nesting any depth. Not for reading values (base/json_value.h).
//
// JsonValue::Parse is no substitute. It refuses JSON that its values can not hold (1e999, half of a
// surrogate pair, the 128th level of nesting), which a client may well be able to read: the model's
// value would become a string. It also copies every string and number only to drop them, which
// takes five times as long.
#pragma once

#include <string_view>

namespace deepinfer {

// One JSON value with white space around it. `text` is UTF-8. Time is linear, memory one bit per
// level of nesting.
bool IsJson(std::string_view text);

// What JSON allows around a value.
inline constexpr std::string_view kJsonSpace = " \t\n\r";
std::string_view TrimJsonSpace(std::string_view text);

}  // namespace deepinfer
