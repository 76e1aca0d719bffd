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
    Start(job);
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
  if (!thread_.joinable() && finished_.empty()) CompletePending();
  std::unique_lock lock(mutex_);
  if (finished_.empty()) {
    waiting_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !finished_.empty(); });
    waiting_ = false;
  }
  return finished_.Pop();
}

void StepRunner::Loop() {
  if (trace_ != nullptr) trace_->NameThread("steps");
  std::unique_lock lock(mutex_);
  for (;;) {
    // While nobody waits for the pending step, another one may still come in time to follow it
    // without a gap.
    changed_.wait(
        lock, [this] { return stop_ || !launched_.empty() || (waiting_ && pending_ != nullptr); });
    if (!launched_.empty()) {
      StepJob* job = launched_.Pop();
      lock.unlock();
      Start(job);
    } else if (pending_ != nullptr) {
      lock.unlock();
      CompletePending();
    } else {
      return;
    }
    lock.lock();
  }
}

void StepRunner::Hand(StepJob* job) {
  {
    const std::lock_guard lock(mutex_);
    finished_.Push(job);
  }
  changed_.notify_all();
}

void StepRunner::Clear(StepJob& job) {
  job.outcomes.resize(job.draws.size());
  for (StepOutcome& outcome : job.outcomes) {
    outcome.token.reset();
    outcome.error.reset();
    outcome.prompt_logprobs.clear();
  }
  job.error.reset();
}

void StepRunner::FailJob(StepJob& job, Error error) {
  job.error = std::move(error);
  // A step that has been launched already may take a slot's token: any valid one will do, as its
  // results will not be used.
  for (const StepChunk& chunk : job.plan.chunks) backend_.SetSampledToken(chunk.slot, 0);
}

void StepRunner::Start(StepJob* job) {
  Clear(*job);
  if (backend_.draws_tokens()) {
    Begin(job);
  } else {
    Run(*job);
    Hand(job);
  }
}

void StepRunner::Begin(StepJob* job) {
  const auto start = std::chrono::steady_clock::now();
  TraceSpan span(trace_, "step");
  span.Arg("sequences", static_cast<int64_t>(job->draws.size()));
  Status begun = backend_.BeginStep(job->plan);
  CompletePending();
  if (!begun.has_value()) {
    FailJob(*job, std::move(begun.error()));
    Hand(job);
    return;
  }
  StartMasks(*job);
  FinishMasks(*job);
  {
    TraceSpan draw_span(trace_, "draw");
    Prepare(*job);
    backend_.DrawStep(draws_, host_rows_);
  }
  pending_ = job;
  pending_since_ = start;
}

void StepRunner::Prepare(StepJob& job) {
  draws_.clear();
  host_rows_.clear();
  if (chunk_draws_.size() < job.draws.size()) chunk_draws_.resize(job.draws.size());
  int32_t row = 0;
  for (size_t i = 0; i < job.draws.size(); ++i) {
    const StepDraw& draw = job.draws[i];
    const StepChunk& chunk = job.plan.chunks[i];
    ChunkDraw& at = chunk_draws_[i];
    at.status = {};
    at.first_row = std::ssize(draws_);
    at.first_logits = -1;
    const auto want_logits = [&](int32_t of_row) {
      if (at.first_logits < 0) at.first_logits = std::ssize(host_rows_);
      host_rows_.push_back(of_row);
    };
    for (size_t k = 0; k < draw.next_tokens.size(); ++k) {
      const int32_t logit_row = row + static_cast<int32_t>(k);
      draws_.push_back({.draw = GivenTokenDraw(draw.next_tokens[k])});
      draws_.back().draw.logit_row = logit_row;
      if (draw.num_top > 0) want_logits(logit_row);
    }
    row += static_cast<int32_t>(chunk.num_logit_rows);
    if (draw.sampler == nullptr) continue;
    at.status = draw.sampler->Prepare(
        backend_.vocab_size(), draw.mask >= 0 ? masks_.mask(draw.mask) : DrawMask{}, &at.prepared);
    if (!at.status.has_value()) {
      backend_.SetSampledToken(chunk.slot, 0);
      continue;
    }
    draws_.push_back({.draw = at.prepared.draw, .lists = at.prepared.lists});
    draws_.back().draw.logit_row = row - 1;
    draws_.back().draw.slot = chunk.slot;
    if (at.prepared.num_top > 0) want_logits(row - 1);
  }
}

void StepRunner::CompletePending() {
  if (pending_ == nullptr) return;
  StepJob& job = *std::exchange(pending_, nullptr);
  const Result<DrawnRows> drawn = backend_.FinishStep();
  if (!drawn.has_value()) {
    FailJob(job, drawn.error());
  } else if (drawn->logits.empty()) {
    for (size_t i = 0; i < job.draws.size(); ++i) TakeIn(job, i, *drawn, scratch_[0]);
  } else {
    const auto take_in = [this, &job, &drawn](int64_t chunk, int worker) {
      TakeIn(job, static_cast<size_t>(chunk), *drawn, scratch_[static_cast<size_t>(worker)]);
    };
    backend_.ForEach(static_cast<int64_t>(job.draws.size()), std::cref(take_in));
  }
  job.run_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - pending_since_).count();
  Hand(&job);
}

void StepRunner::TakeIn(StepJob& job, size_t chunk, const DrawnRows& drawn,
                        SamplerScratch& scratch) {
  const StepDraw& draw = job.draws[chunk];
  const ChunkDraw& at = chunk_draws_[chunk];
  StepOutcome& outcome = job.outcomes[chunk];
  const auto vocab = static_cast<size_t>(backend_.vocab_size());
  int64_t next_logits = at.first_logits;
  const auto next_row = [&] {
    return drawn.logits.subspan(static_cast<size_t>(next_logits++) * vocab, vocab);
  };
  const auto row_of = [&](size_t i) -> const SampledRow& {
    return drawn.rows[static_cast<size_t>(at.first_row) + i];
  };
  for (size_t i = 0; i < draw.next_tokens.size(); ++i) {
    Result<TokenLogprobs> entry =
        draw.num_top > 0 ? RowLogprobs(next_row(), draw.next_tokens[i], draw.num_top, scratch)
                         : GivenTokenLogprobs(row_of(i));
    if (!entry.has_value()) {
      outcome.error = std::move(entry.error());
      return;
    }
    outcome.prompt_logprobs.push_back(std::move(*entry));
  }
  if (draw.sampler == nullptr) return;
  if (!at.status.has_value()) {
    outcome.error = at.status.error();
    return;
  }
  const SampledRow& row = row_of(draw.next_tokens.size());
  Result<SampledToken> token =
      at.prepared.num_top > 0 ? draw.sampler->Sample(next_row(), scratch, at.prepared.constraint)
                              : draw.sampler->Complete(at.prepared, row);
  if (token.has_value() && token->token_id != row.token) {
    outcome.error = Error{.code = Code::kInternal,
                          .message = fmt::format("the device has drawn token {}, the host {} from "
                                                 "the same logits.",
                                                 row.token, token->token_id),
                          .field = {}};
    return;
  }
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

void StepRunner::Run(StepJob& job) {
  const auto start = std::chrono::steady_clock::now();
  TraceSpan span(trace_, "step");
  span.Arg("sequences", static_cast<int64_t>(job.draws.size()));
  StartMasks(job);
  const Result<std::span<const float>> logits = backend_.Step(job.plan);
  FinishMasks(job);
  if (!logits.has_value()) {
    FailJob(job, logits.error());
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
