// Rotary frequencies of the two kinds of layers (model description, section 5.6), in fp32 as the
// reference computes them.
#pragma once

#include <vector>

#include "model/config.h"

namespace deepinfer {

// qk_rope_head_dim / 2 values. Layers with ratio 0: base rope_theta, no scaling.
std::vector<float> WindowRopeFrequencies(const ModelConfig& config);
// Layers with ratio > 0: base compress_rope_theta with YaRN's ramp between interpolated and
// original frequencies.
std::vector<float> CompressedRopeFrequencies(const ModelConfig& config);

}  // namespace deepinfer
