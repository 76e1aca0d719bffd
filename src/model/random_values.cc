#include "model/random_values.h"

#include <array>
#include <memory>

namespace deepinfer {
namespace {

using QuantileTable = std::array<float, 65536>;

// Integrates exp(-x^2/2) on a grid and inverts the integral linearly. Only additions,
// multiplications and divisions, which IEEE arithmetic defines exactly; no library function whose
// last bit may differ.
std::unique_ptr<const QuantileTable> MakeNormalQuantiles() {
  constexpr int kSteps = 6 * 1024;
  constexpr double kStep = 1.0 / 1024;
  // exp(-h^2/2) for h = 2^-10 to the last bit: 1 - 2^-21 + 2^-43.
  constexpr double kFirstRatio = 1.0 - 0x1p-21 + 0x1p-43;
  auto integral = std::make_unique<std::array<double, kSteps + 1>>();
  double density = 1;
  double ratio = kFirstRatio;  // density(k+1) / density(k) = exp(-h^2 (2k+1) / 2)
  (*integral)[0] = 0;
  for (int k = 0; k < kSteps; ++k) {
    const double next = density * ratio;
    (*integral)[static_cast<size_t>(k) + 1] =
        (*integral)[static_cast<size_t>(k)] + (density + next) / 2;
    density = next;
    ratio *= kFirstRatio * kFirstRatio;
  }
  auto table = std::make_unique<QuantileTable>();
  size_t cell = 0;
  for (size_t i = 0; i < 32768; ++i) {
    const double target = (*integral)[kSteps] * ((static_cast<double>(i) + 0.5) / 32768);
    while ((*integral)[cell + 1] < target) ++cell;
    const double fraction =
        (target - (*integral)[cell]) / ((*integral)[cell + 1] - (*integral)[cell]);
    const auto x = static_cast<float>((static_cast<double>(cell) + fraction) * kStep);
    (*table)[32768 + i] = x;
    (*table)[32767 - i] = -x;
  }
  return table;
}

}  // namespace

uint64_t RandomKey(uint64_t seed, std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return RandomWord(RandomWord(seed, 0) ^ hash, 0);
}

std::span<const float, 65536> NormalQuantiles() {
  static const std::unique_ptr<const QuantileTable> table = MakeNormalQuantiles();
  return *table;
}

}  // namespace deepinfer
