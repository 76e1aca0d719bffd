// The memory plan against what really happens: scratch of random steps, weights, resident memory,
// and how many sequences the pools take.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "runtime/executor.h"
#include "runtime/session.h"
#include "support/model_runs.h"

namespace deepinfer {
namespace {

using ::testing::HasSubstr;

ExecutorOptions Options(const std::string& folder) {
  ExecutorOptions options;
  options.model_dir = std::string(DI_TEST_DATA_DIR) + "/model/" + folder + "/checkpoint";
  options.num_threads = 2;
  options.max_sequences = 8;
  options.cache_tokens = 8 * 1024;
  options.max_batched_tokens = 256;
  return options;
}

std::unique_ptr<Executor> Create(const ExecutorOptions& options) {
  auto executor = Executor::Create(options);
  EXPECT_TRUE(executor.has_value()) << executor.error().message;
  return std::move(*executor);
}

std::vector<int32_t> Ids(int64_t count, std::mt19937& random) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>(random() % 512));
  return ids;
}

class MemoryPlanTest : public ::testing::TestWithParam<const char*> {};

TEST_P(MemoryPlanTest, NoStepTakesMoreScratchThanPlanned) {
  for (const int64_t rows : {1, 5, 64, 256}) {
    ExecutorOptions options = Options(GetParam());
    options.max_batched_tokens = rows;
    std::unique_ptr<Executor> executor = Create(options);
    const int64_t planned = executor->memory_plan().scratch_bytes;
    const int64_t before = executor->memory_use().held_scratch_bytes;
    std::mt19937 random(static_cast<uint32_t>(rows));
    const int64_t context = executor->config().max_position_embeddings;
    StatePools pools = MakeStatePools(*executor);
    // One sequence of whole chunks up to the full context, then many small ones.
    {
      Session session = *Session::Create(*executor, pools);
      while (std::ssize(session.tokens()) + rows <= context) {
        if (rows < 64 && session.tokens().size() > 200) break;
        const std::vector<int32_t> ids = Ids(rows, random);
        const auto logits = session.Append(ids, std::min<int64_t>(rows, 256));
        ASSERT_TRUE(logits.has_value()) << logits.error().message;
      }
    }
    for (int step = 0; step < 10; ++step) {
      const int64_t count = std::min<int64_t>(rows, 8);
      std::vector<Session> sessions;
      std::vector<std::vector<int32_t>> ids;
      for (int64_t s = 0; s < count; ++s) {
        sessions.push_back(*Session::Create(*executor, pools));
        ids.push_back(Ids(rows / count, random));
      }
      std::vector<Session::Part> parts;
      for (size_t s = 0; s < sessions.size(); ++s) parts.push_back({&sessions[s], ids[s], 1});
      ASSERT_TRUE(Session::Step(parts).has_value());
    }
    const MemoryUse use = executor->memory_use();
    EXPECT_LE(use.peak_scratch_bytes, planned) << rows << " rows";
    EXPECT_EQ(use.held_scratch_bytes, before) << "a step allocated, with " << rows << " rows";
    EXPECT_GE(use.peak_scratch_bytes, planned / 2) << "the plan is too large";
  }
}

TEST_P(MemoryPlanTest, NoDraftingPassTakesMoreScratchThanPlanned) {
  for (const int64_t rows : {1, 64, 256}) {
    for (const int64_t sequences : {1, 8}) {
      ExecutorOptions options = Options(GetParam());
      options.max_batched_tokens = rows;
      options.max_sequences = sequences;
      options.draft_tokens = 3;
      std::unique_ptr<Executor> executor = Create(options);
      const int64_t planned = executor->memory_plan().scratch_bytes;
      const int64_t before = executor->memory_use().held_scratch_bytes;
      std::mt19937 random(7);
      StatePools pools = MakeStatePools(*executor);
      std::vector<Session> sessions;
      std::vector<DraftChunk> chunks;
      for (int64_t s = 0; s < sequences; ++s) {
        sessions.push_back(*Session::Create(*executor, pools));
        for (int64_t done = 0; done < 140; done += rows)
          ASSERT_TRUE(sessions.back().Append(Ids(rows, random), 1).has_value());
      }
      for (const Session& session : sessions) chunks.push_back(session.ChunkForDraft(5));
      ASSERT_TRUE(executor->Draft(chunks).has_value());
      const MemoryUse use = executor->memory_use();
      EXPECT_LE(use.peak_scratch_bytes, planned) << rows << " rows, " << sequences;
      EXPECT_EQ(use.held_scratch_bytes, before) << rows << " rows, " << sequences;
      EXPECT_GE(use.peak_scratch_bytes, planned / 2) << "the plan is too large";
    }
  }
}

TEST_P(MemoryPlanTest, WeightsTakeWhatIsPlanned) {
  for (const CpuLevel level : {CpuLevel::kScalar, CpuLevel::kAvx2, CpuLevel::kAmx}) {
    for (const int64_t draft_tokens : {0, 3}) {
      ExecutorOptions options = Options(GetParam());
      options.max_cpu_level = level;
      options.draft_tokens = draft_tokens;
      std::unique_ptr<Executor> executor = Create(options);
      const int64_t planned = executor->memory_plan().weights.resident_bytes();
      EXPECT_LE(executor->memory_use().weight_bytes, planned);
      EXPECT_GE(executor->memory_use().weight_bytes, planned / 2);
    }
  }
}

// What the plan says of a context length is what the pools take.
TEST_P(MemoryPlanTest, AsManySequencesFitAsThePlanSays) {
  int64_t cache_bytes = -1;
  for (const int64_t limit : {128, 300, 1024}) {
    ExecutorOptions options = Options(GetParam());
    options.max_model_len = limit;
    options.max_sequences = 40;
    options.cache_tokens = 5000;
    std::unique_ptr<Executor> executor = Create(options);
    const MemoryPlan& plan = executor->memory_plan();
    EXPECT_EQ(plan.max_sequence_tokens, limit);
    // The limit moves how many fit, not the memory.
    if (cache_bytes < 0) cache_bytes = plan.block_pool_bytes;
    EXPECT_EQ(plan.block_pool_bytes, cache_bytes);
    for (const int64_t tokens : {int64_t{1}, int64_t{127}, limit}) {
      StatePools pools = MakeStatePools(*executor);
      std::vector<SequenceState> states;
      std::vector<StateCommand> commands;
      for (bool fits = true; fits;) {
        std::optional<SequenceState> state = SequenceState::Create(pools);
        fits = state.has_value();
        for (int64_t done = 0; fits && done < tokens; ++done) {
          fits = state->Extend(1, &commands);
          if (fits) state->Advance(1);
        }
        if (fits) states.push_back(std::move(*state));
      }
      EXPECT_EQ(std::ssize(states), plan.SequencesThatFit(tokens)) << tokens << " tokens";
    }
    EXPECT_EQ(plan.SequencesThatFit(limit + 1), 0);
  }
}

TEST_P(MemoryPlanTest, APlanThatDoesNotFitIsRefusedBeforeLoading) {
  ExecutorOptions options = Options(GetParam());
  options.memory_bytes = 1 << 20;
  const auto refused = Executor::Create(options);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Code::kResourceExhausted);
  for (const char* part : {"needs", "0.001 GB may be used", "cache_tokens (now 8192)",
                           "max_num_seqs (now 8)", "max_num_batched_tokens (now 256)"}) {
    EXPECT_THAT(refused.error().message, HasSubstr(part));
  }
  options.memory_bytes = 0;
  options.cache_tokens = int64_t{1} << 36;
  EXPECT_FALSE(Executor::Create(options).has_value());
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, MemoryPlanTest, ::testing::Values("two", "three"));

}  // namespace
}  // namespace deepinfer
