// Splits text into the pieces that byte-pair encoding works on: a hand-written scanner for the one
// pre-tokenizer that the published file declares. Its three patterns are applied one after the
// other, each to every piece of the one before:
//
//   1. runs of up to three numbers (\p{N}{1,3});
//   2. runs of Chinese ideographs and kana (U+4E00-9FA5, U+3040-30FF);
//   3. the first that fits of: an ASCII punctuation character with ASCII letters; letters and
//   marks, with at most one
//      other character in front that is not a line break, punctuation or symbol; punctuation and
//      symbols, with at most one space in front and all line breaks behind; white space up to its
//      last line break; white space up to, but not including, the last character in front of
//      something else; white space.
//
// What no pattern matches stays as it is, one piece per gap. No look-back is needed: the end of a
// piece follows from its start, so the scanner has no state.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

namespace deepinfer {

// The patterns above as they are spelt in a tokenizer file, in order.
extern const std::string_view kPreTokenizerPatterns[3];

// The end of the piece that starts at `begin`; begin < end. [begin, end) must be valid UTF-8, and
// `begin` the start of the text or the end of a piece. Takes time proportional to the piece and,
// for white space, nothing beyond it.
const char* EndOfPiece(const char* begin, const char* end);

// All pieces, as views of `text`, which must be valid UTF-8.
std::vector<std::string_view> SplitIntoPieces(std::string_view text);

}  // namespace deepinfer
