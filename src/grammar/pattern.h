// Regular expressions, read into a grammar tree. The syntax is what ECMA-262 and Python share;
// docs/structured_output.md lists it. What a grammar cannot do (look-around, back references, word
// boundaries) or what dialects disagree on is refused by name.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "grammar/grammar_tree.h"

namespace deepinfer {

enum class PatternUse : uint8_t {
  kWholeText,         // the text is matched from its beginning to its end
  kInsideJsonString,  // of a JSON string's value; found anywhere in it unless anchored
  kInsideValue,       // the same for a value that stands as it is, without kMarkerBar
};

// What the marker of tool calls begins and ends with, "｜". Where it is left out of a text, the
// marker cannot be spelled.
inline constexpr uint32_t kMarkerBar = 0xFF5C;

// Errors: kInvalidArgument or kUnsupported with the offset in the pattern; kResourceExhausted.
Result<GrammarTree::NodeId> PatternToTree(std::string_view pattern, PatternUse use,
                                          GrammarTree* tree);

// A character of a JSON string's value as JSON writes it: the character itself, or its escape where
// JSON demands one.
GrammarTree::NodeId JsonCharacters(const CodePointSet& characters, GrammarTree* tree);

}  // namespace deepinfer
