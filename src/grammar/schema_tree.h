// JSON schemas, read into a grammar tree of the JSON texts that they allow. A keyword is enforced,
// or it is an annotation, or the schema is refused with the keyword's place: nothing is ignored in
// silence. docs/structured_output.md has the table, and what texts the tree allows of those that
// are valid (the order of properties, the forms of numbers).
#pragma once

#include <string_view>

#include "base/error.h"
#include "base/json_value.h"
#include "grammar/grammar_tree.h"

namespace deepinfer {

struct JsonTextOptions {
  int max_whitespace = 2;  // in a row, between the tokens of JSON
};

// Adds rules to an empty `tree`, of which the first is the root. Errors: kInvalidArgument,
// kUnsupported or kResourceExhausted; the field is the place in the schema as a JSON pointer behind
// "#".
Status SchemaToTree(const JsonValue& schema, const JsonTextOptions& options, GrammarTree* tree);
// Any JSON object.
Status JsonObjectToTree(const JsonTextOptions& options, GrammarTree* tree);

}  // namespace deepinfer
