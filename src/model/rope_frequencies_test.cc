#include "model/rope_frequencies.h"

#include <gtest/gtest.h>

#include <cmath>

namespace deepinfer {
namespace {

// Known answers of the model description, section 23, to one unit in the last place.
void ExpectUlp(float actual, float expected) {
  EXPECT_GE(actual, std::nextafter(expected, 0.0f)) << expected;
  EXPECT_LE(actual, std::nextafter(expected, 10.0f)) << expected;
}

ModelConfig RopeConfig() {
  ModelConfig config;
  config.qk_rope_head_dim = 64;
  config.rope_theta = 10000;
  config.compress_rope_theta = 160000;
  config.rope_factor = 16;
  config.rope_original_positions = 65536;
  return config;
}

TEST(RopeFrequencies, ReleasedModelKnownAnswers) {
  const std::vector<float> compressed = CompressedRopeFrequencies(RopeConfig());
  ASSERT_EQ(compressed.size(), 32u);
  const std::pair<size_t, float> answers[] = {{0, 1.0f},
                                              {1, 6.87656045e-1f},
                                              {14, 5.28685655e-3f},
                                              {15, 3.63553851e-3f},
                                              {16, 2.26562493e-3f},
                                              {17, 1.39680132e-3f},
                                              {20, 2.96977785e-4f},
                                              {24, 1.95312532e-5f},
                                              {25, 5.37231244e-6f},
                                              {31, 5.68052940e-7f}};
  for (const auto& [i, value] : answers) ExpectUlp(compressed[i], value);
  const std::vector<float> window = WindowRopeFrequencies(RopeConfig());
  ExpectUlp(window[1], 7.49894202e-1f);
  ExpectUlp(window[16], 9.99999978e-3f);
  ExpectUlp(window[31], 1.33352150e-4f);
}

TEST(RopeFrequencies, TinyModelKnownAnswers) {
  ModelConfig config = RopeConfig();
  config.qk_rope_head_dim = 16;
  config.compress_rope_theta = 1000;
  config.rope_factor = 4;
  config.rope_original_positions = 64;
  const float answers[8] = {1.0f,           3.16272378e-1f, 8.89139697e-2f, 1.87473539e-2f,
                            7.90569466e-3f, 3.33380373e-3f, 1.40585331e-3f, 5.92843455e-4f};
  const std::vector<float> frequencies = CompressedRopeFrequencies(config);
  ASSERT_EQ(frequencies.size(), 8u);
  for (size_t i = 0; i < 8; ++i) ExpectUlp(frequencies[i], answers[i]);
}

TEST(RopeFrequencies, TheAngleIsRoundedToFp32BeforeTheCosine) {
  const float angle = 1048575.0f * CompressedRopeFrequencies(RopeConfig())[1];
  EXPECT_EQ(angle, 721058.9375f);
  EXPECT_NEAR(std::cos(static_cast<double>(angle)), 0.8300226, 1e-6);
  EXPECT_NEAR(std::sin(static_cast<double>(angle)), 0.5577297, 1e-6);
}

}  // namespace
}  // namespace deepinfer
