// Implementations behind ops/moe/moe.h.
#pragma once

#include "ops/moe/moe.h"

namespace deepinfer::reference {

void RouterSelect(const RouterSelectArgs& args, int64_t row_begin, int64_t row_end);
void Swiglu(const SwigluArgs& args, int64_t row_begin, int64_t row_end);
void MoeCombine(const MoeCombineArgs& args, int64_t row_begin, int64_t row_end);

// sqrt(softplus(z)), linear above 20; log1p keeps very negative logits apart.
float SqrtSoftplus(float z);

}  // namespace deepinfer::reference

namespace deepinfer::cuda {

Status RouterSelect(const RouterSelectArgs& args, Stream& stream);
Status GroupByExpert(const GroupByExpertArgs& args, Stream& stream);
Status RouteExperts(const RouterSelectArgs& select, const GroupByExpertArgs& group, Stream& stream);
Status Route(const RouteArgs& args, Stream& stream);
Status Swiglu(const SwigluArgs& args, Stream& stream);
Status MoeCombine(const MoeCombineArgs& args, Stream& stream);

}  // namespace deepinfer::cuda

namespace deepinfer::cpu {

// Channels [begin, end) of one row; for Swiglu multiples of 32.
void Swiglu(CpuLevel level, const SwigluArgs& args, int64_t row, int64_t begin, int64_t end);
void MoeCombine(CpuLevel level, const MoeCombineArgs& args, int64_t row, int64_t begin,
                int64_t end);

}  // namespace deepinfer::cpu
