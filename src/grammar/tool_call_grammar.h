// Calls of tools in the model's own markup, read into a grammar tree: the tags, the names of the
// tools, and between the tags of each parameter a value that the tool's schema allows. The marker
// in the tags is one token, which stands nowhere else; other tokens never spell a tag.
// docs/structured_output.md has the rules. Not for reading what the model wrote
// (text/output_parser.h).
#pragma once

#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "deepinfer/chat.h"
#include "grammar/grammar_tree.h"
#include "grammar/schema_tree.h"

namespace deepinfer {

struct ToolCallGrammarOptions {
  ChatDialect dialect = ChatDialect::kV41;
  bool inside_block = false;  // the text begins behind the block's opening tag, not in it
  int32_t marker_id = 0;
  JsonTextOptions json;
};

// Adds the rules to an empty `tree`. `tools` is a JSON list of
// {"type": "function", "function": {"name", "parameters"}}; other members do not matter. Errors:
// kInvalidArgument, kUnsupported or kResourceExhausted; the message names the tool and the place in
// its schema, the field is the place in the list as a JSON pointer behind "#".
Status ToolCallsToTree(std::string_view tools, const ToolCallGrammarOptions& options,
                       GrammarTree* tree);

}  // namespace deepinfer
