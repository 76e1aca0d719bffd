#include "runtime/memory_plan.h"

#include <gtest/gtest.h>

namespace deepinfer {
namespace {

ModelConfig ReleasedCacheConfig() {
  ModelConfig config;
  config.num_hidden_layers = 40;
  config.head_dim = 512;
  config.index_head_dim = 128;
  config.sliding_window = 128;
  config.max_position_embeddings = 1048576;
  config.kv_source_layer_ids = {2, 8, 14, 20};
  config.compress_ratios = {0, 0};
  for (int i = 0; i < 18; ++i) config.compress_ratios.push_back(2);
  for (int i = 0; i < 20; ++i) config.compress_ratios.push_back(1);
  return config;
}

// The model description's figures: 890 bytes per token, 67,584 bytes of window per layer, 4,096 per
// remainder.
TEST(MemoryPlan, ReleasedModelTakes890BytesPerToken) {
  const CacheGeometry geometry = MakeCacheGeometry(ReleasedCacheConfig());
  EXPECT_EQ(geometry.BytesPerBlock(), 890 * kBlockTokens);
  EXPECT_EQ(geometry.BytesPerSlot(), 40 * 67584 + 3 * 4096);
}

TEST(MemoryPlan, HoldsWhatWasAskedOrWhatMemoryAllows) {
  const ModelConfig config = ReleasedCacheConfig();
  EXPECT_EQ(PlanMemory(config, 4, 1000, int64_t{1} << 40).num_blocks, 8);
  const MemoryPlan roomy = PlanMemory(config, 4, 0, int64_t{1} << 40);
  EXPECT_EQ(roomy.num_blocks, 8192 + 3 * 64);
  const MemoryPlan tight = PlanMemory(config, 4, 0, int64_t{1} << 30);
  EXPECT_LE(tight.block_pool_bytes, int64_t{1} << 28);
  EXPECT_GE(PlanMemory(config, 1, 0, 1).num_blocks, 1);
}

}  // namespace
}  // namespace deepinfer
