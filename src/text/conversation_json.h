// Conversations from JSON, outside of the server protocols (those: text/chat_request.h): the
// objects of the vendor's toolkit, and the messages that the checkpoint's own encoder takes. For
// command line tools and recorded cases. Unknown fields are ignored.
#pragma once

#include <string_view>

#include "base/error.h"
#include "base/json_value.h"
#include "deepinfer/chat.h"

namespace deepinfer {

// Recipe profile. {"messages": [{"role", "content", "reasoning_content", "tool_calls": [{"id",
// "name", "arguments"}], "tool_call_id", "prefix", "tools", "images"}], "thinking", "tools":
// [{"name", "description", "parameters", "defer_loading"}], "tool_choice", "reasoning_effort" (an
// integer, "low", "high", "xhigh" or "max"), "response_format", "response_schema",
// "response_regex"}. `images` is a number n: the first n times that the content spells the image
// token are images. Errors: kInvalidArgument with the field.
Result<Chat> ChatFromConversation(const JsonValue& conversation);

// Checkpoint profile. {"messages": [...], "mode": "thinking" or "chat", "effort": an integer from 1
// to 100, "low", "high" or "max", "drop_thinking"}; messages may have lists of blocks as content,
// "tools", "response_format", "task" and "wo_eos". An image token that is spelt out in a text gets
// ASCII bars, so that nobody takes it for an image. Errors: kInvalidArgument with the field.
Result<Chat> ChatFromCheckpointMessages(const JsonValue& line);

// The same from the JSON text, by which the integers of tools and response formats keep all their
// digits.
Result<Chat> ChatFromCheckpointLine(std::string_view line);

}  // namespace deepinfer
