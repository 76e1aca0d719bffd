// The conversation of an input line: its fields `messages`, `tools`, `tool_choice`,
// `response_format`, `thinking`, `thinking_mode`, `reasoning_effort`, `encoding_profile` and
// `drop_thinking`, in the form of Chat Completions, become a Chat. Stricter than a server: what has
// no effect is refused.
#pragma once

#include <string_view>

#include "base/error.h"
#include "base/json_value.h"
#include "deepinfer/chat.h"

namespace deepinfer {

// Whether a line's field of this name belongs to its conversation.
bool IsChatField(std::string_view name);

// `fields` are those of a line for which IsChatField holds, `messages` among them. Errors:
// kInvalidArgument with the field's path.
Result<Chat> ChatFromLine(const JsonValue& fields);

}  // namespace deepinfer
