#include "base/cpu_features.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <ostream>

namespace deepinfer {
namespace {

uint64_t ReadXcr0() {
  uint32_t eax = 0;
  uint32_t edx = 0;
  asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  return (static_cast<uint64_t>(edx) << 32) | eax;
}

bool RequestAmxPermission() {
  constexpr long kArchReqXcompPerm = 0x1023;  // arch_prctl(2)
  constexpr long kXfeatureXtiledata = 18;
  return ::syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
}

CpuFeatures Detect() {
  CpuFeatures features;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return features;
  const bool osxsave = (ecx & (1u << 27)) != 0;
  const bool fma = (ecx & (1u << 12)) != 0;
  const bool f16c = (ecx & (1u << 29)) != 0;
  const uint64_t xcr0 = osxsave ? ReadXcr0() : 0;
  const bool os_ymm = (xcr0 & 0x6) == 0x6;
  const bool os_zmm = (xcr0 & 0xe6) == 0xe6;
  const bool os_tile = (xcr0 & 0x60000) == 0x60000;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0) {
    const unsigned max_subleaf = eax;
    features.avx2 = os_ymm && fma && f16c && (ebx & (1u << 5)) != 0;
    const bool f = (ebx & (1u << 16)) != 0, dq = (ebx & (1u << 17)) != 0;
    const bool bw = (ebx & (1u << 30)) != 0, vl = (ebx & (1u << 31)) != 0;
    features.avx512 = os_zmm && features.avx2 && f && dq && bw && vl;
    features.avx512_vbmi = features.avx512 && (ecx & (1u << 1)) != 0;
    features.avx512_vnni = features.avx512 && (ecx & (1u << 11)) != 0;
    const bool tile = (edx & (1u << 24)) != 0, tile_bf16 = (edx & (1u << 22)) != 0;
    if (max_subleaf >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0) {
      features.avx512_bf16 = features.avx512 && (eax & (1u << 5)) != 0;
    }
    features.amx_bf16 = os_tile && features.avx512_bf16 && features.avx512_vbmi && tile &&
                        tile_bf16 && RequestAmxPermission();
  }
  char brand[49] = {};
  for (unsigned leaf = 0; leaf < 3; ++leaf) {
    unsigned regs[4] = {};
    if (__get_cpuid(0x80000002u + leaf, &regs[0], &regs[1], &regs[2], &regs[3]) == 0) break;
    std::memcpy(brand + 16 * leaf, regs, 16);
  }
  features.brand = brand;
  return features;
}

}  // namespace

std::string_view CpuLevelName(CpuLevel level) {
  switch (level) {
    case CpuLevel::kScalar:
      return "scalar";
    case CpuLevel::kAvx2:
      return "avx2";
    case CpuLevel::kAvx512:
      return "avx512";
    case CpuLevel::kAvx512Bf16:
      return "avx512_bf16";
    case CpuLevel::kAmx:
      return "amx";
  }
  return "unknown";
}

std::ostream& operator<<(std::ostream& out, CpuLevel level) {
  return out << CpuLevelName(level);
}

CpuLevel CpuFeatures::best_level() const {
  if (amx_bf16) return CpuLevel::kAmx;
  if (avx512_bf16 && avx512_vnni) return CpuLevel::kAvx512Bf16;
  if (avx512) return CpuLevel::kAvx512;
  if (avx2) return CpuLevel::kAvx2;
  return CpuLevel::kScalar;
}

const CpuFeatures& HostCpuFeatures() {
  static const CpuFeatures features = Detect();
  return features;
}

}  // namespace deepinfer
