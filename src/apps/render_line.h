// One line of `deepinfer render`: a request or a conversation becomes a prompt.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"
#include "text/tokenizer.h"

namespace deepinfer {

// Of deepinfer/chat.h, whose types deepinfer/llm.h has under the same names.
enum class ChatDialect : uint8_t;
enum class EncodingProfile : uint8_t;

// The id of a line as it was written.
struct RenderedId {
  std::string text;
  bool is_integer = false;
};

class LineRenderer {
 public:
  // `profile`: "recipe" or "checkpoint". `dialect`: "v4.1", "v4" or empty, for the tokenizer's and
  // v4.1 without one. Errors: kUnsupported for a tokenizer that has neither.
  static Result<LineRenderer> Create(std::string_view profile, std::string_view dialect,
                                     std::optional<Tokenizer> tokenizer);

  // The output line, without its end. `id` is filled if the line has one, also if the rest is
  // wrong. Errors: kInvalidArgument with the field.
  Result<std::string> Render(std::string_view line, std::optional<RenderedId>* id) const;

 private:
  LineRenderer(EncodingProfile profile, ChatDialect dialect, std::optional<Tokenizer> tokenizer);

  EncodingProfile profile_;
  ChatDialect dialect_;
  std::optional<Tokenizer> tokenizer_;
};

}  // namespace deepinfer
