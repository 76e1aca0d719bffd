// The rotation of one vector, shared by all operations that rotate.
#pragma once

#include <cmath>
#include <cstdint>

namespace deepinfer {

// Rotates pairs of x[0 ... 2*pairs-1] by table = {cos, sin} per pair; fused as fma(x0, cos,
// -(x1*sin)), fma(x0, sin, x1*cos).
inline void RotatePairs(float* x, const float* table, int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float x0 = x[2 * i];
    const float x1 = x[2 * i + 1];
    const float cos = table[2 * i];
    const float sin = table[2 * i + 1];
    x[2 * i] = std::fma(x0, cos, -(x1 * sin));
    x[2 * i + 1] = std::fma(x0, sin, x1 * cos);
  }
}

// The inverse rotation (conjugate).
inline void RotatePairsBack(float* x, const float* table, int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float x0 = x[2 * i];
    const float x1 = x[2 * i + 1];
    const float cos = table[2 * i];
    const float sin = -table[2 * i + 1];
    x[2 * i] = std::fma(x0, cos, -(x1 * sin));
    x[2 * i + 1] = std::fma(x0, sin, x1 * cos);
  }
}

}  // namespace deepinfer
