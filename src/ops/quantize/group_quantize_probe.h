// The device quantisers on chosen groups, for their test.
#pragma once

#include <cstdint>

#include "ops/numerics.h"
#include "tensor/stream.h"

namespace deepinfer::testing {

// What the device makes of `groups` groups of 32 floats; arrays are device memory.
struct GroupProbe {
  const float* x = nullptr;      // [groups, 32]
  uint8_t* q8_codes = nullptr;   // [groups, 32]
  uint8_t* q8_scale = nullptr;   // [groups]
  uint16_t* q8_grid = nullptr;   // [groups, 32] bf16
  uint8_t* q4p_codes = nullptr;  // [groups, 16]
  uint8_t* q4p_scale = nullptr;  // [groups]
  uint16_t* q4p_grid = nullptr;  // [groups, 32] bf16
  uint8_t* q4e_codes = nullptr;  // [groups, 16]: two groups of 16
  uint8_t* q4e_scale = nullptr;  // [groups, 2]
  uint16_t* q4e_grid = nullptr;  // [groups, 32] bf16
};
Status QuantizeGroups(const GroupProbe& probe, int64_t groups, Numerics numerics, Stream& stream);

// value[256 * scale + code] = E4M3 code times E8M0 scale as bf16, all of both; scales[256] as fp32.
Status DecodeEveryE4M3(uint16_t* values, float* scales, Stream& stream);
// value[16 * scale + code] = E2M1 code times finite E4M3 scale as bf16.
Status DecodeEveryE2M1(uint16_t* values, Stream& stream);

}  // namespace deepinfer::testing
