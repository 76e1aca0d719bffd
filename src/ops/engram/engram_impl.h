// Implementations behind ops/engram/engram.h.
#pragma once

#include "ops/engram/engram.h"

namespace deepinfer::cuda {

Status EngramHash(const EngramHashArgs& args, Stream& stream);
Status EngramGather(const EngramGatherArgs& args, Stream& stream);
Status EngramApply(const EngramApplyArgs& args, Stream& stream);

}  // namespace deepinfer::cuda

namespace deepinfer::reference {

// Look-ups [begin, end) of all rows' look-ups in order.
void EngramGather(const EngramGatherArgs& args, int64_t begin, int64_t end);
void EngramApply(const EngramApplyArgs& args, int64_t row_begin, int64_t row_end);

}  // namespace deepinfer::reference

namespace deepinfer::cpu {

void EngramGather(CpuLevel level, const EngramGatherArgs& args, int64_t begin, int64_t end);
// One residual stream of one row; streams are independent.
void EngramApply(CpuLevel level, const EngramApplyArgs& args, int64_t row, int64_t residual_stream);

}  // namespace deepinfer::cpu
