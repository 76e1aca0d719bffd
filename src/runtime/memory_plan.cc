#include "runtime/memory_plan.h"

#include <algorithm>

#include "ops/quantize/group_quantize.h"

namespace deepinfer {

CacheGeometry MakeCacheGeometry(const ModelConfig& config) {
  CacheGeometry geometry;
  for (int64_t layer : config.kv_source_layer_ids) {
    const int64_t ratio = config.ratio(layer);
    geometry.producers.push_back({.ratio = ratio,
                                  .kv_record_bytes = Q4ERecordBytes(config.head_dim),
                                  .index_record_bytes = Q4PRecordBytes(config.index_head_dim),
                                  .remainder_floats = ratio == 1 ? 0 : 2 * config.head_dim});
  }
  geometry.num_layers = config.num_hidden_layers;
  geometry.window_record_bytes = Q8RecordBytes(config.head_dim);
  geometry.ring_rows = config.sliding_window;
  return geometry;
}

MemoryPlan PlanMemory(const ModelConfig& config, int64_t max_sequences, int64_t cache_tokens,
                      int64_t memory_bytes) {
  const CacheGeometry geometry = MakeCacheGeometry(config);
  const auto blocks_for = [](int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; };
  MemoryPlan plan;
  plan.num_slots = max_sequences;
  if (cache_tokens > 0) {
    plan.num_blocks = blocks_for(cache_tokens);
  } else {
    constexpr int64_t kTokensPerFurtherSequence = 8192;
    const int64_t per_further = std::min(kTokensPerFurtherSequence, config.max_position_embeddings);
    const int64_t wanted =
        blocks_for(config.max_position_embeddings) + (max_sequences - 1) * blocks_for(per_further);
    const int64_t affordable = memory_bytes / 4 / std::max<int64_t>(1, geometry.BytesPerBlock());
    plan.num_blocks = std::max<int64_t>(1, std::min(wanted, affordable));
  }
  plan.block_pool_bytes = plan.num_blocks * geometry.BytesPerBlock();
  plan.slot_pool_bytes = plan.num_slots * geometry.BytesPerSlot();
  return plan;
}

}  // namespace deepinfer
