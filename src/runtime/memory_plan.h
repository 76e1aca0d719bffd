// What the caches will take, decided once at start from the model and the options. Pure arithmetic,
// so that `deepinfer inspect` and the executor agree.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "model/config.h"
#include "state/cache_memory.h"

namespace deepinfer {

// How window keys, compressed keys and index keys are stored. The bits of results are the same.
enum class CacheFormat : uint8_t {
  kPacked,  // codes and scales
  kBf16,    // the values they stand for: more memory, less decoding
};

// From "packed" or "bf16". Errors: kInvalidArgument with field "cache_format".
Result<CacheFormat> ParseCacheFormat(std::string_view name);

// Record sizes that follow from the model configuration. `rollback_tokens`: by how much a sequence
// can be set back in place.
CacheGeometry MakeCacheGeometry(const ModelConfig& config, int64_t rollback_tokens,
                                CacheFormat format = CacheFormat::kPacked);

struct MemoryRequest {
  int64_t max_sequences = 1;
  // Capacity of the block pool over all sequences. 0: one sequence of full context plus 8,192
  // tokens for each of the others, within a quarter of `memory_bytes`.
  int64_t cache_tokens = 0;
  int64_t max_batched_tokens = 2048;  // rows of the largest step
  int64_t rollback_tokens = 6;
  // Window pages beyond those of running sequences, for the prefix cache. -1: two for every
  // sequence, which is what a conversation that pauses leaves behind.
  int64_t window_cache_pages = -1;
  CacheFormat format = CacheFormat::kPacked;
  int64_t memory_bytes = 0;  // of the machine
};

struct MemoryPlan {
  int64_t num_blocks = 0;
  int64_t num_window_pages = 0;
  int64_t num_slots = 0;
  int64_t block_pool_bytes = 0;
  int64_t window_pool_bytes = 0;
  int64_t slot_pool_bytes = 0;
};

// The plan holds at least one block. Window pages suffice for all sequences at once in a step of
// max_batched_tokens rows, however those are spread over them.
MemoryPlan PlanMemory(const ModelConfig& config, const MemoryRequest& request);

}  // namespace deepinfer
