#include <immintrin.h>

#include <cstring>

#include "ops/bench/peaks.h"

namespace deepinfer {

double SpinAmxBf16(int64_t rounds) {
  struct alignas(64) {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  static_assert(sizeof(config) == 64);
  // g++ 12 believes that the instruction reads 8 of the 64 bytes.
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return static_cast<double>(rounds) * 4 * 2 * 16 * 16 * 32;
}

}  // namespace deepinfer
