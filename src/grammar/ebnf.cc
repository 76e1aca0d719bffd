#include "grammar/ebnf.h"

#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/quoted.h"
#include "base/utf8.h"
#include "grammar/text_cursor.h"

namespace deepinfer {
namespace {

using NodeId = GrammarTree::NodeId;

constexpr int kMaxGroupDepth = 60;

bool IsNameStart(char c) {
  return c == '_' || c == '-' || c == '.' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}
bool IsNameChar(char c) {
  return IsNameStart(c) || (c >= '0' && c <= '9');
}

class Parser : TextCursor {
 public:
  Parser(std::string_view text, GrammarTree* tree) : TextCursor(text), tree_(tree) {}

  Status Parse() {
    rules_.emplace("root", Rule{tree_->AddRule("root"), false, text_.size()});
    SkipSpace();
    if (AtEnd()) return Wrong("there is no rule");
    while (!AtEnd()) DI_RETURN_IF_ERROR(ParseRule());
    const std::string* undefined = nullptr;
    offset_ = text_.size();
    for (const auto& [name, rule] : rules_) {
      if (rule.defined || (undefined != nullptr && rule.first_use >= offset_)) continue;
      undefined = &name;
      offset_ = rule.first_use;
    }
    if (undefined == nullptr) return {};
    return Wrong(fmt::format("the rule {} is not defined", Quoted(*undefined)));
  }

 private:
  struct Rule {
    GrammarTree::RuleId id;
    bool defined;
    size_t first_use;
  };

  std::string Place() const {
    const std::string_view before = text_.substr(0, std::min(offset_, text_.size()));
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const size_t line_start =
        before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
    return fmt::format("line {}, column {}", line, before.size() - line_start + 1);
  }
  tl::unexpected<Error> Wrong(std::string_view what) const {
    return Fail(Code::kInvalidArgument,
                fmt::format("The grammar is wrong at {}: {}.", Place(), what));
  }
  tl::unexpected<Error> Unsupported(std::string_view what) const {
    return Fail(Code::kUnsupported,
                fmt::format("The grammar uses {} at {}, which is not supported.", what, Place()));
  }

  void SkipSpace() {
    while (!AtEnd()) {
      const char c = Peek();
      if (c == '#') {
        while (!AtEnd() && Peek() != '\n' && Peek() != '\r') ++offset_;
      } else if (c == ' ' || c == '\t' || c == '\n' || c == '\r') {
        ++offset_;
      } else {
        return;
      }
    }
  }

  std::string Name() {
    const size_t start = offset_;
    while (IsNameChar(Peek())) ++offset_;
    return std::string(text_.substr(start, offset_ - start));
  }

  // Whether a rule's definition begins here, first on its line.
  bool AtDefinition() {
    const size_t start = offset_;
    if (!IsNameStart(Peek())) return false;
    Name();
    SkipSpace();
    const bool definition = Peek() == ':' && Peek(1) == ':' && Peek(2) == '=';
    offset_ = start;
    return definition;
  }

  Status ParseRule() {
    if (!IsNameStart(Peek())) return Wrong("a rule's name is expected");
    const size_t start = offset_;
    const std::string name = Name();
    if (Peek() == '[') return Unsupported("rule options");
    SkipSpace();
    if (!Take("::=")) return Wrong("\"::=\" is expected after the rule's name");
    const auto [entry, is_new] = rules_.try_emplace(name, Rule{-1, true, start});
    if (is_new) {
      entry->second.id = tree_->AddRule(name);
    } else if (entry->second.defined) {
      offset_ = start;
      return Wrong(fmt::format("the rule {} is defined twice", Quoted(name)));
    }
    entry->second.defined = true;
    const GrammarTree::RuleId id = entry->second.id;
    DI_ASSIGN_OR_RETURN(NodeId body, Choices(0));
    tree_->SetBody(id, body);
    SkipSpace();
    if (Peek() == ')') return Wrong("there is a ')' without its '('");
    return {};
  }

  Result<NodeId> Choices(int depth) {
    std::vector<NodeId> choices;
    while (true) {
      DI_ASSIGN_OR_RETURN(NodeId sequence, SequenceOf(depth));
      choices.push_back(sequence);
      SkipSpace();
      if (!Take("|")) break;
    }
    return tree_->Choice(std::move(choices));
  }

  Result<NodeId> SequenceOf(int depth) {
    std::vector<NodeId> parts;
    while (true) {
      SkipSpace();
      if (tree_->full()) {
        return Fail(Code::kResourceExhausted, "The grammar has too many parts.");
      }
      if (AtEnd() || Peek() == '|' || Peek() == ')' || AtDefinition()) break;
      DI_ASSIGN_OR_RETURN(NodeId element, Element(depth));
      DI_ASSIGN_OR_RETURN(element, Quantified(element));
      parts.push_back(element);
    }
    if (parts.empty()) return Wrong("an element is expected; write \"\" for the empty text");
    return tree_->Sequence(std::move(parts));
  }

  Result<NodeId> Quantified(NodeId element) {
    SkipSpace();
    int64_t min = 0;
    int64_t max = GrammarTree::kUnbounded;
    if (Take("*")) {
    } else if (Take("+")) {
      min = 1;
    } else if (Take("?")) {
      max = 1;
    } else if (Peek() == '{') {
      DI_RETURN_IF_ERROR(Counts(&min, &max));
    } else {
      return element;
    }
    SkipSpace();
    if (Peek() == '*' || Peek() == '+' || Peek() == '?' || Peek() == '{') {
      return Wrong("a quantifier follows a quantifier; put parentheses around the first");
    }
    return tree_->Repeat(element, min, max);
  }

  Status Counts(int64_t* min, int64_t* max) {
    const size_t start = offset_;
    ++offset_;
    SkipSpace();
    const std::optional<int64_t> low = Number();
    if (!low) return Wrong("a number is expected after '{'");
    std::optional<int64_t> high = low;
    SkipSpace();
    if (Take(",")) {
      SkipSpace();
      high = Peek() == '}' ? GrammarTree::kUnbounded : Number();
      if (!high) return Wrong("a number or '}' is expected after ','");
    }
    SkipSpace();
    if (!Take("}")) return Wrong("'}' is expected");
    if (*low > GrammarTree::kMaxRepeat || *high > GrammarTree::kMaxRepeat) {
      offset_ = start;
      return Fail(Code::kResourceExhausted,
                  fmt::format("The grammar repeats something {} times at {}; at most {} are "
                              "allowed.",
                              std::max(*low, *high), Place(), GrammarTree::kMaxRepeat));
    }
    if (*high != GrammarTree::kUnbounded && *high < *low) {
      return Wrong("the lower count is above the upper one");
    }
    *min = *low;
    *max = *high;
    return {};
  }

  Result<NodeId> Element(int depth) {
    const char c = Peek();
    if (c == '(') {
      if (Peek(1) == '=') return Unsupported("look-ahead");
      if (depth >= kMaxGroupDepth) {
        return Fail(
            Code::kResourceExhausted,
            fmt::format("The grammar has groups more than {} levels deep.", kMaxGroupDepth));
      }
      ++offset_;
      SkipSpace();
      if (Take(")")) return tree_->Empty();
      DI_ASSIGN_OR_RETURN(NodeId inner, Choices(depth + 1));
      SkipSpace();
      if (!Take(")")) return Wrong("a '(' is not closed");
      return inner;
    }
    if (c == '"') return StringLiteral();
    if (c == '[') return CharacterClass();
    if (!IsNameStart(c)) return Wrong(fmt::format("{} is not expected here", QuotedChar()));
    const size_t start = offset_;
    const std::string name = Name();
    if (Peek() == '(') {
      static constexpr std::string_view kMacros[] = {"TagDispatch",      "Token", "ExcludeToken",
                                                     "TokenTagDispatch", "Regex", "Substring"};
      if (std::find(std::begin(kMacros), std::end(kMacros), name) != std::end(kMacros)) {
        offset_ = start;
        return Unsupported(fmt::format("the macro {}", name));
      }
    }
    const auto [entry, is_new] = rules_.try_emplace(name, Rule{-1, false, start});
    if (is_new) entry->second.id = tree_->AddRule(name);
    return tree_->Reference(entry->second.id);
  }

  std::string QuotedChar() const {
    size_t end = offset_;
    if (NextCodePoint(text_, &end) < 0) return "a byte that is not UTF-8";
    return Quoted(text_.substr(offset_, end - offset_));
  }

  Result<uint32_t> CodePoint(bool in_class) {
    if (Peek() == '\\') return Escape(in_class);
    if (Peek() == '\n' || Peek() == '\r') return Wrong("a line ends inside; write \\n");
    const int64_t value = NextCodePoint(text_, &offset_);
    if (value < 0) return Wrong("it is not UTF-8");
    return static_cast<uint32_t>(value);
  }

  Result<uint32_t> Escape(bool in_class) {
    if (offset_ + 1 >= text_.size()) return Wrong("it ends in a backslash");
    const char kind = Peek(1);
    offset_ += 2;
    switch (kind) {
      case 'n':
        return '\n';
      case 'r':
        return '\r';
      case 't':
        return '\t';
      case 'b':
        return '\b';
      case 'f':
        return '\f';
      case 'a':
        return '\a';
      case 'v':
        return '\v';
      case '0':
        return 0;
      case 'e':
        return 0x1B;
      case 'x':
        return Hex(1, 8);
      case 'u':
        return Hex(4, 4);
      case 'U':
        return Hex(8, 8);
      default:
        break;
    }
    constexpr std::string_view kPlain = "\"\\/'?";
    constexpr std::string_view kPlainInClass = "^$\\.*+?()[]{}|/-\"'";
    if ((in_class ? kPlainInClass : kPlain).find(kind) == std::string_view::npos) {
      offset_ -= 2;
      return Wrong("the escape is not known");
    }
    return static_cast<uint8_t>(kind);
  }

  Result<uint32_t> Hex(int least, int most) {
    uint32_t value = 0;
    int digits = 0;
    for (; digits < most; ++digits, ++offset_) {
      const char c = Peek();
      if (c >= '0' && c <= '9') {
        value = value * 16 + static_cast<uint32_t>(c - '0');
      } else if ((c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F')) {
        value = value * 16 + static_cast<uint32_t>((c | 0x20) - 'a' + 10);
      } else {
        break;
      }
    }
    if (digits < least) return Wrong("an escape has too few hexadecimal digits");
    if (value > kLastCodePoint || (value >= 0xD800 && value <= 0xDFFF)) {
      return Wrong("an escape names no character");
    }
    return value;
  }

  Result<NodeId> StringLiteral() {
    ++offset_;
    std::string literal;
    while (!Take("\"")) {
      if (AtEnd()) return Wrong("a string is not closed");
      DI_ASSIGN_OR_RETURN(const uint32_t code_point, CodePoint(false));
      AppendUtf8(code_point, &literal);
    }
    return tree_->Literal(literal);
  }

  Result<NodeId> CharacterClass() {
    ++offset_;
    const bool negated = Take("^");
    CodePointSet set;
    while (!Take("]")) {
      if (AtEnd()) return Wrong("a '[' is not closed");
      DI_ASSIGN_OR_RETURN(const uint32_t low, CodePoint(true));
      uint32_t high = low;
      if (Peek() == '-' && Peek(1) != ']' && offset_ + 1 < text_.size()) {
        ++offset_;
        DI_ASSIGN_OR_RETURN(high, CodePoint(true));
        if (high < low) return Wrong("a range's bounds are in the wrong order");
      }
      set.push_back({low, high});
    }
    if (set.empty() && !negated) return Wrong("a character class is empty");
    return tree_->Class(negated ? Complement(set) : std::move(set));
  }

  GrammarTree* tree_;
  std::unordered_map<std::string, Rule> rules_;
};

}  // namespace

Status EbnfToTree(std::string_view text, GrammarTree* tree) {
  return Parser(text, tree).Parse();
}

}  // namespace deepinfer
