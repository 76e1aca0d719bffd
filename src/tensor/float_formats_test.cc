#include "tensor/float_formats.h"

#include <gtest/gtest.h>

#include <rapidcheck/gtest.h>

namespace deepinfer {
namespace {

// Nearest code by search over all codes, ties to the even code: the definition, independent of bit
// tricks.
template <class Decode>
uint8_t NearestCode(float a, int num_codes, Decode decode) {
  int best = 0;
  for (int code = 1; code < num_codes; ++code) {
    const double d_code = std::fabs(static_cast<double>(decode(static_cast<uint8_t>(code))) - a);
    const double d_best = std::fabs(static_cast<double>(decode(static_cast<uint8_t>(best))) - a);
    if (d_code < d_best || (d_code == d_best && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best);
}

TEST(FloatFormats, E4M3RoundTripsEveryCodeAndRoundsToNearestEven) {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) continue;
    EXPECT_EQ(F32ToE4M3(E4M3ToF32(static_cast<uint8_t>(code))), code);
  }
  EXPECT_EQ(E4M3ToF32(0x01), 0x1p-9f);
  EXPECT_EQ(E4M3ToF32(0x7e), 448.0f);
  EXPECT_TRUE(std::isnan(E4M3ToF32(0x7f)));
  for (int code = 0; code < 0x7e; ++code) {
    const float low = E4M3ToF32(static_cast<uint8_t>(code));
    const float high = E4M3ToF32(static_cast<uint8_t>(code + 1));
    const float middle = 0.5f * (low + high);
    EXPECT_EQ(F32ToE4M3(middle), code % 2 == 0 ? code : code + 1);
    EXPECT_EQ(F32ToE4M3(std::nextafter(middle, 0.0f)), code);
    EXPECT_EQ(F32ToE4M3(std::nextafter(middle, 1000.0f)), code + 1);
  }
  EXPECT_EQ(F32ToE4M3(1e30f), 0x7e);
  EXPECT_EQ(F32ToE4M3(-1e30f), 0xfe);
}

TEST(FloatFormats, E2M1RoundTripsAndTiesGoToTheEvenCode) {
  for (int code = 0; code < 16; ++code)
    EXPECT_EQ(F32ToE2M1(E2M1ToF32(static_cast<uint8_t>(code))), code);
  for (float a = 0.0f; a <= 7.0f; a += 1.0f / 64) {
    EXPECT_EQ(F32ToE2M1(a), NearestCode(a, 8, E2M1ToF32)) << a;
    EXPECT_EQ(F32ToE2M1(-a), NearestCode(a, 8, E2M1ToF32) + 8) << a;
  }
}

TEST(FloatFormats, E8M0BoundaryBytes) {
  EXPECT_EQ(E8M0ToF32(0), 0x1p-127f);
  EXPECT_EQ(E8M0ToF32(127), 1.0f);
  EXPECT_EQ(E8M0ToF32(254), 0x1p127f);
  EXPECT_TRUE(std::isnan(E8M0ToF32(255)));
}

RC_GTEST_PROP(FloatFormats, Bf16IsTheNearestOfItsNeighbours, (uint32_t bits)) {
  const float x = std::bit_cast<float>(bits);
  RC_PRE(std::isfinite(x) && std::fabs(x) < 1e38f);
  const float y = RoundToBf16(x);
  const float below = std::bit_cast<float>(bits & 0xffff0000u);
  const float above = std::bit_cast<float>((bits & 0xffff0000u) + 0x10000u);
  const double d_below = std::fabs(static_cast<double>(x) - below);
  const double d_above = std::fabs(static_cast<double>(above) - x);
  if (d_below < d_above) RC_ASSERT(y == below);
  if (d_above < d_below) RC_ASSERT(y == above);
  if (d_above == d_below) RC_ASSERT((std::bit_cast<uint32_t>(y) >> 16) % 2 == 0);
}

// Known answers of the model description, section 23: bytes of the released checkpoint.
TEST(FloatFormats, ReleasedCheckpointBytesDecodeToTheirKnownValues) {
  const uint8_t fp8[8] = {0xd8, 0x71, 0xf2, 0x79, 0x70, 0x69, 0xf0, 0xe5};
  const float fp8_values[8] = {-0.00390625f, 0.03515625f,  -0.0390625f, 0.0703125f,
                               0.03125f,     0.017578125f, -0.03125f,   -0.0126953125f};
  for (int i = 0; i < 8; ++i) EXPECT_EQ(E4M3ToF32(fp8[i]) * E8M0ToF32(0x73), fp8_values[i]);
  const uint8_t fp4[8] = {0xa0, 0xa8, 0xec, 0x4a, 0xad, 0xaf, 0x42, 0xaa};
  const float fp4_values[16] = {0,           -0.0078125f, 0,           -0.0078125f,
                                -0.015625f,  -0.03125f,   -0.0078125f, 0.015625f,
                                -0.0234375f, -0.0078125f, -0.046875f,  -0.0078125f,
                                0.0078125f,  0.015625f,   -0.0078125f, -0.0078125f};
  for (int i = 0; i < 16; ++i) {
    const uint8_t code = i % 2 == 0 ? fp4[i / 2] & 0xf : fp4[i / 2] >> 4;
    EXPECT_EQ(E2M1ToF32(code) * E8M0ToF32(0x78), fp4_values[i]) << i;
  }
}

}  // namespace
}  // namespace deepinfer
