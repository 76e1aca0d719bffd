#include "engine/statistics.h"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace deepinfer {
namespace {

int64_t Sum(const std::array<int64_t, kNumEndReasons>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

void AddTotals(const SequenceTotals& sequence, SequenceTotals* sum) {
  sum->prompt_tokens += sequence.prompt_tokens;
  sum->prompt_tokens_computed += sequence.prompt_tokens_computed;
  sum->prompt_tokens_cached += sequence.prompt_tokens_cached;
  sum->completion_tokens += sequence.completion_tokens;
  sum->preemptions += sequence.preemptions;
}

}  // namespace

RowCounts CountRows(int64_t begin, int64_t end, int64_t num_recomputed, int64_t prompt_tokens) {
  // Rows that have run before come first.
  RowCounts rows;
  rows.recomputed = num_recomputed;
  const int64_t first_new = begin + num_recomputed;
  rows.prompt = std::max<int64_t>(0, std::min(end, prompt_tokens) - first_new);
  rows.decode = end - first_new - rows.prompt;
  return rows;
}

EndReason StrongerReason(EndReason a, EndReason b) {
  const auto strength = [](EndReason reason) {
    switch (reason) {
      case EndReason::kStop:
        return 0;
      case EndReason::kLength:
        return 1;
      case EndReason::kAbort:
        return 2;
      case EndReason::kDeadline:
        return 3;
      case EndReason::kError:
        return 4;
      case EndReason::kRefused:
        return 5;
    }
    return 0;
  };
  return strength(a) >= strength(b) ? a : b;
}

void LivingTotals::Add(const SequenceTotals& sequence) {
  ++sequences;
  if (sequence.started) ++started;
  if (sequence.first_token_seconds >= 0) ++with_first_token;
  AddTotals(sequence, &tokens);
}

EngineStatistics::EngineStatistics(std::string model) {
  now_.model = std::move(model);
}

void EngineStatistics::RecordSubmitted() {
  const std::lock_guard lock(mutex_);
  ++now_.requests_submitted;
}

void EngineStatistics::RecordRefused() {
  RecordRequestEnded(EndReason::kRefused);
}

void EngineStatistics::RecordCreated(int64_t prompt_tokens) {
  const std::lock_guard lock(mutex_);
  ++now_.sequences_created;
  now_.prompt_tokens_submitted += prompt_tokens;
}

void EngineStatistics::RecordStarted(double queue_seconds) {
  const std::lock_guard lock(mutex_);
  now_.queue_time.Add(queue_seconds);
}

void EngineStatistics::RecordPlanned(const PlannedStep& step) {
  const std::lock_guard lock(mutex_);
  ++now_.steps;
  now_.rows += step.rows.prompt + step.rows.decode + step.rows.recomputed;
  now_.prompt_tokens_computed += step.rows.prompt;
  now_.decode_rows += step.rows.decode;
  now_.recomputed_rows += step.rows.recomputed;
  now_.prompt_tokens_cached += step.prompt_tokens_cached;
  now_.preemptions += step.preemptions;
  now_.plan_time.Add(step.plan_seconds);
}

void EngineStatistics::RecordPreempted(int64_t sequences) {
  const std::lock_guard lock(mutex_);
  now_.preemptions += sequences;
}

void EngineStatistics::RecordFirstToken(double seconds) {
  const std::lock_guard lock(mutex_);
  now_.first_token_time.Add(seconds);
}

void EngineStatistics::RecordGrammar(bool compiled) {
  const std::lock_guard lock(mutex_);
  ++(compiled ? now_.grammars_compiled : now_.grammars_failed);
}

void EngineStatistics::RecordCommitted(const CommittedStep& step) {
  const std::lock_guard lock(mutex_);
  ++committed_steps_;
  now_.completion_tokens += step.completion_tokens;
  now_.step_time.Add(step.step_seconds);
  now_.commit_time.Add(step.commit_seconds);
  now_.grammars_waiting = step.grammars_waiting;
  if (step.num_masks > 0) {
    now_.masks += step.num_masks;
    now_.mask_time.Add(step.mask_seconds);
    now_.mask_wait_time.Add(step.mask_wait_seconds);
  }
  now_.sequences_held = step.sequences_held;
  now_.sequences_waiting = step.sequences_waiting;
  now_.sequences_running = step.sequences_running;
  living_when_committed_ = now_.sequences_created - Sum(now_.sequences_ended);
  now_.blocks = step.blocks;
  now_.window_pages = step.window_pages;
  now_.slots = step.slots;
}

void EngineStatistics::RecordSequenceEnded(EndReason reason, const SequenceTotals& sequence) {
  const std::lock_guard lock(mutex_);
  ++now_.sequences_ended[static_cast<size_t>(reason)];
  now_.total_time.Add(sequence.total_seconds);
  AddTotals(sequence, &ended_);
  if (sequence.started) ++ended_started_;
  if (sequence.first_token_seconds < 0) return;
  ++ended_with_first_token_;
  if (sequence.completion_tokens < 2) return;
  ++ended_with_two_tokens_;
  now_.output_token_time.Add((sequence.total_seconds - sequence.first_token_seconds) /
                             static_cast<double>(sequence.completion_tokens - 1));
}

void EngineStatistics::RecordRequestEnded(EndReason reason) {
  const std::lock_guard lock(mutex_);
  ++now_.requests_ended[static_cast<size_t>(reason)];
}

StatisticsSnapshot EngineStatistics::Snapshot() const {
  const std::lock_guard lock(mutex_);
  return now_;
}

std::string EngineStatistics::FindViolation(const LivingTotals& living) const {
  const std::lock_guard lock(mutex_);
  std::string found;
  const auto equal = [&](const char* left_name, int64_t left, const char* right_name,
                         int64_t right) {
    if (found.empty() && left != right) {
      found = fmt::format("{} is {}, but {} is {}.", left_name, left, right_name, right);
    }
  };
  const auto at_most = [&](const char* left_name, int64_t left, const char* right_name,
                           int64_t right) {
    if (found.empty() && left > right) {
      found =
          fmt::format("{} is {}, more than {}, which is {}.", left_name, left, right_name, right);
    }
  };
  equal("requests submitted", now_.requests_submitted, "those that ended and those that live",
        Sum(now_.requests_ended) + living.requests);
  equal("sequences created", now_.sequences_created, "those that ended and those that live",
        Sum(now_.sequences_ended) + living.sequences);
  equal("sequences refused", now_.sequences_ended[static_cast<size_t>(EndReason::kRefused)],
        "what is possible", 0);
  equal("sequences held, waiting and running after the last step",
        now_.sequences_held + now_.sequences_waiting + now_.sequences_running,
        "those that lived then", living_when_committed_);
  equal("prompt tokens submitted", now_.prompt_tokens_submitted, "the sum over sequences",
        ended_.prompt_tokens + living.tokens.prompt_tokens);
  equal("prompt tokens computed", now_.prompt_tokens_computed, "the sum over sequences",
        ended_.prompt_tokens_computed + living.tokens.prompt_tokens_computed);
  equal("prompt tokens cached", now_.prompt_tokens_cached, "the sum over sequences",
        ended_.prompt_tokens_cached + living.tokens.prompt_tokens_cached);
  // Less while prompts wait, and when what was computed before a preemption is followed by a hit.
  at_most("prompt tokens computed and cached",
          now_.prompt_tokens_computed + now_.prompt_tokens_cached, "prompt tokens submitted",
          now_.prompt_tokens_submitted);
  equal("completion tokens", now_.completion_tokens, "the sum over sequences",
        ended_.completion_tokens + living.tokens.completion_tokens);
  equal("preemptions", now_.preemptions, "the sum over sequences",
        ended_.preemptions + living.tokens.preemptions);
  equal("rows", now_.rows, "the sum over their kinds",
        now_.prompt_tokens_computed + now_.decode_rows + now_.recomputed_rows);
  at_most("committed steps", committed_steps_, "planned steps", now_.steps);
  equal("entries of plan_time", now_.plan_time.count, "steps", now_.steps);
  equal("entries of step_time", now_.step_time.count, "committed steps", committed_steps_);
  at_most("entries of mask_time", now_.mask_time.count, "committed steps", committed_steps_);
  at_most("entries of mask_time", now_.mask_time.count, "masks", now_.masks);
  equal("entries of mask_wait_time", now_.mask_wait_time.count, "entries of mask_time",
        now_.mask_time.count);
  at_most("grammars that were compiled or failed", now_.grammars_compiled + now_.grammars_failed,
          "requests submitted", now_.requests_submitted);
  at_most("grammars that wait", now_.grammars_waiting, "requests submitted",
          now_.requests_submitted);
  equal("entries of queue_time", now_.queue_time.count, "sequences that started",
        ended_started_ + living.started);
  equal("entries of first_token_time", now_.first_token_time.count, "sequences with a token",
        ended_with_first_token_ + living.with_first_token);
  equal("entries of output_token_time", now_.output_token_time.count,
        "ended sequences with two tokens", ended_with_two_tokens_);
  equal("entries of total_time", now_.total_time.count, "ended sequences",
        Sum(now_.sequences_ended));
  for (const TimeHistogram* histogram :
       {&now_.plan_time, &now_.step_time, &now_.commit_time, &now_.queue_time,
        &now_.first_token_time, &now_.output_token_time, &now_.total_time, &now_.mask_time,
        &now_.mask_wait_time}) {
    equal("the sum over a histogram's ranges",
          std::accumulate(histogram->counts.begin(), histogram->counts.end(), int64_t{0}),
          "its number of entries", histogram->count);
  }
  for (const PoolUse* pool : {&now_.blocks, &now_.window_pages, &now_.slots}) {
    at_most("used and reclaimable units of a pool", pool->used + pool->reclaimable, "the pool",
            pool->total);
    at_most("the negative number of units used", -pool->used, "what is possible", 0);
    at_most("the negative number of units reclaimable", -pool->reclaimable, "what is possible", 0);
  }
  return found;
}

}  // namespace deepinfer
