// The renderers behind RenderChat, one for each set of rules, and what they share. They take
// conversations that RenderChat has checked: texts are UTF-8, images stand within their text, the
// effort is in range.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "deepinfer/chat.h"
#include "text/chat_render.h"
#include "text/prompt_builder.h"

namespace deepinfer {

Result<ChatPrompt> RenderRecipeV41(const Chat& chat);
Result<ChatPrompt> RenderRecipeV4(const Chat& chat);
Result<ChatPrompt> RenderCheckpointV41(const Chat& chat);

// The conversation's tools, unless its choice hides them.
std::vector<const Tool*> VisibleTools(const Chat& chat);

// Ends a prompt of the recipe profile: the opening of the answer, unless the conversation has begun
// it (`continued` then says where its parser starts), and that of a call which is forced.
ChatPrompt WithAnswerBegun(const Chat& chat, ChatDialect dialect, bool has_tools,
                           std::optional<OutputParserOptions::Start> continued,
                           PromptBuilder* prompt);

// What carries the tools and the format of a conversation that begins otherwise.
const Message& EmptySystemMessage();

// The instructions with one line of JSON for each tool.
void AppendToolBlock(const std::vector<std::string>& lines, ChatDialect dialect,
                     PromptBuilder* prompt);

// The block that makes the model adhere to the conversation's format, separator included; empty if
// the prompt does not mention the format.
Result<std::string> FormatBlock(const ResponseFormat& format, ChatDialect dialect);

// Recipe profile: the lines of the tools that are listed (deferred ones are not), or of all.
// `field` names the list in errors.
Result<std::vector<std::string>> RecipeToolLines(const std::vector<const Tool*>& tools,
                                                 bool with_deferred, ChatDialect dialect,
                                                 const std::string& field);

}  // namespace deepinfer
