// Grammar rules in EBNF ("root ::= ..."), read into a grammar tree. The syntax is the grammar
// library's own without its extensions (macros, rule options, look-ahead), which are refused by
// name; docs/structured_output.md describes it.
#pragma once

#include <string_view>

#include "base/error.h"
#include "grammar/grammar_tree.h"

namespace deepinfer {

// The tree's rules are added to an empty `tree`; "root" becomes its first rule. Errors:
// kInvalidArgument or kUnsupported with line and column; kResourceExhausted.
Status EbnfToTree(std::string_view text, GrammarTree* tree);

}  // namespace deepinfer
