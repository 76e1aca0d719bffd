// JSON schemas, read into a grammar tree of the JSON texts that they allow. A keyword is enforced,
// or it is an annotation, or the schema is refused with the keyword's place: nothing is ignored in
// silence. docs/structured_output.md has the table, and what texts the tree allows of those that
// are valid (the order of properties, the forms of numbers).
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>

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

// Whether the tags of calls can hold a name as it is.
bool IsMarkupName(std::string_view name);

// How the arguments of a call are written: each member of the object by itself, in tags with its
// name, as text that stands as it is (strings) or as JSON (all else).
struct ParameterMarkup {
  GrammarTree::NodeId begin;       // in front of a name
  GrammarTree::NodeId text_value;  // between the name and a string
  GrammarTree::NodeId json_value;  // between the name and JSON
  GrammarTree::NodeId end;         // behind the value
  GrammarTree::NodeId none;        // instead of any parameter
  GrammarTree::NodeId plain_text;  // a string without limits: PlainTextToTree's
  // By schema: what several trees of parameters have in common. Kept by the caller.
  std::unordered_map<std::string, GrammarTree::RuleId>* shared_rules;
};

// Any text in which the marker of calls is not spelled.
GrammarTree::NodeId PlainTextToTree(GrammarTree* tree);

// The objects of a schema in that notation; adds rules to a tree that may have others. Without
// "additionalProperties" there are no parameters but those that the schema names. Errors as above,
// and kUnsupported for a name that the markup cannot hold.
Result<GrammarTree::NodeId> ParametersToTree(const JsonValue& schema,
                                             const JsonTextOptions& options,
                                             const ParameterMarkup& markup, GrammarTree* tree);

}  // namespace deepinfer
