// The identity table of the forward pass: ways of computing the same rows that must agree bit for
// bit. A row's logits may depend on its own sequence only, never on how the sequence is cut into
// steps, what shares the batch, or how many threads run.
#include <gtest/gtest.h>

#include <random>

#include "support/model_runs.h"

namespace deepinfer {
namespace {

using namespace testing_support;  // NOLINT

class IdentityTest : public ::testing::TestWithParam<const char*> {};

TEST_P(IdentityTest, EveryLengthAndEverySplitInTwoEqualsTheWholePrompt) {
  auto executor = LoadExecutor(GetParam(), 2);
  const int64_t window = executor->config().sliding_window;
  for (int64_t length = 1; length <= 3 * window + 3; ++length) {
    const std::vector<int32_t> ids = RandomIds(length, static_cast<uint32_t>(length));
    const Rows whole = RunAlone(*executor, ids, {length});
    for (int64_t first = 1; first < length; ++first) {
      ASSERT_EQ(FirstDifference(whole, RunAlone(*executor, ids, {first, length - first})), "")
          << "length " << length << " cut at " << first;
    }
  }
}

TEST_P(IdentityTest, TokenByTokenAndAnyChunkingEqualTheWholePrompt) {
  auto executor = LoadExecutor(GetParam(), 2);
  // 400 tokens cross three cache blocks, fill the candidate pool and pass the original context of
  // the scaled rotation.
  const std::vector<int32_t> ids = RandomIds(400, 1);
  const Rows whole = RunAlone(*executor, ids, {400});
  EXPECT_EQ(FirstDifference(whole, RunAlone(*executor, ids, std::vector<int64_t>(400, 1))), "");
  for (uint32_t seed = 0; seed < 8; ++seed) {
    EXPECT_EQ(FirstDifference(
                  whole, RunAlone(*executor, ids, RandomCuts(400, seed, 1 + (7 << (seed % 5))))),
              "")
        << seed;
  }
}

TEST_P(IdentityTest, ASequenceAloneEqualsTheSameSequenceInAnyBatch) {
  auto executor = LoadExecutor(GetParam(), 2);
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::vector<int64_t>> cuts;
  std::vector<Rows> alone;
  for (uint32_t s = 0; s < 12; ++s) {
    const int64_t length = 1 + (s * 37) % 150;
    ids.push_back(RandomIds(length, 100 + s));
    cuts.push_back(s % 3 == 0 ? std::vector<int64_t>(static_cast<size_t>(length), 1)
                              : RandomCuts(length, s, 40));
    alone.push_back(RunAlone(*executor, ids.back(), {length}));
  }
  for (int order = 0; order < 3; ++order) {
    const std::vector<Rows> together = RunTogether(*executor, ids, cuts);
    for (size_t s = 0; s < ids.size(); ++s)
      EXPECT_EQ(FirstDifference(alone[s], together[s]), "") << "sequence " << s;
    std::mt19937 generator(static_cast<uint32_t>(order));
    for (size_t i = ids.size() - 1; i > 0; --i) {
      const size_t j = generator() % (i + 1);
      std::swap(ids[i], ids[j]);
      std::swap(cuts[i], cuts[j]);
      std::swap(alone[i], alone[j]);
    }
  }
}

TEST_P(IdentityTest, TheNumberOfThreadsChangesNothing) {
  const std::vector<int32_t> ids = RandomIds(150, 5);
  const std::vector<int64_t> cuts = {64, 1, 1, 30, 54};
  auto one = LoadExecutor(GetParam(), 1);
  const Rows expected = RunAlone(*one, ids, cuts);
  for (int threads : {2, 3, 5}) {
    auto many = LoadExecutor(GetParam(), threads);
    EXPECT_EQ(FirstDifference(expected, RunAlone(*many, ids, cuts)), "") << threads << " threads";
  }
}

// A GPU replays decoding steps from graphs, padded to few shapes.
TEST_P(IdentityTest, StepsReplayedFromGraphsEqualStepsLaunchedOneByOne) {
  if (!OnCuda()) GTEST_SKIP() << "graphs are a matter of a GPU";
  ExecutorOptions options;
  auto graphs = LoadExecutor(GetParam(), 1, options);
  options.use_graphs = false;
  auto eager = LoadExecutor(GetParam(), 1, options);
  // Batches of 1 to 11 single rows: padded to 1, 2, 4, 8 and 16.
  for (const size_t sequences : {1u, 2u, 3u, 5u, 11u}) {
    std::vector<std::vector<int32_t>> ids;
    std::vector<std::vector<int64_t>> cuts;
    for (uint32_t s = 0; s < sequences; ++s) {
      ids.push_back(RandomIds(60 + 11 * s, 300 + s));
      cuts.push_back({30 + 11 * s});
      cuts.back().insert(cuts.back().end(), 30, 1);
    }
    const std::vector<Rows> expected = RunTogether(*eager, ids, cuts);
    const std::vector<Rows> replayed = RunTogether(*graphs, ids, cuts);
    for (size_t s = 0; s < sequences; ++s)
      EXPECT_EQ(FirstDifference(expected[s], replayed[s]), "") << "sequence " << s;
  }
}

// Slots and blocks are handed on with whatever the last owner left in them.
TEST_P(IdentityTest, StaleCacheContentsAreNeverRead) {
  auto executor = LoadExecutor(GetParam(), 2);
  const std::vector<int32_t> ids = RandomIds(200, 9);
  const Rows fresh = RunAlone(*executor, ids, {150, 50});
  CacheMemory& memory = executor->memory();
  for (size_t p = 0; p < memory.geometry().producers.size(); ++p) {
    Poison(memory.KvBlocks(static_cast<int64_t>(p)));
    Poison(memory.IndexBlocks(static_cast<int64_t>(p)));
    Poison(memory.Remainders(static_cast<int64_t>(p)));
  }
  for (int64_t layer = 0; layer < memory.geometry().num_layers; ++layer)
    Poison(memory.WindowPages(layer));
  EXPECT_EQ(FirstDifference(fresh, RunAlone(*executor, ids, {150, 50})), "");
  EXPECT_EQ(FirstDifference(fresh, RunAlone(*executor, ids, {1, 2, 3, 194})), "");
}

TEST_P(IdentityTest, TheFormatOfTheCachesChangesNothing) {
  const std::vector<int32_t> ids = RandomIds(300, 11);
  for (bool reference_ops : {false, true}) {
    if (reference_ops && OnCuda()) continue;  // the plain operations run on the CPU
    for (Numerics numerics : {Numerics::kProduction, Numerics::kReference}) {
      ExecutorOptions options;
      options.use_reference_ops = reference_ops;
      options.numerics = numerics;
      auto packed = LoadExecutor(GetParam(), 2, options);
      options.cache_format = CacheFormat::kBf16;
      auto wide = LoadExecutor(GetParam(), 2, options);
      EXPECT_GT(wide->memory().geometry().BytesPerBlock(),
                3 * packed->memory().geometry().BytesPerBlock());
      const Rows expected = RunAlone(*packed, ids, {300});
      EXPECT_EQ(FirstDifference(expected, RunAlone(*wide, ids, {300})), "");
      if (reference_ops) continue;
      EXPECT_EQ(FirstDifference(expected, RunAlone(*wide, ids, std::vector<int64_t>(300, 1))), "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, IdentityTest, ::testing::Values("two", "three"));

}  // namespace
}  // namespace deepinfer
