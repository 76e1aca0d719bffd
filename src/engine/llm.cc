#include "deepinfer/llm.h"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <random>
#include <utility>

#include "base/error.h"
#include "engine/batch_runner.h"
#include "engine/executor_backend.h"
#include "engine/grammar_constraints.h"
#include "engine/llm_options.h"
#include "engine/resolve_request.h"
#include "engine/selfcheck.h"
#include "runtime/device_choice.h"
#include "runtime/executor.h"
#include "text/tokenizer.h"

namespace deepinfer {
namespace {

// The last part of the path that is a name.
std::string ModelName(const std::string& dir) {
  std::filesystem::path path = std::filesystem::path(dir).lexically_normal();
  if (path.filename().empty()) path = path.parent_path();
  return path.filename().string();
}

}  // namespace

struct LLM::Impl {
  Tokenizer tokenizer;
  std::unique_ptr<Executor> executor;
  ExecutorBackend backend;
  EngineOptions engine_options;
  std::unique_ptr<EngineStatistics> statistics;
  std::unique_ptr<TraceRecorder> trace;  // null: not asked for
  // Lives as long as the model, and with it the prefix cache.
  std::unique_ptr<Engine> engine;
  std::random_device entropy;

  BatchContext Context() {
    return {*engine, tokenizer, [this] { return (uint64_t{entropy()} << 32) | entropy(); }};
  }

  void StartEngine() {
    engine = std::make_unique<Engine>(backend, tokenizer, engine_options, EngineEvents{});
  }

  Impl(Tokenizer loaded_tokenizer, std::unique_ptr<Executor> loaded_executor)
      : tokenizer(std::move(loaded_tokenizer)),
        executor(std::move(loaded_executor)),
        backend(*executor) {}
};

LLM::LLM() = default;
LLM::~LLM() = default;

Result<std::unique_ptr<LLM>> LLM::Load(const LLMOptions& options) {
  DI_RETURN_IF_ERROR(CheckOptions(options));
  // The configuration first: what is wrong with a directory is explained there.
  DI_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(options.model_dir));
  DI_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::Load(options.model_dir + "/tokenizer.json"));
  if (tokenizer.vocab_size() > config.vocab_size) {
    return Fail(Code::kInvalidArgument,
                fmt::format("{}/tokenizer.json has {} tokens, more than the {} of config.json "
                            "(vocab_size); the files belong to "
                            "different models.",
                            options.model_dir, tokenizer.vocab_size(), config.vocab_size));
  }
  DI_RETURN_IF_ERROR(CheckOptionsForModel(options, config));
  const bool replays = options.decoder_replay != DecoderReplay::kOff;
  ExecutorOptions executor_options;
  DI_ASSIGN_OR_RETURN(executor_options.device, ChooseDevice(options.device));
  executor_options.engram_memory =
      options.engram_on_device ? TableMemory::kDevice : TableMemory::kPinnedHost;
  executor_options.use_graphs = options.cuda_graphs;
  executor_options.rollback_tokens = kRollbackTokens;
  if (replays) {
    executor_options.replay =
        options.decoder_replay == DecoderReplay::kMask ? ReplayMode::kMask : ReplayMode::kCompact;
  }
  executor_options.cache_format = options.bf16_cache ? CacheFormat::kBf16 : CacheFormat::kPacked;
  executor_options.model_dir = options.model_dir;
  executor_options.numerics = options.numerics == NumericsProfile::kReference
                                  ? Numerics::kReference
                                  : Numerics::kProduction;
  executor_options.num_threads = options.num_threads;
  executor_options.max_sequences = options.max_num_seqs;
  executor_options.cache_tokens = options.cache_tokens;
  executor_options.max_model_len = options.max_model_len;
  executor_options.max_batched_tokens = options.max_num_batched_tokens;
  DI_ASSIGN_OR_RETURN(std::unique_ptr<Executor> executor, Executor::Create(executor_options));

  std::unique_ptr<LLM> llm(new LLM());
  llm->impl_ = std::make_unique<Impl>(std::move(tokenizer), std::move(executor));
  Impl& impl = *llm->impl_;
  EngineOptions& engine = impl.engine_options;
  engine.max_model_len =
      options.max_model_len > 0 ? options.max_model_len : config.max_position_embeddings;
  const StateCapacity capacity = impl.backend.capacity();
  SchedulerOptions& scheduler = engine.scheduler;
  scheduler.max_num_seqs = std::min(options.max_num_seqs, capacity.num_slots);
  scheduler.max_num_batched_tokens = options.max_num_batched_tokens;
  scheduler.max_chunk_tokens = options.max_chunk_tokens;
  scheduler.prefix_caching = options.prefix_caching;
  scheduler.approximate_hit_tokens = options.approximate_hit_tokens;
  if (replays) {
    scheduler.replay_keep_tokens =
        options.replay_keep_tokens > 0 ? options.replay_keep_tokens : DefaultTailTokens(config);
  }
  scheduler.preemption =
      options.preempt_by_saving ? PreemptionMode::kSave : PreemptionMode::kRecompute;
  engine.async_scheduling = options.async_scheduling;
  engine.end_ids = EndOfTurnIds(impl.tokenizer, config.eos_token_id, config.vocab_size);
  engine.compile_constraint =
      MakeConstraintCompiler(impl.tokenizer, engine.end_ids, config.vocab_size);
  // The compiler has a limit of its own, which counts from a compilation's turn: what others ask
  // for must not make one fail.
  engine.grammars.max_seconds = std::numeric_limits<double>::infinity();
  impl.statistics = std::make_unique<EngineStatistics>(ModelName(options.model_dir));
  engine.statistics = impl.statistics.get();
  engine.record_schedule = options.record_schedule;
  if (options.record_trace) {
    impl.trace = std::make_unique<TraceRecorder>();
    impl.trace->NameThread("engine");
    engine.trace = impl.trace.get();
  }
  impl.StartEngine();
  return llm;
}

std::vector<RequestOutput> LLM::Generate(std::span<const Request> requests,
                                         const GenerateCallbacks& callbacks) {
  return RunBatch(impl_->Context(), requests, callbacks);
}

void LLM::GenerateStream(const RequestSource& next, const GenerateCallbacks& callbacks) {
  RunStream(impl_->Context(), next, callbacks);
}

Result<std::vector<int32_t>> LLM::Encode(std::string_view text, bool parse_special) const {
  EncodeOptions options;
  options.parse_special = parse_special;
  return impl_->tokenizer.Encode(text, options);
}

Result<SelfcheckReport> LLM::Selfcheck(const SelfcheckOptions& options,
                                       const SelfcheckCallback& progress) {
  if (const std::vector<Error> problems = options.Validate(); !problems.empty())
    return tl::unexpected<Error>(problems.front());
  // Other engines are going to use the cache's memory: what ours holds there is void.
  impl_->engine.reset();
  EngineOptions base = impl_->engine_options;
  base.statistics = nullptr;
  base.record_schedule = false;
  SelfcheckReport report = RunSelfcheck(impl_->backend, impl_->tokenizer, base, options, progress);
  impl_->StartEngine();
  return report;
}

StatisticsSnapshot LLM::Statistics() const {
  return impl_->statistics->Snapshot();
}

void LLM::CountRefused() {
  impl_->statistics->RecordSubmitted();
  impl_->statistics->RecordRefused();
}

std::string LLM::TakeSchedule() {
  return impl_->engine->TakeSchedule();
}

void LLM::WriteTrace(const std::function<bool(std::string_view piece)>& write) const {
  if (impl_->trace != nullptr) impl_->trace->WriteJson(write);
}

std::string LLM::Decode(std::span<const int32_t> ids, bool skip_special_tokens) const {
  return impl_->tokenizer.Decode(ids, skip_special_tokens);
}

int64_t LLM::vocab_size() const {
  return impl_->backend.vocab_size();
}

int64_t LLM::max_model_len() const {
  return impl_->engine->max_sequence_tokens();
}

}  // namespace deepinfer
