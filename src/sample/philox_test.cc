#include "sample/philox.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>

#include "ops/sample_rows/exponential.h"

namespace deepinfer {
namespace {

TEST(Philox, GivesThePublishedKnownAnswers) {
  // Known answers of the Random123 distribution.
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, FollowsTheVendorsCounterLayout) {
  EXPECT_EQ(RandomWords(42, 10, RandomStream::kSample)[0], 0x0d048bedu);
  EXPECT_EQ(RandomWords(42, 10, RandomStream::kResidual)[0], 0x4429196du);
  EXPECT_EQ(RandomWords(42, 10, RandomStream::kAccept)[0], 0xa642fd96u);
  EXPECT_EQ(RandomWords(1'000'000'049, 11, RandomStream::kSample)[0], 0x87e64987u);
  EXPECT_EQ(RandomWords(42, 10'000'029, RandomStream::kAccept)[0], 0xade07bb8u);
}

TEST(Philox, UsesAllBitsOfSeedAndPosition) {
  std::set<uint32_t> words;
  for (int bit = 0; bit < 64; ++bit)
    words.insert(RandomWords(uint64_t{1} << bit, 5, RandomStream::kSample)[0]);
  for (int bit = 0; bit < 60; ++bit)
    words.insert(RandomWords(7, int64_t{1} << bit, RandomStream::kSample)[0]);
  EXPECT_EQ(words.size(), 124u);
}

TEST(CompletionSeed, KeepsTheRequestsSeedForTheFirstAndSpreadsTheOthers) {
  EXPECT_EQ(CompletionSeed(123, 0), 123u);
  std::set<uint64_t> seeds;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    for (int64_t index = 0; index < 100; ++index) seeds.insert(CompletionSeed(seed, index));
  }
  EXPECT_EQ(seeds.size(), 10'000u);
}

TEST(ExpNonPositive, AgreesWithTheLibraryToARoundingOrTwo) {
  std::mt19937_64 rng(1);
  std::uniform_real_distribution<double> uniform(-700.0, 0.0);
  double worst = 0;
  for (int i = 0; i < 200'000; ++i) {
    const double x = i % 2 == 0 ? uniform(rng) : uniform(rng) / 100.0;
    worst = std::max(worst, std::fabs(ExpNonPositive(x) / std::exp(x) - 1.0));
  }
  EXPECT_LT(worst, 1e-15);
  EXPECT_EQ(ExpNonPositive(0.0), 1.0);
  EXPECT_LT(ExpNonPositive(-INFINITY), 1e-303);
  EXPECT_EQ(ExpNonPositive(-701.0), ExpNonPositive(-700.0));
}

}  // namespace
}  // namespace deepinfer
