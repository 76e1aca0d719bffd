// What a process will take of its device's memory, decided once at start from the model and the
// options. Pure arithmetic, so that `deepinfer plan` says what the executor does. Nothing is
// allocated that is not in the plan, and the executor refuses a plan that does not fit, before
// anything is loaded.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "model/config.h"
#include "model/weight_memory.h"
#include "state/cache_memory.h"

namespace deepinfer {

// How window keys, compressed keys and index keys are stored. The bits of results are the same.
enum class CacheFormat : uint8_t {
  kPacked,  // codes and scales
  kBf16,    // the values they stand for: more memory, less decoding
};

// From "packed" or "bf16". Errors: kInvalidArgument with field "cache_format".
Result<CacheFormat> ParseCacheFormat(std::string_view name);

// kInvalidArgument if a sequence may be asked to be longer than the model supports.
Status CheckMaxModelLen(const ModelConfig& config, int64_t max_model_len);

// Record sizes that follow from the model configuration. `rollback_tokens`: by how much a sequence
// can be set back in place. `drafting`: window pages also hold the keys of the draft stages.
CacheGeometry MakeCacheGeometry(const ModelConfig& config, int64_t rollback_tokens,
                                CacheFormat format = CacheFormat::kPacked, bool drafting = false);

struct MemoryRequest {
  int64_t max_sequences = 1;
  // Capacity of the block pool over all sequences. 0: one sequence of full context plus 8,192
  // tokens for each of the others, within half of the memory that is left on a CPU, whose other
  // half holds what the page cache keeps of mapped files; all that is left on a GPU.
  int64_t cache_tokens = 0;
  int64_t max_model_len = 0;            // prompt + output of a sequence; 0: what the model supports
  int64_t max_batched_tokens = 2048;    // rows of the largest step
  int64_t max_prompt_logit_rows = 256;  // of a step, beyond one per sequence
  int64_t rollback_tokens = 6;
  int64_t draft_tokens =
      0;  // of a block; 0: no drafting, and nothing of the draft layers is loaded
  // Window pages beyond those of running sequences, for the prefix cache. -1: two for every
  // sequence, which is what a conversation that pauses leaves behind.
  int64_t window_cache_pages = -1;
  CacheFormat cache_format = CacheFormat::kPacked;
  bool drops_rows = false;  // decoder bounded replay in compact form
  int num_threads = 1;
  int64_t gpu_ranks = 0;        // 0: a CPU; else this plan is that of each of so many GPUs
  bool engram_on_host = false;  // of a GPU: the Engram tables are in the host's memory
  int64_t memory_bytes = 0;     // that may be used, on each device
};

// A line of the plan. Pools of equal units have units; the rest has bytes only.
struct MemoryItem {
  std::string name;
  int64_t bytes = 0;
  int64_t units = 0;
  int64_t unit_bytes = 0;
};

struct MemoryPlan {
  WeightMemory weights;
  int64_t num_blocks = 0;
  int64_t num_window_pages = 0;
  int64_t num_slots = 0;
  int64_t block_pool_bytes = 0;
  int64_t window_pool_bytes = 0;
  int64_t slot_pool_bytes = 0;
  int64_t scratch_bytes = 0;  // of the largest step, or of the largest drafting pass
  int64_t logits_bytes = 0;
  int64_t host_bytes = 0;  // tokenizer, sampler, tables of the pools and the prefix cache
  int64_t memory_bytes = 0;

  // Limits.
  int64_t max_sequence_tokens = 0;  // prompt + output
  int64_t history_tokens = 0;       // of the windows, which a running sequence keeps
  int64_t step_logit_rows = 0;

  int64_t total_bytes() const;
  // In the order of what is allocated.
  std::vector<MemoryItem> Items() const;
  // How many sequences of `tokens` tokens can be in memory at the same time; 0: not one.
  int64_t SequencesThatFit(int64_t tokens) const;
};

// The plan holds at least one block, whether that fits or not.
MemoryPlan PlanMemory(const ModelConfig& config, const MemoryRequest& request);

// Errors: kResourceExhausted when the plan takes more than may be used; the sentence names need,
// have, and the options that lower the need.
Status CheckFits(const MemoryPlan& plan, const MemoryRequest& request);

// What the machine has for us: physical memory, or the limit of the control group or of the address
// space if that is less.
int64_t UsableHostMemoryBytes();

// What the process really takes, for comparison with its plan. 0 where the system does not tell.
struct ProcessMemory {
  int64_t resident_bytes = 0;       // of its own: mapped files are not part of it
  int64_t peak_resident_bytes = 0;  // mapped files included
};
ProcessMemory MeasureProcessMemory();

}  // namespace deepinfer
