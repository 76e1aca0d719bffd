// One line of `deepinfer parse`: the fields of an answer of the model, and the message that it is.
#pragma once

#include <string>

#include "base/error.h"
#include "base/json_value.h"
#include "text/tokenizer.h"

namespace deepinfer {

// Reads {"id", "text" or "ids", "parser"?, "finish"?, "cuts"?} and returns the line with the
// message; docs/answers.md has the fields. `json` is an object with an id. `tokenizer` may be null
// if the line has a text. Errors: kInvalidArgument, naming the field.
Result<std::string> ParseAnswerLine(const JsonValue& json, bool toolkit_policy,
                                    const Tokenizer* tokenizer);

}  // namespace deepinfer
