// What this CPU can do, read once from CPUID and the operating system. Kernels pick an
// implementation from this at run time; nothing is compiled with -march=native.
#pragma once

#include <iosfwd>
#include <string>
#include <string_view>

namespace deepinfer {

// Instruction-set levels that kernels are written for, in ascending order. A level implies the ones
// below it.
enum class CpuLevel {
  kScalar,      // any x86-64 (and the reference)
  kAvx2,        // AVX2 + FMA + F16C
  kAvx512,      // AVX-512 F, BW, DQ, VL
  kAvx512Bf16,  // + AVX512-BF16 and VNNI
  kAmx,         // + AMX-TILE, AMX-BF16, VBMI, with the operating system's permission granted
};

std::string_view CpuLevelName(CpuLevel level);
// Lets test names and streams show the level by name.
std::ostream& operator<<(std::ostream& out, CpuLevel level);

struct CpuFeatures {
  bool avx2 = false;
  bool avx512 = false;  // F, BW, DQ, VL
  bool avx512_vbmi = false;
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  bool amx_bf16 = false;  // usable: permission was requested and granted
  std::string brand;      // for reports

  CpuLevel best_level() const;
};

// Detects on the first call (which also asks the kernel for AMX state, so it must run before
// threads that use AMX start).
const CpuFeatures& HostCpuFeatures();

}  // namespace deepinfer
