// exp(x) for x <= 0 with the same bits on every machine: the C library picks variants by processor,
// and a sampled token must not depend on that. Kernels use it as well (constant expressions may run
// on a device), so it holds on GPUs too.
#pragma once

#include <bit>
#include <cstdint>

namespace deepinfer {

// Relative error below 1e-15; x below -700 counts as -700 (1e-304). x must not be NaN or positive.
// Free of branches and of conversions to integers, so that loops over it can use vector registers.
constexpr double ExpNonPositive(double x) {
  x = x < -700.0 ? -700.0 : x;
  // x = k ln 2 + r with |r| <= ln(2) / 2. Adding and subtracting 1.5 * 2^52 rounds to the nearest
  // integer. ln 2 is split so that k times its upper part (32 bits) is exact.
  constexpr double kRound = 0x1.8p52;
  const double shifted = x * 0x1.71547652b82fep0 + kRound;
  const double k = shifted - kRound;
  const double r = (x - k * 0x1.62e42feep-1) - k * 0x1.a39ef35793c76p-33;
  // Taylor series to r^13 / 13!: the next term is below 5e-18.
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  // The low mantissa bits of `shifted` are k in two's complement, -1010 ... 0: the scale 2^k is a
  // normal number.
  return p * std::bit_cast<double>((std::bit_cast<uint64_t>(shifted) + 1023) << 52);
}

}  // namespace deepinfer
