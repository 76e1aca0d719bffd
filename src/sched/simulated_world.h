// For the tests of this module: random runs of the scheduler with a simulated engine. Whatever
// happens, the tokens are those of the plain model, everything ends once, nothing leaks and nothing
// stands still.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <random>

#include "sched/recorder.h"
#include "sched/simulated_engine.h"

namespace deepinfer {
class Draw {
 public:
  explicit Draw(uint64_t seed) : bits_(seed) {}
  int64_t Below(int64_t n) {
    return static_cast<int64_t>(bits_() % static_cast<uint64_t>(n));
  }
  bool OneIn(int64_t n) {
    return Below(n) == 0;
  }
  template <class T>
  T Of(std::initializer_list<T> values) {
    return values.begin()[Below(std::ssize(values))];
  }

 private:
  std::mt19937_64 bits_;
};

struct SimulationTotals {
  int64_t steps = 0;
  int64_t finished = 0;
  int64_t checked_tokens = 0;
  int64_t preemptions = 0;
  int64_t preemptions_saved = 0;
  int64_t cached_tokens = 0;
  int64_t recomputed_tokens = 0;
  int64_t approximate = 0;
  int64_t replayed = 0;
  std::array<int64_t, 5> reasons = {};
  int64_t expired = 0;
  int64_t most_overtakes = 0;
  int64_t most_steps_waited = 0;
};

// One world: options, pools and prompts drawn from the seed, then `num_steps` steps of random calls
// and a drain.
class SimulatedWorld {
 public:
  explicit SimulatedWorld(uint64_t seed) : draw_(seed) {
    options_.max_num_seqs = draw_.Of<int64_t>({1, 2, 5, 16});
    options_.max_num_batched_tokens =
        std::max(options_.max_num_seqs, draw_.Of<int64_t>({1, 7, 64, 256, 256, 512}));
    options_.max_chunk_tokens = draw_.Of<int64_t>({0, 0, 0, 0, 1, 7, 128});
    options_.max_prompt_logit_rows = draw_.Of<int64_t>({1, 16, 256});
    options_.prefix_caching = !draw_.OneIn(4);
    options_.replay_keep_tokens = draw_.Of<int64_t>({0, 0, 0, 1, 140});
    options_.approximate_hit_tokens = draw_.Of<int64_t>({0, 0, 20, 130});
    options_.preemption = draw_.Of({PreemptionMode::kRecompute, PreemptionMode::kSave});
    options_.max_overtakes = draw_.Of<int64_t>({1, 4, 64});
    options_.forced_preemption_interval = draw_.Of<int64_t>({0, 0, 1, 3, 10});
    // Where rows come singly, running everything again for each new row would take too long.
    if (std::min(options_.max_num_batched_tokens,
                 options_.max_chunk_tokens > 0 ? options_.max_chunk_tokens : 512) < 64)
      options_.forced_preemption_interval = draw_.Of<int64_t>({0, 50});
    options_.forced_preemption_seed = seed;
    long_prompts_ = draw_.Of<int64_t>({2, 8});
    const int64_t blocks = draw_.Of<int64_t>({2, 4, 7, 12, 40});
    const int64_t pages = std::max<int64_t>(2, blocks * draw_.Of<int64_t>({1, 2, 4}) / 4);
    pools_ = std::make_unique<StatePools>(blocks, pages, draw_.Of<int64_t>({1, 3, 16}), 128,
                                          draw_.Of<int64_t>({1, 7}));
    cache_ = std::make_unique<PrefixCache>(*pools_);
    ahead_ = draw_.Of<int64_t>({0, 1, 2});
    if (seed % 8 == 0) recorder_ = std::make_unique<ScheduleRecorder>(options_, *pools_, true);
    engine_ = std::make_unique<SimulatedEngine>(options_, *pools_, cache_.get(), recorder_.get());
    for (std::vector<int32_t>& stem : stems_)
      for (int i = 0; i < 1000; ++i) stem.push_back(static_cast<int32_t>(draw_.Below(50000)));
  }

  std::string Run(int64_t num_steps, SimulationTotals* totals) {
    std::string problem;
    for (int64_t i = 0; i < num_steps && problem.empty(); ++i) problem = OneStep(i, true);
    // Everything that is left ends by itself once nothing is held back.
    for (const SeqId id : ids_)
      if (engine_->living(id)) engine_->Release(id);
    int64_t idle = 0;
    for (int64_t i = 0; problem.empty() && engine_->num_living() > 0; ++i) {
      problem = OneStep(i, false);
      if (++idle > 200000) problem = "does not come to an end";
    }
    while (engine_->num_flights() > 0 && problem.empty()) {
      engine_->Land();
      problem = engine_->problem();
    }
    if (!problem.empty()) return problem;
    const Scheduler& scheduler = engine_->scheduler();
    if (!scheduler.idle() || scheduler.num_held() + scheduler.num_waiting() != 0)
      return "is not idle at the end";
    if (submitted_ != finished_) return "not everything has ended";
    if (std::string found = scheduler.FindViolation(); !found.empty()) return found;
    cache_->Clear();
    if (pools_->blocks.num_free() != pools_->blocks.size() ||
        pools_->window_pages.num_free() != pools_->window_pages.size() ||
        pools_->slots.num_free() != pools_->slots.size())
      return "units have leaked";
    if (recorder_ != nullptr) {
      const Result<ScheduleReplay> replay = ReplaySchedule(recorder_->TakeText());
      if (!replay.has_value()) return "does not replay: " + replay.error().message;
      if (replay->first_divergence.has_value())
        return "replays differently: " + replay->first_divergence->description;
      ++totals->replayed;
    }
    const SchedulerCounters& counters = scheduler.counters();
    if (counters.most_overtakes > options_.max_overtakes) return "overtaken too often";
    totals->steps += counters.steps;
    totals->finished += finished_;
    totals->checked_tokens += engine_->num_checked_tokens();
    totals->preemptions += counters.preemptions;
    totals->preemptions_saved += counters.preemptions_saved;
    totals->cached_tokens += counters.cached_tokens;
    totals->recomputed_tokens += counters.recomputed_tokens;
    totals->approximate += engine_->num_approximate();
    for (size_t i = 0; i < reasons_.size(); ++i) totals->reasons[i] += reasons_[i];
    totals->expired += counters.expired;
    totals->most_overtakes = std::max(totals->most_overtakes, counters.most_overtakes);
    totals->most_steps_waited = std::max(totals->most_steps_waited, engine_->most_steps_waited());
    return {};
  }

 private:
  std::string OneStep(int64_t index, bool disturb) {
    now_ += 1;
    if (disturb) {
      while (draw_.OneIn(3) && engine_->num_living() < 24) Submit();
      if (draw_.OneIn(8) && !ids_.empty()) {
        const SeqId id = ids_[static_cast<size_t>(draw_.Below(std::ssize(ids_)))];
        if (engine_->living(id)) engine_->Abort(id);
      }
      for (const SeqId id : ids_)
        if (engine_->living(id) && engine_->held(id) && draw_.OneIn(6)) engine_->Release(id);
    }
    // Mostly as far ahead as this world goes, sometimes less.
    while (engine_->num_flights() > ahead_ || (engine_->num_flights() > 0 && draw_.OneIn(5)) ||
           engine_->num_flights() == 2) {
      engine_->Land(!(disturb && draw_.OneIn(200)));
    }
    const bool could_run = engine_->num_flights() == 0 && engine_->CouldRun();
    if (!engine_->Launch(now_)) {
      const bool still = engine_->num_flights() == 0 && engine_->CouldRun();
      if (could_run && still) return "stands still";
      if (engine_->num_flights() > 0) engine_->Land();
    }
    if (ahead_ == 0 && engine_->num_flights() > 0) engine_->Land();
    for (const SimulatedEngine::Finished& finished : engine_->TakeFinished()) {
      ++finished_;
      ++reasons_[static_cast<size_t>(finished.reason)];
      std::erase(ids_, finished.id);
    }
    if (!engine_->problem().empty()) return engine_->problem();
    return index % 16 == 0 ? engine_->scheduler().FindViolation() : std::string();
  }

  void Submit() {
    SequenceSpec spec;
    spec.id = next_id_++;
    spec.user = std::string(1, static_cast<char>('a' + draw_.Below(4)));
    spec.priority = draw_.OneIn(5) ? static_cast<int32_t>(draw_.Below(3)) - 1 : 0;
    if (draw_.OneIn(6)) spec.deadline = now_ + static_cast<double>(draw_.Below(60));
    const std::vector<int32_t>& stem = stems_[static_cast<size_t>(draw_.Below(2))];
    const int64_t longest = std::min<int64_t>(engine_->scheduler().max_sequence_tokens() + 3, 700);
    const int64_t length =
        1 + (draw_.OneIn(long_prompts_) ? draw_.Below(longest) : draw_.Below(20));
    int64_t shared = draw_.Below(length + 1);
    if (draw_.OneIn(3)) shared = length;
    spec.prompt.assign(stem.begin(), stem.begin() + shared);
    while (std::ssize(spec.prompt) < length)
      spec.prompt.push_back(static_cast<int32_t>(draw_.Below(50000)));
    spec.max_new_tokens = draw_.OneIn(8) ? 0 : 1 + draw_.Below(draw_.OneIn(4) ? 300 : 20);
    spec.cache_salt = draw_.OneIn(5) ? "salt" : "";
    spec.use_prefix_cache = !draw_.OneIn(10);
    if (draw_.OneIn(10)) spec.first_prompt_logit_row = draw_.Below(length);
    spec.held = draw_.OneIn(6);
    const int64_t n = draw_.OneIn(6) ? 1 + draw_.Below(4) : 1;
    const SeqId leader = spec.id;
    for (int64_t i = 0; i < n; ++i) {
      if (i > 0) {
        spec.id = next_id_++;
        spec.leader = leader;
        spec.held = spec.held && draw_.OneIn(2);
        spec.first_prompt_logit_row = std::numeric_limits<int64_t>::max();
      }
      const bool fits =
          length + (spec.max_new_tokens > 0 ? 1 : 0) <= engine_->scheduler().max_sequence_tokens();
      const Status added = engine_->Add(spec, now_);
      EXPECT_EQ(added.has_value(), fits);
      if (!added.has_value()) continue;
      ++submitted_;
      ids_.push_back(spec.id);
    }
  }

  Draw draw_;
  SchedulerOptions options_;
  int64_t ahead_ = 0;
  int64_t long_prompts_ = 2;  // one in so many
  std::unique_ptr<StatePools> pools_;
  std::unique_ptr<PrefixCache> cache_;
  std::unique_ptr<ScheduleRecorder> recorder_;
  std::unique_ptr<SimulatedEngine> engine_;
  std::array<std::vector<int32_t>, 2> stems_;
  std::vector<SeqId> ids_;
  SeqId next_id_ = 1;
  int64_t submitted_ = 0;
  int64_t finished_ = 0;
  std::array<int64_t, 5> reasons_ = {};
  double now_ = 0;
};

inline void RunWorlds(uint64_t first_seed, int64_t steps_in_all) {
  SimulationTotals totals;
  uint64_t seed = first_seed;
  while (totals.steps < steps_in_all) {
    const std::string problem = SimulatedWorld(seed).Run(400, &totals);
    ASSERT_EQ(problem, "") << "in the world of seed " << seed;
    ++seed;
  }
  const auto record = [](const char* what, int64_t value) {
    ::testing::Test::RecordProperty(what, std::to_string(value));
    fmt::print("{} {}\n", value, what);
  };
  record("worlds", static_cast<int64_t>(seed - first_seed));
  record("steps", totals.steps);
  record("ended", totals.finished);
  record("tokens_checked", totals.checked_tokens);
  record("preemptions", totals.preemptions);
  record("preemptions_saved", totals.preemptions_saved);
  record("cached_tokens", totals.cached_tokens);
  record("recomputed_tokens", totals.recomputed_tokens);
  record("approximate", totals.approximate);
  record("replayed_worlds", totals.replayed);
  record("most_overtakes", totals.most_overtakes);
  record("most_steps_waited", totals.most_steps_waited);
  // The worlds contain what they are meant to contain.
  EXPECT_GT(totals.preemptions - totals.preemptions_saved, steps_in_all / 100);
  EXPECT_GT(totals.preemptions_saved, steps_in_all / 100);
  EXPECT_GT(totals.cached_tokens, steps_in_all / 10);
  EXPECT_GT(totals.recomputed_tokens, steps_in_all / 10);
  EXPECT_GT(totals.most_overtakes, 0);
  EXPECT_GT(totals.approximate, steps_in_all / 10'000);
  for (const int64_t reason : totals.reasons) EXPECT_GT(reason, steps_in_all / 1000);
}

}  // namespace deepinfer
