// What the caches will take, decided once at start from the model and the options. Pure arithmetic,
// so that `deepinfer inspect` and the executor agree.
#pragma once

#include <cstdint>

#include "model/config.h"
#include "state/cache_pool.h"

namespace deepinfer {

// Record and ring sizes that follow from the model configuration.
CacheGeometry MakeCacheGeometry(const ModelConfig& config);

struct MemoryPlan {
  int64_t num_blocks = 0;
  int64_t num_slots = 0;
  int64_t block_pool_bytes = 0;
  int64_t slot_pool_bytes = 0;
};

// `cache_tokens` 0 asks for one sequence of full context plus 8,192 tokens for each of the others,
// within a quarter of `memory_bytes`. The plan holds at least one block.
MemoryPlan PlanMemory(const ModelConfig& config, int64_t max_sequences, int64_t cache_tokens,
                      int64_t memory_bytes);

}  // namespace deepinfer
