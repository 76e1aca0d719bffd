// Implementations behind ops/engram/engram.h.
#pragma once

#include "ops/engram/engram.h"

namespace deepinfer::reference {

void EngramApply(const EngramApplyArgs& args, int64_t row_begin, int64_t row_end);

}  // namespace deepinfer::reference
