#include "apps/eval_scorer.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/quoted.h"
#include "grammar/grammar.h"

namespace deepinfer {
namespace {

tl::unexpected<Error> WrongExpected(std::string_view scorer, const JsonValue& expected,
                                    std::string_view allowed) {
  return Fail(Code::kInvalidArgument,
              fmt::format("expected is {}; scorer {} takes {}.", Quoted(expected.DumpCompact(), 60),
                          Quoted(scorer), allowed),
              "expected");
}

std::string_view Trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\n\v\f\r";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

// ---- Texts: one of several is enough.

using TextTest = bool (*)(std::string_view answer, std::string_view expected);

class TextScorer : public Scorer {
 public:
  TextScorer(TextTest test, std::vector<std::string> expected)
      : test_(test), expected_(std::move(expected)) {}

  bool Accepts(const ParsedMessage& answer) const override {
    return std::any_of(expected_.begin(), expected_.end(), [&](const std::string& expected) {
      return test_(answer.content, expected);
    });
  }

 private:
  TextTest test_;
  std::vector<std::string> expected_;
};

std::optional<std::vector<std::string>> Texts(const JsonValue& expected) {
  std::vector<std::string> texts;
  const auto add = [&](const JsonValue& value) {
    const std::string* text = value.if_string();
    if (text != nullptr) texts.push_back(*text);
    return text != nullptr;
  };
  if (const JsonValue::Array* list = expected.if_array(); list != nullptr) {
    if (list->empty() || !std::all_of(list->begin(), list->end(), add)) return std::nullopt;
  } else if (!add(expected)) {
    return std::nullopt;
  }
  return texts;
}

// ---- The last number of a text.

bool IsDigit(char c) {
  return c >= '0' && c <= '9';
}

// The end of the digits that begin at `at`, with commas between groups of three.
size_t EndOfDigits(std::string_view text, size_t at) {
  const size_t begin = at;
  while (at < text.size() && IsDigit(text[at])) ++at;
  if (at - begin > 3) return at;
  const auto group = [&](size_t comma) {
    return comma + 3 < text.size() && text[comma] == ',' && IsDigit(text[comma + 1]) &&
           IsDigit(text[comma + 2]) && IsDigit(text[comma + 3]) &&
           (comma + 4 >= text.size() || !IsDigit(text[comma + 4]));
  };
  while (group(at)) at += 4;
  return at;
}

std::optional<double> LastNumber(std::string_view text) {
  std::string last;
  for (size_t at = 0; at < text.size();) {
    if (!IsDigit(text[at])) {
      ++at;
      continue;
    }
    size_t end = EndOfDigits(text, at);
    if (end + 1 < text.size() && text[end] == '.' && IsDigit(text[end + 1])) {
      ++end;
      while (end < text.size() && IsDigit(text[end])) ++end;
    }
    // Behind a digit, a letter or a bracket it is the operator of a difference.
    const auto is_operand_end = [](char c) {
      return IsDigit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == ')' || c == ']';
    };
    const bool negative =
        at > 0 && text[at - 1] == '-' && !(at > 1 && is_operand_end(text[at - 2]));
    last = negative ? "-" : "";
    for (const char c : text.substr(at, end - at)) {
      if (c != ',') last += c;
    }
    at = end;
  }
  double number = 0;
  const auto [end, error] = std::from_chars(last.data(), last.data() + last.size(), number);
  if (last.empty() || error != std::errc()) return std::nullopt;
  return number;
}

class NumberScorer : public Scorer {
 public:
  explicit NumberScorer(double expected) : expected_(expected) {}

  bool Accepts(const ParsedMessage& answer) const override {
    const std::optional<double> number = LastNumber(answer.content);
    // Decimal fractions that were computed in another order differ in their last bits.
    return number.has_value() &&
           std::abs(*number - expected_) <= 1e-9 * std::max(1.0, std::abs(expected_));
  }

 private:
  double expected_;
};

// ---- JSON.

class JsonScorer : public Scorer {
 public:
  explicit JsonScorer(JsonValue expected) : expected_(std::move(expected)) {}

  bool Accepts(const ParsedMessage& answer) const override {
    const Result<JsonValue> value = JsonValue::Parse(Trimmed(answer.content));
    return value.has_value() && SameJson(*value, expected_);
  }

 private:
  JsonValue expected_;
};

struct ExpectedCall {
  std::string name;
  JsonValue arguments;
};

class ToolCallsScorer : public Scorer {
 public:
  explicit ToolCallsScorer(std::vector<ExpectedCall> expected) : expected_(std::move(expected)) {}

  bool Accepts(const ParsedMessage& answer) const override {
    return std::equal(expected_.begin(), expected_.end(), answer.tool_calls.begin(),
                      answer.tool_calls.end(), [](const ExpectedCall& want, const ToolCall& call) {
                        if (call.name != want.name) return false;
                        const Result<JsonValue> arguments = JsonValue::Parse(call.arguments);
                        return arguments.has_value() && SameJson(*arguments, want.arguments);
                      });
  }

 private:
  std::vector<ExpectedCall> expected_;
};

Result<std::vector<ExpectedCall>> ExpectedCalls(const JsonValue& expected) {
  const auto wrong = [&] {
    return WrongExpected("tool_calls", expected,
                         "a list of {\"name\": a string, \"arguments\": an object}");
  };
  std::vector<ExpectedCall> calls;
  if (expected.if_array() == nullptr) return wrong();
  for (const JsonValue& item : *expected.if_array()) {
    const JsonValue* name = item.Find("name");
    const JsonValue* arguments = item.Find("arguments");
    if (name == nullptr || name->if_string() == nullptr || arguments == nullptr ||
        arguments->if_object() == nullptr || item.if_object()->size() != 2) {
      return wrong();
    }
    calls.push_back({*name->if_string(), *arguments});
  }
  return calls;
}

// ---- Patterns, in the dialect of structured outputs. Bytes are the tokens.

constexpr int32_t kEndOfText = 256;

class PatternScorer : public Scorer {
 public:
  static Result<std::unique_ptr<const Scorer>> Create(const std::string& pattern) {
    GrammarVocabulary bytes;
    for (int byte = 0; byte < kEndOfText; ++byte)
      bytes.token_bytes.emplace_back(1, static_cast<char>(byte));
    bytes.token_bytes.emplace_back();
    bytes.end_ids = {kEndOfText};
    bytes.vocab_size = kEndOfText + 1;
    GrammarCompiler compiler(std::move(bytes), {});
    GrammarSpec spec;
    spec.kind = GrammarSpec::Kind::kRegex;
    spec.text = pattern;
    Result<std::shared_ptr<const CompiledGrammar>> compiled = compiler.Compile(spec);
    if (!compiled.has_value()) {
      return Fail(compiled.error().code, fmt::format("expected: {}", compiled.error().message),
                  "expected");
    }
    return std::unique_ptr<const Scorer>(new PatternScorer(std::move(*compiled)));
  }

  bool Accepts(const ParsedMessage& answer) const override {
    const std::unique_ptr<TokenConstraint> matcher = compiled_->NewMatcher(/*max_rollback=*/0);
    for (const char c : answer.content) {
      if (!matcher->Accept(static_cast<unsigned char>(c)).has_value()) return false;
    }
    return matcher->Accept(kEndOfText).has_value();
  }

 private:
  explicit PatternScorer(std::shared_ptr<const CompiledGrammar> compiled)
      : compiled_(std::move(compiled)) {}

  std::shared_ptr<const CompiledGrammar> compiled_;
};

// ---- By name.

struct NamedTextTest {
  std::string_view name;
  TextTest test;
};
constexpr NamedTextTest kTextTests[] = {
    {"exact",
     [](std::string_view answer, std::string_view expected) { return answer == expected; }},
    {"trimmed", [](std::string_view answer,
                   std::string_view expected) { return Trimmed(answer) == Trimmed(expected); }},
    {"prefix", [](std::string_view answer,
                  std::string_view expected) { return answer.starts_with(expected); }},
    {"contains",
     [](std::string_view answer, std::string_view expected) {
       return answer.find(expected) != std::string_view::npos;
     }},
};

}  // namespace

std::string_view ScorerNames() {
  return "exact, trimmed, prefix, contains, regex, number, json and tool_calls";
}

Result<std::unique_ptr<const Scorer>> MakeScorer(std::string_view name, const JsonValue& expected) {
  for (const NamedTextTest& known : kTextTests) {
    if (name != known.name) continue;
    std::optional<std::vector<std::string>> texts = Texts(expected);
    if (!texts.has_value())
      return WrongExpected(name, expected, "a string, or a list of strings of which one is enough");
    return std::make_unique<const TextScorer>(known.test, std::move(*texts));
  }
  if (name == "regex") {
    if (expected.if_string() == nullptr)
      return WrongExpected(name, expected, "a pattern, a string");
    return PatternScorer::Create(*expected.if_string());
  }
  if (name == "number") {
    if (!expected.is_number()) return WrongExpected(name, expected, "a number");
    return std::make_unique<const NumberScorer>(expected.AsDouble());
  }
  if (name == "json") return std::make_unique<const JsonScorer>(expected);
  if (name == "tool_calls") {
    DI_ASSIGN_OR_RETURN(std::vector<ExpectedCall> calls, ExpectedCalls(expected));
    return std::make_unique<const ToolCallsScorer>(std::move(calls));
  }
  return Fail(Code::kInvalidArgument,
              fmt::format("scorer is {}; allowed are {}.", Quoted(name, 60), ScorerNames()),
              "scorer");
}

bool SameJson(const JsonValue& a, const JsonValue& b) {
  if (a.is_number() && b.is_number()) {
    const bool exact = a.if_double() == nullptr && b.if_double() == nullptr;
    return exact ? a == b : a.AsDouble() == b.AsDouble();
  }
  if (a.if_array() != nullptr && b.if_array() != nullptr) {
    return std::equal(a.if_array()->begin(), a.if_array()->end(), b.if_array()->begin(),
                      b.if_array()->end(), SameJson);
  }
  if (a.if_object() == nullptr || b.if_object() == nullptr) return a == b;
  if (a.if_object()->size() != b.if_object()->size()) return false;
  return std::all_of(a.if_object()->begin(), a.if_object()->end(),
                     [&](const JsonValue::Member& member) {
                       const JsonValue* other = b.Find(member.first);
                       return other != nullptr && SameJson(member.second, *other);
                     });
}

}  // namespace deepinfer
