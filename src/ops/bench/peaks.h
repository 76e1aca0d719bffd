// Loops that run one instruction at full rate, each compiled for its instruction set. Each returns
// the floating-point operations that `rounds` rounds perform; at least one round.
#pragma once

#include <cstdint>

namespace deepinfer {

double SpinFp32Avx2(int64_t rounds);
double SpinFp32Avx512(int64_t rounds);
double SpinBf16Dot(int64_t rounds);
double SpinAmxBf16(int64_t rounds);

}  // namespace deepinfer
