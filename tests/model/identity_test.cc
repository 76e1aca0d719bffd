// The identity table of the forward pass: ways of computing the same rows that must agree bit for
// bit. A row's logits may depend on its own sequence only, never on how the sequence is cut into
// steps, what shares the batch, or how many threads run.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <random>

#include "runtime/executor.h"

namespace deepinfer {
namespace {

using Rows = std::vector<std::vector<float>>;  // logits of every row of a sequence

std::unique_ptr<Executor> LoadExecutor(const std::string& folder, int threads,
                                       CpuLevel level = CpuLevel::kAmx) {
  ExecutorOptions options;
  options.model_dir = std::string(DI_TEST_DATA_DIR) + "/model/" + folder + "/checkpoint";
  options.num_threads = threads;
  options.max_sequences = 16;
  options.cache_tokens = 16384;
  options.max_cpu_level = level;
  auto executor = Executor::Create(options);
  EXPECT_TRUE(executor.has_value()) << executor.error().message;
  return std::move(*executor);
}

std::vector<int32_t> RandomIds(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>(generator() % 512));
  return ids;
}

// Runs several sequences at once; chunks[s] are the chunk sizes of sequence s, one step takes the
// next chunk of every sequence that has one.
std::vector<Rows> RunTogether(Executor& executor, const std::vector<std::vector<int32_t>>& ids,
                              const std::vector<std::vector<int64_t>>& chunks) {
  std::vector<Sequence> sequences;
  for (size_t s = 0; s < ids.size(); ++s)
    sequences.push_back(std::move(*Sequence::Create(executor.pool())));
  std::vector<Rows> rows(ids.size());
  for (size_t round = 0;; ++round) {
    std::vector<Executor::Chunk> step;
    std::vector<size_t> who;
    for (size_t s = 0; s < ids.size(); ++s) {
      if (round >= chunks[s].size()) continue;
      const auto size = static_cast<size_t>(chunks[s][round]);
      step.push_back({.sequence = &sequences[s],
                      .token_ids = std::span(ids[s]).subspan(
                          static_cast<size_t>(sequences[s].num_tokens()), size),
                      .num_logit_rows = chunks[s][round]});
      who.push_back(s);
    }
    if (step.empty()) return rows;
    auto logits = executor.Step(step);
    EXPECT_TRUE(logits.has_value());
    int64_t row = 0;
    for (size_t i = 0; i < who.size(); ++i) {
      for (int64_t r = 0; r < step[i].num_logit_rows; ++r, ++row) {
        rows[who[i]].emplace_back(logits->Row<float>(row),
                                  logits->Row<float>(row) + logits->dim(1));
      }
    }
  }
}

Rows RunAlone(Executor& executor, const std::vector<int32_t>& ids,
              const std::vector<int64_t>& chunks) {
  return RunTogether(executor, {ids}, {chunks})[0];
}

// Empty when equal bit for bit, else where the first difference is.
std::string FirstDifference(const Rows& a, const Rows& b) {
  if (a.size() != b.size())
    return "row counts " + std::to_string(a.size()) + " and " + std::to_string(b.size());
  for (size_t r = 0; r < a.size(); ++r) {
    if (std::memcmp(a[r].data(), b[r].data(), a[r].size() * sizeof(float)) != 0)
      return "row " + std::to_string(r);
  }
  return {};
}

std::vector<int64_t> RandomCuts(int64_t total, uint32_t seed, int64_t largest) {
  std::mt19937 generator(seed);
  std::vector<int64_t> cuts;
  while (total > 0) {
    const int64_t size = std::min<int64_t>(
        total, 1 + static_cast<int64_t>(generator() % static_cast<uint32_t>(largest)));
    cuts.push_back(size);
    total -= size;
  }
  return cuts;
}

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

// Slots and blocks are handed on with whatever the last owner left in them.
TEST_P(IdentityTest, StaleCacheContentsAreNeverRead) {
  auto executor = LoadExecutor(GetParam(), 2);
  const std::vector<int32_t> ids = RandomIds(200, 9);
  const Rows fresh = RunAlone(*executor, ids, {150, 50});
  const auto poison = [&](const TensorView& view) {
    if (!view.empty())
      std::memset(view.data(), 0xff,
                  static_cast<size_t>(view.num_elements() * DTypeBytes(view.dtype())));
  };
  CachePool& pool = executor->pool();
  for (size_t p = 0; p < pool.geometry().producers.size(); ++p) {
    poison(pool.KvBlocks(static_cast<int64_t>(p)));
    poison(pool.IndexBlocks(static_cast<int64_t>(p)));
    poison(pool.Remainders(static_cast<int64_t>(p)));
  }
  for (int64_t layer = 0; layer < pool.geometry().num_layers; ++layer)
    poison(pool.WindowRings(layer));
  EXPECT_EQ(FirstDifference(fresh, RunAlone(*executor, ids, {150, 50})), "");
  EXPECT_EQ(FirstDifference(fresh, RunAlone(*executor, ids, {1, 2, 3, 194})), "");
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, IdentityTest, ::testing::Values("two", "three"));

TEST(Executor, AStepThatCannotRunLeavesItsSequencesUntouched) {
  auto executor = LoadExecutor("two", 1);
  auto sequence = *Sequence::Create(executor->pool());
  const auto step = [&](std::vector<int32_t> ids, int64_t logit_rows = 0) {
    const Executor::Chunk chunk{
        .sequence = &sequence, .token_ids = ids, .num_logit_rows = logit_rows};
    auto result = executor->Step({&chunk, 1});
    return result.has_value() ? std::string() : result.error().message;
  };
  EXPECT_NE(step({1, 512}).find("512"), std::string::npos);
  EXPECT_NE(step({-1}).find("-1"), std::string::npos);
  EXPECT_NE(step({}), "");
  EXPECT_NE(step({1}, 2), "");
  EXPECT_NE(step(std::vector<int32_t>(1025, 3)).find("1024"), std::string::npos);
  EXPECT_EQ(sequence.num_tokens(), 0);
  EXPECT_EQ(executor->pool().num_free_blocks(), executor->pool().num_blocks());
  EXPECT_EQ(step({1, 2, 3}, 1), "");
  EXPECT_EQ(sequence.num_tokens(), 3);
}

}  // namespace
}  // namespace deepinfer
