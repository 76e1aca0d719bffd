// The published chat encoding, basic case: text conversations of system, user and assistant turns
// become a prompt. Tools, images, reminders, quick-instruction tasks, response formats and
// continued answers are not part of it and have no field here; whoever reads requests must refuse
// them.
//
// Where the checkpoint's encoder and the vendor's server toolkit render differently, this follows
// the checkpoint.
//
// What text/chat_render.h is the whole of; in a namespace of its own because the names are the
// same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "text/tokenizer.h"

namespace deepinfer::basic_chat {

enum class ThinkingMode {
  kChat,      // the model answers at once
  kThinking,  // the model reasons first
};

// "chat" or "thinking".
Result<ThinkingMode> ParseThinkingMode(std::string_view name);

// Reasoning effort is a number from 1 to 100 that the prompt states; it limits nothing.
inline constexpr int kEffortLow = 50;
inline constexpr int kEffortHigh = 75;
inline constexpr int kEffortMax = 100;

// "low", "high" or "max".
Result<int> ParseReasoningEffort(std::string_view name);

struct ChatMessage {
  std::string role;     // "system", "user" or "assistant"
  std::string content;  // UTF-8; may be empty
  std::optional<std::string>
      reasoning_content;  // of earlier answers; without effect in other roles
};

struct ChatOptions {
  ThinkingMode mode = ThinkingMode::kThinking;
  int reasoning_effort = kEffortHigh;  // without effect in chat mode
  // Leaves out the reasoning of answers before the last user turn.
  bool drop_thinking = true;
};

// A rendered prompt. Only the ranges in `specials` stand for special tokens; a marker that someone
// typed into a message is text, though the characters are the same.
struct ChatPrompt {
  struct Range {
    size_t begin;
    size_t end;
  };
  std::string text;
  std::vector<Range> specials;  // in order, not overlapping
};

// A conversation that ends with an assistant turn gets no opening for another answer.
// Errors: kInvalidArgument (no messages, effort out of range, content that is not UTF-8),
// kUnsupported (another role).
Result<ChatPrompt> RenderChat(std::span<const ChatMessage> messages, const ChatOptions& options);

// The ids of a prompt. Message text can not produce the ids of added tokens. Errors: kUnsupported
// if the tokenizer lacks a marker (the one of the preceding model generation has no system marker).
Result<std::vector<int32_t>> EncodeChatPrompt(const Tokenizer& tokenizer, const ChatPrompt& prompt);

// RenderChat and EncodeChatPrompt.
Result<std::vector<int32_t>> EncodeChat(const Tokenizer& tokenizer,
                                        std::span<const ChatMessage> messages,
                                        const ChatOptions& options);

}  // namespace deepinfer::basic_chat
