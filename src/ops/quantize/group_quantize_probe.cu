#include "ops/quantize/group_quantize_probe.h"

#include "ops/quantize/group_quantize.cuh"

namespace deepinfer::testing {
namespace {

using namespace cuda;

// A warp has eight groups, a lane eight values.
template <Numerics kNumerics>
__global__ void QuantizeGroupsKernel(const GroupProbe p, int64_t groups) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * 32 + LaneId()) * 8;
  const int64_t group = first / 32;
  float x[8] = {};
  if (group < groups) {
    for (int i = 0; i < 8; ++i) x[i] = p.x[first + i];
  }
  const float half = LaneGroupMax<2>(Amax(x));
  const float whole = LaneGroupMax<4>(Amax(x));
  if (group >= groups) return;
  const Q8Scale q8(whole);
  const Q4PScale q4p(whole);
  const Q4EScale<kNumerics> q4e(half);
  uint32_t pairs[4];
  for (int i = 0; i < 2; ++i) {
    const uint32_t codes = Q8Codes(x + 4 * i, q8);
    for (int j = 0; j < 4; ++j)
      p.q8_codes[first + 4 * i + j] = static_cast<uint8_t>(codes >> (8 * j));
  }
  for (int i = 0; i < 8; i += 2) {
    const uint32_t pair = Q8Grid(x[i], x[i + 1], q8);
    p.q8_grid[first + i] = static_cast<uint16_t>(pair);
    p.q8_grid[first + i + 1] = static_cast<uint16_t>(pair >> 16);
  }
  const auto put = [&](uint32_t codes, uint8_t* code, uint16_t* grid) {
    for (int i = 0; i < 4; ++i) {
      code[first / 2 + i] = static_cast<uint8_t>(codes >> (8 * i));
      grid[first + 2 * i] = static_cast<uint16_t>(pairs[i]);
      grid[first + 2 * i + 1] = static_cast<uint16_t>(pairs[i] >> 16);
    }
  };
  DecodeE2M1x8(E2M1Codes(x, q4p), q4p.bf16x2(), pairs);
  put(E2M1Codes(x, q4p), p.q4p_codes, p.q4p_grid);
  DecodeE2M1x8(E2M1Codes(x, q4e), q4e.bf16x2(), pairs);
  put(E2M1Codes(x, q4e), p.q4e_codes, p.q4e_grid);
  if (first % 32 == 0) {
    p.q8_scale[group] = static_cast<uint8_t>(q8.byte);
    p.q4p_scale[group] = static_cast<uint8_t>(q4p.byte);
  }
  if (first % 16 == 0) p.q4e_scale[first / 16] = static_cast<uint8_t>(q4e.code);
}

__global__ void DecodeE4M3Kernel(uint16_t* values, float* scales) {
  const uint32_t scale = blockIdx.x;
  const uint32_t code = 4 * threadIdx.x;
  uint32_t pairs[2];
  DecodeAnyE4M3x4(code | ((code + 1) << 8) | ((code + 2) << 16) | ((code + 3) << 24), scale, pairs);
  for (int i = 0; i < 4; ++i)
    values[256 * scale + code + i] = static_cast<uint16_t>(pairs[i / 2] >> (16 * (i % 2)));
  if (code == 0) scales[scale] = E8M0ToFloat(scale);
}

__global__ void DecodeE2M1Kernel(uint16_t* values) {
  const uint32_t scale = threadIdx.x;
  uint32_t pairs[4];
  for (int half = 0; half < 2; ++half) {
    DecodeE2M1x8(half == 0 ? 0x76543210u : 0xfedcba98u, E4M3ToBf16x2(scale), pairs);
    for (int i = 0; i < 8; ++i) {
      values[16 * scale + 8 * half + i] = static_cast<uint16_t>(pairs[i / 2] >> (16 * (i % 2)));
    }
  }
}

}  // namespace

Status QuantizeGroups(const GroupProbe& probe, int64_t groups, Numerics numerics, Stream& stream) {
  const LaunchConfig config{.grid = {static_cast<uint32_t>((groups + 7) / 8)}, .block = 32};
  return Launch("QuantizeGroups",
                numerics == Numerics::kProduction ? QuantizeGroupsKernel<Numerics::kProduction>
                                                  : QuantizeGroupsKernel<Numerics::kReference>,
                config, stream, probe, groups);
}

Status DecodeEveryE4M3(uint16_t* values, float* scales, Stream& stream) {
  return Launch("DecodeEveryE4M3", DecodeE4M3Kernel, {.grid = {256}, .block = 64}, stream, values,
                scales);
}

Status DecodeEveryE2M1(uint16_t* values, Stream& stream) {
  return Launch("DecodeEveryE2M1", DecodeE2M1Kernel, {.grid = {1}, .block = 128}, stream, values);
}

}  // namespace deepinfer::testing
