#include <immintrin.h>

#include "ops/bench/peaks.h"

namespace deepinfer {

double SpinBf16Dot(int64_t rounds) {
  __m512 sum[16];
  for (int i = 0; i < 16; ++i) sum[i] = _mm512_setzero_ps();
  const __m512 a = _mm512_setzero_ps();
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) asm volatile("vdpbf16ps %1, %1, %0" : "+v"(sum[i]) : "v"(a));
  }
  return static_cast<double>(rounds) * 16 * 64;
}

}  // namespace deepinfer
