#include "ops/bench/peaks.h"

namespace deepinfer {

// Fourteen independent chains cover two units times a latency of up to seven.
// The loop is written out: compilers keep such accumulators in memory or add moves, and then it
// measures half of the peak.
double SpinBf16Dot(int64_t rounds) {
  int64_t left = rounds;
  asm volatile(
      "vxorps %%xmm0, %%xmm0, %%xmm0\n"
      "vxorps %%xmm1, %%xmm1, %%xmm1\n"
      "vxorps %%xmm2, %%xmm2, %%xmm2\n"
      "vxorps %%xmm3, %%xmm3, %%xmm3\n"
      "vxorps %%xmm4, %%xmm4, %%xmm4\n"
      "vxorps %%xmm5, %%xmm5, %%xmm5\n"
      "vxorps %%xmm6, %%xmm6, %%xmm6\n"
      "vxorps %%xmm7, %%xmm7, %%xmm7\n"
      "vxorps %%xmm8, %%xmm8, %%xmm8\n"
      "vxorps %%xmm9, %%xmm9, %%xmm9\n"
      "vxorps %%xmm10, %%xmm10, %%xmm10\n"
      "vxorps %%xmm11, %%xmm11, %%xmm11\n"
      "vxorps %%xmm12, %%xmm12, %%xmm12\n"
      "vxorps %%xmm13, %%xmm13, %%xmm13\n"
      "vxorps %%xmm15, %%xmm15, %%xmm15\n"
      "1:\n"
      "vdpbf16ps %%zmm15, %%zmm15, %%zmm0\n"
      "vdpbf16ps %%zmm15, %%zmm15, %%zmm1\n"
      "vdpbf16ps %%zmm15, %%zmm15, %%zmm2\n"
      "vdpbf16ps %%zmm15, %%zmm15, %%zmm3\n"
      "vdpbf16ps %%zmm15, %%zmm15, %%zmm4\n"
      "vdpbf16ps %%zmm15, %%zmm15, %%zmm5\n"
      "vdpbf16ps %%zmm15, %%zmm15, %%zmm6\n"
      "vdpbf16ps %%zmm15, %%zmm15, %%zmm7\n"
      "vdpbf16ps %%zmm15, %%zmm15, %%zmm8\n"
      "vdpbf16ps %%zmm15, %%zmm15, %%zmm9\n"
      "vdpbf16ps %%zmm15, %%zmm15, %%zmm10\n"
      "vdpbf16ps %%zmm15, %%zmm15, %%zmm11\n"
      "vdpbf16ps %%zmm15, %%zmm15, %%zmm12\n"
      "vdpbf16ps %%zmm15, %%zmm15, %%zmm13\n"
      "dec %0\n"
      "jnz 1b\n"
      "vzeroupper\n"
      : "+r"(left)
      :
      : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
        "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
  return static_cast<double>(rounds) * 14 * 64;
}

}  // namespace deepinfer
