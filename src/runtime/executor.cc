#include "runtime/executor.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "base/ceil_div.h"
#include "base/check.h"
#include "base/log.h"
#include "model/decoder_replay.h"
#include "model/drafting.h"
#include "model/engram_token_map.h"
#include "model/inventory.h"
#include "model/model.h"
#include "ops/sample_rows/sample_rows.h"
#include "runtime/device_choice.h"
#include "runtime/step_graphs.h"
#include "runtime/step_upload.h"
#include "tensor/copy.h"
#include "tensor/cuda_device.h"
#include "tensor/stream.h"

namespace deepinfer {
namespace {

void LogPlan(const MemoryPlan& plan) {
  for (const MemoryItem& item : plan.Items()) {
    Log(LogLevel::kInfo, "memory planned pool='{}' bytes={} units={} unit_bytes={}", item.name,
        item.bytes, item.units, item.unit_bytes);
  }
  Log(LogLevel::kInfo,
      "memory planned total_bytes={} usable_bytes={} mapped_bytes={} longest_sequence={} "
      "longest_sequences_that_fit={}",
      plan.total_bytes(), plan.memory_bytes, plan.weights.mapped_bytes(), plan.max_sequence_tokens,
      plan.SequencesThatFit(plan.max_sequence_tokens));
}

// Of Impl::sampled, beside tokens.
constexpr int32_t kNothingSampled = -1;
constexpr int32_t kSampledOnDevice = -2;

// A step on its way through the device, and its memory on the host: two take turns.
struct Lane {
  Buffer staging;       // page-locked: index arrays on their way to a GPU
  Buffer draw_staging;  // the same for draws
  Buffer results;       // drawn rows, then logits
  int64_t num_draws = 0;
  int64_t num_host_rows = 0;
  TensorView logits;  // of the step, on the device
  Status drawn;       // whether the draws are in the stream
  void* event = nullptr;
};

int64_t ResultBytes(int64_t num_draws) {
  return RoundUpScratch(num_draws * static_cast<int64_t>(sizeof(SampledRow)));
}

}  // namespace

struct Executor::Impl {
  Impl(ExecutorOptions opts, Model loaded, CacheMemory cache_memory, std::vector<int32_t> map,
       std::unique_ptr<Stream> cpu_stream)
      : options(std::move(opts)),
        stream(std::move(cpu_stream)),
        model(std::move(loaded)),
        memory(std::move(cache_memory)),
        token_map(std::move(map)) {}
  ~Impl() {
    for (Lane& lane : lanes) {
      if (lane.event != nullptr) cuda::DestroyEvent(lane.event);
    }
  }

  ExecutorOptions options;
  MemoryPlan memory_plan;
  int64_t weight_bytes = 0;  // that the weights really take
  std::unique_ptr<Stream> stream;
  Model model;
  CacheMemory memory;
  CacheViews caches;
  std::vector<int32_t> token_map;  // token id -> compressed id of the n-gram tables
  std::vector<int64_t> ratios;     // distinct compression ratios
  std::vector<int32_t> sampled;    // per slot: the latest token, or one of the above
  Buffer token_map_on_device;      // [vocab] i32
  Buffer sampled_on_device;        // [slots] i32
  Buffer logits;                   // of the last step, on the device
  Buffer host_logits;              // the same on the host; unused when the device is the host
  std::array<Lane, 2> lanes;
  int64_t begun = 0;  // steps
  int64_t drawn = 0;
  int64_t finished = 0;
  std::unique_ptr<StepGraphs> graphs;  // of decoding steps; null where they are not used
  std::unique_ptr<Drafter> drafter;    // null: no drafting

  // Who uses a unit in the step that is being checked: 1 + its chunk, negative if it only reads.
  std::vector<int32_t> block_users, page_users, slot_users;

  Status Validate(const StepPlan& plan);
  Status ValidateRows(const StepChunk& chunk) const;
  Status ValidateUnits(const StepChunk& chunk) const;
  Status ClaimUnits(const StepPlan& plan);
  // Puts the rows into the stream. Result: the logits on the device.
  Result<TensorView> Launch(std::span<const StepChunk> chunks, Lane& lane, LayerTrace* trace);
  // Puts draws from the lane's logits into the stream.
  Status Draw(std::span<const ListedDraw> draws, std::span<const int32_t> host_rows, Lane& lane);
  // Memory that the device can write later.
  Result<Buffer> HostBuffer(int64_t bytes) const;
  // Whether every chunk is one row whose logits are wanted.
  bool IsDecodingStep(std::span<const StepChunk> chunks) const;
  // 0 where only the device knows.
  int32_t TokenOf(const StepChunk& chunk, int64_t row) const {
    return chunk.tokens.empty() ? std::max(0, sampled[static_cast<size_t>(chunk.slot)])
                                : chunk.tokens[static_cast<size_t>(row)];
  }
  bool IsOnDevice(const StepChunk& chunk) const {
    return chunk.tokens.empty() && chunk.slot < std::ssize(sampled) &&
           sampled[static_cast<size_t>(chunk.slot)] == kSampledOnDevice;
  }
};

Executor::Executor() = default;
Executor::~Executor() {
  if (impl_ == nullptr) return;
  const MemoryUse use = memory_use();
  const MemoryPlan& plan = memory_plan();
  Log(LogLevel::kInfo,
      "memory used weight_bytes={} of_planned={} step_buffer_bytes={} of_planned={} "
      "resident_bytes={} of_planned={} peak_with_mapped_files_bytes={}",
      use.weight_bytes, plan.weights.resident_bytes(), use.peak_scratch_bytes, plan.scratch_bytes,
      use.process.resident_bytes, plan.total_bytes(), use.process.peak_resident_bytes);
}

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
  const auto check = [](const char* name, int64_t value, int64_t least, int64_t most) -> Status {
    if (value >= least && value <= most) return {};
    return Fail(Code::kInvalidArgument,
                fmt::format("{} is {}; allowed are {} to {}.", name, value, least, most), name);
  };
  DI_RETURN_IF_ERROR(check("max_batched_tokens", options.max_batched_tokens, 1, int64_t{1} << 24));
  DI_RETURN_IF_ERROR(check("rollback_tokens", options.rollback_tokens, 0, 1024));
  DI_RETURN_IF_ERROR(check("window_cache_pages", options.window_cache_pages, -1, int64_t{1} << 24));
  DI_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(options.model_dir));
  if (config.engram_max_ngram_size - 1 > kMaxLookback) {
    return Fail(Code::kUnsupported,
                fmt::format("engram_max_ngram_size is {}; steps carry {} tokens of history, enough "
                            "for {}.",
                            config.engram_max_ngram_size, kMaxLookback, kMaxLookback + 1),
                "text_config.engram_max_ngram_size");
  }
  if (options.replay != ReplayMode::kOff) DI_RETURN_IF_ERROR(CheckDecoderReplay(config));
  DI_RETURN_IF_ERROR(CheckDrafting(config, options.draft_tokens, options.force_draft_tokens));
  const bool drafting = options.draft_tokens > 0;
  if (drafting && options.rollback_tokens <= options.draft_tokens) {
    return Fail(
        Code::kInvalidArgument,
        fmt::format("rollback_tokens is {}; with blocks of {} drafted tokens at least {} "
                    "are needed.",
                    options.rollback_tokens, options.draft_tokens, options.draft_tokens + 1),
        "rollback_tokens");
  }
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
  const int num_threads = options.num_threads > 0 ? options.num_threads : usable_cores;
  const bool gpu = options.device.kind == DeviceKind::kCuda;
  if (gpu && options.use_reference_ops) {
    return Fail(
        Code::kUnsupported,
        "The plain reference of the operations runs on the CPU only; choose the device cpu.",
        "device");
  }
  DI_ASSIGN_OR_RETURN(
      std::unique_ptr<Stream> stream,
      gpu ? Stream::CreateCuda(options.device.index, num_threads) : Stream::Create(num_threads));
  int64_t usable_bytes = options.memory_bytes;
  if (usable_bytes == 0) {
    usable_bytes = UsableHostMemoryBytes();
    if (gpu) {
      // What the runtime itself takes for kernels and graphs is not in the plan.
      DI_ASSIGN_OR_RETURN(const int64_t free_bytes, cuda::FreeMemoryBytes(options.device.index));
      usable_bytes = free_bytes - free_bytes / 20;
    }
  }
  stream->set_cpu_level(options.max_cpu_level);
  stream->set_use_reference(options.use_reference_ops);
  const MemoryRequest request{.max_sequences = options.max_sequences,
                              .cache_tokens = options.cache_tokens,
                              .max_model_len = options.max_model_len,
                              .max_batched_tokens = options.max_batched_tokens,
                              .max_prompt_logit_rows = options.max_prompt_logit_rows,
                              .rollback_tokens = options.rollback_tokens,
                              .draft_tokens = options.draft_tokens,
                              .window_cache_pages = options.window_cache_pages,
                              .cache_format = options.cache_format,
                              .drops_rows = options.replay == ReplayMode::kCompact,
                              .num_threads = stream->pool().num_threads(),
                              .gpu_ranks = gpu ? 1 : 0,
                              .engram_on_host = options.engram_memory == TableMemory::kPinnedHost,
                              .memory_bytes = usable_bytes};
  const MemoryPlan plan = PlanMemory(config, request);
  LogPlan(plan);
  DI_RETURN_IF_ERROR(CheckFits(plan, request));
  DI_RETURN_IF_ERROR(stream->ReserveScratch(plan.scratch_bytes));
  DI_ASSIGN_OR_RETURN(Buffer logits, Buffer::Allocate(stream->device(), plan.logits_bytes));
  DI_ASSIGN_OR_RETURN(
      ModelWeights weights,
      LoadModelWeights(std::move(checkpoint), config, options.engram_memory, drafting, *stream));
  DI_RETURN_IF_ERROR(stream->Synchronize());
  const int64_t weight_bytes = weights.packed_bytes;

  DI_ASSIGN_OR_RETURN(
      CacheMemory memory,
      CacheMemory::Create(
          MakeCacheGeometry(config, options.rollback_tokens, options.cache_format, drafting),
          stream->device(), plan.num_blocks, plan.num_window_pages, plan.num_slots, gpu));
  Log(LogLevel::kInfo, "model loaded dir={} device={} weight_bytes={} threads={} kernels={}",
      options.model_dir, DeviceName(stream->device()), weight_bytes, stream->pool().num_threads(),
      gpu ? "cuda" : CpuLevelName(stream->cpu_level()));

  std::unique_ptr<Executor> executor(new Executor());
  executor->impl_ =
      std::make_unique<Impl>(options, Model(config, std::move(weights), options.numerics),
                             std::move(memory), std::move(token_map), std::move(stream));
  Impl& impl = *executor->impl_;
  impl.memory_plan = plan;
  impl.weight_bytes = weight_bytes;
  impl.logits = std::move(logits);
  if (gpu && options.use_graphs && cuda::RecordsGraphs())
    impl.graphs = std::make_unique<StepGraphs>();
  for (size_t p = 0; p < config.kv_source_layer_ids.size(); ++p) {
    const auto producer = static_cast<int64_t>(p);
    impl.caches.kv_blocks.push_back(impl.memory.KvBlocks(producer));
    impl.caches.index_blocks.push_back(impl.memory.IndexBlocks(producer));
    impl.caches.remainders.push_back(impl.memory.Remainders(producer));
    const int64_t ratio = config.ratio(config.kv_source_layer_ids[p]);
    if (std::find(impl.ratios.begin(), impl.ratios.end(), ratio) == impl.ratios.end())
      impl.ratios.push_back(ratio);
  }
  for (int64_t layer = 0; layer < impl.memory.geometry().num_layers; ++layer) {
    impl.caches.window_pages.push_back(impl.memory.WindowPages(layer));
  }
  if (drafting) {
    DI_ASSIGN_OR_RETURN(Drafter drafter, Drafter::Create(config, options.draft_tokens,
                                                         options.max_sequences, *impl.stream));
    impl.drafter = std::make_unique<Drafter>(std::move(drafter));
  }
  impl.sampled.assign(static_cast<size_t>(plan.num_slots), kNothingSampled);
  const Device device = impl.stream->device();
  const int64_t map_bytes = std::ssize(impl.token_map) * 4;
  DI_ASSIGN_OR_RETURN(impl.token_map_on_device, Buffer::Allocate(device, map_bytes));
  DI_RETURN_IF_ERROR(CopyToDevice(
      impl.token_map.data(),
      impl.token_map_on_device.View(DType::kI32, {std::ssize(impl.token_map)}), *impl.stream));
  DI_ASSIGN_OR_RETURN(impl.sampled_on_device, Buffer::AllocateZeroed(device, plan.num_slots * 4));
  if (gpu) {
    for (Lane& lane : impl.lanes) {
      DI_ASSIGN_OR_RETURN(lane.event, cuda::CreateEvent(device.index));
    }
  }
  DI_RETURN_IF_ERROR(impl.stream->Synchronize());
  impl.block_users.assign(static_cast<size_t>(plan.num_blocks), 0);
  impl.page_users.assign(static_cast<size_t>(plan.num_window_pages), 0);
  impl.slot_users.assign(static_cast<size_t>(plan.num_slots), 0);
  return executor;
}

const ModelConfig& Executor::config() const {
  return impl_->model.config();
}

const ExecutorOptions& Executor::options() const {
  return impl_->options;
}

const MemoryPlan& Executor::memory_plan() const {
  return impl_->memory_plan;
}

MemoryUse Executor::memory_use() const {
  return {.weight_bytes = impl_->weight_bytes,
          .peak_scratch_bytes = impl_->stream->peak_scratch_bytes(),
          .held_scratch_bytes = impl_->stream->held_scratch_bytes(),
          .logits_bytes = impl_->logits.bytes(),
          .process = MeasureProcessMemory()};
}

CacheMemory& Executor::memory() {
  return impl_->memory;
}

ThreadPool& Executor::thread_pool() {
  return impl_->stream->pool();
}

int Executor::num_threads() const {
  return impl_->stream->pool().num_threads();
}

void Executor::SetSampledToken(int32_t slot, int32_t token) {
  DI_CHECK(slot >= 0 && slot < std::ssize(impl_->sampled));
  DI_CHECK(token >= 0 && token < config().vocab_size);
  impl_->sampled[static_cast<size_t>(slot)] = token;
}

Result<Drafts> Executor::Draft(std::span<const DraftChunk> chunks, bool want_logits,
                               DraftChooser* chooser) {
  if (impl_->drafter == nullptr)
    return Fail(Code::kInvalidArgument, "The executor was made without drafting.", "draft_tokens");
  const int64_t rows = std::ssize(chunks) * impl_->drafter->block();
  const int64_t vocab = config().vocab_size;
  if (rows * vocab * 4 > impl_->logits.bytes()) {
    return Fail(Code::kInvalidArgument,
                fmt::format("A drafting pass has {} chunks; allowed are 1 to {}.", chunks.size(),
                            options().max_sequences),
                "chunks");
  }
  return impl_->drafter->Run(impl_->model, impl_->caches, impl_->memory, chunks,
                             impl_->logits.View(DType::kF32, {rows, vocab}), want_logits, chooser,
                             *impl_->stream);
}

Status Executor::SetDraftTemperatures(std::span<const float> temperatures) {
  if (impl_->drafter == nullptr)
    return Fail(Code::kInvalidArgument, "The executor was made without drafting.", "draft_tokens");
  return impl_->drafter->SetTemperatures(temperatures, *impl_->stream);
}

Result<TensorView> Executor::Step(const StepPlan& plan, LayerTrace* trace) {
  Impl& impl = *impl_;
  DI_CHECK_EQ(impl.begun, impl.finished);
  DI_RETURN_IF_ERROR(impl.Validate(plan));
  DI_RETURN_IF_ERROR(impl.memory.Execute(plan.commands, *impl.stream));
  if (plan.chunks.empty())
    return TensorView(static_cast<void*>(nullptr), DType::kF32, {0, config().vocab_size});
  DI_ASSIGN_OR_RETURN(const TensorView logits, impl.Launch(plan.chunks, impl.lanes[0], trace));
  if (impl.stream->device().kind == DeviceKind::kCpu) return logits;
  const int64_t bytes = logits.num_elements() * 4;
  if (impl.host_logits.bytes() < bytes) {
    DI_ASSIGN_OR_RETURN(impl.host_logits, Buffer::AllocatePinned(bytes));
  }
  DI_RETURN_IF_ERROR(CopyToHost(logits, impl.host_logits.data(), *impl.stream));
  return impl.host_logits.View(DType::kF32, {logits.rows(), config().vocab_size});
}

Status Executor::BeginStep(const StepPlan& plan) {
  Impl& impl = *impl_;
  DI_CHECK_EQ(impl.begun, impl.drawn);
  DI_CHECK_LE(impl.drawn - impl.finished, 1);
  DI_RETURN_IF_ERROR(impl.Validate(plan));
  DI_RETURN_IF_ERROR(impl.memory.Execute(plan.commands, *impl.stream));
  Lane& lane = impl.lanes[static_cast<size_t>(impl.begun % 2)];
  lane.logits = {};
  if (!plan.chunks.empty()) {
    Result<TensorView> logits = impl.Launch(plan.chunks, lane, nullptr);
    if (!logits.has_value()) {
      // What is in the stream still reads the lane's memory.
      static_cast<void>(impl.stream->Synchronize());
      return tl::unexpected<Error>(std::move(logits.error()));
    }
    lane.logits = *logits;
  }
  ++impl.begun;
  return {};
}

void Executor::DrawStep(std::span<const ListedDraw> draws, std::span<const int32_t> host_rows) {
  Impl& impl = *impl_;
  DI_CHECK_EQ(impl.begun, impl.drawn + 1);
  Lane& lane = impl.lanes[static_cast<size_t>(impl.drawn++ % 2)];
  lane.drawn = impl.Draw(draws, host_rows, lane);
  if (!lane.drawn.has_value()) static_cast<void>(impl.stream->Synchronize());
}

Status Executor::Impl::Draw(std::span<const ListedDraw> draws, std::span<const int32_t> host_rows,
                            Lane& lane) {
  const int64_t vocab = model.config().vocab_size;
  lane.num_draws = std::ssize(draws);
  lane.num_host_rows = std::ssize(host_rows);
  const int64_t bytes = ResultBytes(lane.num_draws) + lane.num_host_rows * vocab * 4;
  if (lane.results.bytes() < bytes) {
    DI_ASSIGN_OR_RETURN(lane.results, HostBuffer(bytes));
  }
  if (!draws.empty()) {
    std::vector<RowDraw> rows;
    std::vector<RowEdit> edits;
    std::vector<int32_t> tokens;
    std::vector<uint32_t> masks;
    const auto words = static_cast<size_t>((vocab + 31) / 32);
    for (const ListedDraw& from : draws) {
      const RowLists& lists = from.lists;
      RowDraw& row = rows.emplace_back(from.draw);
      DI_CHECK(row.logit_row >= 0 && row.logit_row < lane.logits.rows());
      DI_CHECK(row.slot >= -1 && row.slot < memory.num_slots());
      const auto append = [](auto& all, const auto& list, int32_t* begin, int32_t* end) {
        *begin = static_cast<int32_t>(all.size());
        all.insert(all.end(), list.begin(), list.end());
        *end = static_cast<int32_t>(all.size());
      };
      append(edits, lists.edits, &row.edits_begin, &row.edits_end);
      append(tokens, lists.excluded, &row.excluded_begin, &row.excluded_end);
      append(tokens, lists.ends, &row.ends_begin, &row.ends_end);
      if (!lists.mask.empty()) {
        DI_CHECK_EQ(lists.mask.size(), words);
        row.mask = static_cast<int32_t>(masks.size() / words);
        masks.insert(masks.end(), lists.mask.begin(), lists.mask.end());
      }
      if (row.slot >= 0) sampled[static_cast<size_t>(row.slot)] = kSampledOnDevice;
    }
    ScratchScope scratch(*stream);
    SampleRowsArgs args;
    args.logits = lane.logits;
    args.sampled = sampled_on_device.View(DType::kI32, {memory.num_slots()});
    args.out = scratch.Tensor(DType::kU8, {lane.num_draws, sizeof(SampledRow)});
    StepUpload upload;
    const auto add = [&upload]<class T>(const std::vector<T>& values, TensorView* target) {
      constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
      upload.Add(values.data(), std::ssize(values) * kBytes, DType::kU8,
                 {std::ssize(values), kBytes}, target);
    };
    add(rows, &args.draws);
    add(edits, &args.edits);
    upload.Add(tokens, {std::ssize(tokens)}, &args.tokens);
    const auto words_per_mask = static_cast<int64_t>(words);
    upload.Add(masks.data(), std::ssize(masks) * 4, DType::kI32,
               {std::ssize(masks) / words_per_mask, words_per_mask}, &args.masks);
    DI_RETURN_IF_ERROR(upload.Finish(scratch, &lane.draw_staging, *stream));
    DI_RETURN_IF_ERROR(SampleRows(args, *stream));
    DI_RETURN_IF_ERROR(CopyToHostInOrder(args.out, lane.results.data(), *stream));
  }
  char* target = static_cast<char*>(lane.results.data()) + ResultBytes(lane.num_draws);
  for (const int32_t row : host_rows) {
    DI_RETURN_IF_ERROR(CopyToHostInOrder(lane.logits.Rows(row, row + 1), target, *stream));
    target += vocab * 4;
  }
  if (lane.event == nullptr) return {};
  return cuda::RecordEvent(lane.event, stream->cuda_stream());
}

Result<DrawnRows> Executor::FinishStep() {
  Impl& impl = *impl_;
  DI_CHECK_LT(impl.finished, impl.drawn);
  const Lane& lane = impl.lanes[static_cast<size_t>(impl.finished++ % 2)];
  DI_RETURN_IF_ERROR(lane.drawn);
  if (lane.event != nullptr) DI_RETURN_IF_ERROR(cuda::SynchronizeEvent(lane.event));
  const auto* bytes = static_cast<const char*>(lane.results.data());
  return DrawnRows{
      .rows = std::span(reinterpret_cast<const SampledRow*>(bytes),
                        static_cast<size_t>(lane.num_draws)),
      .logits = std::span(reinterpret_cast<const float*>(bytes + ResultBytes(lane.num_draws)),
                          static_cast<size_t>(lane.num_host_rows * config().vocab_size))};
}

Result<Buffer> Executor::Impl::HostBuffer(int64_t bytes) const {
  if (stream->device().kind == DeviceKind::kCuda) return Buffer::AllocatePinned(bytes);
  return Buffer::Allocate(Device{}, bytes);
}

Status Executor::Impl::ValidateRows(const StepChunk& chunk) const {
  const ModelConfig& config = model.config();
  const auto refuse = [](const char* field, std::string message) -> Status {
    return Fail(Code::kInvalidArgument, std::move(message), field);
  };
  if (chunk.slot < 0 || chunk.slot >= memory.num_slots()) {
    return refuse("slot", fmt::format("slot is {}; allowed are 0 to {}.", chunk.slot,
                                      memory.num_slots() - 1));
  }
  const int64_t context = config.max_position_embeddings;
  if (chunk.num_rows < 1) return refuse("num_rows", "A chunk of a step holds no rows.");
  if (chunk.begin < 0 || chunk.num_rows > context || chunk.begin > context - chunk.num_rows) {
    return refuse("num_rows",
                  fmt::format("A chunk has {} rows from position {} on; the model's context holds "
                              "{} tokens.",
                              chunk.num_rows, chunk.begin, context));
  }
  if (chunk.tokens.empty()) {
    if (chunk.num_rows != 1 || sampled[static_cast<size_t>(chunk.slot)] == kNothingSampled) {
      return refuse(
          "tokens",
          fmt::format("A chunk of {} rows has no tokens; only a single row can be without, "
                      "when a token has been sampled for its slot.",
                      chunk.num_rows));
    }
  } else if (std::ssize(chunk.tokens) != chunk.num_rows) {
    return refuse("tokens", fmt::format("A chunk of {} rows has {} tokens.", chunk.num_rows,
                                        chunk.tokens.size()));
  }
  for (int32_t id : chunk.tokens) {
    if (id >= 0 && id < config.vocab_size) continue;
    return refuse("tokens",
                  fmt::format("Token id {} is outside the vocabulary; allowed are 0 to {}.", id,
                              config.vocab_size - 1));
  }
  for (int64_t i = 0; i < kMaxLookback; ++i) {
    const int32_t id = chunk.lookback[static_cast<size_t>(i)];
    const bool exists = chunk.begin - 1 - i >= 0;
    // Ids that no n-gram reaches may be left out.
    const bool needed = exists && i < config.engram_max_ngram_size - 1;
    if (id < -1 || id >= config.vocab_size || (needed && id < 0) || (!exists && id >= 0)) {
      return refuse(
          "lookback",
          fmt::format("lookback[{}] is {} for a chunk that begins at position {}; an id is "
                      "0 to {}, and -1 stands before the sequence's start.",
                      i, id, chunk.begin, config.vocab_size - 1));
    }
  }
  const int64_t end = chunk.begin + chunk.num_rows;
  if (chunk.num_logit_rows < 0 || chunk.num_logit_rows > chunk.num_rows) {
    return refuse("num_logit_rows", fmt::format("num_logit_rows is {}; allowed are 0 to {}.",
                                                chunk.num_logit_rows, chunk.num_rows));
  }
  struct Bound {
    const char* name;
    int64_t value;
    int64_t most;
  };
  // The decoder half may begin behind this chunk, in one that is still to come.
  for (const Bound& bound : {Bound{"window_begin", chunk.window_begin, end},
                             Bound{"decoder_begin", chunk.decoder_begin, context},
                             Bound{"entries_begin", chunk.entries_begin, end}}) {
    if (bound.value >= 0 && bound.value <= bound.most) continue;
    return refuse(bound.name, fmt::format("{} is {}; allowed are 0 to {}.", bound.name, bound.value,
                                          bound.most));
  }
  if (chunk.decoder_begin > 0 && options.replay == ReplayMode::kOff) {
    return refuse("decoder_begin",
                  fmt::format("decoder_begin is {}, but bounded replay of the decoder is off.",
                              chunk.decoder_begin));
  }
  if (chunk.num_logit_rows > 0 && end - chunk.num_logit_rows < chunk.decoder_begin) {
    return refuse(
        "num_logit_rows",
        fmt::format("Logits are wanted from position {} on, but the decoder half begins at "
                    "{}.",
                    end - chunk.num_logit_rows, chunk.decoder_begin));
  }
  return {};
}

Status Executor::Impl::ValidateUnits(const StepChunk& chunk) const {
  const int64_t end = chunk.begin + chunk.num_rows;
  const int64_t units = CeilDiv(end, kBlockTokens);
  if (std::ssize(chunk.blocks) < units) {
    return Fail(
        Code::kInvalidArgument,
        fmt::format("A chunk up to position {} has {} cache blocks of {} tokens; it needs {}.", end,
                    chunk.blocks.size(), kBlockTokens, units),
        "blocks");
  }
  // The first row's window, or if it sees nothing before the chunk, what later rows will look for.
  const int64_t window = model.config().sliding_window;
  int64_t oldest = std::max<int64_t>({0, chunk.begin - window + 1, chunk.window_begin});
  if (oldest >= chunk.begin) oldest = std::max(oldest, end - window + 1);
  const int64_t pages_end = chunk.first_window_page + std::ssize(chunk.window_pages);
  if (chunk.first_window_page < 0 || chunk.first_window_page > oldest / kBlockTokens ||
      pages_end < units || pages_end > model.config().max_position_embeddings) {
    return Fail(Code::kInvalidArgument,
                fmt::format("A chunk of positions {} to {} has the window pages {} to {} of its "
                            "sequence; it needs those from {} to {}.",
                            chunk.begin, end - 1, chunk.first_window_page, pages_end - 1,
                            oldest / kBlockTokens, units - 1),
                "window_pages");
  }
  const auto check = [](std::span<const int32_t> ids, int64_t count, const char* field) -> Status {
    for (int32_t id : ids) {
      if (id >= 0 && id < count) continue;
      return Fail(Code::kInvalidArgument,
                  fmt::format("{} holds the id {}; allowed are 0 to {}.", field, id, count - 1),
                  field);
    }
    return {};
  };
  DI_RETURN_IF_ERROR(check(chunk.blocks, memory.num_blocks(), "blocks"));
  return check(chunk.window_pages, memory.num_window_pages(), "window_pages");
}

// Units that a chunk writes belong to it alone; units that are only read may be shared.
Status Executor::Impl::ClaimUnits(const StepPlan& plan) {
  const auto claim = [](std::vector<int32_t>& users, int32_t id, int32_t chunk, bool writes) {
    int32_t& user = users[static_cast<size_t>(id)];
    if (user != 0 && (writes || user > 0)) return false;
    user = writes ? chunk : -chunk;
    return true;
  };
  const auto refuse = [](const char* field, const char* what, int32_t id) -> Status {
    return Fail(Code::kInvalidArgument,
                fmt::format("The step writes to {} {}, which it uses for something else as well.",
                            what, id),
                field);
  };
  int32_t number = 0;
  for (const StepChunk& chunk : plan.chunks) {
    ++number;
    const int64_t units = CeilDiv(chunk.begin + chunk.num_rows, kBlockTokens);
    const int64_t first_written = chunk.begin / kBlockTokens;
    // Entries before entries_begin are known, so blocks in front of it are only read.
    const int64_t first_block = std::max(chunk.begin, chunk.entries_begin) / kBlockTokens;
    if (!claim(slot_users, chunk.slot, number, true)) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("Slot {} has more than one chunk in a step.", chunk.slot), "slot");
    }
    for (int64_t i = 0; i < units; ++i) {
      const int32_t block = chunk.blocks[static_cast<size_t>(i)];
      if (!claim(block_users, block, number, i >= first_block))
        return refuse("blocks", "cache block", block);
      const int64_t page = i - chunk.first_window_page;
      if (page < 0) continue;
      const int32_t id = chunk.window_pages[static_cast<size_t>(page)];
      if (!claim(page_users, id, number, i >= first_written))
        return refuse("window_pages", "window page", id);
    }
  }
  return {};
}

Status Executor::Impl::Validate(const StepPlan& plan) {
  if (plan.chunks.empty() && plan.commands.empty())
    return Fail(Code::kInvalidArgument, "A step needs at least one chunk or command.", "chunks");
  for (const StepChunk& chunk : plan.chunks) {
    DI_RETURN_IF_ERROR(ValidateRows(chunk));
    DI_RETURN_IF_ERROR(ValidateUnits(chunk));
  }
  const Status claimed = ClaimUnits(plan);
  for (const StepChunk& chunk : plan.chunks) {
    slot_users[static_cast<size_t>(chunk.slot)] = 0;
    for (int32_t id : chunk.blocks) block_users[static_cast<size_t>(id)] = 0;
    for (int32_t id : chunk.window_pages) page_users[static_cast<size_t>(id)] = 0;
  }
  return claimed;
}

Result<TensorView> Executor::Impl::Launch(std::span<const StepChunk> chunks, Lane& lane,
                                          LayerTrace* trace) {
  const ModelConfig& config = model.config();
  const int64_t real_sequences = std::ssize(chunks);
  const int64_t ngram = config.engram_max_ngram_size;
  const bool compact = options.replay == ReplayMode::kCompact;
  // A step that can be replayed from a graph is padded to one of few shapes: with rows of nobody,
  // at position 0 of the padding units, and with entries that are not written.
  const bool graph = graphs != nullptr && trace == nullptr && IsDecodingStep(chunks);
  const int64_t num_sequences = graph ? StepGraphs::PaddedRows(real_sequences) : real_sequences;
  // Rows as a layout: all of them, or those that the decoder half runs.
  struct HostRows {
    std::vector<int32_t> positions, sequence, start, window_begin;
    void Add(int64_t position, int64_t s) {
      positions.push_back(static_cast<int32_t>(position));
      sequence.push_back(static_cast<int32_t>(s));
    }
  };
  HostRows all, decoder;
  struct HostEntries {
    std::vector<int32_t> last_row, sequence, index;
  };
  std::vector<HostEntries> entries(ratios.size());
  std::vector<int32_t> ids, sampled_slots, kept_rows, slots, lookback, logit_rows, block_table,
      window_table, first_page;
  // What a graph does must not depend on where tokens are.
  bool places_tokens = graph;
  int64_t max_blocks = 1;
  int64_t max_pages = 1;
  for (const StepChunk& chunk : chunks) {
    max_blocks = std::max<int64_t>(max_blocks, std::ssize(chunk.blocks));
    max_pages = std::max<int64_t>(max_pages, std::ssize(chunk.window_pages));
  }
  if (graph) {
    max_blocks = StepGraphs::PaddedUnits(max_blocks);
    max_pages = StepGraphs::PaddedUnits(max_pages);
  }
  const int32_t padding_block[] = {static_cast<int32_t>(memory.num_blocks())};
  const int32_t padding_page[] = {static_cast<int32_t>(memory.num_window_pages())};
  const int32_t padding_token[] = {0};
  StepChunk padding;
  padding.slot = static_cast<int32_t>(memory.num_slots());
  padding.num_rows = 1;
  padding.tokens = padding_token;
  padding.blocks = padding_block;
  padding.window_pages = padding_page;
  padding.num_logit_rows = 1;
  const int32_t pad = token_map[static_cast<size_t>(config.engram_pad_token_id)];
  for (int64_t s = 0; s < num_sequences; ++s) {
    const StepChunk& chunk = s < real_sequences ? chunks[static_cast<size_t>(s)] : padding;
    const int64_t first_row = std::ssize(ids);
    all.start.push_back(static_cast<int32_t>(first_row));
    all.window_begin.push_back(static_cast<int32_t>(chunk.window_begin));
    decoder.start.push_back(static_cast<int32_t>(decoder.positions.size()));
    decoder.window_begin.push_back(
        static_cast<int32_t>(std::max(chunk.window_begin, chunk.decoder_begin)));
    slots.push_back(chunk.slot);
    first_page.push_back(static_cast<int32_t>(chunk.first_window_page));
    for (int64_t i = 0; i < chunk.num_rows; ++i) {
      const int64_t position = chunk.begin + i;
      ids.push_back(TokenOf(chunk, i));
      sampled_slots.push_back(IsOnDevice(chunk) ? chunk.slot : -1);
      places_tokens = places_tokens || sampled_slots.back() >= 0;
      all.Add(position, s);
      for (int64_t shift = 0; shift < ngram; ++shift) {
        const int32_t id = shift <= i ? TokenOf(chunk, i - shift)
                                      : chunk.lookback[static_cast<size_t>(shift - i - 1)];
        lookback.push_back(id < 0 ? pad : token_map[static_cast<size_t>(id)]);
      }
      for (size_t r = 0; r < ratios.size(); ++r) {
        if ((position + 1) % ratios[r] != 0 || position < chunk.entries_begin) {
          if (!graph) continue;
          entries[r].last_row.push_back(static_cast<int32_t>(first_row + i));
          entries[r].sequence.push_back(static_cast<int32_t>(s));
          entries[r].index.push_back(-1);
          continue;
        }
        entries[r].last_row.push_back(static_cast<int32_t>(first_row + i));
        entries[r].sequence.push_back(static_cast<int32_t>(s));
        entries[r].index.push_back(static_cast<int32_t>(position / ratios[r]));
      }
      if (compact && position < chunk.decoder_begin) continue;
      if (i >= chunk.num_rows - chunk.num_logit_rows)
        logit_rows.push_back(static_cast<int32_t>(decoder.positions.size()));
      kept_rows.push_back(static_cast<int32_t>(first_row + i));
      decoder.Add(position, s);
    }
    block_table.insert(block_table.end(), chunk.blocks.begin(), chunk.blocks.end());
    block_table.resize(static_cast<size_t>((s + 1) * max_blocks), -1);
    window_table.insert(window_table.end(), chunk.window_pages.begin(), chunk.window_pages.end());
    window_table.resize(static_cast<size_t>((s + 1) * max_pages), -1);
  }
  all.start.push_back(static_cast<int32_t>(all.positions.size()));
  decoder.start.push_back(static_cast<int32_t>(decoder.positions.size()));
  const auto rows = static_cast<int64_t>(ids.size());

  ScratchScope scratch(*stream);
  StepUpload upload;
  StepBatch batch;
  PlaceSampledTokensArgs place;
  upload.Add(ids, {rows}, &batch.token_ids);
  upload.Add(sampled_slots, {rows}, &place.slots);
  upload.Add(slots, {num_sequences}, &batch.layout.sequence_slot);
  upload.Add(block_table, {num_sequences, max_blocks}, &batch.layout.block_table);
  upload.Add(window_table, {num_sequences, max_pages}, &batch.layout.window_table);
  upload.Add(first_page, {num_sequences}, &batch.layout.window_first_page);
  const auto add_rows = [&](const HostRows& host, BatchLayout* layout) {
    const auto count = static_cast<int64_t>(host.positions.size());
    upload.Add(host.positions, {count}, &layout->positions);
    upload.Add(host.sequence, {count}, &layout->row_sequence);
    upload.Add(host.start, {num_sequences + 1}, &layout->sequence_start);
    upload.Add(host.window_begin, {num_sequences}, &layout->window_begin);
  };
  add_rows(all, &batch.layout);
  add_rows(decoder, &batch.decoder_layout);
  batch.drops_rows = std::ssize(kept_rows) < rows;
  upload.Add(kept_rows, {std::ssize(kept_rows)}, &batch.kept_rows);
  upload.Add(lookback, {rows, ngram}, &batch.engram_lookback);
  upload.Add(logit_rows, {std::ssize(logit_rows)}, &batch.logit_rows);
  batch.entries.resize(ratios.size());
  for (size_t r = 0; r < ratios.size(); ++r) {
    const auto count = static_cast<int64_t>(entries[r].index.size());
    batch.entries[r].ratio = ratios[r];
    upload.Add(entries[r].last_row, {count}, &batch.entries[r].last_row);
    upload.Add(entries[r].sequence, {count}, &batch.entries[r].sequence);
    upload.Add(entries[r].index, {count}, &batch.entries[r].index);
  }
  DI_RETURN_IF_ERROR(upload.Finish(scratch, &lane.staging, *stream));
  place.sampled = sampled_on_device.View(DType::kI32, {memory.num_slots()});
  place.token_map = token_map_on_device.View(DType::kI32, {std::ssize(token_map)});
  place.token_ids = batch.token_ids;
  place.lookback = batch.engram_lookback;
  batch.decoder_layout.sequence_slot = batch.layout.sequence_slot;
  batch.decoder_layout.block_table = batch.layout.block_table;
  batch.decoder_layout.window_table = batch.layout.window_table;
  batch.decoder_layout.window_first_page = batch.layout.window_first_page;

  const auto num_logits = static_cast<int64_t>(logit_rows.size());
  const int64_t real_logits = graph ? real_sequences : num_logits;
  const int64_t logit_bytes = num_logits * config.vocab_size * 4;
  if (logits.bytes() < logit_bytes) {
    DI_RETURN_IF_ERROR(stream->Synchronize());
    if (graphs != nullptr) graphs->Clear();
    DI_ASSIGN_OR_RETURN(logits, Buffer::Allocate(stream->device(), logit_bytes));
  }
  const TensorView logit_view = logits.View(DType::kF32, {num_logits, config.vocab_size});
  const auto forward = [&]() -> Status {
    if (places_tokens) DI_RETURN_IF_ERROR(PlaceSampledTokens(place, *stream));
    return model.Forward(batch, caches, logit_view, trace, *stream);
  };
  if (graph) {
    const StepGraphs::Shape shape{.rows = rows, .blocks = max_blocks, .pages = max_pages};
    DI_RETURN_IF_ERROR(graphs->Run(shape, *stream, forward));
  } else {
    DI_RETURN_IF_ERROR(forward());
  }
  return logit_view.Rows(0, real_logits);
}

bool Executor::Impl::IsDecodingStep(std::span<const StepChunk> chunks) const {
  return std::all_of(chunks.begin(), chunks.end(), [](const StepChunk& chunk) {
    return chunk.num_rows == 1 && chunk.num_logit_rows == 1 && chunk.decoder_begin <= chunk.begin;
  });
}

}  // namespace deepinfer
