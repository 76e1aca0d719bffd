#include <immintrin.h>

#include "ops/bench/peaks.h"

namespace deepinfer {

double SpinFp32Avx512(int64_t rounds) {
  __m512 sum[12];
  for (int i = 0; i < 12; ++i) sum[i] = _mm512_setzero_ps();
  const __m512 a = _mm512_setzero_ps();
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) asm volatile("vfmadd231ps %1, %1, %0" : "+v"(sum[i]) : "v"(a));
  }
  return static_cast<double>(rounds) * 12 * 32;
}

}  // namespace deepinfer
