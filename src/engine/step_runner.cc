#include "engine/step_runner.h"

#include <chrono>
#include <utility>

#include "base/check.h"

namespace deepinfer {

void StepRunner::Fifo::Push(StepJob* job) {
  DI_CHECK_LT(size_, kMaxInFlight);
  jobs_[(first_ + size_++) % kMaxInFlight] = job;
}

StepJob* StepRunner::Fifo::Pop() {
  DI_CHECK_GE(size_, size_t{1});
  StepJob* job = jobs_[first_];
  first_ = (first_ + 1) % kMaxInFlight;
  --size_;
  return job;
}

StepRunner::StepRunner(ModelBackend& backend, bool own_thread, int mask_threads,
                       TraceRecorder* trace)
    : backend_(backend),
      trace_(trace),
      scratch_(static_cast<size_t>(backend.num_workers())),
      masks_(backend.vocab_size(), mask_threads, trace) {
  if (own_thread) thread_ = std::thread([this] { Loop(); });
}

StepRunner::~StepRunner() {
  while (in_flight_ > 0) Wait();
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void StepRunner::Launch(StepJob* job) {
  ++in_flight_;
  if (!thread_.joinable()) {
    Run(*job);
    finished_.Push(job);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    launched_.Push(job);
  }
  changed_.notify_all();
}

StepJob* StepRunner::Wait() {
  DI_CHECK_GE(in_flight_, 1);
  --in_flight_;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !finished_.empty(); });
  return finished_.Pop();
}

void StepRunner::Loop() {
  if (trace_ != nullptr) trace_->NameThread("steps");
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !launched_.empty(); });
    if (launched_.empty()) return;
    StepJob* job = launched_.Pop();
    lock.unlock();
    Run(*job);
    lock.lock();
    finished_.Push(job);
    changed_.notify_all();
  }
}

void StepRunner::Run(StepJob& job) {
  const auto start = std::chrono::steady_clock::now();
  TraceSpan span(trace_, "step");
  span.Arg("sequences", static_cast<int64_t>(job.draws.size()));
  job.outcomes.resize(job.draws.size());
  for (StepOutcome& outcome : job.outcomes) {
    outcome.token.reset();
    outcome.error.reset();
    outcome.prompt_logprobs.clear();
  }
  job.error.reset();
  StartMasks(job);
  const Result<std::span<const float>> logits = backend_.Step(job.plan);
  FinishMasks(job);
  if (!logits.has_value()) {
    job.error = logits.error();
    // A step that has been launched already may take this slot's token: any valid one will do, as
    // its results will not be used.
    for (const StepChunk& chunk : job.plan.chunks) backend_.SetSampledToken(chunk.slot, 0);
  } else {
    first_row_.clear();
    int64_t row = 0;
    for (const StepChunk& chunk : job.plan.chunks) {
      first_row_.push_back(row);
      row += chunk.num_logit_rows;
    }
    TraceSpan draw_span(trace_, "draw");
    logits_ = *logits;
    // Two pointers: what a std::function holds without allocating.
    backend_.ForEach(static_cast<int64_t>(job.draws.size()),
                     [this, &job](int64_t chunk, int worker) {
                       Draw(job, static_cast<size_t>(chunk), scratch_[static_cast<size_t>(worker)]);
                     });
    for (size_t i = 0; i < job.draws.size(); ++i) {
      if (job.draws[i].sampler == nullptr) continue;
      const std::optional<SampledToken>& token = job.outcomes[i].token;
      backend_.SetSampledToken(job.plan.chunks[i].slot, token.has_value() ? token->token_id : 0);
    }
  }
  job.run_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void StepRunner::StartMasks(StepJob& job) {
  masks_.Clear();
  for (StepDraw& draw : job.draws) {
    if (!draw.constrained) continue;
    draw.mask = masks_.size();
    masks_.Add(draw.sampler);
  }
  masks_.Start();
}

void StepRunner::FinishMasks(StepJob& job) {
  job.num_masks = masks_.size();
  if (job.num_masks == 0) return;
  const auto start = std::chrono::steady_clock::now();
  masks_.Finish();
  job.mask_wait_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  job.mask_seconds = masks_.fill_seconds();
}

void StepRunner::Draw(StepJob& job, size_t chunk, SamplerScratch& scratch) {
  const StepDraw& draw = job.draws[chunk];
  StepOutcome& outcome = job.outcomes[chunk];
  const auto vocab = static_cast<size_t>(backend_.vocab_size());
  const auto row_of = [&](int64_t row) {
    return logits_.subspan(static_cast<size_t>(first_row_[chunk] + row) * vocab, vocab);
  };
  for (size_t i = 0; i < draw.next_tokens.size(); ++i) {
    Result<TokenLogprobs> entry =
        RowLogprobs(row_of(static_cast<int64_t>(i)), draw.next_tokens[i], draw.num_top, scratch);
    if (!entry.has_value()) {
      outcome.error = std::move(entry.error());
      return;
    }
    outcome.prompt_logprobs.push_back(std::move(*entry));
  }
  if (draw.sampler == nullptr) return;
  Result<SampledToken> token =
      draw.sampler->Sample(row_of(job.plan.chunks[chunk].num_logit_rows - 1), scratch,
                           draw.mask >= 0 ? masks_.mask(draw.mask) : DrawMask{});
  if (!token.has_value()) {
    outcome.error = std::move(token.error());
    return;
  }
  if (Status accepted = draw.sampler->Accept(token->token_id); !accepted.has_value()) {
    outcome.error = std::move(accepted.error());
    return;
  }
  outcome.token = std::move(*token);
}

}  // namespace deepinfer
