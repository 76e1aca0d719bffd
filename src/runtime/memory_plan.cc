#include "runtime/memory_plan.h"

#include <algorithm>

#include "base/quoted.h"
#include "ops/quantize/group_quantize.h"

namespace deepinfer {

Result<CacheFormat> ParseCacheFormat(std::string_view name) {
  if (name == "packed") return CacheFormat::kPacked;
  if (name == "bf16") return CacheFormat::kBf16;
  return Fail(Code::kInvalidArgument,
              fmt::format("cache_format is {}; allowed are packed and bf16.", Quoted(name)),
              "cache_format");
}

CacheGeometry MakeCacheGeometry(const ModelConfig& config, int64_t rollback_tokens,
                                CacheFormat format) {
  CacheGeometry geometry;
  const auto bytes = [format](int64_t packed, int64_t channels) {
    return format == CacheFormat::kBf16 ? Bf16RecordBytes(channels) : packed;
  };
  for (int64_t layer : config.kv_source_layer_ids) {
    const int64_t ratio = config.ratio(layer);
    geometry.producers.push_back(
        {.ratio = ratio,
         .kv_record_bytes = bytes(Q4ERecordBytes(config.head_dim), config.head_dim),
         .index_record_bytes = bytes(Q4PRecordBytes(config.index_head_dim), config.index_head_dim),
         .remainder_floats = ratio == 1 ? 0 : 2 * config.head_dim});
  }
  geometry.num_layers = config.num_hidden_layers;
  geometry.window_record_bytes = bytes(Q8RecordBytes(config.head_dim), config.head_dim);
  geometry.remainder_rows = rollback_tokens + 1;
  return geometry;
}

MemoryPlan PlanMemory(const ModelConfig& config, const MemoryRequest& request) {
  const CacheGeometry geometry = MakeCacheGeometry(config, request.rollback_tokens, request.format);
  const auto blocks_for = [](int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; };
  MemoryPlan plan;
  plan.num_slots = request.max_sequences;
  if (request.cache_tokens > 0) {
    plan.num_blocks = blocks_for(request.cache_tokens);
  } else {
    constexpr int64_t kTokensPerFurtherSequence = 8192;
    const int64_t per_further = std::min(kTokensPerFurtherSequence, config.max_position_embeddings);
    const int64_t wanted = blocks_for(config.max_position_embeddings) +
                           (request.max_sequences - 1) * blocks_for(per_further);
    const int64_t affordable =
        request.memory_bytes / 4 / std::max<int64_t>(1, geometry.BytesPerBlock());
    plan.num_blocks = std::max<int64_t>(1, std::min(wanted, affordable));
  }
  // A sequence with `history` tokens before its `rows` of a step touches at most
  // floor((history + rows - 2) / 128) + 2 pages; the rows of all sequences together are bounded.
  const int64_t history = config.sliding_window - 1 + request.rollback_tokens;
  const int64_t running = request.max_sequences * ((history - 1) / kBlockTokens + 3) +
                          blocks_for(request.max_batched_tokens);
  const int64_t cached =
      request.window_cache_pages < 0 ? 2 * request.max_sequences : request.window_cache_pages;
  plan.num_window_pages = running + cached;
  plan.block_pool_bytes = plan.num_blocks * geometry.BytesPerBlock();
  plan.window_pool_bytes = plan.num_window_pages * geometry.BytesPerWindowPage();
  plan.slot_pool_bytes = plan.num_slots * geometry.BytesPerSlot();
  return plan;
}

}  // namespace deepinfer
