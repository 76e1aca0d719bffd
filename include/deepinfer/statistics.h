// What an engine has done so far, in numbers: a copy that may be read at leisure, and three ways to
// write it down. docs/metrics.md describes every number. Part of the public interface.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace deepinfer {

// Why a request or one of its completions ended.
enum class EndReason : uint8_t { kStop, kLength, kAbort, kDeadline, kError, kRefused };
inline constexpr size_t kNumEndReasons = 6;
// "stop", "length", "abort", "deadline", "error", "refused".
std::string_view EndReasonName(EndReason reason);

// How long something took, counted in fixed ranges.
struct TimeHistogram {
  // Upper ends of the ranges in seconds, included in them; a last range has no end.
  static constexpr std::array<double, 26> kBounds = {
      1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1,
      0.25, 0.5,    1,    2.5,  5,      10,   25,   50,     100,  250,  500,    1000, 2500};

  std::array<int64_t, kBounds.size() + 1> counts{};  // per range, not accumulated
  int64_t count = 0;
  double sum_seconds = 0;
  double max_seconds = 0;

  void Add(double seconds);
  double mean_seconds() const {
    return count > 0 ? sum_seconds / static_cast<double>(count) : 0;
  }
};

// Units of one of the cache's pools. The rest of `total` is free.
struct PoolUse {
  int64_t total = 0;
  int64_t used = 0;         // referred to by running sequences
  int64_t reclaimable = 0;  // kept for reuse by the prefix cache only
  int64_t unit_bytes = 0;
};

struct StatisticsSnapshot {
  std::string model;  // the name of the checkpoint

  // A request asks for one or more completions; each completion is a sequence.
  int64_t requests_submitted = 0;
  std::array<int64_t, kNumEndReasons> requests_ended{};
  int64_t sequences_created = 0;
  std::array<int64_t, kNumEndReasons> sequences_ended{};  // none is refused
  int64_t sequences_held = 0;                             // after the last step
  int64_t sequences_waiting = 0;
  int64_t sequences_running = 0;

  int64_t prompt_tokens_submitted = 0;  // prompts of the sequences that were created
  int64_t prompt_tokens_computed = 0;   // for the first time
  int64_t prompt_tokens_cached = 0;
  int64_t completion_tokens = 0;

  int64_t steps = 0;
  int64_t rows = 0;  // prompt_tokens_computed + decode_rows + recomputed_rows
  int64_t decode_rows = 0;
  int64_t recomputed_rows = 0;
  int64_t preemptions = 0;

  int64_t grammars_compiled = 0;  // structured outputs, one per request
  int64_t grammars_failed = 0;
  int64_t grammars_waiting = 0;  // after the last step
  int64_t masks = 0;             // of constrained draws

  TimeHistogram plan_time;
  TimeHistogram step_time;
  TimeHistogram commit_time;
  TimeHistogram queue_time;
  TimeHistogram first_token_time;
  TimeHistogram output_token_time;
  TimeHistogram total_time;
  TimeHistogram mask_time;       // of steps with constrained draws, over all threads
  TimeHistogram mask_wait_time;  // of the same steps, after their rows

  PoolUse blocks;
  PoolUse window_pages;
  PoolUse slots;
};

// One line for people. With `elapsed_seconds` above 0, also tokens per second.
std::string SummaryLine(const StatisticsSnapshot& statistics, double elapsed_seconds = 0);
// One JSON object whose members are the metrics.
std::string StatisticsJson(const StatisticsSnapshot& statistics);
// Prometheus' text format, version 0.0.4.
std::string StatisticsPrometheus(const StatisticsSnapshot& statistics);
// The page docs/metrics.md.
std::string MetricsPage();

}  // namespace deepinfer
