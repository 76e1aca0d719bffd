#include "model/rope_frequencies.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace deepinfer {
namespace {

std::vector<float> BaseFrequencies(double base, int64_t dim) {
  std::vector<float> frequencies;
  for (int64_t i = 0; i < dim / 2; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(dim);
    frequencies.push_back(1.0f / static_cast<float>(std::pow(base, static_cast<double>(exponent))));
  }
  return frequencies;
}

}  // namespace

std::vector<float> WindowRopeFrequencies(const ModelConfig& config) {
  return BaseFrequencies(config.rope_theta, config.qk_rope_head_dim);
}

std::vector<float> CompressedRopeFrequencies(const ModelConfig& config) {
  const int64_t dim = config.qk_rope_head_dim;
  std::vector<float> frequencies = BaseFrequencies(config.compress_rope_theta, dim);
  // Channel pair that turns `rotations` times over the original context.
  const auto pair_of = [&](double rotations) {
    return static_cast<double>(dim) *
           std::log(static_cast<double>(config.rope_original_positions) /
                    (rotations * 2.0 * std::numbers::pi)) /
           (2.0 * std::log(config.compress_rope_theta));
  };
  const double low = std::max(std::floor(pair_of(config.rope_beta_fast)), 0.0);
  double high = std::min(std::ceil(pair_of(config.rope_beta_slow)), static_cast<double>(dim - 1));
  if (low == high) high += 0.001;  // a ramp of no width would divide by zero
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const float ramp = std::clamp(
        (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low), 0.0f,
        1.0f);
    const float smooth = 1.0f - ramp;
    const float f = frequencies[i];
    frequencies[i] = f / static_cast<float>(config.rope_factor) * (1.0f - smooth) + f * smooth;
  }
  return frequencies;
}

}  // namespace deepinfer
