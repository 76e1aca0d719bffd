// Constraints for a part of the output. Before a trigger text is free (reasoning), after an end
// token it is free again (ignore_eos); in between an inner constraint decides.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "sample/token_constraint.h"

namespace deepinfer {

struct ConstraintTrigger {
  std::vector<int32_t> trigger_ids;  // not empty
  std::optional<int32_t> bound_id;
};

// The inner constraint begins after exactly this sequence has been drawn, wherever in the output
// that is; text before it is free, end tokens included. With a bound id, the rest of the trigger is
// forced, token by token, once the bound id was drawn: the ids that the output does not end with
// yet. All ids are below `vocab_size`.
std::unique_ptr<TokenConstraint> MakeTriggeredConstraint(ConstraintTrigger trigger,
                                                         std::unique_ptr<TokenConstraint> inner,
                                                         int64_t vocab_size);

// Every token is allowed once the inner constraint has accepted one of `end_ids`; the inner one
// does not see what follows.
std::unique_ptr<TokenConstraint> MakeConstraintUntilEnd(std::vector<int32_t> end_ids,
                                                        std::unique_ptr<TokenConstraint> inner);

}  // namespace deepinfer
