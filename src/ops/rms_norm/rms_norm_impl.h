// Implementations behind ops/rms_norm/rms_norm.h.
#pragma once

#include "ops/rms_norm/rms_norm.h"
#include "tensor/float_formats.h"

namespace deepinfer::cuda {

Status RmsNorm(const RmsNormArgs& args, Stream& stream);

}  // namespace deepinfer::cuda

namespace deepinfer::reference {

void RmsNorm(const RmsNormArgs& args, int64_t row_begin, int64_t row_end);

// One row held in fp32: y = bf16(weight * (x * rsqrt(mean(x^2) + eps))) as fp32 values.
void RmsNormRow(const float* x, const Bf16* weight, int64_t channels, float eps, float* y);

}  // namespace deepinfer::reference

namespace deepinfer::cpu {

void RmsNorm(CpuLevel level, const RmsNormArgs& args, int64_t row_begin, int64_t row_end);

}  // namespace deepinfer::cpu
