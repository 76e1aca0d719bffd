#include "model/engram_constants.h"

#include <algorithm>
#include <limits>

#include "base/check.h"

namespace deepinfer {
namespace {

using uint128 = unsigned __int128;

uint64_t PowMod(uint64_t base, uint64_t exponent, uint64_t modulus) {
  uint128 result = 1;
  uint128 power = base % modulus;
  for (; exponent > 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result = result * power % modulus;
    power = power * power % modulus;
  }
  return static_cast<uint64_t>(result);
}

// Miller-Rabin with the bases 2, 3, 5, 7, which decide every number below 3,215,031,751; table
// sizes are below 2^29.
bool IsPrime(int64_t candidate) {
  const auto n = static_cast<uint64_t>(candidate);
  if (n < 2) return false;
  for (const uint64_t p : {2, 3, 5, 7}) {
    if (n % p == 0) return n == p;
  }
  uint64_t odd = n - 1;
  int shift = 0;
  for (; odd % 2 == 0; odd /= 2) ++shift;
  for (const uint64_t base : {2, 3, 5, 7}) {
    uint64_t x = PowMod(base, odd, n);
    bool witness = x != 1 && x != n - 1;
    for (int i = 1; i < shift && witness; ++i) {
      x = static_cast<uint64_t>(static_cast<uint128>(x) * x % n);
      witness = x != n - 1;
    }
    if (witness) return false;
  }
  return true;
}

// All primes of all layers: consecutive ones from engram_vocab_size on.
std::vector<int64_t> ConsecutivePrimes(const ModelConfig& config) {
  DI_CHECK_LT(config.engram_vocab_size, int64_t{1} << 29);
  const size_t count =
      config.engram_layer_ids.size() * static_cast<size_t>(config.engram_rows_per_token());
  std::vector<int64_t> primes;
  for (int64_t n = config.engram_vocab_size; primes.size() < count; ++n) {
    if (IsPrime(n)) primes.push_back(n);
  }
  return primes;
}

// numpy.random.SeedSequence for one integer seed: entropy words are hashed into a pool of four
// 32-bit words, from which output words are drawn. The constants are NumPy's.
class SeedSequence {
 public:
  explicit SeedSequence(uint64_t seed) {
    // A seed below 2^32 is one entropy word.
    const uint32_t words[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    const size_t count = words[1] != 0 ? 2 : 1;
    uint32_t constant = 0x43b0d7e5u;
    const auto hash = [&constant](uint32_t value) {
      value ^= constant;
      constant *= 0x931e8875u;
      value *= constant;
      return value ^ (value >> 16);
    };
    for (size_t i = 0; i < pool_.size(); ++i) pool_[i] = hash(i < count ? words[i] : 0);
    for (size_t source = 0; source < pool_.size(); ++source) {
      for (size_t target = 0; target < pool_.size(); ++target) {
        if (source == target) continue;
        const uint32_t mixed = 0xca01f9ddu * pool_[target] - 0x4973f715u * hash(pool_[source]);
        pool_[target] = mixed ^ (mixed >> 16);
      }
    }
  }

  // generate_state(4, uint64).
  std::array<uint64_t, 4> Generate() const {
    std::array<uint64_t, 4> out = {};
    uint32_t constant = 0x8b51f9ddu;
    for (size_t i = 0; i < 8; ++i) {
      uint32_t value = pool_[i % pool_.size()] ^ constant;
      constant *= 0x58f38dedu;
      value *= constant;
      value ^= value >> 16;
      out[i / 2] |= static_cast<uint64_t>(value) << (32 * (i % 2));
    }
    return out;
  }

 private:
  std::array<uint32_t, 4> pool_ = {};
};

constexpr uint128 kPcgMultiplier =
    (static_cast<uint128>(2549297995355413924u) << 64) | 4865540595714422341u;

}  // namespace

NumpyPcg64::NumpyPcg64(uint64_t seed) {
  const std::array<uint64_t, 4> words = SeedSequence(seed).Generate();
  const uint128 initial_state = (static_cast<uint128>(words[0]) << 64) | words[1];
  const uint128 initial_sequence = (static_cast<uint128>(words[2]) << 64) | words[3];
  increment_ = (initial_sequence << 1) | 1;
  state_ = (increment_ + initial_state) * kPcgMultiplier + increment_;
}

uint64_t NumpyPcg64::Next() {
  state_ = state_ * kPcgMultiplier + increment_;
  const uint64_t folded = static_cast<uint64_t>(state_ >> 64) ^ static_cast<uint64_t>(state_);
  const auto rotation = static_cast<unsigned>(state_ >> 122);
  return (folded >> rotation) | (folded << ((64 - rotation) % 64));
}

uint64_t NumpyPcg64::NextBelow(uint64_t bound) {
  DI_CHECK_GT(bound, uint64_t{1} << 32);
  // Lemire's method: the low half decides whether the draw would be biased.
  const uint64_t threshold = (std::numeric_limits<uint64_t>::max() - (bound - 1)) % bound;
  uint128 product = static_cast<uint128>(Next()) * bound;
  while (static_cast<uint64_t>(product) < threshold) product = static_cast<uint128>(Next()) * bound;
  return static_cast<uint64_t>(product >> 64);
}

std::vector<int64_t> EngramTableRows(const ModelConfig& config) {
  const std::vector<int64_t> primes = ConsecutivePrimes(config);
  const auto per_layer = static_cast<size_t>(config.engram_rows_per_token());
  std::vector<int64_t> rows(config.engram_layer_ids.size(), 0);
  for (size_t i = 0; i < primes.size(); ++i) rows[i / per_layer] += primes[i];
  return rows;
}

EngramConstants ComputeEngramConstants(const ModelConfig& config) {
  const std::vector<int64_t> primes = ConsecutivePrimes(config);
  const int64_t per_layer = config.engram_rows_per_token();
  EngramConstants constants;
  for (size_t i = 0; i < config.engram_layer_ids.size(); ++i) {
    EngramLayerConstants layer;
    const auto begin = primes.begin() + static_cast<int64_t>(i) * per_layer;
    layer.primes.assign(begin, begin + per_layer);
    for (const int64_t prime : layer.primes) {
      layer.offsets.push_back(layer.rows);
      layer.rows += prime;
    }
    // Half of the largest value that keeps (compressed id) x (2v + 1) below 2^63.
    const int64_t bound =
        std::numeric_limits<int64_t>::max() / config.engram_compressed_vocab_size / 2;
    NumpyPcg64 generator(static_cast<uint64_t>(10007 * config.engram_layer_ids[i]));
    for (int64_t k = 0; k < config.engram_max_ngram_size; ++k) {
      layer.multipliers.push_back(
          static_cast<int64_t>(2 * generator.NextBelow(static_cast<uint64_t>(bound)) + 1));
    }
    constants.layers.push_back(std::move(layer));
  }
  return constants;
}

}  // namespace deepinfer
