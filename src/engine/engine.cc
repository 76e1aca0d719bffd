#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/thread_pool.h"
#include "engine/chat_answer.h"
#include "engine/completion_text.h"
#include "sample/philox.h"
#include "sample/sampler.h"
#include "sample/triggered_constraint.h"
#include "tensor/device_lost.h"

namespace deepinfer {
namespace {

// Output that is made room for at once; longer ones grow as they come.
constexpr int64_t kReservedOutputTokens = 4096;
// When everything waits for compilations, the caller gets its turn that often: it may have new
// requests, or want to stop.
constexpr double kCompileWaitSeconds = 0.002;

EndReason EndReasonOf(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
    case FinishReason::kToolCalls:
      return EndReason::kStop;
    case FinishReason::kLength:
      return EndReason::kLength;
    case FinishReason::kAbort:
      return EndReason::kAbort;
    case FinishReason::kDeadline:
      return EndReason::kDeadline;
    case FinishReason::kError:
    case FinishReason::kNone:
      break;
  }
  return EndReason::kError;
}

}  // namespace

// Shared by the sequences of a request.
struct Engine::Request {
  int64_t number = 0;
  EngineRequest input;
  RequestOutput output;
  int64_t unfinished = 0;  // completions
  double submitted = 0;    // clock values
  std::optional<double> first_row;
  std::optional<double> first_token;
  std::optional<EndReason> end_reason;  // of the completions that have ended
};

struct Engine::Sequence {
  SeqId id = 0;
  std::shared_ptr<Request> request;
  int64_t index = 0;
  int64_t max_new_tokens = 0;
  SequenceSampler sampler;
  CompletionText text;
  std::optional<ChatAnswer> answer;  // in place of `text`

  SequenceTotals totals = {};
  std::string delta_text = {};  // not yet emitted
  std::string delta_reasoning = {};
  std::vector<int32_t> delta_ids = {};
  bool scheduled = true;  // false: asks for nothing, unknown to the scheduler
  bool finished = false;

  const SamplingParams& params() const {
    return request->input.params;
  }
  CompletionOutput& output() {
    return request->output.outputs[static_cast<size_t>(index)];
  }
  const std::vector<int32_t>& prompt() const {
    return request->output.prompt_token_ids;
  }
  int64_t prompt_tokens() const {
    return static_cast<int64_t>(prompt().size());
  }
  // Completion 0 collects the prompt's log-probabilities.
  bool wants_prompt_logprobs() const {
    return index == 0 && params().prompt_logprobs.has_value() && prompt_tokens() > 1;
  }
};

struct Engine::Job : StepJob {
  std::vector<Sequence*> sequences;  // one per chunk; they live as long as the job is in flight
  // What the plan's spans point to: the scheduler's own vectors may move while the step runs.
  std::vector<int32_t> ids;
};

Engine::Engine(ModelBackend& backend, const Tokenizer& tokenizer, EngineOptions options,
               EngineEvents events)
    : backend_(backend),
      tokenizer_(tokenizer),
      options_(std::move(options)),
      events_(std::move(events)),
      pools_(backend.capacity().num_blocks, backend.capacity().num_window_pages,
             backend.capacity().num_slots, backend.capacity().window_tokens,
             backend.capacity().rollback_tokens),
      prefix_cache_(pools_),
      scheduler_(options_.scheduler, pools_, &prefix_cache_),
      runner_(backend, options_.async_scheduling,
              options_.mask_threads >= 0 ? options_.mask_threads : std::min(2, UsableCores()),
              options_.trace) {
  DI_CHECK_GE(options_.scheduler.max_num_seqs, 1);
  DI_CHECK_GE(options_.scheduler.max_num_batched_tokens, options_.scheduler.max_num_seqs);
  DI_CHECK_GE(options_.scheduler.max_prompt_logit_rows, 1);
  max_sequence_tokens_ = std::min(options_.max_model_len, scheduler_.max_sequence_tokens());
  for (std::unique_ptr<Job>& job : jobs_) job = std::make_unique<Job>();
  if (options_.compile_constraint != nullptr)
    grammars_ = std::make_unique<GrammarService>(options_.compile_constraint, options_.grammars);
  if (options_.record_schedule) {
    recorder_ = std::make_unique<ScheduleRecorder>(options_.scheduler, pools_,
                                                   /*has_prefix_cache=*/true);
  }
}

Engine::~Engine() {
  while (runner_.in_flight() > 0) runner_.Wait();
}

double Engine::Now() const {
  if (options_.clock) return options_.clock();
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Engine::Sequence* Engine::Find(SeqId id) {
  const auto found = sequences_.find(id);
  return found == sequences_.end() ? nullptr : found->second.get();
}

int64_t Engine::num_waiting() const {
  return scheduler_.num_waiting() + scheduler_.num_held() +
         static_cast<int64_t>(scored_at_once_.size());
}

int64_t Engine::num_running() const {
  return scheduler_.num_running();
}

EngineCounters Engine::counters() const {
  const SchedulerCounters& from = scheduler_.counters();
  EngineCounters counters;
  counters.steps = from.steps;
  counters.prompt_tokens = from.prompt_tokens;
  counters.cached_tokens = from.cached_tokens;
  counters.completion_tokens = completion_tokens_;
  counters.recomputed_tokens = from.recomputed_tokens;
  counters.preemptions = from.preemptions;
  if (grammars_ != nullptr) {
    const GrammarCounters grammars = grammars_->counters();
    counters.grammars_compiled = grammars.compiled;
    counters.grammars_failed = grammars.failed;
  }
  return counters;
}

Status Engine::CheckRequest(const EngineRequest& request) const {
  if (device_lost_.has_value()) return tl::unexpected<Error>(*device_lost_);
  const std::vector<Error> problems = request.params.Validate(backend_.vocab_size());
  if (!problems.empty()) return tl::unexpected<Error>(Joined(problems));
  if (request.params.structured_output.has_value() && grammars_ == nullptr) {
    return Fail(Code::kUnsupported,
                "structured_output is given, but there is nothing that compiles it.",
                "structured_output");
  }
  if (request.prompt.empty()) {
    return Fail(Code::kInvalidArgument, "the prompt has no tokens; at least one is needed.",
                "prompt");
  }
  for (size_t i = 0; i < request.prompt.size(); ++i) {
    const int32_t id = request.prompt[i];
    if (id >= 0 && id < backend_.vocab_size()) continue;
    return Fail(Code::kInvalidArgument,
                fmt::format("prompt token {} is {}; token ids of this model are 0 ... {}.", i, id,
                            backend_.vocab_size() - 1),
                fmt::format("prompt_token_ids[{}]", i));
  }
  const int64_t prompt_tokens = static_cast<int64_t>(request.prompt.size());
  const int64_t room_for = request.params.max_tokens == 0 ? 0 : 1;
  if (prompt_tokens + room_for > max_sequence_tokens_) {
    const char* what = max_sequence_tokens_ < options_.max_model_len ? "the cache memory holds"
                                                                     : "the context limit is";
    return Fail(
        Code::kInvalidArgument,
        fmt::format("the prompt has {} tokens, but {} {} tokens for prompt and output together.",
                    prompt_tokens, what, max_sequence_tokens_),
        "prompt");
  }
  return {};
}

void Engine::CountRefused() {
  if (options_.statistics == nullptr) return;
  options_.statistics->RecordSubmitted();
  options_.statistics->RecordRefused();
}

Result<int64_t> Engine::Submit(EngineRequest input) {
  EngineStatistics* const statistics = options_.statistics;
  if (statistics != nullptr) statistics->RecordSubmitted();
  if (Status accepted = CheckRequest(input); !accepted.has_value()) {
    if (statistics != nullptr) statistics->RecordRefused();
    return tl::unexpected<Error>(std::move(accepted.error()));
  }
  auto request = std::make_shared<Request>();
  request->number = next_request_++;
  request->input = std::move(input);
  request->submitted = Now();
  EngineRequest& in = request->input;
  const int64_t prompt_tokens = static_cast<int64_t>(in.prompt.size());
  request->output.id = in.id;
  request->output.prompt_token_ids = std::move(in.prompt);
  const std::vector<int32_t>& prompt = request->output.prompt_token_ids;
  request->output.usage.prompt_tokens = prompt_tokens;
  request->output.outputs.resize(static_cast<size_t>(in.params.n));
  request->unfinished = in.params.n;

  std::vector<int32_t> end_ids = in.params.ignore_eos ? std::vector<int32_t>{} : options_.end_ids;
  for (const int64_t id : in.params.stop_token_ids) end_ids.push_back(static_cast<int32_t>(id));
  const int64_t room = max_sequence_tokens_ - prompt_tokens;
  // Where nothing is drawn there is nothing to constrain.
  const bool constrained = in.params.structured_output.has_value() && in.params.max_tokens != 0;
  if (constrained) {
    compiling_.emplace(request->number, request);
    grammars_->Start(request->number, *in.params.structured_output);
  }
  SeqId leader = -1;
  for (int64_t index = 0; index < in.params.n; ++index) {
    const uint64_t seed = CompletionSeed(in.seed, index);
    request->output.outputs[static_cast<size_t>(index)].index = index;
    request->output.outputs[static_cast<size_t>(index)].seq_seed = seed;
    auto sequence = std::make_unique<Sequence>(
        Sequence{.id = next_sequence_++,
                 .request = request,
                 .index = index,
                 .max_new_tokens = std::min(in.params.max_tokens.value_or(room), room),
                 .sampler = SequenceSampler(in.params, seed, prompt, in.bad_words, end_ids),
                 .text = CompletionText(tokenizer_, in.params),
                 .answer = std::nullopt});
    if (in.answer.has_value()) sequence->answer.emplace(tokenizer_, in.params, *in.answer, seed);
    const SeqId id = sequence->id;
    if (sequence->max_new_tokens == 0 && !sequence->wants_prompt_logprobs()) {
      sequence->scheduled = false;
      scored_at_once_.push_back(id);
    } else {
      SequenceSpec spec;
      spec.id = id;
      spec.user = in.user_id;
      spec.priority = in.priority;
      spec.deadline = request->submitted + in.timeout_seconds;
      spec.prompt = prompt;
      spec.max_new_tokens = sequence->max_new_tokens;
      spec.cache_salt = in.cache_salt;
      if (sequence->wants_prompt_logprobs()) spec.first_prompt_logit_row = 0;
      // One function for all completions of a request: prompt log-probabilities need every row.
      spec.replay = !in.params.prompt_logprobs.has_value();
      spec.context = sequence.get();
      spec.held = constrained;
      // The others find the prompt of the first in the cache.
      if (options_.scheduler.prefix_caching) spec.leader = leader;
      // The checks above leave it no reason to refuse.
      if (recorder_ != nullptr) recorder_->Add(spec, request->submitted, /*accepted=*/true);
      const Status added = scheduler_.Add(std::move(spec), request->submitted);
      DI_CHECK(added.has_value());
      if (leader < 0) leader = id;
    }
    sequence->totals.prompt_tokens = prompt_tokens;
    if (statistics != nullptr) statistics->RecordCreated(prompt_tokens);
    sequences_.emplace(id, std::move(sequence));
  }
  return request->number;
}

bool Engine::Step() {
  if (sequences_.empty()) return false;
  if (!compiling_.empty()) TakeInGrammars();
  for (const SeqId id : std::exchange(scored_at_once_, {})) {
    Sequence* sequence = Find(id);  // a callback may have aborted it
    if (sequence != nullptr) Finish(*sequence, FinishReason::kLength);
  }
  const int64_t ahead = options_.async_scheduling ? 2 : 1;
  const bool launched = PlanAndLaunch();
  if (runner_.in_flight() == ahead || (!launched && runner_.in_flight() > 0)) {
    Collect();
  } else if (!launched && !compiling_.empty()) {
    grammars_->Wait(kCompileWaitSeconds);
  }
  return true;
}

void Engine::TakeInGrammars() {
  for (GrammarService::Finished& finished : grammars_->Poll()) {
    // A callback may have ended it.
    auto entry = compiling_.extract(finished.ticket);
    if (entry.empty()) continue;
    if (options_.statistics != nullptr)
      options_.statistics->RecordGrammar(finished.factory.has_value());
    if (finished.factory.has_value()) {
      BeginConstrained(*entry.mapped(), *finished.factory);
    } else {
      EndUnstarted(entry.mapped(), std::move(finished.factory.error()));
    }
  }
}

void Engine::BeginConstrained(Request& request, const ConstraintFactory& factory) {
  const StructuredOutput& output = *request.input.params.structured_output;
  for (const SeqId id : LivingSequencesOf(request.number)) {
    Sequence& sequence = *Find(id);
    std::unique_ptr<TokenConstraint> constraint =
        MakeConstraintUntilEnd(options_.end_ids, factory());
    if (!output.trigger_token_ids.empty()) {
      ConstraintTrigger trigger;
      trigger.trigger_ids.assign(output.trigger_token_ids.begin(), output.trigger_token_ids.end());
      if (output.bound_token_id.has_value())
        trigger.bound_id = static_cast<int32_t>(*output.bound_token_id);
      constraint = MakeTriggeredConstraint(std::move(trigger), std::move(constraint), vocab_size());
    }
    sequence.sampler.set_constraint(std::move(constraint));
    scheduler_.Release(id);
    if (recorder_ != nullptr) recorder_->Release(id);
  }
}

// A request that could not start: its completions have had no rows and leave no events.
void Engine::EndUnstarted(const std::shared_ptr<Request>& request, Error error) {
  for (const SeqId id : LivingSequencesOf(request->number)) {
    Sequence& sequence = *Find(id);
    EndInScheduler(id);
    RecordEnd(sequence, EndReason::kError);
    EraseIfDone(sequence);
  }
  if (options_.statistics != nullptr) options_.statistics->RecordRequestEnded(EndReason::kError);
  RequestOutput output;
  output.id = request->input.id;
  output.error = std::move(error);
  // What the compiler names is a place in the description.
  constexpr std::string_view kCompilersName = "structured_output";
  std::string& field = output.error->field;
  if (field.starts_with(kCompilersName)) field.erase(0, kCompilersName.size());
  field = request->input.constraint_field + field;
  if (events_.on_finished) events_.on_finished(request->number, std::move(output));
}

bool Engine::PlanAndLaunch() {
  TraceSpan span(options_.trace, "plan");
  const auto start = std::chrono::steady_clock::now();
  const double now = Now();
  scheduler_.Schedule(now, &step_);
  if (recorder_ != nullptr) recorder_->Schedule(now, step_);
  for (const SeqId id : step_.expired) Finish(*Find(id), FinishReason::kDeadline);
  if (step_.chunks.empty()) {
    // Its byte moves come with a later step; there need not be one that would count preemptions.
    const int64_t preemptions = scheduler_.counters().preemptions;
    if (options_.statistics != nullptr && preemptions != recorded_.preemptions)
      options_.statistics->RecordPreempted(preemptions - recorded_.preemptions);
    recorded_.preemptions = preemptions;
    return false;
  }
  Job& job = *jobs_[next_job_];
  next_job_ = (next_job_ + 1) % jobs_.size();
  job.launched = now;
  Fill(job);
  span.Arg("rows", step_.num_rows);
  last_plan_seconds_ =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  RecordPlan(last_plan_seconds_);
  runner_.Launch(&job);
  return true;
}

void Engine::RecordPlan(double seconds) {
  const SchedulerCounters& now = scheduler_.counters();
  if (options_.statistics != nullptr) {
    options_.statistics->RecordPlanned(
        {.rows = {.prompt = now.prompt_tokens - recorded_.prompt_tokens,
                  .decode = now.decode_tokens - recorded_.decode_tokens,
                  .recomputed = now.recomputed_tokens - recorded_.recomputed_tokens},
         .prompt_tokens_cached = now.cached_tokens - recorded_.cached_tokens,
         .preemptions = now.preemptions - recorded_.preemptions,
         .plan_seconds = seconds});
  }
  recorded_ = now;
  if (options_.trace != nullptr) {
    options_.trace->Counter("running", scheduler_.num_running());
    options_.trace->Counter("waiting", num_waiting());
  }
}

void Engine::RecordCommit(const StepJob& job, double seconds) {
  const int64_t tokens = completion_tokens_ - std::exchange(recorded_tokens_, completion_tokens_);
  if (options_.statistics == nullptr) return;
  const auto use = [](const BlockPool& pool, int64_t unit_bytes) {
    return PoolUse{.total = pool.size(),
                   .used = pool.size() - pool.num_free() - pool.num_reclaimable(),
                   .reclaimable = pool.num_reclaimable(),
                   .unit_bytes = unit_bytes};
  };
  const StateCapacity capacity = backend_.capacity();
  options_.statistics->RecordCommitted(
      {.completion_tokens = tokens,
       .step_seconds = std::max(0.0, Now() - job.launched),
       .commit_seconds = seconds,
       .grammars_waiting = static_cast<int64_t>(compiling_.size()),
       .num_masks = job.num_masks,
       .mask_seconds = job.mask_seconds,
       .mask_wait_seconds = job.mask_wait_seconds,
       .sequences_held = scheduler_.num_held(),
       .sequences_waiting = scheduler_.num_waiting() + static_cast<int64_t>(scored_at_once_.size()),
       .sequences_running = scheduler_.num_running(),
       .blocks = use(pools_.blocks, capacity.block_bytes),
       .window_pages = use(pools_.window_pages, capacity.window_page_bytes),
       .slots = use(pools_.slots, capacity.slot_bytes)});
}

std::string Engine::FindViolation() const {
  if (std::string violation = scheduler_.FindViolation(); !violation.empty()) return violation;
  if (options_.statistics == nullptr) return {};
  LivingTotals living;
  std::vector<int64_t> requests;
  for (const auto& [id, sequence] : sequences_) {
    if (sequence->finished) continue;
    living.Add(sequence->totals);
    requests.push_back(sequence->request->number);
  }
  std::sort(requests.begin(), requests.end());
  living.requests = std::unique(requests.begin(), requests.end()) - requests.begin();
  return options_.statistics->FindViolation(living);
}

// Turns the scheduler's decision into a plan that stays valid while the scheduler goes on.
void Engine::Fill(Job& job) {
  job.plan.commands.clear();
  std::swap(job.plan.commands, step_.commands);
  job.plan.chunks.clear();
  job.draws.clear();
  job.results.clear();
  job.sequences.clear();
  size_t ids = 0;
  for (const PlannedChunk& chunk : step_.chunks) {
    ids += static_cast<size_t>(2 * (chunk.end - chunk.begin)) + chunk.blocks.size() +
           chunk.window_pages.size();
  }
  job.ids.clear();
  job.ids.reserve(ids);  // spans point into it from here on
  const auto keep = [&job](std::span<const int32_t> values) -> std::span<const int32_t> {
    const size_t begin = job.ids.size();
    job.ids.insert(job.ids.end(), values.begin(), values.end());
    return std::span<const int32_t>(job.ids).subspan(begin);
  };
  for (const PlannedChunk& planned : step_.chunks) {
    Sequence& sequence = *static_cast<Sequence*>(planned.context);
    job.sequences.push_back(&sequence);
    if (!sequence.request->first_row.has_value()) sequence.request->first_row = job.launched;
    SequenceTotals& totals = sequence.totals;
    totals.prompt_tokens_computed +=
        CountRows(planned.begin, planned.end, planned.num_recomputed, sequence.prompt_tokens())
            .prompt;
    if (!std::exchange(totals.started, true)) {
      totals.prompt_tokens_cached = scheduler_.cached_tokens(planned.id);
      if (options_.statistics != nullptr)
        options_.statistics->RecordStarted(job.launched - sequence.request->submitted);
    }
    const std::span<const int32_t> tokens = planned.tokens;
    StepChunk chunk;
    chunk.slot = planned.slot;
    chunk.begin = planned.begin;
    chunk.num_rows = planned.end - planned.begin;
    if (!planned.token_in_flight) {
      chunk.tokens = keep(
          tokens.subspan(static_cast<size_t>(planned.begin), static_cast<size_t>(chunk.num_rows)));
    }
    for (size_t i = 0; i < chunk.lookback.size(); ++i) {
      const int64_t at = planned.begin - 1 - static_cast<int64_t>(i);
      if (at >= 0) chunk.lookback[i] = tokens[static_cast<size_t>(at)];
    }
    chunk.blocks = keep(planned.blocks);
    chunk.window_pages = keep(planned.window_pages);
    chunk.first_window_page = planned.first_window_page;
    chunk.window_begin = planned.window_begin;
    chunk.decoder_begin = planned.decoder_begin;
    chunk.entries_begin = planned.entries_begin;
    chunk.num_logit_rows = planned.num_logit_rows;

    StepDraw draw;
    if (planned.samples) {
      draw.sampler = &sequence.sampler;
      draw.constrained = sequence.sampler.constrained();
      // Before its first draw it is in nobody else's hands.
      if (planned.end == sequence.prompt_tokens())
        sequence.sampler.ReserveOutput(std::min(sequence.max_new_tokens, kReservedOutputTokens));
    }
    const int64_t first_logit_row = planned.end - planned.num_logit_rows;
    const int64_t prompt_rows_end = std::min(planned.end, sequence.prompt_tokens() - 1);
    if (sequence.wants_prompt_logprobs() && first_logit_row < prompt_rows_end) {
      draw.next_tokens =
          keep(tokens.subspan(static_cast<size_t>(first_logit_row + 1),
                              static_cast<size_t>(prompt_rows_end - first_logit_row)));
      draw.num_top = *sequence.params().prompt_logprobs;
    }
    job.plan.chunks.push_back(chunk);
    job.draws.push_back(draw);
  }
}

void Engine::Collect() {
  Job& job = *static_cast<Job*>(runner_.Wait());
  TraceSpan span(options_.trace, "collect");
  collecting_ = true;
  const auto start = std::chrono::steady_clock::now();
  if (job.error.has_value()) {
    // States that the step should have saved run again.
    for (StateCommand& command : job.plan.commands) {
      if (command.kind == StateCommand::Kind::kExport) command.image->lost = true;
    }
  }
  // What failed ends before the step is committed, so that nothing of it reaches the prefix cache.
  for (size_t i = 0; i < job.draws.size(); ++i) {
    Sequence& sequence = *job.sequences[i];
    StepOutcome& outcome = job.outcomes[i];
    if (job.error.has_value()) outcome.error = job.error;
    int32_t token = -1;
    if (outcome.error.has_value()) {
      if (!sequence.finished) EndWithError(sequence, std::move(*outcome.error));
    } else if (outcome.token.has_value()) {
      token = outcome.token->token_id;
    }
    job.results.push_back({sequence.id, token});
  }
  scheduler_.Commit(job.results, !job.error.has_value());
  if (recorder_ != nullptr) recorder_->Commit(job.results, !job.error.has_value());
  for (size_t i = 0; i < job.draws.size(); ++i) {
    Sequence& sequence = *job.sequences[i];
    // It may have ended while the step ran, or a callback may have aborted it.
    if (!sequence.finished) TakeIn(sequence, job.plan.chunks[i], job.outcomes[i]);
  }
  collecting_ = false;
  for (const Sequence* sequence : job.sequences) {
    if (sequence->finished) ended_while_collecting_.push_back(sequence->id);
  }
  for (const SeqId id : ended_while_collecting_) {
    if (const Sequence* sequence = Find(id); sequence != nullptr) EraseIfDone(*sequence);
  }
  ended_while_collecting_.clear();
  if (job.error.has_value() && IsDeviceLost(*job.error)) EndForLostDevice(*job.error);
  last_collect_seconds_ =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  RecordCommit(job, last_collect_seconds_);
}

void Engine::TakeIn(Sequence& sequence, const StepChunk& chunk, StepOutcome& outcome) {
  std::vector<TokenLogprobs>& collected = sequence.request->output.prompt_logprobs;
  int64_t row = chunk.begin + chunk.num_rows - chunk.num_logit_rows;
  for (TokenLogprobs& entry : outcome.prompt_logprobs) {
    // Rows that ran again after a preemption have been collected before.
    if (row++ == static_cast<int64_t>(collected.size())) collected.push_back(std::move(entry));
  }
  if (outcome.token.has_value()) {
    CommitToken(sequence, std::move(*outcome.token));
  } else if (sequence.max_new_tokens == 0 &&
             static_cast<int64_t>(collected.size()) == sequence.prompt_tokens() - 1) {
    Finish(sequence, FinishReason::kLength);
  }
}

void Engine::CommitToken(Sequence& sequence, SampledToken token) {
  const int32_t id = token.token_id;
  CompletionOutput& output = sequence.output();
  if (output.token_ids.empty()) {
    const double now = Now();
    if (!sequence.request->first_token.has_value()) sequence.request->first_token = now;
    sequence.totals.first_token_seconds = now - sequence.request->submitted;
    if (options_.statistics != nullptr)
      options_.statistics->RecordFirstToken(sequence.totals.first_token_seconds);
    const int64_t expected = std::min(sequence.max_new_tokens, kReservedOutputTokens);
    output.token_ids.reserve(static_cast<size_t>(expected));
    if (sequence.params().logprobs.has_value())
      output.logprobs.reserve(static_cast<size_t>(expected));
    output.text.reserve(static_cast<size_t>(4 * expected));
    sequence.delta_ids.reserve(8);
    sequence.delta_text.reserve(256);
  }
  ++completion_tokens_;
  ++sequence.totals.completion_tokens;
  output.token_ids.push_back(id);
  sequence.delta_ids.push_back(id);
  if (sequence.params().logprobs.has_value()) {
    output.cumulative_logprob += double{token.logprobs.logprob};
    output.logprobs.push_back(std::move(token.logprobs));
  }

  if (token.ends) {
    output.stop_reason = int64_t{id};
    Finish(sequence, FinishReason::kStop);
    return;
  }
  const int64_t count = static_cast<int64_t>(output.token_ids.size());
  const bool may_stop = count >= sequence.params().min_tokens;
  if (sequence.answer.has_value()) {
    sequence.answer->Push(id, may_stop, &sequence.delta_text, &sequence.delta_reasoning);
  } else {
    sequence.text.Push(id, may_stop, &sequence.delta_text);
  }
  const std::optional<std::string>& stop_string =
      sequence.answer.has_value() ? sequence.answer->stop_string() : sequence.text.stop_string();
  if (stop_string.has_value()) {
    output.stop_reason = *stop_string;
    Finish(sequence, FinishReason::kStop);
  } else if (count == sequence.max_new_tokens) {
    Finish(sequence, FinishReason::kLength);
  } else {
    Emit(sequence, FinishReason::kNone);
  }
}

void Engine::Emit(Sequence& sequence, FinishReason reason) {
  sequence.output().text += sequence.delta_text;
  if (events_.on_delta) {
    events_.on_delta({.request = sequence.request->number,
                      .completion = sequence.index,
                      .text = sequence.delta_text,
                      .reasoning = sequence.delta_reasoning,
                      .token_ids = sequence.delta_ids,
                      .finish_reason = reason});
  }
  sequence.delta_text.clear();
  sequence.delta_reasoning.clear();
  sequence.delta_ids.clear();
}

void Engine::EndWithError(Sequence& sequence, Error error) {
  sequence.output().error = std::move(error);
  Finish(sequence, FinishReason::kError);
}

void Engine::Finish(Sequence& sequence, FinishReason reason) {
  const std::shared_ptr<Request> request = sequence.request;
  if (sequence.scheduled) {
    sequence.totals.preemptions = scheduler_.preemptions(sequence.id);
    request->output.usage.preemptions += sequence.totals.preemptions;
    if (sequence.index == 0)
      request->output.usage.cached_tokens = scheduler_.cached_tokens(sequence.id);
    if (reason != FinishReason::kDeadline) EndInScheduler(sequence.id);
  }
  const EndReason end_reason = EndReasonOf(reason);
  RecordEnd(sequence, end_reason);
  if (sequence.answer.has_value()) {
    reason = sequence.answer->Finish(reason, &sequence.delta_text, &sequence.delta_reasoning);
    sequence.output().message = sequence.answer->TakeMessage();
  } else {
    sequence.delta_text += sequence.text.Finish();
  }
  sequence.output().finish_reason = reason;
  request->end_reason = request->end_reason.has_value()
                            ? StrongerReason(*request->end_reason, end_reason)
                            : end_reason;
  Emit(sequence, reason);
  EraseIfDone(sequence);

  if (--request->unfinished > 0) return;
  if (compiling_.erase(request->number) > 0) grammars_->Cancel(request->number);
  if (options_.statistics != nullptr) options_.statistics->RecordRequestEnded(*request->end_reason);
  const double now = Now();
  for (const CompletionOutput& output : request->output.outputs) {
    request->output.usage.completion_tokens += static_cast<int64_t>(output.token_ids.size());
  }
  request->output.timings.queue_seconds = request->first_row.value_or(now) - request->submitted;
  request->output.timings.first_token_seconds =
      request->first_token.value_or(now) - request->submitted;
  request->output.timings.total_seconds = now - request->submitted;
  if (events_.on_finished) events_.on_finished(request->number, std::move(request->output));
}

void Engine::RecordEnd(Sequence& sequence, EndReason reason) {
  sequence.finished = true;
  sequence.totals.total_seconds = Now() - sequence.request->submitted;
  if (options_.statistics != nullptr)
    options_.statistics->RecordSequenceEnded(reason, sequence.totals);
}

// A finished sequence is needed as long as a step with its rows, its sampler and its prompt runs.
void Engine::EraseIfDone(const Sequence& sequence) {
  const SeqId id = sequence.id;
  if (collecting_) {
    ended_while_collecting_.push_back(id);
  } else if (!sequence.scheduled || !scheduler_.InFlight(id)) {
    sequences_.erase(id);
  }
}

std::vector<SeqId> Engine::LivingSequencesOf(int64_t request) const {
  std::vector<SeqId> ids;
  for (const auto& [id, sequence] : sequences_) {
    if (sequence->request->number == request && !sequence->finished) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

bool Engine::Abort(int64_t request) {
  const std::vector<SeqId> ids = LivingSequencesOf(request);
  AbortAll(ids);
  return !ids.empty();
}

void Engine::Abort() {
  std::vector<SeqId> ids;
  for (const auto& [id, sequence] : sequences_) {
    if (!sequence->finished) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  AbortAll(ids);
}

void Engine::EndForLostDevice(const Error& error) {
  if (device_lost_.has_value()) return;
  device_lost_ = error;
  std::vector<SeqId> ids;
  for (const auto& [id, sequence] : sequences_) {
    if (!sequence->finished) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  for (const SeqId id : ids) {
    Sequence* sequence = Find(id);  // a callback may have aborted it
    if (sequence != nullptr && !sequence->finished) EndWithError(*sequence, error);
  }
}

void Engine::EndInScheduler(SeqId id) {
  scheduler_.End(id);
  if (recorder_ != nullptr) recorder_->End(id);
}

std::string Engine::TakeSchedule() {
  return recorder_ != nullptr ? recorder_->TakeText() : std::string();
}

void Engine::AbortAll(const std::vector<SeqId>& ids) {
  for (const SeqId id : ids) {
    Sequence* sequence = Find(id);  // a callback may have aborted it
    if (sequence != nullptr && !sequence->finished) Finish(*sequence, FinishReason::kAbort);
  }
}

}  // namespace deepinfer
