// The chat encoding: a conversation becomes a prompt, and a prompt token ids. Rules, profiles and
// dialects: docs/chat.md. Pure functions; whoever reads requests turns them into a Chat first
// (text/chat_request.h). Not for parsing what the model answers (text/output_parser.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "deepinfer/chat.h"
#include "text/output_parser.h"
#include "text/tokenizer.h"

namespace deepinfer {

// Only the ranges in `specials` stand for special tokens; a marker that someone typed into a
// message is text, though the characters are the same.
struct ChatPrompt {
  struct Range {
    size_t begin;
    size_t end;
    friend bool operator==(const Range&, const Range&) = default;
  };
  std::string text;
  std::vector<Range> specials;      // in order, not overlapping
  std::vector<ImageSource> images;  // of the image tokens, in order
  // Where the parser of the answer starts, and whether it looks for calls and JSON.
  OutputParserOptions parser;
};

// Errors: kInvalidArgument with the field at fault ("messages[2].content"): text that is not UTF-8,
// effort out of range, images where the model takes none or outside of their text, members that the
// role or the profile does not know (`task` in the recipe profile), tools whose function is no JSON
// object, no messages (checkpoint profile). kUnsupported: the checkpoint profile with kV4.
Result<ChatPrompt> RenderChat(const Chat& chat, ChatDialect dialect);

// The ids of a prompt: text between special tokens is encoded as one piece in which no added token
// is recognised. Errors: kUnsupported if the tokenizer lacks a marker of the prompt,
// kInvalidArgument if the ranges are not in order.
Result<std::vector<int32_t>> EncodeChatPrompt(const Tokenizer& tokenizer, const ChatPrompt& prompt);

// kV41 if the tokenizer has the system token, kV4 if it has the rest. Errors: kUnsupported.
Result<ChatDialect> DialectOf(const Tokenizer& tokenizer);

}  // namespace deepinfer
