// Structural tags: a JSON description of free text with tagged parts, as for tool calls. Checked
// here, and rewritten so that the schemas, patterns and rules inside are ours: the grammar library
// then only puts the parts together.
#pragma once

#include <string>
#include <string_view>

#include "base/error.h"
#include "grammar/schema_tree.h"

namespace deepinfer {

// The description for the library. Errors: kInvalidArgument, kUnsupported or kResourceExhausted
// with the place as a JSON pointer behind "#".
Result<std::string> RewriteStructuralTag(std::string_view text, const JsonTextOptions& options);

}  // namespace deepinfer
