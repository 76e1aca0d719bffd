// How an answer is compared with the expected one. Each scorer has a name for task files and is a
// pure function of the answer; docs/evaluation.md describes them.
#pragma once

#include <memory>
#include <string_view>

#include "base/error.h"
#include "base/json_value.h"
#include "deepinfer/chat.h"

namespace deepinfer {

class Scorer {
 public:
  virtual ~Scorer() = default;
  // `answer.content` is the text that is compared; of a prompt without messages it is the
  // completion.
  virtual bool Accepts(const ParsedMessage& answer) const = 0;
};

// "exact, trimmed, ...": what MakeScorer knows.
std::string_view ScorerNames();

// Errors: kInvalidArgument with the field, "scorer" or "expected"; a pattern's errors are those of
// structured outputs.
Result<std::unique_ptr<const Scorer>> MakeScorer(std::string_view name, const JsonValue& expected);

// Whether two JSON values mean the same: members in any order, numbers by value (4 is 4.0).
bool SameJson(const JsonValue& a, const JsonValue& b);

}  // namespace deepinfer
