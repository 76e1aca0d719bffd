// One line of `deepinfer render`: a request or a conversation becomes a prompt.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "apps/json_line.h"
#include "base/error.h"
#include "deepinfer/chat.h"
#include "text/tokenizer.h"

namespace deepinfer {

class LineRenderer {
 public:
  // `profile`: "recipe" or "checkpoint". `dialect`: "v4.1", "v4" or empty, for the tokenizer's and
  // v4.1 without one. Errors: kUnsupported for a tokenizer that has neither.
  static Result<LineRenderer> Create(std::string_view profile, std::string_view dialect,
                                     std::optional<Tokenizer> tokenizer);

  // The output line, without its end. Errors: kInvalidArgument with the field.
  Result<std::string> Render(const JsonLine& line) const;

 private:
  LineRenderer(EncodingProfile profile, ChatDialect dialect, std::optional<Tokenizer> tokenizer);

  EncodingProfile profile_;
  ChatDialect dialect_;
  std::optional<Tokenizer> tokenizer_;
};

}  // namespace deepinfer
