// The decimal texts of the numbers in a range, as a grammar tree: for the bounds of JSON numbers.
#pragma once

#include <optional>
#include <string>

#include "grammar/grammar_tree.h"

namespace deepinfer {

// Whole numbers without a sign before 0; at most kMaxIntegerDigits digits on a side without bound.
inline constexpr int kMaxIntegerDigits = 19;
GrammarTree::NodeId IntegerRange(std::optional<int64_t> minimum, std::optional<int64_t> maximum,
                                 GrammarTree* tree);

// A bound of a decimal number: its value is (negative ? -1 : 1) * digits / 10^scale.
struct DecimalBound {
  bool negative = false;
  std::string whole = "0";  // digits, no leading zeros
  std::string fraction;     // digits, no trailing zeros
  bool exclusive = false;
};
// From the shortest text of a finite double; nullopt when that needs an exponent beyond 20 digits.
std::optional<DecimalBound> DecimalBoundOf(double value, bool exclusive);

// Decimal numbers without an exponent, with at most six digits after those that a bound has.
GrammarTree::NodeId DecimalRange(const std::optional<DecimalBound>& minimum,
                                 const std::optional<DecimalBound>& maximum, GrammarTree* tree);

// Whole numbers that are multiples of `divisor`, at least 2.
GrammarTree::NodeId IntegerMultiples(int64_t divisor, GrammarTree* tree);

}  // namespace deepinfer
