#include <immintrin.h>

#include "ops/bench/peaks.h"

namespace deepinfer {

// Twelve independent chains cover two units times a latency of up to five. The instruction is written out because compilers
// add moves to such loops, which then measure half of the peak.
double SpinFp32Avx2(int64_t rounds) {
  __m256 sum[12];
  for (int i = 0; i < 12; ++i) sum[i] = _mm256_setzero_ps();
  const __m256 a = _mm256_setzero_ps();
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) asm volatile("vfmadd231ps %1, %1, %0" : "+x"(sum[i]) : "x"(a));
  }
  return static_cast<double>(rounds) * 12 * 16;
}

}  // namespace deepinfer
