// Implementations behind ops/hyper_connection/hyper_connection.h.
#pragma once

#include "ops/hyper_connection/hyper_connection.h"

namespace deepinfer::reference {

void HcMix(const HcMixArgs& args, int64_t row_begin, int64_t row_end);
void HcCollapseNorm(const HcCollapseNormArgs& args, int64_t row_begin, int64_t row_end);
void HcExpand(const HcExpandArgs& args, int64_t row_begin, int64_t row_end);

}  // namespace deepinfer::reference
