// Which instruction sets the vector code of operations is compiled for. Included first by every
// <op>_cpu.cc, before any Highway header.
//
// Two levels are worth their compile time: AVX2 with FMA and F16C, and AVX-512 (F, BW, DQ, VL).
// Every other machine runs the plain reference. The level is chosen per call from the stream (so
// tests can lower it), not by Highway's own dispatcher, and the library part of Highway is not
// linked.
#pragma once

// The scalar targets stay enabled because Highway insists on a baseline.
#define HWY_DISABLED_TARGETS (~(HWY_AVX2 | HWY_AVX3 | HWY_EMU128 | HWY_SCALAR))

// True inside the passes that contain code; the baseline pass of foreach_target.h stays empty.
#define DI_SIMD_PASS (HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3)

// The function of the best compiled level that `level` allows; `level` is at least kAvx2 (see
// UseReference).
#define DI_SIMD_FUNCTION(level, function) \
  ((level) >= CpuLevel::kAvx512 ? &N_AVX3::function : &N_AVX2::function)
