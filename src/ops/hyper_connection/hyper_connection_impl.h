// Implementations behind ops/hyper_connection/hyper_connection.h.
#pragma once

#include "ops/hyper_connection/hyper_connection.h"

namespace deepinfer::reference {

void HcMix(const HcMixArgs& args, int64_t row_begin, int64_t row_end);
void HcCollapseNorm(const HcCollapseNormArgs& args, int64_t row_begin, int64_t row_end);
void HcExpand(const HcExpandArgs& args, int64_t row_begin, int64_t row_end);

}  // namespace deepinfer::reference

namespace deepinfer::cuda {

Status HcMix(const HcMixArgs& args, Stream& stream);
Status HcCollapseNorm(const HcCollapseNormArgs& args, Stream& stream);
Status HcExpand(const HcExpandArgs& args, Stream& stream);
Status HcBoundary(const HcBoundaryArgs& args, Stream& stream);

}  // namespace deepinfer::cuda

namespace deepinfer::cpu {

inline constexpr int64_t kHcOutputTile = 3;  // outputs of HcMix are computed in tiles of this many

// For rows [row_begin, row_end) and outputs [output_begin, output_end) (multiples of the tile):
// adds the products of streams and fn to sums[row * 24 + output]; the call with output 0 also adds
// the squares of the streams to squares[row].
void HcMixSums(CpuLevel level, const HcMixArgs& args, int64_t row_begin, int64_t row_end,
               int64_t output_begin, int64_t output_end, double* sums, double* squares);
void HcCollapseNorm(CpuLevel level, const HcCollapseNormArgs& args, int64_t row_begin,
                    int64_t row_end);
// Channels [begin, end) of one row.
void HcExpand(CpuLevel level, const HcExpandArgs& args, int64_t row, int64_t begin, int64_t end);

}  // namespace deepinfer::cpu
