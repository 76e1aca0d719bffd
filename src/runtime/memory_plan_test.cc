#include "runtime/memory_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace deepinfer {
namespace {

ModelConfig ConfigOf(const std::string& name) {
  std::ifstream file(std::string(DI_TEST_DATA_DIR "/configs/") + name);
  std::stringstream text;
  text << file.rdbuf();
  return *ParseModelConfig(text.str());
}

ModelConfig Released() {
  return ConfigOf("released.json");
}

// The model description's figures: 890 bytes per token, 528 bytes of window per layer and token,
// 4,096 per token of a remainder.
TEST(MemoryPlan, ReleasedModelTakes890BytesPerToken) {
  const CacheGeometry geometry = MakeCacheGeometry(Released(), 6);
  EXPECT_EQ(geometry.BytesPerBlock(), 890 * kBlockTokens);
  EXPECT_EQ(geometry.BytesPerWindowPage(), 40 * 528 * kBlockTokens);
  EXPECT_EQ(geometry.BytesPerSlot(), 7 * 3 * 4096);
}

TEST(MemoryPlan, Bf16RecordsTakeTwoBytesPerChannel) {
  const CacheGeometry geometry = MakeCacheGeometry(Released(), 6, CacheFormat::kBf16);
  EXPECT_EQ(geometry.BytesPerBlock(), 3200 * kBlockTokens);
  EXPECT_EQ(geometry.BytesPerWindowPage(), 40 * 1024 * kBlockTokens);
  EXPECT_EQ(geometry.BytesPerSlot(), 7 * 3 * 4096);
}

// The model description's figures: 202,752 bytes of window more per 128 tokens for the draft stages
// (section 16), and 7,932,874,632 bytes of weights (section 4.4).
TEST(MemoryPlan, DraftingIsPaidForWhereItIsAskedFor) {
  const ModelConfig config = Released();
  const CacheGeometry geometry = MakeCacheGeometry(config, 6, CacheFormat::kPacked, true);
  EXPECT_EQ(geometry.BytesPerWindowPage(), 40 * 528 * kBlockTokens + 202752);
  MemoryRequest request{.max_sequences = 4, .cache_tokens = 1000, .memory_bytes = int64_t{1} << 40};
  const auto groups = [](const MemoryPlan& plan) {
    return plan.weights.resident[static_cast<size_t>(TensorGroup::kDraft)] +
           plan.weights.resident[static_cast<size_t>(TensorGroup::kDraftExperts)];
  };
  for (const int64_t ranks : {0, 1}) {
    request.gpu_ranks = ranks;
    request.draft_tokens = 0;
    const MemoryPlan off = PlanMemory(config, request);
    EXPECT_EQ(groups(off), 0);
    request.draft_tokens = 5;
    const MemoryPlan on = PlanMemory(config, request);
    // A CPU leaves the Markov embedding in the file, and its layouts have padding.
    const int64_t mapped = on.weights.mapped_bytes() - off.weights.mapped_bytes();
    EXPECT_EQ(mapped, ranks == 0 ? int64_t{129280} * 256 * 2 : 0);
    EXPECT_NEAR(static_cast<double>(groups(on) + mapped), 7932874632.0,
                ranks == 0 ? 7932874632.0 / 50 : 0.0);
    EXPECT_GT(on.window_pool_bytes, off.window_pool_bytes);
    EXPECT_GE(on.scratch_bytes, off.scratch_bytes);
    EXPECT_EQ(on.block_pool_bytes, off.block_pool_bytes);
  }
}

TEST(MemoryPlan, FormatsHaveNames) {
  EXPECT_EQ(ParseCacheFormat("packed").value(), CacheFormat::kPacked);
  EXPECT_EQ(ParseCacheFormat("bf16").value(), CacheFormat::kBf16);
  EXPECT_EQ(ParseCacheFormat("BF16").error().field, "cache_format");
}

TEST(MemoryPlan, HoldsWhatWasAskedOrWhatMemoryAllows) {
  const ModelConfig config = Released();
  MemoryRequest request{.max_sequences = 4, .cache_tokens = 1000, .memory_bytes = int64_t{1} << 40};
  EXPECT_EQ(PlanMemory(config, request).num_blocks, 8);
  request.cache_tokens = 0;
  EXPECT_EQ(PlanMemory(config, request).num_blocks, 8192 + 3 * 64);
  // Half of what is left after the rest; the other half is the page cache's.
  const MemoryPlan roomy = PlanMemory(config, request);
  request.memory_bytes = roomy.total_bytes() - roomy.block_pool_bytes + (int64_t{1} << 28);
  const MemoryPlan tight = PlanMemory(config, request);
  EXPECT_LE(tight.block_pool_bytes, int64_t{9} << 24);
  EXPECT_GE(tight.block_pool_bytes, int64_t{1} << 26);
  EXPECT_TRUE(CheckFits(tight, request).has_value());
  EXPECT_GE(PlanMemory(config, {.memory_bytes = 1}).num_blocks, 1);
}

TEST(MemoryPlan, WindowPagesSufficeHoweverAStepIsSpreadOverSequences) {
  const ModelConfig config = Released();
  for (int64_t sequences : {1, 3, 64}) {
    for (int64_t rows : {1, 64, 300, 2048}) {
      const MemoryRequest request{.max_sequences = sequences,
                                  .max_batched_tokens = std::max(rows, sequences),
                                  .window_cache_pages = 0,
                                  .memory_bytes = int64_t{1} << 40};
      const int64_t pages = PlanMemory(config, request).num_window_pages;
      // Rows evenly spread, all to one sequence, and two each: the last cost a page most often.
      for (int64_t each : {int64_t{1}, int64_t{2}, std::max<int64_t>(1, rows / sequences), rows}) {
        for (int64_t tokens = 1000; tokens < 1000 + kBlockTokens; ++tokens) {
          int64_t left = std::max(rows, sequences);
          int64_t used = 0;
          for (int64_t s = 0; s < sequences; ++s) {
            const int64_t mine = std::min(left, each);
            left -= mine;
            used += (tokens + mine + kBlockTokens - 1) / kBlockTokens -
                    (tokens - (config.sliding_window - 1 + 6)) / kBlockTokens;
          }
          ASSERT_LE(used, pages) << sequences << " sequences, " << each << " rows each";
        }
      }
    }
  }
}

TEST(MemoryPlan, ThePrefixCacheHasPagesOfItsOwn) {
  const ModelConfig config = Released();
  const MemoryRequest none{.max_sequences = 8, .window_cache_pages = 0, .memory_bytes = 1};
  MemoryRequest some = none;
  some.window_cache_pages = 5;
  MemoryRequest automatic = none;
  automatic.window_cache_pages = -1;
  const int64_t running = PlanMemory(config, none).num_window_pages;
  EXPECT_EQ(PlanMemory(config, some).num_window_pages, running + 5);
  EXPECT_EQ(PlanMemory(config, automatic).num_window_pages, running + 16);
}

}  // namespace
}  // namespace deepinfer
