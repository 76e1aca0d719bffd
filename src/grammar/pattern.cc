#include "grammar/pattern.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "grammar/text_cursor.h"

namespace deepinfer {
namespace {

using NodeId = GrammarTree::NodeId;

const CodePointSet kDigits = {{'0', '9'}};
const CodePointSet kWordCharacters = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
// What every dialect takes for white space; \S leaves out what any of them does.
const CodePointSet kSpaces = {{'\t', '\r'}, {' ', ' '}};
const CodePointSet kAllSpaces = {{'\t', '\r'},     {0x1C, ' '},      {0x85, 0x85},
                                 {0xA0, 0xA0},     {0x1680, 0x1680}, {0x2000, 0x200A},
                                 {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F},
                                 {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
const CodePointSet kLineEnds = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};

constexpr int kMaxGroupDepth = 60;

class Parser : TextCursor {
 public:
  Parser(std::string_view pattern, PatternUse use, GrammarTree* tree)
      : TextCursor(pattern), use_(use), tree_(tree) {}

  Result<NodeId> Parse() {
    std::vector<NodeId> alternatives;
    while (true) {
      DI_ASSIGN_OR_RETURN(NodeId alternative, TopAlternative());
      alternatives.push_back(alternative);
      if (AtEnd()) break;
      if (Peek() == ')') return Wrong("there is a ')' without its '('");
      ++offset_;  // '|'
    }
    return tree_->Choice(std::move(alternatives));
  }

 private:
  tl::unexpected<Error> Wrong(std::string_view what) const {
    return Fail(Code::kInvalidArgument,
                fmt::format("The pattern is wrong at offset {}: {}.", offset_, what));
  }
  tl::unexpected<Error> Unsupported(std::string_view what) const {
    return Fail(
        Code::kUnsupported,
        fmt::format("The pattern uses {} at offset {}, which cannot be enforced.", what, offset_));
  }

  NodeId Characters(const CodePointSet& set) {
    if (use_ == PatternUse::kInsideJsonString) return JsonCharacters(set, tree_);
    if (use_ == PatternUse::kWholeText) return tree_->Class(set);
    return tree_->Class(Intersection(set, Complement({{kMarkerBar, kMarkerBar}})));
  }
  NodeId AnyText() {
    return tree_->Automaton(tree_->Repeat(Characters(Complement({})), 0, GrammarTree::kUnbounded));
  }

  // One alternative outside of all groups, where anchors have their place.
  Result<NodeId> TopAlternative() {
    std::vector<NodeId> parts;
    bool from_begin = use_ == PatternUse::kWholeText;
    bool to_end = use_ == PatternUse::kWholeText;
    if (Take("^")) from_begin = true;
    while (!AtEnd() && Peek() != '|' && Peek() != ')') {
      if (Peek() == '$' && (offset_ + 1 == text_.size() || Peek(1) == '|')) {
        ++offset_;
        to_end = true;
        break;
      }
      DI_RETURN_IF_ERROR(Piece(0, &parts));
    }
    if (!from_begin) parts.insert(parts.begin(), AnyText());
    if (!to_end) parts.push_back(AnyText());
    return tree_->Sequence(std::move(parts));
  }

  Result<NodeId> Group(int depth) {
    std::vector<NodeId> alternatives;
    while (true) {
      std::vector<NodeId> parts;
      while (!AtEnd() && Peek() != '|' && Peek() != ')') DI_RETURN_IF_ERROR(Piece(depth, &parts));
      alternatives.push_back(tree_->Sequence(std::move(parts)));
      if (AtEnd()) return Wrong("a '(' is not closed");
      if (Take(")")) break;
      ++offset_;  // '|'
    }
    return tree_->Choice(std::move(alternatives));
  }

  // An atom with its quantifier.
  Status Piece(int depth, std::vector<NodeId>* parts) {
    if (tree_->full()) {
      return Fail(Code::kResourceExhausted, "The pattern has too many parts.");
    }
    DI_ASSIGN_OR_RETURN(NodeId atom, Atom(depth));
    int64_t min = 1;
    int64_t max = 1;
    bool quantified = true;
    if (Take("*")) {
      min = 0;
      max = GrammarTree::kUnbounded;
    } else if (Take("+")) {
      max = GrammarTree::kUnbounded;
    } else if (Take("?")) {
      min = 0;
    } else if (Peek() == '{') {
      DI_ASSIGN_OR_RETURN(quantified, Counts(&min, &max));
    } else {
      quantified = false;
    }
    if (quantified) {
      Take("?");  // shortest or longest makes no difference to what matches
      if (Peek() == '+') return Unsupported("a possessive quantifier");
      if (Peek() == '*' || Peek() == '?') return Wrong("a quantifier follows a quantifier");
    }
    parts->push_back(tree_->Repeat(atom, min, max));
    return {};
  }

  // "{3}", "{3,}" or "{3,5}"; false when the brace begins none of these and stands for itself.
  Result<bool> Counts(int64_t* min, int64_t* max) {
    const size_t start = offset_;
    ++offset_;
    if (Peek() == ',') return Unsupported("\"{,\", which dialects read differently,");
    const std::optional<int64_t> low = Number();
    std::optional<int64_t> high = low;
    if (low && Take(",")) {
      high = Peek() == '}' ? GrammarTree::kUnbounded : Number();
    }
    if (!low || !high || !Take("}")) {
      offset_ = start;
      return false;
    }
    if (*low > GrammarTree::kMaxRepeat || *high > GrammarTree::kMaxRepeat) {
      return Fail(Code::kResourceExhausted,
                  fmt::format("The pattern repeats something {} times at offset {}; at most {} are "
                              "allowed.",
                              std::max(*low, *high), start, GrammarTree::kMaxRepeat));
    }
    if (*high != GrammarTree::kUnbounded && *high < *low) {
      return Wrong("the lower count is above the upper one");
    }
    *min = *low;
    *max = *high;
    return true;
  }

  Result<NodeId> Atom(int depth) {
    switch (Peek()) {
      case '(': {
        if (depth >= kMaxGroupDepth) {
          return Fail(
              Code::kResourceExhausted,
              fmt::format("The pattern is nested more than {} groups deep.", kMaxGroupDepth));
        }
        ++offset_;
        if (Peek() == '?') DI_RETURN_IF_ERROR(GroupKind());
        return Group(depth + 1);
      }
      case '[': {
        DI_ASSIGN_OR_RETURN(CodePointSet set, BracketedClass());
        return Characters(set);
      }
      case '.':
        ++offset_;
        return Characters(Complement(kLineEnds));
      case '\\': {
        DI_ASSIGN_OR_RETURN(CodePointSet set, Escape(false));
        return Characters(set);
      }
      case '^':
      case '$':
        return Unsupported("an anchor inside the pattern");
      case '*':
      case '+':
      case '?':
        return Wrong("a quantifier has nothing before it");
      case '{': {
        int64_t min = 0;
        int64_t max = 0;
        DI_ASSIGN_OR_RETURN(const bool counts, Counts(&min, &max));
        if (counts) return Wrong("a quantifier has nothing before it");
        break;
      }
      default:
        break;
    }
    DI_ASSIGN_OR_RETURN(const uint32_t code_point, CodePoint());
    return Characters({{code_point, code_point}});
  }

  Status GroupKind() {
    if (Take("?:")) return {};
    if (Take("?P<") || (Peek(2) != '=' && Peek(2) != '!' && Take("?<"))) {
      const size_t start = offset_;
      while (std::isalnum(static_cast<unsigned char>(Peek())) || Peek() == '_') ++offset_;
      if (offset_ == start || !Take(">")) return Wrong("a group's name is not well-formed");
      return {};
    }
    const char kind = Peek(1);
    if (kind == '=' || kind == '!') return Unsupported("look-ahead");
    if (kind == '<') return Unsupported("look-behind");
    return Unsupported("a group of a special kind");
  }

  Result<uint32_t> CodePoint() {
    const int64_t value = NextCodePoint(text_, &offset_);
    if (value < 0) return Wrong("it is not UTF-8");
    return static_cast<uint32_t>(value);
  }

  Result<CodePointSet> BracketedClass() {
    ++offset_;
    const bool negated = Take("^");
    if (Peek() == ']') return Wrong("a character class is empty");
    CodePointSet set;
    while (true) {
      if (AtEnd()) return Wrong("a '[' is not closed");
      if (Take("]")) break;
      if (Peek() == '[' && (Peek(1) == ':' || Peek(1) == '=' || Peek(1) == '.')) {
        return Unsupported("a named character class");
      }
      if ((Peek() == '&' && Peek(1) == '&') || (Peek() == '-' && Peek(1) == '-')) {
        return Unsupported("a set operation in a character class");
      }
      DI_ASSIGN_OR_RETURN(CodePointSet low, ClassMember());
      const bool range = Peek() == '-' && Peek(1) != ']' && offset_ + 1 < text_.size();
      if (!range) {
        set.insert(set.end(), low.begin(), low.end());
        continue;
      }
      ++offset_;
      DI_ASSIGN_OR_RETURN(CodePointSet high, ClassMember());
      const auto single = [](const CodePointSet& s) {
        return s.size() == 1 && s[0].first == s[0].last;
      };
      if (!single(low) || !single(high)) return Wrong("a range needs single characters as bounds");
      if (low[0].first > high[0].first) return Wrong("a range's bounds are in the wrong order");
      set.push_back({low[0].first, high[0].last});
    }
    return negated ? Complement(set) : set;
  }

  Result<CodePointSet> ClassMember() {
    if (Peek() == '\\') return Escape(true);
    DI_ASSIGN_OR_RETURN(const uint32_t code_point, CodePoint());
    return CodePointSet{{code_point, code_point}};
  }

  std::optional<uint32_t> Hex(size_t digits) {
    if (offset_ + digits > text_.size()) return std::nullopt;
    uint32_t value = 0;
    for (size_t i = 0; i < digits; ++i) {
      const char c = text_[offset_ + i];
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) return std::nullopt;
      value = value * 16 + static_cast<uint32_t>(digit);
    }
    offset_ += digits;
    return value;
  }

  Result<CodePointSet> Escape(bool in_class) {
    const char kind = Peek(1);
    if (offset_ + 1 >= text_.size()) return Wrong("it ends in a backslash");
    const auto one = [](uint32_t c) { return CodePointSet{{c, c}}; };
    if (kind >= '1' && kind <= '9') return Unsupported("a back reference");
    switch (kind) {
      case 'k':
        return Unsupported("a back reference");
      case 'p':
      case 'P':
        return Unsupported("a Unicode property");
      case 'b':
        if (!in_class) return Unsupported("a word boundary");
        offset_ += 2;
        return one('\b');
      case 'B':
        return Unsupported("a word boundary");
      case 'A':
      case 'z':
      case 'Z':
      case 'G':
        return Unsupported("an anchor");
      default:
        break;
    }
    offset_ += 2;
    switch (kind) {
      case 'd':
        return kDigits;
      case 'D':
        return Complement(kDigits);
      case 'w':
        return kWordCharacters;
      case 'W':
        return Complement(kWordCharacters);
      case 's':
        return kSpaces;
      case 'S':
        return Complement(kAllSpaces);
      case 'n':
        return one('\n');
      case 'r':
        return one('\r');
      case 't':
        return one('\t');
      case 'f':
        return one('\f');
      case 'v':
        return one('\v');
      case '0':
        if (Peek() >= '0' && Peek() <= '9') return Wrong("an octal escape is not allowed");
        return one(0);
      case 'x': {
        const auto value = Hex(2);
        if (!value) return Wrong("\"\\x\" needs two hexadecimal digits");
        return one(*value);
      }
      case 'c':
        if (!std::isalpha(static_cast<unsigned char>(Peek()))) {
          return Wrong("\"\\c\" needs a letter");
        }
        return one(static_cast<uint32_t>(text_[offset_++]) % 32);
      case 'u':
        return UnicodeEscape();
      default:
        break;
    }
    if (std::isalnum(static_cast<unsigned char>(kind)) || static_cast<uint8_t>(kind) >= 0x80) {
      offset_ -= 2;
      return Unsupported(fmt::format("the escape \"\\{}\"", kind));
    }
    return one(static_cast<uint8_t>(kind));
  }

  Result<CodePointSet> UnicodeEscape() {
    uint32_t value = 0;
    if (Take("{")) {
      bool any = false;
      while (Peek() != '}') {
        const auto digit = Hex(1);
        if (!digit || value > kLastCodePoint) return Wrong("\"\\u{...}\" is not well-formed");
        value = value * 16 + *digit;
        any = true;
      }
      ++offset_;
      if (!any) return Wrong("\"\\u{...}\" is not well-formed");
    } else {
      const auto high = Hex(4);
      if (!high) return Wrong("\"\\u\" needs four hexadecimal digits");
      value = *high;
      if (value >= 0xD800 && value <= 0xDBFF && Take("\\u")) {
        const auto low = Hex(4);
        if (!low || *low < 0xDC00 || *low > 0xDFFF) return Wrong("a surrogate has no partner");
        value = 0x10000 + ((value - 0xD800) << 10) + (*low - 0xDC00);
      }
    }
    if (value > kLastCodePoint || (value >= 0xD800 && value <= 0xDFFF)) {
      return Wrong("the escape names no character");
    }
    return CodePointSet{{value, value}};
  }

  PatternUse use_;
  GrammarTree* tree_;
};

}  // namespace

GrammarTree::NodeId JsonCharacters(const CodePointSet& characters, GrammarTree* tree) {
  const CodePointSet must_escape = {{0, 0x1F}, {'"', '"'}, {'\\', '\\'}};
  std::vector<NodeId> choices;
  CodePointSet raw = Intersection(characters, Complement(must_escape));
  if (!raw.empty()) choices.push_back(tree->Class(std::move(raw)));
  constexpr std::pair<uint32_t, char> kShort[] = {
      {'"', '"'}, {'\\', '\\'}, {'\b', 'b'}, {'\f', 'f'}, {'\n', 'n'}, {'\r', 'r'}, {'\t', 't'}};
  CodePointSet short_names;
  // Last digits of \u000X and \u001X.
  CodePointSet last_digits[2];
  for (const CodePointRange& range : Intersection(characters, must_escape)) {
    for (uint32_t c = range.first; c <= range.last; ++c) {
      const auto* named = std::find_if(std::begin(kShort), std::end(kShort),
                                       [&](const auto& entry) { return entry.first == c; });
      if (named != std::end(kShort)) {
        const auto name = static_cast<uint32_t>(named->second);
        short_names.push_back({name, name});
      } else {
        CodePointSet& digits = last_digits[c / 16];
        const uint32_t digit = c % 16;
        if (digit < 10) {
          digits.push_back({'0' + digit, '0' + digit});
        } else {
          digits.push_back({'a' + digit - 10, 'a' + digit - 10});
          digits.push_back({'A' + digit - 10, 'A' + digit - 10});
        }
      }
    }
  }
  std::vector<NodeId> escapes;
  if (!short_names.empty()) escapes.push_back(tree->Class(std::move(short_names)));
  for (int high = 0; high < 2; ++high) {
    if (last_digits[high].empty()) continue;
    escapes.push_back(tree->Sequence(
        {tree->Literal(high == 0 ? "u000" : "u001"), tree->Class(std::move(last_digits[high]))}));
  }
  if (!escapes.empty()) {
    choices.push_back(tree->Sequence({tree->Literal("\\"), tree->Choice(std::move(escapes))}));
  }
  return tree->Choice(std::move(choices));
}

Result<GrammarTree::NodeId> PatternToTree(std::string_view pattern, PatternUse use,
                                          GrammarTree* tree) {
  return Parser(pattern, use, tree).Parse();
}

}  // namespace deepinfer
