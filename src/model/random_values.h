// Counter-based random values for generated weights. Every value is a function of (key, index) in
// exact integer and IEEE double arithmetic, so files are equal on every machine and for every
// number of threads. Called by the writer of random checkpoints only; sampling has a generator of
// its own.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace deepinfer {

// The key of a named stream of values.
uint64_t RandomKey(uint64_t seed, std::string_view name);

// 64 uniform bits: the `n`-th output of SplitMix64 started at `key`.
inline uint64_t RandomWord(uint64_t key, uint64_t n) {
  uint64_t x = key + (n + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// 16 uniform bits; four neighbouring indices share a word.
inline uint16_t RandomBits16(uint64_t key, uint64_t index) {
  return static_cast<uint16_t>(RandomWord(key, index / 4) >> (16 * (index % 4)));
}

// The quantiles of the standard normal distribution at (i + 1/2) / 65536: a normal value for each
// 16-bit draw. The largest is about 4.3.
std::span<const float, 65536> NormalQuantiles();

}  // namespace deepinfer
