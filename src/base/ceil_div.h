// Division that rounds up: how many units of one size hold so many of another.
#pragma once

#include <cstdint>

namespace deepinfer {

// ceil(a / b) for a >= 0, b > 0.
constexpr int64_t CeilDiv(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace deepinfer
