#include "runtime/memory_plan.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>

#include "base/ceil_div.h"
#include "base/quoted.h"
#include "model/step_memory.h"
#include "ops/quantize/group_quantize.h"
#include "state/sequence_state.h"

namespace deepinfer {
namespace {

// Sizes for people, in sentences.
std::string Gigabytes(int64_t bytes) {
  return fmt::format("{:.3f} GB", static_cast<double>(bytes) / 1e9);
}

// What the program takes besides weights, caches and step buffers.
int64_t HostBytes(const ModelConfig& config, const MemoryPlan& plan) {
  constexpr int64_t kProgramBytes = 64 << 20;  // code, libraries, stacks, heap
  constexpr int64_t kTokenBytes = 512;         // of the tokenizer's tables, each token of it
  constexpr int64_t kSamplerTokenBytes = 20;   // sampler scratch, each token of the vocabulary
  // A block's node in the prefix cache holds its 128 ids; lists and reference counts beside.
  constexpr int64_t kBlockTableBytes = 1024;
  constexpr int64_t kSequenceBytes = 1 << 14;
  return kProgramBytes + config.vocab_size * (kTokenBytes + kSamplerTokenBytes) +
         plan.num_blocks * kBlockTableBytes + plan.num_window_pages * kBlockTableBytes +
         plan.num_slots * kSequenceBytes;
}

// The first line of a file as a number, or the largest there is: control groups without a limit say
// "max".
int64_t NumberIn(const char* path) {
  std::ifstream file(path);
  int64_t number = 0;
  return file >> number && number > 0 ? number : std::numeric_limits<int64_t>::max();
}

}  // namespace

Result<CacheFormat> ParseCacheFormat(std::string_view name) {
  if (name == "packed") return CacheFormat::kPacked;
  if (name == "bf16") return CacheFormat::kBf16;
  return Fail(Code::kInvalidArgument,
              fmt::format("cache_format is {}; allowed are packed and bf16.", Quoted(name)),
              "cache_format");
}

Status CheckMaxModelLen(const ModelConfig& config, int64_t max_model_len) {
  if (max_model_len <= config.max_position_embeddings) return {};
  return Fail(Code::kInvalidArgument,
              fmt::format("max_model_len is {}; this model supports at most {} "
                          "(max_position_embeddings).",
                          max_model_len, config.max_position_embeddings),
              "max_model_len");
}

CacheGeometry MakeCacheGeometry(const ModelConfig& config, int64_t rollback_tokens,
                                CacheFormat format, bool drafting) {
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
  geometry.num_layers = config.num_hidden_layers + (drafting ? config.num_nextn_predict_layers : 0);
  geometry.window_record_bytes = bytes(Q8RecordBytes(config.head_dim), config.head_dim);
  geometry.remainder_rows = rollback_tokens + 1;
  return geometry;
}

int64_t MemoryPlan::total_bytes() const {
  int64_t total = 0;
  for (const MemoryItem& item : Items()) total += item.bytes;
  return total;
}

std::vector<MemoryItem> MemoryPlan::Items() const {
  std::vector<MemoryItem> items;
  for (size_t i = 0; i < kNumTensorGroups; ++i) {
    if (weights.resident[i] == 0) continue;
    items.push_back({"weights: " + std::string(TensorGroupName(static_cast<TensorGroup>(i))),
                     weights.resident[i]});
  }
  const auto pool = [&](const char* name, int64_t bytes, int64_t units) {
    items.push_back({name, bytes, units, units > 0 ? bytes / units : 0});
  };
  pool("cache blocks", block_pool_bytes, num_blocks);
  pool("window pages", window_pool_bytes, num_window_pages);
  pool("slots", slot_pool_bytes, num_slots);
  items.push_back({"step buffers", scratch_bytes});
  pool("logits", logits_bytes, step_logit_rows);
  items.push_back({"program and tables", host_bytes});
  return items;
}

int64_t MemoryPlan::SequencesThatFit(int64_t tokens) const {
  if (tokens < 1 || tokens > max_sequence_tokens) return 0;
  // A row at the end needs the pages of the history before it and its own.
  const int64_t pages =
      std::min(CeilDiv(tokens, kBlockTokens), (history_tokens - 1) / kBlockTokens + 2);
  return std::min(
      {num_slots, num_blocks / CeilDiv(tokens, kBlockTokens), num_window_pages / pages});
}

MemoryPlan PlanMemory(const ModelConfig& config, const MemoryRequest& request) {
  const bool gpu = request.gpu_ranks > 0;
  const bool drafting = request.draft_tokens > 0;
  const CacheGeometry geometry =
      MakeCacheGeometry(config, request.rollback_tokens, request.cache_format, drafting);
  MemoryPlan plan;
  plan.memory_bytes = request.memory_bytes;
  plan.weights = gpu ? GpuWeightMemory(config, request.gpu_ranks, drafting)
                     : CpuWeightMemory(config, drafting);
  if (gpu && request.engram_on_host)
    plan.weights.resident[static_cast<size_t>(TensorGroup::kEngramTable)] = 0;
  plan.num_slots = request.max_sequences;
  plan.history_tokens = config.sliding_window - 1 + request.rollback_tokens;

  // A sequence with `history` tokens before its `rows` of a step touches at most
  // floor((history + rows - 2) / 128) + 2 pages; the rows of all sequences together are bounded.
  const int64_t running = request.max_sequences * ((plan.history_tokens - 1) / kBlockTokens + 3) +
                          CeilDiv(request.max_batched_tokens, kBlockTokens);
  const int64_t cached =
      request.window_cache_pages < 0 ? 2 * request.max_sequences : request.window_cache_pages;
  plan.num_window_pages = running + cached;
  plan.window_pool_bytes = plan.num_window_pages * geometry.BytesPerWindowPage();
  plan.slot_pool_bytes = plan.num_slots * geometry.BytesPerSlot();

  int64_t context = config.max_position_embeddings;
  if (request.max_model_len > 0) context = std::min(context, request.max_model_len);
  if (request.cache_tokens > 0) {
    context = std::min(context, CeilDiv(request.cache_tokens, kBlockTokens) * kBlockTokens);
  }
  const int64_t step_logit_rows =
      std::min(request.max_batched_tokens, request.max_sequences + request.max_prompt_logit_rows);
  // Drafting passes and steps take turns, and use the same memory.
  plan.step_logit_rows = std::max(step_logit_rows, request.max_sequences * request.draft_tokens);
  plan.logits_bytes = plan.step_logit_rows * config.vocab_size * 4;
  const int64_t table_pages = (plan.history_tokens + request.max_batched_tokens) / kBlockTokens + 2;
  plan.scratch_bytes = StepScratchBytes(
      config, {.rows = request.max_batched_tokens,
               .sequences = std::min(request.max_sequences, request.max_batched_tokens),
               .logit_rows = step_logit_rows,
               .context = context,
               .table_pages = table_pages,
               .drops_rows = request.drops_rows,
               .drafts = drafting,
               .num_threads = request.num_threads,
               .gpu = gpu});
  if (drafting) {
    plan.scratch_bytes =
        std::max(plan.scratch_bytes, DraftScratchBytes(config, {.sequences = request.max_sequences,
                                                                .block = request.draft_tokens,
                                                                .table_pages = table_pages,
                                                                .num_threads = request.num_threads,
                                                                .gpu = gpu}));
  }

  const int64_t block_bytes = std::max<int64_t>(1, geometry.BytesPerBlock());
  if (request.cache_tokens > 0) {
    plan.num_blocks = CeilDiv(request.cache_tokens, kBlockTokens);
  } else {
    constexpr int64_t kTokensPerFurtherSequence = 8192;
    const int64_t wanted = CeilDiv(context, kBlockTokens) +
                           (request.max_sequences - 1) *
                               CeilDiv(std::min(kTokensPerFurtherSequence, context), kBlockTokens);
    plan.host_bytes = gpu ? 0 : HostBytes(config, plan);
    const int64_t left = std::max<int64_t>(0, request.memory_bytes - plan.total_bytes());
    plan.num_blocks = gpu ? left / block_bytes : std::min(wanted, left / 2 / block_bytes);
    plan.num_blocks = std::max<int64_t>(1, plan.num_blocks);
  }
  plan.block_pool_bytes = plan.num_blocks * geometry.BytesPerBlock();
  plan.host_bytes = gpu ? 0 : HostBytes(config, plan);
  plan.max_sequence_tokens = std::min(context, plan.num_blocks * kBlockTokens);
  return plan;
}

Status CheckFits(const MemoryPlan& plan, const MemoryRequest& request) {
  const int64_t need = plan.total_bytes();
  if (need <= plan.memory_bytes) return {};
  std::vector<MemoryItem> items = plan.Items();
  std::stable_sort(items.begin(), items.end(),
                   [](const MemoryItem& a, const MemoryItem& b) { return a.bytes > b.bytes; });
  std::string largest;
  for (size_t i = 0; i < std::min<size_t>(3, items.size()); ++i) {
    largest += fmt::format("{}{} {}", largest.empty() ? "" : ", ", items[i].name,
                           Gigabytes(items[i].bytes));
  }
  return Fail(
      Code::kResourceExhausted,
      fmt::format("The memory plan needs {}, and {} may be used; most goes to {}. Options that "
                  "lower the need: cache_tokens (now {}), max_num_seqs (now {}), "
                  "max_num_batched_tokens (now {}), max_model_len (now {}).",
                  Gigabytes(need), Gigabytes(plan.memory_bytes), largest,
                  plan.num_blocks * kBlockTokens, request.max_sequences, request.max_batched_tokens,
                  plan.max_sequence_tokens));
}

int64_t UsableHostMemoryBytes() {
  int64_t bytes = static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) *
                  static_cast<int64_t>(::sysconf(_SC_PAGE_SIZE));
  bytes = std::min({bytes, NumberIn("/sys/fs/cgroup/memory.max"),
                    NumberIn("/sys/fs/cgroup/memory/memory.limit_in_bytes")});
  ::rlimit limit = {};
  if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      limit.rlim_cur < static_cast<rlim_t>(bytes)) {
    bytes = static_cast<int64_t>(limit.rlim_cur);
  }
  return bytes;
}

ProcessMemory MeasureProcessMemory() {
  ProcessMemory memory;
  std::ifstream status("/proc/self/status");
  std::string key;
  int64_t kilobytes = 0;
  while (status >> key) {
    if (key == "VmHWM:" && status >> kilobytes) memory.peak_resident_bytes = kilobytes * 1024;
    if (key == "RssAnon:" && status >> kilobytes) memory.resident_bytes = kilobytes * 1024;
    status.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return memory;
}

}  // namespace deepinfer
