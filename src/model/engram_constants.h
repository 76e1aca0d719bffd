// The constants of the Engram hash, all derived from the configuration: one prime per (Engram
// layer, n-gram length, head), their prefix sums, and one multiplier per look-back distance. Model
// description, section 11.2.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "model/config.h"

namespace deepinfer {

struct EngramLayerConstants {
  std::vector<int64_t> multipliers;  // [max_ngram], odd
  std::vector<int64_t> primes;       // [(max_ngram - 1) * heads], n-gram length major
  std::vector<int64_t>
      offsets;       // exclusive prefix sums of `primes`: the first table row of each head
  int64_t rows = 0;  // sum of `primes`
};

struct EngramConstants {
  std::vector<EngramLayerConstants> layers;  // in the order of engram_layer_ids
};

// Reads only the engram_* values of the configuration.
EngramConstants ComputeEngramConstants(const ModelConfig& config);

// The sums of the primes alone, per Engram layer: what engram_num_embeddings must be.
std::vector<int64_t> EngramTableRows(const ModelConfig& config);

// NumPy's PCG64 (PCG XSL RR 128/64) seeded by SeedSequence(seed), i.e. numpy.random.PCG64(seed),
// reproduced bit for bit because the published multipliers were drawn from it.
class NumpyPcg64 {
 public:
  explicit NumpyPcg64(uint64_t seed);
  uint64_t Next();
  // numpy.random.Generator.integers(bound): uniform in [0, bound). Precondition: bound > 2^32,
  // below which NumPy takes another path.
  uint64_t NextBelow(uint64_t bound);

 private:
  unsigned __int128 state_;
  unsigned __int128 increment_;
};

}  // namespace deepinfer
