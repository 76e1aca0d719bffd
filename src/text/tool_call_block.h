// The block of tool calls of an assistant turn. Names and values are text: whatever they spell,
// they produce no special token (and no tag that the model would have written with one).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "deepinfer/chat.h"
#include "text/prompt_builder.h"

namespace deepinfer {

// An argument of a call, as it stands in its tags.
struct CallArgument {
  std::string name;
  bool is_string = false;
  std::string value;
};

// The members of the JSON object that `arguments` holds; if it holds none, the text itself as the
// one argument "arguments". The checkpoint profile also looks into a JSON string that holds JSON.
std::vector<CallArgument> CallArguments(std::string_view arguments, EncodingProfile profile,
                                        ChatDialect dialect);

// Appends the separator and the block. `calls` must not be empty.
void AppendToolCallBlock(const std::vector<ToolCall>& calls, EncodingProfile profile,
                         ChatDialect dialect, PromptBuilder* prompt);

// What a block begins with, separator included: a prompt that ends in it forces a call.
void AppendToolCallBlockBegin(ChatDialect dialect, PromptBuilder* prompt);

}  // namespace deepinfer
