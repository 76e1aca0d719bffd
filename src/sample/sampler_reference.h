// The law of the sampler as plainly as it can be said: sort everything, add up, compare. For tests
// only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "deepinfer/sampling_params.h"

namespace deepinfer {

// The fixed-point mass of each token that may be drawn, 0 for the others. `logits` are already
// masked and penalised.
inline std::vector<uint64_t> ReferenceMasses(std::span<const float> logits,
                                             const SamplingParams& params) {
  const size_t vocab = logits.size();
  const float largest = *std::max_element(logits.begin(), logits.end());
  std::vector<uint64_t> mass(vocab);
  for (size_t i = 0; i < vocab; ++i) {
    mass[i] = static_cast<uint64_t>(
        std::exp((double{logits[i]} - double{largest}) / params.temperature) * 0x1p40);
  }
  const uint64_t total = std::accumulate(mass.begin(), mass.end(), uint64_t{0});

  std::vector<size_t> order(vocab);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return logits[a] > logits[b]; });

  std::vector<uint64_t> kept(vocab, 0);
  uint64_t before = 0;
  for (size_t place = 0; place < vocab; ++place) {
    const size_t id = order[place];
    const bool in_top_k = params.top_k < 0 || static_cast<int64_t>(place) < params.top_k;
    const bool in_nucleus = params.top_p >= 1.0 || static_cast<double>(before) <=
                                                       params.top_p * static_cast<double>(total);
    const bool likely = static_cast<double>(mass[id]) >= params.min_p * 0x1p40;
    if (in_top_k && in_nucleus && likely) kept[id] = mass[id];
    before += mass[id];
  }
  return kept;
}

}  // namespace deepinfer
