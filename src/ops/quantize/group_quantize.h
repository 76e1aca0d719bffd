// The three group quantisers of the model as scalar code (model description, section 5): the
// definition that vector code is tested against, and the record formats of the caches.
//
//   Q8   groups of 32, E4M3 codes, power-of-two scale            activations, window keys
//   Q4P  groups of 32, E2M1 codes, power-of-two scale            index keys and queries
//   Q4E  groups of 16, E2M1 codes, E4M3 scale                    compressed keys
//
// A packed record is all codes of a vector followed by all its scales. A bf16 record is the
// quantised vector itself: every value of the three grids is a bf16 number. Each quantiser is
// idempotent on its own output. So both store quantised vectors without loss; which one a buffer
// holds is told by the size of its records.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "ops/numerics.h"
#include "tensor/float_formats.h"

namespace deepinfer {

inline constexpr int64_t kQ8Group = 32;
inline constexpr int64_t kQ4PGroup = 32;
inline constexpr int64_t kQ4EGroup = 16;

inline constexpr int64_t Q8RecordBytes(int64_t channels) {
  return channels + channels / kQ8Group;
}
inline constexpr int64_t Q4PRecordBytes(int64_t channels) {
  return channels / 2 + channels / kQ4PGroup;
}
inline constexpr int64_t Q4ERecordBytes(int64_t channels) {
  return channels / 2 + channels / kQ4EGroup;
}

inline constexpr int64_t Bf16RecordBytes(int64_t channels) {
  return 2 * channels;
}

inline float GroupAmax(const float* x, int64_t count) {
  float amax = 0.0f;
  for (int64_t i = 0; i < count; ++i) amax = std::max(amax, std::fabs(x[i]));
  return amax;
}

// Exponent of 2^ceil(log2(t)) for a positive normal t, from its bits.
inline int CeilLog2(float t) {
  const uint32_t bits = std::bit_cast<uint32_t>(t);
  return static_cast<int>(bits >> 23) - 127 + ((bits & 0x7fffffu) != 0 ? 1 : 0);
}

// E8M0 byte of a Q8 group with maximum magnitude `amax`.
inline uint8_t Q8ScaleByte(float amax) {
  const float t = std::max(amax, 1e-4f) * std::bit_cast<float>(0x3B124925u);  // * fp32(1/448)
  return static_cast<uint8_t>(std::min(CeilLog2(t) + 127, 254));
}

inline void QuantizeQ8Group(const float* x, uint8_t* codes, uint8_t* scale) {
  *scale = Q8ScaleByte(GroupAmax(x, kQ8Group));
  const float inverse = E8M0ToF32(static_cast<uint8_t>(254 - *scale));  // exact: 2^(127 - byte)
  for (int64_t i = 0; i < kQ8Group; ++i) {
    codes[i] = F32ToE4M3(std::clamp(x[i] * inverse, -448.0f, 448.0f));
  }
}

// x -> q * s in place; the result is exactly representable in bf16.
inline void Q8InPlace(float* x, int64_t channels) {
  for (int64_t begin = 0; begin < channels; begin += kQ8Group) {
    uint8_t codes[kQ8Group];
    uint8_t scale = 0;
    QuantizeQ8Group(x + begin, codes, &scale);
    const float s = E8M0ToF32(scale);
    for (int64_t i = 0; i < kQ8Group; ++i) x[begin + i] = E4M3ToF32(codes[i]) * s;
  }
}

inline void EncodeQ8Record(const float* x, int64_t channels, uint8_t* record) {
  for (int64_t begin = 0; begin < channels; begin += kQ8Group) {
    QuantizeQ8Group(x + begin, record + begin, record + channels + begin / kQ8Group);
  }
}

inline void DecodeQ8Record(const uint8_t* record, int64_t channels, float* x) {
  for (int64_t i = 0; i < channels; ++i)
    x[i] = E4M3ToF32(record[i]) * E8M0ToF32(record[channels + i / kQ8Group]);
}

// E8M0 byte of a Q4P group.
inline uint8_t Q4PScaleByte(float amax) {
  const float t =
      std::max(amax, 6.0f * 0x1p-126f) * std::bit_cast<float>(0x3E2AAAABu);  // * fp32(1/6)
  return static_cast<uint8_t>(std::clamp(CeilLog2(t) + 127, 1, 254));
}

inline void EncodeQ4PRecord(const float* x, int64_t channels, uint8_t* record) {
  for (int64_t begin = 0; begin < channels; begin += kQ4PGroup) {
    const uint8_t scale = Q4PScaleByte(GroupAmax(x + begin, kQ4PGroup));
    record[channels / 2 + begin / kQ4PGroup] = scale;
    const float s = E8M0ToF32(scale);
    for (int64_t i = 0; i < kQ4PGroup; i += 2) {
      const uint8_t low = F32ToE2M1(std::clamp(x[begin + i] / s, -6.0f, 6.0f));
      const uint8_t high = F32ToE2M1(std::clamp(x[begin + i + 1] / s, -6.0f, 6.0f));
      record[(begin + i) / 2] = static_cast<uint8_t>(low | (high << 4));
    }
  }
}

inline void DecodeQ4PRecord(const uint8_t* record, int64_t channels, float* x) {
  for (int64_t i = 0; i < channels; i += 2) {
    const float s = E8M0ToF32(record[channels / 2 + i / kQ4PGroup]);
    x[i] = E2M1ToF32(record[i / 2] & 15u) * s;
    x[i + 1] = E2M1ToF32(record[i / 2] >> 4) * s;
  }
}

// The profiles differ in division against multiplication by reciprocals (one tie case) and in the
// cap of the scale.
inline void EncodeQ4ERecord(const float* x, int64_t channels, Numerics numerics, uint8_t* record) {
  for (int64_t begin = 0; begin < channels; begin += kQ4EGroup) {
    const float amax = std::max(GroupAmax(x + begin, kQ4EGroup), 6.0f * 0x1p-9f);
    const float t =
        numerics == Numerics::kProduction ? amax * std::bit_cast<float>(0x3E2AAAABu) : amax / 6.0f;
    const uint8_t scale = F32ToE4M3(std::min(t, 448.0f));
    record[channels / 2 + begin / kQ4EGroup] = scale;
    const float s = E4M3ToF32(scale);
    const float inverse = 1.0f / s;
    uint8_t codes[kQ4EGroup];
    for (int64_t i = 0; i < kQ4EGroup; ++i) {
      const float scaled =
          numerics == Numerics::kProduction ? x[begin + i] * inverse : x[begin + i] / s;
      codes[i] = F32ToE2M1(std::clamp(scaled, -6.0f, 6.0f));
    }
    for (int64_t i = 0; i < kQ4EGroup; i += 2) {
      record[(begin + i) / 2] = static_cast<uint8_t>(codes[i] | (codes[i + 1] << 4));
    }
  }
}

inline void DecodeQ4ERecord(const uint8_t* record, int64_t channels, float* x) {
  for (int64_t i = 0; i < channels; i += 2) {
    const float s = E4M3ToF32(record[channels / 2 + i / kQ4EGroup]);
    x[i] = E2M1ToF32(record[i / 2] & 15u) * s;
    x[i + 1] = E2M1ToF32(record[i / 2] >> 4) * s;
  }
}

inline void EncodeBf16Record(const float* x, int64_t channels, uint8_t* record) {
  auto* out = reinterpret_cast<Bf16*>(record);
  for (int64_t i = 0; i < channels; ++i) out[i] = F32ToBf16(x[i]);
}

inline void DecodeBf16Record(const uint8_t* record, int64_t channels, float* x) {
  const auto* values = reinterpret_cast<const Bf16*>(record);
  for (int64_t i = 0; i < channels; ++i) x[i] = Bf16ToF32(values[i]);
}

}  // namespace deepinfer
