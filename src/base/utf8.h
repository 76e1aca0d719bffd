// UTF-8: strict validation, and lossy decoding in which every maximal part that can not belong to a
// valid sequence becomes one U+FFFD (the practice the Unicode standard recommends). Overlong forms,
// surrogates and code points above U+10FFFF are invalid.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace deepinfer {

// The offset of the first byte that does not belong to a valid sequence, or nullopt if all of
// `text` is valid.
std::optional<size_t> FindInvalidUtf8(std::string_view text);

// Appends `bytes` to `out` with U+FFFD in place of invalid parts. A tail that is the proper prefix
// of a valid sequence (at most 3 bytes) is left alone; returns the number of bytes consumed, all
// but that tail.
size_t AppendDecidedUtf8(std::string_view bytes, std::string* out);

// Appends all of `bytes` to `out`; an unfinished sequence at the end becomes U+FFFD too.
void AppendLossyUtf8(std::string_view bytes, std::string* out);

// Decodes the character at `p` of text that is known to be valid and stores the position after it
// in `next`.
inline uint32_t DecodeValidUtf8(const char* p, const char** next) {
  const auto byte = [p](int i) { return static_cast<uint32_t>(static_cast<uint8_t>(p[i])); };
  const uint32_t first = byte(0);
  if (first < 0x80) {
    *next = p + 1;
    return first;
  }
  if (first < 0xE0) {
    *next = p + 2;
    return (first & 0x1F) << 6 | (byte(1) & 0x3F);
  }
  if (first < 0xF0) {
    *next = p + 3;
    return (first & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
  }
  *next = p + 4;
  return (first & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F);
}

// Appends the UTF-8 form of `code_point`, which must be a valid scalar value.
void AppendUtf8(uint32_t code_point, std::string* out);

}  // namespace deepinfer
