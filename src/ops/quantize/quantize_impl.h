// Implementations behind ops/quantize/quantize.h.
#pragma once

#include "ops/quantize/quantize.h"

namespace deepinfer::cuda {

Status QuantizeFp8(const QuantizeFp8Args& args, Stream& stream);

}  // namespace deepinfer::cuda

namespace deepinfer::reference {

void QuantizeFp8(const QuantizeFp8Args& args, int64_t row_begin, int64_t row_end);

}  // namespace deepinfer::reference

namespace deepinfer::cpu {

// Channels [begin, end) of one row; both multiples of 32.
void QuantizeFp8(CpuLevel level, const QuantizeFp8Args& args, int64_t row, int64_t begin,
                 int64_t end);

}  // namespace deepinfer::cpu
