// Scalar conversions between fp32 and the storage formats of the checkpoint and the caches.
// Definitions: round to nearest, ties to even; exact in the other direction. Vector code is tested
// against these.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace deepinfer {

struct Bf16 {
  uint16_t bits;
  friend bool operator==(Bf16, Bf16) = default;
};

inline float Bf16ToF32(Bf16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

inline Bf16 F32ToBf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u)
    return Bf16{static_cast<uint16_t>((bits >> 16) | 0x40u)};  // quiet NaN
  return Bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// fp32 -> bf16 -> fp32.
inline float RoundToBf16(float x) {
  return Bf16ToF32(F32ToBf16(x));
}

inline float E4M3ToF32(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) return std::numeric_limits<float>::quiet_NaN();
  // As fp32 bits the code is 2^-120 of its value, subnormals included.
  const float scaled = std::bit_cast<float>(magnitude << 20) * 0x1p120f;
  return (code & 0x80u) != 0 ? -scaled : scaled;
}

// Values beyond 448 saturate (callers clamp anyway); NaN gives NaN.
inline uint8_t F32ToE4M3(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  const float a = std::fabs(x);
  if (std::isnan(x)) return static_cast<uint8_t>(sign | 0x7fu);
  if (a >= 448.0f) return static_cast<uint8_t>(sign | 0x7eu);
  if (a < 0x1p-6f) {
    // Subnormal: multiples of 2^-9. Adding 2^14 leaves exactly that grid in the mantissa (ulp of
    // [2^14, 2^15) is 2^-9).
    const float shifted = a + 0x1p14f;
    return static_cast<uint8_t>(
        sign | (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0x1p14f)));
  }
  const uint32_t abs_bits = bits & 0x7fffffffu;
  const uint32_t rounded = abs_bits + 0x7ffffu + ((abs_bits >> 20) & 1u);
  const uint32_t code = (rounded >> 20) - (120u << 3);
  return static_cast<uint8_t>(sign | (code > 0x7eu ? 0x7eu : code));
}

// 2^(byte - 127); byte 0 is the subnormal 2^-127, byte 255 is NaN.
inline float E8M0ToF32(uint8_t byte) {
  if (byte == 0) return 0x1p-127f;
  if (byte == 255) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(static_cast<uint32_t>(byte) << 23);
}

inline constexpr float kE2M1Magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

// `code` in 0 ... 15; bit 3 is the sign (code 8 is -0).
inline float E2M1ToF32(uint8_t code) {
  const float magnitude = kE2M1Magnitudes[code & 7u];
  return (code & 8u) != 0 ? -magnitude : magnitude;
}

// Values beyond 6 saturate; ties go to the even code.
inline uint8_t F32ToE2M1(float x) {
  const uint8_t sign = std::signbit(x) ? 8 : 0;
  const float a = std::fabs(x);
  uint8_t code = 0;
  if (a <= 0.25f) {
    code = 0;
  } else if (a < 0.75f) {
    code = 1;
  } else if (a <= 1.25f) {
    code = 2;
  } else if (a < 1.75f) {
    code = 3;
  } else if (a <= 2.5f) {
    code = 4;
  } else if (a < 3.5f) {
    code = 5;
  } else if (a <= 5.0f) {
    code = 6;
  } else {
    code = 7;
  }
  return sign | code;
}

}  // namespace deepinfer
