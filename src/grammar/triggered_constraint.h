// A constraint that begins later: before it, text is free (reasoning). With trigger ids, the inner
// constraint begins after this exact sequence has been drawn; with a bound id too, the rest of the
// trigger is forced, token by token, once the bound id was drawn.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "sample/token_constraint.h"

namespace deepinfer {

struct ConstraintTrigger {
  std::vector<int32_t> trigger_ids;   // not empty
  std::optional<int32_t> bound_id;
};

std::unique_ptr<TokenConstraint> MakeTriggeredConstraint(ConstraintTrigger trigger,
                                                         std::unique_ptr<TokenConstraint> inner,
                                                         int64_t vocab_size);

}  // namespace deepinfer
