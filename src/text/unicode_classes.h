// Classes of Unicode characters as the pre-tokenizer's patterns see them. The tables are generated
// (tools/generate_unicode_classes.py); the pre-tokenizer is their only user.
#pragma once

#include <cstdint>

namespace deepinfer {

// Bits of a character's class. The general categories are exclusive; the other bits come on top.
using CharClass = uint8_t;
inline constexpr CharClass kLetter = 1;       // \p{L}
inline constexpr CharClass kMark = 2;         // \p{M}
inline constexpr CharClass kNumber = 4;       // \p{N}
inline constexpr CharClass kSymbol = 8;       // \p{P} or \p{S}
inline constexpr CharClass kWhiteSpace = 16;  // \s: Unicode White_Space
inline constexpr CharClass kNewline = 32;     // CR or LF; also kWhiteSpace
inline constexpr CharClass kCjk = 64;  // U+4E00-9FA5, U+3040-309F, U+30A0-30FF, assigned or not
inline constexpr CharClass kAsciiLetter = 128;  // A-Z, a-z; also kLetter

namespace internal {
inline constexpr int kCharsPerClassBlock = 128;
extern const uint8_t kCharClassBlock[];
extern const uint8_t kCharClassInBlock[][kCharsPerClassBlock];
}  // namespace internal

// `code_point` must be below 0x110000.
inline CharClass ClassOf(uint32_t code_point) {
  return internal::kCharClassInBlock[internal::kCharClassBlock[code_point /
                                                               internal::kCharsPerClassBlock]]
                                    [code_point % internal::kCharsPerClassBlock];
}

// The same for code points below 128, which all lie in the first block.
inline CharClass ClassOfAscii(uint8_t byte) {
  return internal::kCharClassInBlock[0][byte];
}

}  // namespace deepinfer
