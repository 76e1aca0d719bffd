#include "runtime/executor.h"

#include <unistd.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/log.h"
#include "model/engram_token_map.h"
#include "model/inventory.h"
#include "model/model.h"
#include "runtime/memory_plan.h"
#include "tensor/copy.h"
#include "tensor/stream.h"

namespace deepinfer {
namespace {

int64_t PhysicalMemoryBytes() {
  return static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGESIZE);
}

}  // namespace

struct Executor::Impl {
  Impl(ExecutorOptions opts, Model loaded, CachePool cache_pool, std::vector<int32_t> map,
       std::unique_ptr<Stream> cpu_stream)
      : options(std::move(opts)),
        stream(std::move(cpu_stream)),
        model(std::move(loaded)),
        pool(std::move(cache_pool)),
        token_map(std::move(map)) {}

  ExecutorOptions options;
  std::unique_ptr<Stream> stream;
  Model model;
  CachePool pool;
  CacheViews caches;
  std::vector<int32_t> token_map;  // token id -> compressed id of the n-gram tables
  std::vector<int64_t> ratios;     // distinct compression ratios
  Buffer logits;                   // of the last step, on the device
  Buffer host_logits;              // the same on the host; unused when the device is the host

  Status Validate(std::span<const Chunk> chunks) const;
  Result<TensorView> Run(std::span<const Chunk> chunks, LayerTrace* trace);
};

Executor::Executor() = default;
Executor::~Executor() = default;

Result<std::unique_ptr<Executor>> Executor::Create(const ExecutorOptions& options) {
  if (options.num_threads < 0 || options.num_threads > 4096) {
    return Fail(Code::kInvalidArgument,
                fmt::format("num_threads is {}; allowed are 0 (one per usable core) to 4096.",
                            options.num_threads),
                "num_threads");
  }
  if (options.max_sequences < 1 || options.max_sequences > 65536) {
    return Fail(Code::kInvalidArgument,
                fmt::format("max_sequences is {}; allowed are 1 to 65536.", options.max_sequences),
                "max_sequences");
  }
  if (options.cache_tokens < 0 || options.cache_tokens > (int64_t{1} << 36)) {
    return Fail(Code::kInvalidArgument,
                fmt::format("cache_tokens is {}; allowed are 0 (chosen from the memory) to 2^36.",
                            options.cache_tokens),
                "cache_tokens");
  }
  DI_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(options.model_dir));
  DI_ASSIGN_OR_RETURN(Checkpoint opened, Checkpoint::Open(options.model_dir));
  auto checkpoint = std::make_shared<const Checkpoint>(std::move(opened));
  DI_RETURN_IF_ERROR(CheckInventory(*checkpoint, config));
  DI_ASSIGN_OR_RETURN(std::vector<int32_t> token_map,
                      LoadEngramTokenMap(config, options.model_dir + "/tokenizer.json"));

  const int usable_cores = UsableCores();
  if (options.num_threads > usable_cores) {
    Log(LogLevel::kWarn,
        "more threads than usable cores make every step slower threads={} usable_cores={}",
        options.num_threads, usable_cores);
  }
  DI_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream,
                      Stream::Create(options.num_threads > 0 ? options.num_threads : usable_cores));
  stream->set_cpu_level(options.max_cpu_level);
  stream->set_use_reference(options.use_reference_ops);
  DI_ASSIGN_OR_RETURN(ModelWeights weights,
                      LoadModelWeights(std::move(checkpoint), config, *stream));
  const int64_t weight_bytes = weights.packed_bytes;

  const MemoryPlan plan =
      PlanMemory(config, options.max_sequences, options.cache_tokens, PhysicalMemoryBytes());
  DI_ASSIGN_OR_RETURN(CachePool pool, CachePool::Create(MakeCacheGeometry(config), stream->device(),
                                                        plan.num_blocks, plan.num_slots));
  Log(LogLevel::kInfo,
      "model loaded dir={} weight_bytes={} cache_blocks={} cache_bytes={} slots={} slot_bytes={} "
      "threads={} kernels={}",
      options.model_dir, weight_bytes, plan.num_blocks, plan.block_pool_bytes, plan.num_slots,
      plan.slot_pool_bytes, stream->pool().num_threads(), CpuLevelName(stream->cpu_level()));

  std::unique_ptr<Executor> executor(new Executor());
  executor->impl_ =
      std::make_unique<Impl>(options, Model(config, std::move(weights), options.numerics),
                             std::move(pool), std::move(token_map), std::move(stream));
  Impl& impl = *executor->impl_;
  for (size_t p = 0; p < config.kv_source_layer_ids.size(); ++p) {
    const auto producer = static_cast<int64_t>(p);
    impl.caches.kv_blocks.push_back(impl.pool.KvBlocks(producer));
    impl.caches.index_blocks.push_back(impl.pool.IndexBlocks(producer));
    impl.caches.remainders.push_back(impl.pool.Remainders(producer));
    const int64_t ratio = config.ratio(config.kv_source_layer_ids[p]);
    if (std::find(impl.ratios.begin(), impl.ratios.end(), ratio) == impl.ratios.end())
      impl.ratios.push_back(ratio);
  }
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    impl.caches.rings.push_back(impl.pool.WindowRings(layer));
  }
  return executor;
}

const ModelConfig& Executor::config() const {
  return impl_->model.config();
}

const ExecutorOptions& Executor::options() const {
  return impl_->options;
}

CachePool& Executor::pool() {
  return impl_->pool;
}

int Executor::num_threads() const {
  return impl_->stream->pool().num_threads();
}

Result<TensorView> Executor::Step(std::span<const Chunk> chunks, LayerTrace* trace) {
  DI_RETURN_IF_ERROR(impl_->Validate(chunks));
  int64_t needed = 0;
  for (const Chunk& chunk : chunks)
    needed += chunk.sequence->BlocksNeeded(static_cast<int64_t>(chunk.token_ids.size()));
  if (needed > impl_->pool.num_free_blocks()) {
    return Fail(
        Code::kResourceExhausted,
        fmt::format("The step needs {} more cache blocks of {} tokens; {} of {} are free.", needed,
                    kBlockTokens, impl_->pool.num_free_blocks(), impl_->pool.num_blocks()));
  }
  for (const Chunk& chunk : chunks) {
    DI_RETURN_IF_ERROR(chunk.sequence->Reserve(static_cast<int64_t>(chunk.token_ids.size())));
  }
  DI_ASSIGN_OR_RETURN(const TensorView logits, impl_->Run(chunks, trace));
  for (const Chunk& chunk : chunks) {
    chunk.sequence->Append(chunk.token_ids.data(), static_cast<int64_t>(chunk.token_ids.size()));
  }
  return logits;
}

Status Executor::Impl::Validate(std::span<const Chunk> chunks) const {
  const ModelConfig& config = model.config();
  if (chunks.empty())
    return Fail(Code::kInvalidArgument, "A step needs at least one chunk.", "chunks");
  std::unordered_set<const Sequence*> seen;
  for (const Chunk& chunk : chunks) {
    if (chunk.sequence == nullptr || !seen.insert(chunk.sequence).second) {
      return Fail(Code::kInvalidArgument, "Every chunk of a step needs a sequence of its own.",
                  "sequence");
    }
    const auto count = static_cast<int64_t>(chunk.token_ids.size());
    if (count == 0) return Fail(Code::kInvalidArgument, "A chunk holds no tokens.", "token_ids");
    if (chunk.num_logit_rows < 0 || chunk.num_logit_rows > count) {
      return Fail(
          Code::kInvalidArgument,
          fmt::format("num_logit_rows is {}; allowed are 0 to {}.", chunk.num_logit_rows, count),
          "num_logit_rows");
    }
    if (chunk.sequence->num_tokens() + count > config.max_position_embeddings) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("The sequence would have {} tokens; the model's context holds {}.",
                              chunk.sequence->num_tokens() + count, config.max_position_embeddings),
                  "token_ids");
    }
    for (int32_t id : chunk.token_ids) {
      if (id < 0 || id >= config.vocab_size) {
        return Fail(Code::kInvalidArgument,
                    fmt::format("Token id {} is outside the vocabulary; allowed are 0 to {}.", id,
                                config.vocab_size - 1),
                    "token_ids");
      }
    }
  }
  return {};
}

Result<TensorView> Executor::Impl::Run(std::span<const Chunk> chunks, LayerTrace* trace) {
  const ModelConfig& config = model.config();
  const auto num_sequences = static_cast<int64_t>(chunks.size());
  const int64_t ngram = config.engram_max_ngram_size;
  std::vector<int32_t> ids, positions, row_sequence, start, slots, lookback, logit_rows,
      block_table;
  struct HostEntries {
    std::vector<int32_t> last_row, sequence, index;
  };
  std::vector<HostEntries> entries(ratios.size());
  int64_t max_blocks = 1;
  for (const Chunk& chunk : chunks) {
    max_blocks = std::max(max_blocks, static_cast<int64_t>(chunk.sequence->blocks().size()));
  }
  const int32_t pad = token_map[static_cast<size_t>(config.engram_pad_token_id)];
  for (int64_t s = 0; s < num_sequences; ++s) {
    const Chunk& chunk = chunks[static_cast<size_t>(s)];
    const std::vector<int32_t>& history = chunk.sequence->token_ids();
    const int64_t before = chunk.sequence->num_tokens();
    const auto count = static_cast<int64_t>(chunk.token_ids.size());
    const auto first_row = static_cast<int64_t>(ids.size());
    start.push_back(static_cast<int32_t>(first_row));
    slots.push_back(chunk.sequence->slot());
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = before + i;
      ids.push_back(chunk.token_ids[static_cast<size_t>(i)]);
      positions.push_back(static_cast<int32_t>(position));
      row_sequence.push_back(static_cast<int32_t>(s));
      for (int64_t shift = 0; shift < ngram; ++shift) {
        const int64_t at = position - shift;
        const int32_t id = at >= before ? chunk.token_ids[static_cast<size_t>(at - before)]
                           : at >= 0    ? history[static_cast<size_t>(at)]
                                        : -1;
        lookback.push_back(id < 0 ? pad : token_map[static_cast<size_t>(id)]);
      }
      for (size_t r = 0; r < ratios.size(); ++r) {
        if ((position + 1) % ratios[r] != 0) continue;
        entries[r].last_row.push_back(static_cast<int32_t>(first_row + i));
        entries[r].sequence.push_back(static_cast<int32_t>(s));
        entries[r].index.push_back(static_cast<int32_t>(position / ratios[r]));
      }
    }
    for (int64_t i = count - chunk.num_logit_rows; i < count; ++i)
      logit_rows.push_back(static_cast<int32_t>(first_row + i));
    const std::vector<int32_t>& blocks = chunk.sequence->blocks();
    block_table.insert(block_table.end(), blocks.begin(), blocks.end());
    block_table.resize(static_cast<size_t>((s + 1) * max_blocks), -1);
  }
  start.push_back(static_cast<int32_t>(ids.size()));
  const auto rows = static_cast<int64_t>(ids.size());

  ScratchScope scratch(*stream);
  const auto upload = [&](const std::vector<int32_t>& values,
                          std::initializer_list<int64_t> shape) -> Result<TensorView> {
    const TensorView view = scratch.Tensor(DType::kI32, shape);
    DI_RETURN_IF_ERROR(CopyToDevice(values.data(), view, *stream));
    return view;
  };
  StepBatch batch;
  DI_ASSIGN_OR_RETURN(batch.token_ids, upload(ids, {rows}));
  DI_ASSIGN_OR_RETURN(batch.layout.positions, upload(positions, {rows}));
  DI_ASSIGN_OR_RETURN(batch.layout.row_sequence, upload(row_sequence, {rows}));
  DI_ASSIGN_OR_RETURN(batch.layout.sequence_start, upload(start, {num_sequences + 1}));
  DI_ASSIGN_OR_RETURN(batch.layout.sequence_slot, upload(slots, {num_sequences}));
  DI_ASSIGN_OR_RETURN(batch.layout.block_table, upload(block_table, {num_sequences, max_blocks}));
  DI_ASSIGN_OR_RETURN(batch.engram_lookback, upload(lookback, {rows, ngram}));
  DI_ASSIGN_OR_RETURN(batch.logit_rows,
                      upload(logit_rows, {static_cast<int64_t>(logit_rows.size())}));
  for (size_t r = 0; r < ratios.size(); ++r) {
    const auto count = static_cast<int64_t>(entries[r].index.size());
    CompressedEntries view;
    view.ratio = ratios[r];
    DI_ASSIGN_OR_RETURN(view.last_row, upload(entries[r].last_row, {count}));
    DI_ASSIGN_OR_RETURN(view.sequence, upload(entries[r].sequence, {count}));
    DI_ASSIGN_OR_RETURN(view.index, upload(entries[r].index, {count}));
    batch.entries.push_back(view);
  }

  const auto num_logits = static_cast<int64_t>(logit_rows.size());
  const int64_t logit_bytes = num_logits * config.vocab_size * 4;
  if (logits.bytes() < logit_bytes) {
    DI_ASSIGN_OR_RETURN(logits, Buffer::Allocate(stream->device(), logit_bytes));
  }
  const TensorView logit_view = logits.View(DType::kF32, {num_logits, config.vocab_size});
  DI_RETURN_IF_ERROR(model.Forward(batch, caches, logit_view, trace, *stream));
  if (stream->device().kind == DeviceKind::kCpu) return logit_view;
  if (host_logits.bytes() < logit_bytes) {
    DI_ASSIGN_OR_RETURN(host_logits, Buffer::Allocate({}, logit_bytes));
  }
  DI_RETURN_IF_ERROR(CopyToHost(logit_view, host_logits.data(), *stream));
  return host_logits.View(DType::kF32, {num_logits, config.vocab_size});
}

}  // namespace deepinfer
