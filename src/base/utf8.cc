#include "base/utf8.h"

#include <simdjson.h>

#include "base/check.h"

namespace deepinfer {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

struct Sequence {
  size_t
      size;    // bytes that belong together: a whole character, or the maximal part of a broken one
  bool valid;  // a whole character
  bool unfinished;  // broken only because the text ends here
};

// Looks at the sequence that starts at `bytes[at]`.
Sequence ReadSequence(std::string_view bytes, size_t at) {
  const auto first = static_cast<uint8_t>(bytes[at]);
  if (first < 0x80) return {1, true, false};
  size_t size = 0;
  // The allowed range of the second byte excludes overlong forms, surrogates and values above
  // U+10FFFF.
  uint8_t low = 0x80;
  uint8_t high = 0xBF;
  if (first >= 0xC2 && first <= 0xDF) {
    size = 2;
  } else if (first >= 0xE0 && first <= 0xEF) {
    size = 3;
    if (first == 0xE0) low = 0xA0;
    if (first == 0xED) high = 0x9F;
  } else if (first >= 0xF0 && first <= 0xF4) {
    size = 4;
    if (first == 0xF0) low = 0x90;
    if (first == 0xF4) high = 0x8F;
  } else {
    return {1, false, false};
  }
  for (size_t i = 1; i < size; ++i) {
    if (at + i == bytes.size()) return {i, false, true};
    const auto byte = static_cast<uint8_t>(bytes[at + i]);
    if (byte < low || byte > high) return {i, false, false};
    low = 0x80;
    high = 0xBF;
  }
  return {size, true, false};
}

}  // namespace

std::optional<size_t> FindInvalidUtf8(std::string_view text) {
  if (simdjson::validate_utf8(text.data(), text.size())) return std::nullopt;
  size_t at = 0;
  while (at < text.size()) {
    const Sequence sequence = ReadSequence(text, at);
    if (!sequence.valid) return at;
    at += sequence.size;
  }
  return std::nullopt;
}

size_t AppendDecidedUtf8(std::string_view bytes, std::string* out) {
  size_t at = 0;
  size_t copied = 0;  // bytes before this are in `out`
  while (at < bytes.size()) {
    const Sequence sequence = ReadSequence(bytes, at);
    if (!sequence.valid) {
      out->append(bytes.substr(copied, at - copied));
      if (sequence.unfinished) return at;
      out->append(kReplacement);
      copied = at + sequence.size;
    }
    at += sequence.size;
  }
  out->append(bytes.substr(copied));
  return bytes.size();
}

void AppendLossyUtf8(std::string_view bytes, std::string* out) {
  if (simdjson::validate_utf8(bytes.data(), bytes.size())) {
    out->append(bytes);
    return;
  }
  if (AppendDecidedUtf8(bytes, out) < bytes.size()) out->append(kReplacement);
}

void AppendUtf8(uint32_t code_point, std::string* out) {
  DI_DCHECK(code_point < 0x110000 && (code_point < 0xD800 || code_point > 0xDFFF));
  const auto put = [out](uint32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | code_point >> 6);
    put(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    put(0xE0 | code_point >> 12);
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  } else {
    put(0xF0 | code_point >> 18);
    put(0x80 | (code_point >> 12 & 0x3F));
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  }
}

}  // namespace deepinfer
