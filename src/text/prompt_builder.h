// Collects a prompt: text that someone wrote, and the special tokens of the template. What is added
// as text stays text, whatever it spells. Used by the renderers of the chat encoding only.
#pragma once

#include <string_view>
#include <utility>

#include "deepinfer/chat.h"
#include "text/chat_render.h"

namespace deepinfer {

class PromptBuilder {
 public:
  // `image_marker` must outlive the builder.
  explicit PromptBuilder(std::string_view image_marker) : image_marker_(image_marker) {}

  void Special(std::string_view marker);
  void Text(std::string_view text) {
    prompt_.text += text;
  }
  // A piece of the template in which the tool marker and the marks of reasoning are special tokens.
  // Not for text of a caller.
  void Literal(std::string_view text);
  // Text with image tokens at its offsets, which must be ascending and within the text.
  void Add(const Content& content);

  ChatPrompt Take() {
    return std::move(prompt_);
  }

 private:
  std::string_view image_marker_;
  ChatPrompt prompt_;
};

}  // namespace deepinfer
