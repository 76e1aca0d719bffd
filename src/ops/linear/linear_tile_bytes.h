// Where things are in a packed tile (linear_pack.h), and reading ahead in it. Included by files of
// different instruction sets, so everything has internal linkage (see linear_kernels.h).
#pragma once

#include <xmmintrin.h>

#include <cstdint>

#include "ops/linear/linear_kernels.h"

namespace deepinfer {
namespace {

// Of a block of 32 columns and 64 outputs.
constexpr int64_t kFp4BlockBytes = kLinearTileOutputs + kLinearBlock * kLinearTileOutputs / 2;
constexpr int64_t kFp8BlockBytes = kLinearBlock * kLinearTileOutputs;
constexpr int64_t kBf16BlockBytes = kLinearBlock * kLinearTileOutputs * 2;

// Where the codes of an FP8 tile start: two scales a block, padded to a multiple of 64.
inline int64_t Fp8HeaderBytes(int64_t blocks) {
  return (2 * blocks + 63) / 64 * 64;
}

// Far enough ahead for DRAM latency at one core's share of the bandwidth.
constexpr int64_t kPrefetchBytes = 2048;

inline void Prefetch(const uint8_t* address) {
  _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T0);
}

}  // namespace
}  // namespace deepinfer
