// Implementations behind ops/quantize/quantize.h.
#pragma once

#include "ops/quantize/quantize.h"

namespace deepinfer::reference {

void QuantizeFp8(const QuantizeFp8Args& args, int64_t row_begin, int64_t row_end);

}  // namespace deepinfer::reference
