// Philox4x32-10, a counter-based random generator (Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", 2011): random bits are a pure function of a seed and a counter, so a sequence's
// draws survive batching, preemption and restarts.
#pragma once

#include <array>
#include <cstdint>

namespace deepinfer {

// What a random number is used for. Each position of a sequence has one independent number per
// purpose.
enum class RandomStream : uint64_t {
  kSample = 0,    // drawing a token
  kResidual = 1,  // drawing a replacement for a rejected draft
  kAccept = 2,    // accepting a draft
};
inline constexpr uint64_t kRandomStreams = 3;

inline std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter,
                                          std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product0)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

// The four words of (seed, position, stream). The counter is laid out as cuRAND does it: the
// subsequence in its upper half.
inline std::array<uint32_t, 4> RandomWords(uint64_t seed, int64_t position, RandomStream stream) {
  const uint64_t subsequence =
      kRandomStreams * static_cast<uint64_t>(position) + static_cast<uint64_t>(stream);
  return Philox4x32(
      {0, 0, static_cast<uint32_t>(subsequence), static_cast<uint32_t>(subsequence >> 32)},
      {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
}

// Seed of completion `index` of a request. Completion 0 uses the request's seed itself, so it is
// the same whatever n is; the others are spread by the finaliser of SplitMix64.
inline uint64_t CompletionSeed(uint64_t seed, int64_t index) {
  if (index == 0) return seed;
  uint64_t x = seed + static_cast<uint64_t>(index) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace deepinfer
