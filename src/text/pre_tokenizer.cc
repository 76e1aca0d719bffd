#include "text/pre_tokenizer.h"

#include "base/utf8.h"
#include "text/unicode_classes.h"

namespace deepinfer {

const std::string_view kPreTokenizerPatterns[3] = {
    "\\p{N}{1,3}",
    "[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+",
    R"re([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^)re"
    "\r\n"
    R"re(\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[)re"
    "\r\n"
    R"re(]*|\s*[)re"
    "\r\n"
    R"re(]+|\s+(?!\S)|\s+)re",
};

namespace {

constexpr CharClass kWord = kLetter | kMark;
// Two characters can share a match of the third pattern only if both or neither are CJK and neither
// is a number, because the first two patterns cut the text there.
constexpr CharClass kCuts = kNumber | kCjk;

inline CharClass ReadClass(const char* p, const char** next) {
  const auto byte = static_cast<uint8_t>(*p);
  if (byte < 0x80) {
    *next = p + 1;
    return ClassOfAscii(byte);
  }
  return ClassOf(DecodeValidUtf8(p, next));
}

// Skips characters that have a bit of `wanted` and agree with `segment` about kCjk.
inline const char* SkipClass(const char* p, const char* end, CharClass wanted, CharClass segment) {
  while (p < end) {
    const char* next;
    const CharClass c = ReadClass(p, &next);
    if ((c & wanted) == 0 || ((c ^ segment) & kCjk) != 0) break;
    p = next;
  }
  return p;
}

// True if the third pattern can go on from a character of `segment` to one of class `next`.
inline bool SameSegment(CharClass segment, CharClass next) {
  return ((segment ^ next) & kCuts) == 0;
}

// White space from `begin`; `p` is the end of its first character. It always lies outside of CJK
// and numbers.
const char* EndOfWhiteSpace(const char* begin, const char* p, const char* end) {
  const char* last = begin;  // the last character of the run
  const char* after_newline = nullptr;
  if (*begin == '\n' || *begin == '\r') after_newline = p;
  while (p < end) {
    const char* next;
    const CharClass c = ReadClass(p, &next);
    if ((c & kWhiteSpace) == 0) {
      // At a cut the run ends like at the end of the text: nothing else follows within the segment.
      const bool keep_last = (c & kCuts) != 0;
      if (after_newline != nullptr) return after_newline;
      return keep_last || last == begin ? p : last;
    }
    if ((c & kNewline) != 0) after_newline = next;
    last = p;
    p = next;
  }
  return after_newline != nullptr ? after_newline : p;
}

}  // namespace

const char* EndOfPiece(const char* begin, const char* end) {
  const char* p;
  const CharClass first = ReadClass(begin, &p);
  if ((first & kWord) != 0) return SkipClass(p, end, kWord, first);
  if ((first & kNumber) != 0) {
    for (int i = 1; i < 3 && p < end; ++i) {
      const char* next;
      if ((ReadClass(p, &next) & kNumber) == 0) break;
      p = next;
    }
    return p;
  }
  const bool at_end = p == end;
  const char* after_second = end;
  const CharClass second = at_end ? CharClass{0} : ReadClass(p, &after_second);
  const bool goes_on = !at_end && SameSegment(first, second);

  if ((first & kSymbol) != 0) {
    if (static_cast<uint8_t>(*begin) < 0x80 && (second & kAsciiLetter) != 0) {
      return SkipClass(after_second, end, kAsciiLetter, first);
    }
    p = SkipClass(p, end, kSymbol, first);
    return (first & kCjk) != 0 ? p : SkipClass(p, end, kNewline, first);
  }
  if ((first & kNewline) == 0 && goes_on && (second & kWord) != 0) {
    return SkipClass(after_second, end, kWord, first);
  }
  if (*begin == ' ' && goes_on && (second & kSymbol) != 0) {
    p = SkipClass(after_second, end, kSymbol, first);
    return SkipClass(p, end, kNewline, first);
  }
  if ((first & kWhiteSpace) != 0) return EndOfWhiteSpace(begin, p, end);

  // Nothing matches here (control characters, unassigned code points, ...). The piece is the gap up
  // to the next match: a character of another class, or the last of the gap if letters follow it.
  while (p < end) {
    const char* next;
    const CharClass c = ReadClass(p, &next);
    if (!SameSegment(first, c) || (c & (kWord | kSymbol | kWhiteSpace)) != 0) break;
    if (next < end) {
      const char* unused;
      const CharClass following = ReadClass(next, &unused);
      if (SameSegment(first, following) && (following & kWord) != 0) break;
    }
    p = next;
  }
  return p;
}

std::vector<std::string_view> SplitIntoPieces(std::string_view text) {
  std::vector<std::string_view> pieces;
  const char* p = text.data();
  const char* end = p + text.size();
  while (p < end) {
    const char* next = EndOfPiece(p, end);
    pieces.emplace_back(p, static_cast<size_t>(next - p));
    p = next;
  }
  return pieces;
}

}  // namespace deepinfer
