// Implementations behind ops/rope/rope.h: heads [begin, end) of all rows' heads in order.
#pragma once

#include "ops/rope/rope.h"

namespace deepinfer::cuda {

Status RopeTable(const RopeTableArgs& args, Stream& stream);
Status Rope(const RopeArgs& args, Stream& stream);

}  // namespace deepinfer::cuda

namespace deepinfer::reference {

void Rope(const RopeArgs& args, int64_t begin, int64_t end);

}  // namespace deepinfer::reference

namespace deepinfer::cpu {

void Rope(CpuLevel level, const RopeArgs& args, int64_t begin, int64_t end);

}  // namespace deepinfer::cpu
