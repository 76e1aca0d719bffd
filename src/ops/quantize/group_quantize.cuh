// The group quantisers of ops/quantize/group_quantize.h on the device: the same bits for the same
// fp32 input, NaN, infinities and subnormals included. All functions are of one thread; the only
// thing lanes share is a group's largest magnitude (LaneGroupMax).
//
// A group is quantised in three steps: Amax of the values a lane holds, LaneGroupMax over the lanes
// that hold the rest, then Q8Scale / Q4PScale / Q4EScale, which every lane computes for itself, and
// codes or grid values of the lane's own channels. Example, 8 channels per lane and so 4 lanes per
// group of 32:
//
//   const Q8Scale scale(LaneGroupMax<4>(Amax(x)));
//   const uint2 codes = {Q8Codes(x, scale), Q8Codes(x + 4, scale)};    // into a record, or
//   const uint32_t pair = Q8Grid(x[0], x[1], scale);                   // q * s as two bf16
//
// Decoding multiplies bf16 pairs: the bits of a code, put into the right places of a bf16 number,
// are the code's value times a power of two, subnormal codes included, and so are exact after one
// multiplication; a second one by the scale rounds only where bf16 itself cannot hold the product.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "device.cuh"
#include "ops/numerics.h"

namespace deepinfer::cuda {

// ---- Scales
// --------------------------------------------------------------------------------------

// 2^(byte - 127): 0 is the subnormal 2^-127, 255 is NaN.
__device__ inline float E8M0ToFloat(uint32_t byte) {
  const uint32_t bits = byte == 255u ? 0x7fc00000u : byte << 23;
  return std::bit_cast<float>(byte == 0u ? 0x00400000u : bits);
}

// The same as bf16 in both halves of a word.
__device__ inline uint32_t E8M0ToBf16x2(uint32_t byte) {
  const uint32_t bits = byte == 255u ? 0x7fc07fc0u : (byte << 7) | (byte << 23);
  return byte == 0u ? 0x00400040u : bits;
}

// ---- Codes to bf16
// -------------------------------------------------------------------------------

// Codes are in the order of the elements, element 0 in the lowest bits; so are the bf16 pairs.
inline constexpr uint32_t kBf16x2TwoTo120 = 0x7b807b80u;
inline constexpr uint32_t kBf16x2TwoTo126 = 0x7e807e80u;
inline constexpr uint32_t kBf16Nan = 0x7fc0u;

// Two E4M3 codes (bits 0 ... 15) as bf16. NaN codes, which no encoder writes for finite input,
// become +-480; E4M3x4HasNan finds them.
__device__ inline uint32_t E4M3x2ToBf16x2(uint32_t codes) {
  const uint32_t spread = ((codes & 0xffu) << 8) | ((codes & 0xff00u) << 16);
  return MulBf16x2((spread & 0x80008000u) | ((spread >> 4) & 0x07f007f0u), kBf16x2TwoTo120);
}

// Whether one of four codes is NaN (0x7f or 0xff).
__device__ inline bool E4M3x4HasNan(uint32_t codes) {
  return (((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) != 0;
}

// Four E4M3 codes times a scale (the same bf16 in both halves), without NaN codes as above.
__device__ inline void DecodeE4M3x4(uint32_t codes, uint32_t scale_bf16x2, uint32_t* out) {
  out[0] = MulBf16x2(E4M3x2ToBf16x2(codes), scale_bf16x2);
  out[1] = MulBf16x2(E4M3x2ToBf16x2(codes >> 16), scale_bf16x2);
}

// The same where codes or scale may be NaN: the canonical NaN then, as on the CPU.
__device__ inline void DecodeAnyE4M3x4(uint32_t codes, uint32_t scale_byte, uint32_t* out) {
  if (scale_byte == 255u) {
    out[0] = out[1] = kBf16Nan | (kBf16Nan << 16);
    return;
  }
  DecodeE4M3x4(codes, E8M0ToBf16x2(scale_byte), out);
  if (!E4M3x4HasNan(codes)) return;
  for (int i = 0; i < 4; ++i) {
    if (((codes >> (8 * i)) & 0x7fu) != 0x7fu) continue;
    const int shift = 16 * (i % 2);
    out[i / 2] = (out[i / 2] & ~(0xffffu << shift)) | (kBf16Nan << shift);
  }
}

// Two E2M1 codes (bits 0 ... 7) as bf16.
__device__ inline uint32_t E2M1x2ToBf16x2(uint32_t codes) {
  const uint32_t spread = (codes & 0xffu) * 0x1001u;  // the second code at bits 16 ... 19
  return MulBf16x2(((spread << 12) & 0x80008000u) | ((spread << 6) & 0x01c001c0u), kBf16x2TwoTo126);
}

// Eight E2M1 codes times a scale (the same bf16 in both halves).
__device__ inline void DecodeE2M1x8(uint32_t codes, uint32_t scale_bf16x2, uint32_t* out) {
  for (int i = 0; i < 4; ++i) out[i] = MulBf16x2(E2M1x2ToBf16x2(codes >> (8 * i)), scale_bf16x2);
}

// A finite E4M3 scale of Q4E as bf16 in both halves.
__device__ inline uint32_t E4M3ToBf16x2(uint32_t code) {
  return E4M3x2ToBf16x2((code & 0xffu) * 0x101u);
}

// ---- A group's largest magnitude
// -----------------------------------------------------------------

// NaN does not count, as on the CPU.
template <int kCount>
__device__ inline float Amax(const float (&x)[kCount]) {
  float amax = 0.0f;
  for (int i = 0; i < kCount; ++i) amax = fmaxf(amax, fabsf(x[i]));
  return amax;
}

// The maximum over aligned runs of kLanes lanes, for all of them. Warp.
template <int kLanes>
__device__ inline float LaneGroupMax(float x) {
  for (int mask = 1; mask < kLanes; mask *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

// ---- Q8: groups of 32, E4M3 codes, power-of-two scale
// --------------------------------------------

struct Q8Scale {
  __device__ explicit Q8Scale(float amax) {
    const float t = fmaxf(amax, 1e-4f) * std::bit_cast<float>(0x3B124925u);  // * fp32(1/448)
    const uint32_t up = (std::bit_cast<uint32_t>(t) + 0x7fffffu) >> 23;
    byte = up < 254u ? up : 254u;
    inverse = E8M0ToFloat(254u - byte);
  }
  uint32_t byte;  // E8M0, 105 ... 254
  float inverse;  // 2^(127 - byte)
  __device__ uint32_t bf16x2() const {
    return (byte << 7) | (byte << 23);
  }
};

// Codes of four consecutive channels.
__device__ inline uint32_t Q8Codes(const float* x, const Q8Scale& scale) {
  const uint32_t low = FloatsToE4M3x2(x[0] * scale.inverse, x[1] * scale.inverse);
  const uint32_t high = FloatsToE4M3x2(x[2] * scale.inverse, x[3] * scale.inverse);
  // The conversion drops the sign of NaN only.
  uint32_t signs = 0;
  for (int i = 0; i < 4; ++i) signs |= ((std::bit_cast<uint32_t>(x[i]) >> 24) & 0x80u) << (8 * i);
  return low | (high << 16) | signs;
}

// Two channels on the grid, q * s as bf16.
__device__ inline uint32_t Q8Grid(float x0, float x1, const Q8Scale& scale) {
  const uint32_t codes = FloatsToE4M3x2(x0 * scale.inverse, x1 * scale.inverse);
  uint32_t pair = MulBf16x2(E4M3x2ToBf16x2(codes), scale.bf16x2());
  if (x0 != x0) pair = (pair & 0xffff0000u) | kBf16Nan;
  if (x1 != x1) pair = (pair & 0xffffu) | (kBf16Nan << 16);
  return pair;
}

// ---- Q4P and Q4E: E2M1 codes
// ---------------------------------------------------------------------

// The code of `scaled`, whose sign is that of x (NaN keeps x's); beyond 6 it saturates, NaN to 6.
__device__ inline uint32_t E2M1Code(float scaled, float x) {
  const float a = fminf(fabsf(scaled), 6.0f);
  const uint32_t bits = std::bit_cast<uint32_t>(a);
  // From 1 on: one bit of mantissa, ties to even.
  const uint32_t normal = ((bits + 0x1fffffu + ((bits >> 22) & 1u)) >> 22) - 252u;
  // Below: multiples of 1/2, which adding 2^22 leaves in the mantissa.
  const uint32_t small = std::bit_cast<uint32_t>(a + 0x1p22f) - std::bit_cast<uint32_t>(0x1p22f);
  return (a < 1.0f ? small : normal) | ((std::bit_cast<uint32_t>(x) >> 28) & 8u);
}

struct Q4PScale {
  __device__ explicit Q4PScale(float amax) {
    const float t = fmaxf(amax, 6.0f * 0x1p-126f) * std::bit_cast<float>(0x3E2AAAABu);
    const uint32_t up = (std::bit_cast<uint32_t>(t) + 0x7fffffu) >> 23;
    byte = up < 1u ? 1u : (up < 254u ? up : 254u);
    inverse = E8M0ToFloat(254u - byte);
  }
  uint32_t byte;  // E8M0, 1 ... 254
  float inverse;  // multiplying by it is dividing by the scale, a power of two
  __device__ uint32_t bf16x2() const {
    return (byte << 7) | (byte << 23);
  }
  __device__ uint32_t ScaleByte() const {
    return byte;
  }
  __device__ uint32_t Code(float x) const {
    return E2M1Code(x * inverse, x);
  }
};

template <Numerics kNumerics>
struct Q4EScale {
  __device__ explicit Q4EScale(float group_amax) {
    const float amax = fmaxf(group_amax, 6.0f * 0x1p-9f);
    const float t =
        kNumerics == Numerics::kProduction ? amax * std::bit_cast<float>(0x3E2AAAABu) : amax / 6.0f;
    code = FloatsToE4M3x2(t, 0.0f) & 0x7fu;
    scale = std::bit_cast<float>(code << 20) * 0x1p120f;
    inverse = 1.0f / scale;
  }
  uint32_t code;  // E4M3, 0x01 ... 0x7e
  float scale;
  float inverse;
  __device__ uint32_t bf16x2() const {
    return E4M3ToBf16x2(code);
  }
  __device__ uint32_t ScaleByte() const {
    return code;
  }
  __device__ uint32_t Code(float x) const {
    return E2M1Code(kNumerics == Numerics::kProduction ? x * inverse : x / scale, x);
  }
};

// Codes of eight consecutive channels of a group of either kind.
template <class Scale>
__device__ inline uint32_t E2M1Codes(const float* x, const Scale& scale) {
  uint32_t codes = 0;
  for (int i = 0; i < 8; ++i) codes |= scale.Code(x[i]) << (4 * i);
  return codes;
}

}  // namespace deepinfer::cuda
