#include "grammar/decimal_ranges.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>
#include <vector>

#include "base/check.h"

namespace deepinfer {
namespace {

using NodeId = GrammarTree::NodeId;

// Digits after the last one that a bound decides about.
constexpr int64_t kFreeFractionDigits = 6;

NodeId Digits(char first, char last, GrammarTree* tree) {
  return tree->Class({{static_cast<uint32_t>(first), static_cast<uint32_t>(last)}});
}

NodeId AnyDigits(int64_t min, int64_t max, GrammarTree* tree) {
  return tree->Repeat(Digits('0', '9', tree), min, max);
}

// Digit strings of one length between two of that length.
NodeId SameLength(std::string_view low, std::string_view high, GrammarTree* tree) {
  if (low.empty()) return tree->Empty();
  const auto rest = static_cast<int64_t>(low.size()) - 1;
  if (low.find_first_not_of('0') == std::string_view::npos &&
      high.find_first_not_of('9') == std::string_view::npos) {
    return AnyDigits(rest + 1, rest + 1, tree);
  }
  if (low[0] == high[0]) {
    return tree->Sequence(
        {Digits(low[0], low[0], tree), SameLength(low.substr(1), high.substr(1), tree)});
  }
  const std::string zeros(low.size() - 1, '0');
  const std::string nines(low.size() - 1, '9');
  std::vector<NodeId> choices;
  char first = low[0];
  char last = high[0];
  if (low.substr(1) != zeros) {
    choices.push_back(
        tree->Sequence({Digits(first, first, tree), SameLength(low.substr(1), nines, tree)}));
    ++first;
  }
  bool upper = false;
  if (high.substr(1) != nines) {
    upper = true;
    --last;
  }
  if (first <= last) {
    choices.push_back(tree->Sequence({Digits(first, last, tree), AnyDigits(rest, rest, tree)}));
  }
  if (upper) {
    choices.push_back(
        tree->Sequence({Digits(high[0], high[0], tree), SameLength(zeros, high.substr(1), tree)}));
  }
  return tree->Choice(std::move(choices));
}

bool Below(std::string_view a, std::string_view b) {
  return a.size() != b.size() ? a.size() < b.size() : a < b;
}

// Whole numbers without sign between two, both without leading zeros.
NodeId Between(std::string_view low, std::string_view high, GrammarTree* tree) {
  std::vector<NodeId> choices;
  for (size_t length = low.size(); length <= high.size(); ++length) {
    std::string from = length == 1 ? "0" : "1" + std::string(length - 1, '0');
    std::string to(length, '9');
    if (length == low.size()) from = low;
    if (length == high.size()) to = high;
    if (Below(to, from)) continue;
    choices.push_back(SameLength(from, to, tree));
  }
  return tree->Choice(std::move(choices));
}

uint64_t Magnitude(int64_t value) {
  return value < 0 ? ~static_cast<uint64_t>(value) + 1 : static_cast<uint64_t>(value);
}

std::string AddOne(std::string digits) {
  for (size_t i = digits.size(); i-- > 0;) {
    if (digits[i] != '9') {
      ++digits[i];
      return digits;
    }
    digits[i] = '0';
  }
  return "1" + digits;
}

std::string SubtractOne(std::string digits) {  // of a number above zero
  for (size_t i = digits.size(); i-- > 0;) {
    if (digits[i] != '0') {
      --digits[i];
      break;
    }
    digits[i] = '9';
  }
  const size_t first = digits.find_first_not_of('0');
  return first == std::string::npos ? "0" : digits.substr(first);
}

bool AllZero(std::string_view digits) {
  return digits.find_first_not_of('0') == std::string_view::npos;
}

// The digits after the point, from where both bounds still decide. A null bound does not.
NodeId FractionDigits(const std::string_view* low, bool low_exclusive, const std::string_view* high,
                      bool high_exclusive, GrammarTree* tree) {
  if (low != nullptr && low->empty() && !low_exclusive) low = nullptr;
  if (low == nullptr && high == nullptr) return AnyDigits(0, kFreeFractionDigits, tree);
  if (high != nullptr && high->empty()) {
    if (high_exclusive || (low != nullptr && !AllZero(*low)) || (low != nullptr && low_exclusive)) {
      return tree->Choice({});
    }
    return tree->Repeat(Digits('0', '0', tree), 0, kFreeFractionDigits);
  }
  if (high == nullptr && low->empty()) {  // above zero: some digit is not
    return tree->Sequence({tree->Repeat(Digits('0', '0', tree), 0, kFreeFractionDigits - 1),
                           Digits('1', '9', tree), AnyDigits(0, 2, tree)});
  }
  const auto head = [](std::string_view digits) { return digits.empty() ? '0' : digits[0]; };
  const auto tail = [](std::string_view digits) {
    return digits.empty() ? digits : digits.substr(1);
  };
  std::vector<NodeId> choices;
  // Stopping here means zero from here on.
  const bool stop_low = low == nullptr || (AllZero(*low) && !low_exclusive);
  const bool stop_high = high == nullptr || !AllZero(*high) || !high_exclusive;
  if (stop_low && stop_high) choices.push_back(tree->Empty());
  const char first = low == nullptr ? '0' : head(*low);
  const char last = high == nullptr ? '9' : head(*high);
  std::string_view low_tail = low == nullptr ? std::string_view() : tail(*low);
  std::string_view high_tail = high == nullptr ? std::string_view() : tail(*high);
  if (low != nullptr && high != nullptr && first == last) {
    choices.push_back(tree->Sequence(
        {Digits(first, first, tree),
         FractionDigits(&low_tail, low_exclusive, &high_tail, high_exclusive, tree)}));
    return tree->Choice(std::move(choices));
  }
  char free_first = first;
  char free_last = last;
  if (low != nullptr) {
    ++free_first;
    if (first <= last) {
      choices.push_back(
          tree->Sequence({Digits(first, first, tree),
                          FractionDigits(&low_tail, low_exclusive, nullptr, false, tree)}));
    }
  }
  if (high != nullptr) {
    --free_last;
    if (first <= last) {
      choices.push_back(
          tree->Sequence({Digits(last, last, tree),
                          FractionDigits(nullptr, false, &high_tail, high_exclusive, tree)}));
    }
  }
  if (free_first <= free_last) {
    choices.push_back(tree->Sequence(
        {Digits(free_first, free_last, tree), AnyDigits(0, kFreeFractionDigits, tree)}));
  }
  return tree->Choice(std::move(choices));
}

// What may follow the digits before the point: nothing, or a point and at least one digit.
NodeId Fraction(const std::string* low, bool low_exclusive, const std::string* high,
                bool high_exclusive, GrammarTree* tree) {
  std::string_view low_view = low == nullptr ? std::string_view() : *low;
  std::string_view high_view = high == nullptr ? std::string_view() : *high;
  const std::string_view* low_digits = low == nullptr ? nullptr : &low_view;
  const std::string_view* high_digits = high == nullptr ? nullptr : &high_view;
  std::vector<NodeId> choices;
  const bool stop_low = low == nullptr || (low->empty() && !low_exclusive);
  const bool stop_high = high == nullptr || !high->empty() || !high_exclusive;
  if (stop_low && stop_high) choices.push_back(tree->Empty());
  // The first digit is there; which it is, FractionDigits says for each.
  std::vector<NodeId> with_point;
  for (char digit = '0'; digit <= '9'; ++digit) {
    const char first = low_view.empty() ? '0' : low_view[0];
    const char last = high_view.empty() ? '0' : high_view[0];
    if (low_digits != nullptr && digit < first) continue;
    if (high_digits != nullptr && digit > last) continue;
    std::string_view low_tail = low_view.empty() ? low_view : low_view.substr(1);
    std::string_view high_tail = high_view.empty() ? high_view : high_view.substr(1);
    const bool low_decides = low_digits != nullptr && digit == first;
    const bool high_decides = high_digits != nullptr && digit == last;
    with_point.push_back(tree->Sequence(
        {Digits(digit, digit, tree),
         FractionDigits(low_decides ? &low_tail : nullptr, low_exclusive,
                        high_decides ? &high_tail : nullptr, high_exclusive, tree)}));
  }
  if (!with_point.empty()) {
    choices.push_back(tree->Sequence({tree->Literal("."), tree->Choice(std::move(with_point))}));
  }
  return tree->Choice(std::move(choices));
}

// Numbers without sign between two; a null bound is none.
NodeId DecimalsBetween(const DecimalBound& low, const DecimalBound* high, GrammarTree* tree) {
  const std::string top(kMaxIntegerDigits, '9');
  std::vector<NodeId> choices;
  const NodeId free = Fraction(nullptr, false, nullptr, false, tree);
  if (high != nullptr && high->whole == low.whole) {
    return tree->Sequence(
        {tree->Literal(low.whole),
         Fraction(&low.fraction, low.exclusive, &high->fraction, high->exclusive, tree)});
  }
  if (high != nullptr && Below(high->whole, low.whole)) return tree->Choice({});
  choices.push_back(tree->Sequence(
      {tree->Literal(low.whole), Fraction(&low.fraction, low.exclusive, nullptr, false, tree)}));
  const std::string from = AddOne(low.whole);
  const std::string to = high == nullptr ? top : SubtractOne(high->whole);
  if (!Below(to, from)) choices.push_back(tree->Sequence({Between(from, to, tree), free}));
  if (high != nullptr) {
    choices.push_back(
        tree->Sequence({tree->Literal(high->whole),
                        Fraction(nullptr, false, &high->fraction, high->exclusive, tree)}));
  }
  return tree->Choice(std::move(choices));
}

}  // namespace

NodeId IntegerRange(std::optional<int64_t> minimum, std::optional<int64_t> maximum,
                    GrammarTree* tree) {
  const std::string top(kMaxIntegerDigits, '9');
  std::vector<NodeId> choices;
  if (!maximum || *maximum >= 0) {
    const std::string low = std::to_string(minimum && *minimum > 0 ? *minimum : 0);
    const std::string high = maximum ? std::to_string(*maximum) : top;
    if (!Below(high, low)) choices.push_back(Between(low, high, tree));
  }
  if (!minimum || *minimum < 0) {
    const std::string low =
        std::to_string(maximum && *maximum < 0 ? Magnitude(*maximum) : uint64_t{1});
    const std::string high = minimum ? std::to_string(Magnitude(*minimum)) : top;
    if (!Below(high, low)) {
      choices.push_back(tree->Sequence({tree->Literal("-"), Between(low, high, tree)}));
    }
  }
  return tree->Choice(std::move(choices));
}

std::optional<DecimalBound> DecimalBoundOf(double value, bool exclusive) {
  if (!std::isfinite(value)) return std::nullopt;
  char text[64];
  const auto [end, error] =
      std::to_chars(std::begin(text), std::end(text), value, std::chars_format::fixed);
  if (error != std::errc()) return std::nullopt;
  std::string_view digits(text, static_cast<size_t>(end - text));
  DecimalBound bound;
  bound.exclusive = exclusive;
  bound.negative = digits.starts_with('-');
  if (bound.negative) digits.remove_prefix(1);
  const size_t point = std::min(digits.find('.'), digits.size());
  bound.whole = digits.substr(0, point);
  if (point < digits.size()) bound.fraction = digits.substr(point + 1);
  while (bound.fraction.ends_with('0')) bound.fraction.pop_back();
  if (bound.whole.size() > kMaxIntegerDigits || bound.fraction.size() > 20) return std::nullopt;
  if (bound.whole == "0" && bound.fraction.empty()) bound.negative = false;
  return bound;
}

NodeId DecimalRange(const std::optional<DecimalBound>& minimum,
                    const std::optional<DecimalBound>& maximum, GrammarTree* tree) {
  std::vector<NodeId> choices;
  const DecimalBound zero;
  if (!maximum || !maximum->negative) {
    const DecimalBound& low = minimum && !minimum->negative ? *minimum : zero;
    choices.push_back(DecimalsBetween(low, maximum ? &*maximum : nullptr, tree));
  }
  if (!minimum || minimum->negative) {
    // Mirrored: what is at least -3 is at most 3 behind its sign. Zero itself has no sign here.
    DecimalBound low;
    low.exclusive = true;
    if (maximum && (maximum->negative || (maximum->whole == "0" && maximum->fraction.empty()))) {
      low = *maximum;
      low.exclusive = maximum->exclusive || !maximum->negative;
    }
    choices.push_back(tree->Sequence(
        {tree->Literal("-"), DecimalsBetween(low, minimum ? &*minimum : nullptr, tree)}));
  }
  return tree->Choice(std::move(choices));
}

NodeId IntegerMultiples(int64_t divisor, GrammarTree* tree) {
  DI_CHECK(divisor >= 2);
  // A rule for each remainder of what was read so far: what may follow.
  std::vector<GrammarTree::RuleId> rules;
  for (int64_t i = 0; i < divisor; ++i) {
    rules.push_back(tree->AddRule(fmt::format("multiple of {}", divisor)));
  }
  const auto follow = [&](int64_t remainder, char first_digit) {
    std::vector<NodeId> choices;
    for (char digit = first_digit; digit <= '9'; ++digit) {
      choices.push_back(
          tree->Sequence({Digits(digit, digit, tree),
                          tree->Reference(rules[(remainder * 10 + (digit - '0')) % divisor])}));
    }
    return choices;
  };
  for (int64_t i = 0; i < divisor; ++i) {
    std::vector<NodeId> choices = follow(i, '0');
    if (i == 0) choices.push_back(tree->Empty());
    tree->SetBody(rules[i], tree->Choice(std::move(choices)));
  }
  const NodeId sign = tree->Repeat(tree->Literal("-"), 0, 1);
  return tree->Choice({tree->Literal("0"), tree->Sequence({sign, tree->Choice(follow(0, '1'))})});
}

}  // namespace deepinfer
