// What an output must look like. Part of the public interface; docs/structured_output.md has the
// tables of supported schema keywords and pattern syntax.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "deepinfer/chat.h"

namespace deepinfer {

struct StructuredOutput {
  enum class Kind : uint8_t {
    kJsonSchema,     // `schema`: a JSON schema
    kJsonObject,     // any JSON object
    kRegex,          // `schema`: a pattern that the whole output matches
    kEbnf,           // `schema`: rules, beginning with "root"
    kChoice,         // one of `choices`
    kStructuralTag,  // `schema`: a JSON description of tags and what they enclose
    // `schema`: a JSON list of function tools; the output is calls of them in the model's markup.
    // What a conversation with forced or strict tools asks for.
    kToolCalls,
  };
  Kind kind = Kind::kJsonSchema;
  std::string schema;                // at most 1 MiB
  std::vector<std::string> choices;  // of kChoice: at least one, at most 4,096
  // White space characters in a row between JSON tokens: 0 ... 64.
  int max_whitespace = 2;
  // Of kToolCalls: the template that the calls are written in, and whether the output begins inside
  // of the block of calls, because the prompt has opened it; else it begins behind the first marker
  // token, which the model draws by itself.
  ChatDialect dialect = ChatDialect::kV41;
  bool inside_block = false;
  // The constraint begins after this sequence of tokens has been generated; empty: at once, in a
  // conversation whose prompt ends inside of reasoning after that.
  std::vector<int64_t> trigger_token_ids;
  // After this token the rest of the trigger is forced; needs a trigger.
  std::optional<int64_t> bound_token_id;
};

}  // namespace deepinfer
