#include "sched/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "state/allocation_count_for_test.h"

namespace deepinfer {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<int32_t> Prompt(int64_t tokens, int32_t first = 0) {
  std::vector<int32_t> prompt(static_cast<size_t>(tokens));
  std::iota(prompt.begin(), prompt.end(), first);
  return prompt;
}

SequenceSpec Spec(SeqId id, int64_t prompt_tokens, int64_t max_new_tokens) {
  return {.id = id,
          .prompt = Prompt(prompt_tokens, static_cast<int32_t>(id) * 10000),
          .max_new_tokens = max_new_tokens};
}

// A scheduler with its pools; every sampled token is 7 unless said otherwise.
class SchedulerTest : public ::testing::Test {
 protected:
  void Start(const SchedulerOptions& options, int64_t blocks = 64, int64_t pages = 64,
             int64_t slots = 16, bool with_cache = false) {
    scheduler_.reset();
    cache_.reset();
    pools_ = std::make_unique<StatePools>(blocks, pages, slots, 128, 7);
    if (with_cache) cache_ = std::make_unique<PrefixCache>(*pools_);
    scheduler_ = std::make_unique<Scheduler>(options, *pools_, cache_.get());
  }

  void Add(SequenceSpec spec) {
    const Status added = scheduler_->Add(std::move(spec), now_);
    ASSERT_TRUE(added.has_value()) << added.error().message;
  }

  const SchedulerStep& Plan() {
    scheduler_->Schedule(now_, &step_);
    EXPECT_EQ(scheduler_->FindViolation(), "");
    if (!step_.chunks.empty()) {
      std::vector<Scheduler::ChunkResult> results;
      for (const PlannedChunk& chunk : step_.chunks)
        results.push_back({chunk.id, chunk.samples ? 7 : -1});
      flights_.push_back(std::move(results));
    }
    return step_;
  }

  void Commit(bool ran = true) {
    ASSERT_FALSE(flights_.empty());
    if (!ran)
      for (Scheduler::ChunkResult& result : flights_.front()) result.token = -1;
    scheduler_->Commit(flights_.front(), ran);
    flights_.erase(flights_.begin());
    EXPECT_EQ(scheduler_->FindViolation(), "");
  }

  // One step whose tokens are known at once.
  const SchedulerStep& Step() {
    Plan();
    if (!step_.chunks.empty()) Commit();
    return step_;
  }

  // "id: begin-end" of every chunk.
  std::vector<std::string> Chunks() const {
    std::vector<std::string> chunks;
    for (const PlannedChunk& chunk : step_.chunks)
      chunks.push_back(fmt::format("{}: {}-{}", chunk.id, chunk.begin, chunk.end));
    return chunks;
  }

  std::unique_ptr<StatePools> pools_;
  std::unique_ptr<PrefixCache> cache_;
  std::unique_ptr<Scheduler> scheduler_;
  SchedulerStep step_;
  std::vector<std::vector<Scheduler::ChunkResult>> flights_;
  double now_ = 0;
};

TEST_F(SchedulerTest, WorkStartsInTheFirstStepAfterAnIdleOne) {
  Start({});
  EXPECT_THAT(Step().chunks, IsEmpty());
  EXPECT_TRUE(scheduler_->idle());
  Add(Spec(1, 3, 2));
  EXPECT_FALSE(scheduler_->idle());
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 0-3"));
  EXPECT_TRUE(step_.chunks[0].samples);
  EXPECT_EQ(step_.chunks[0].num_logit_rows, 1);
}

TEST_F(SchedulerTest, WhatCanNeverFitIsRefusedAtOnce) {
  Start({}, /*blocks=*/2);
  EXPECT_EQ(scheduler_->max_sequence_tokens(), 256);
  const Status refused = scheduler_->Add(Spec(1, 256, 1), 0);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Code::kResourceExhausted);
  EXPECT_THAT(refused.error().message, ::testing::HasSubstr("256"));
  EXPECT_TRUE(scheduler_->idle());
  Add(Spec(2, 255, 1));
  Add(Spec(3, 256, 0));
  EXPECT_EQ(scheduler_->Add({.id = 4}, 0).error().code, Code::kInvalidArgument);
}

TEST_F(SchedulerTest, WindowPagesAndSlotsLimitTheLongestSequenceToo) {
  Start({}, 64, /*pages=*/2);
  EXPECT_EQ(scheduler_->max_sequence_tokens(), 256);
  Start({}, 64, /*pages=*/3);
  EXPECT_EQ(scheduler_->max_sequence_tokens(), 64 * 128);
  Start({}, 64, 64, /*slots=*/0);
  EXPECT_EQ(scheduler_->max_sequence_tokens(), 0);
}

TEST_F(SchedulerTest, PromptAndOutputRowsShareAStep) {
  Start({.max_num_batched_tokens = 100});
  Add(Spec(1, 10, 5));
  Step();
  Add(Spec(2, 200, 5));
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 10-11", "2: 0-99"));
  EXPECT_FALSE(step_.chunks[1].samples);
  EXPECT_EQ(step_.chunks[1].num_logit_rows, 0);
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 11-12", "2: 99-198"));
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 12-13", "2: 198-200"));
  EXPECT_TRUE(step_.chunks[1].samples);
}

TEST_F(SchedulerTest, AChunkIsNotLongerThanItsOwnLimit) {
  Start({.max_chunk_tokens = 7});
  Add(Spec(1, 16, 1));
  Add(Spec(2, 3, 1));
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 0-7", "2: 0-3"));
}

TEST_F(SchedulerTest, ALongPromptLeavesRowsToShortOnesThatWait) {
  Start({.max_num_batched_tokens = 128});
  Add(Spec(1, 4000, 1));
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 0-128"));
  Add(Spec(2, 20, 1));
  Step();
  // Half of the rows is kept back; what the short one does not need goes to the long one again.
  EXPECT_THAT(Chunks(), ElementsAre("1: 128-236", "2: 0-20"));
}

TEST_F(SchedulerTest, RowsWhoseLogitsAreWantedAreLimited) {
  Start({.max_prompt_logit_rows = 10});
  SequenceSpec spec = Spec(1, 30, 1);
  spec.first_prompt_logit_row = 5;
  Add(spec);
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 0-16"));
  EXPECT_EQ(step_.chunks[0].num_logit_rows, 11);
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 16-27"));
  EXPECT_EQ(step_.chunks[0].num_logit_rows, 11);
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 27-30"));
  EXPECT_EQ(step_.chunks[0].num_logit_rows, 3);
}

TEST_F(SchedulerTest, PromptLogitsAreNotAskedForAgainAfterAPreemption) {
  Start({.max_num_batched_tokens = 64, .forced_preemption_interval = 3});
  SequenceSpec spec = Spec(1, 100, 4);
  spec.first_prompt_logit_row = 0;
  Add(spec);
  EXPECT_EQ(Step().chunks[0].num_logit_rows, 64);
  EXPECT_EQ(Step().chunks[0].num_logit_rows, 36);
  EXPECT_EQ(Step().chunks[0].num_recomputed, 64);
  EXPECT_EQ(step_.chunks[0].num_logit_rows, 0);
  EXPECT_EQ(Step().chunks[0].num_recomputed, 36);
  EXPECT_EQ(step_.chunks[0].num_logit_rows, 1);
  EXPECT_EQ(scheduler_->preemptions(1), 1);
}

TEST_F(SchedulerTest, AScoredPromptSamplesNothing) {
  Start({});
  SequenceSpec spec = Spec(1, 10, 0);
  spec.first_prompt_logit_row = 0;
  Add(spec);
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 0-10"));
  EXPECT_FALSE(step_.chunks[0].samples);
  EXPECT_THAT(Step().chunks, IsEmpty());
  EXPECT_EQ(scheduler_->tokens(1).size(), 10u);
}

TEST_F(SchedulerTest, FewWindowPagesMakeChunksShorterInsteadOfStoppingThem) {
  Start({.max_num_batched_tokens = 2000}, 64, /*pages=*/3);
  Add(Spec(1, 1500, 1));
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 0-384"));
  int64_t steps = 1;
  while (!Step().chunks.empty()) ++steps;
  EXPECT_LE(steps, 1500 / 128 + 1);
  EXPECT_EQ(scheduler_->tokens(1).size(), 1501u);
}

TEST_F(SchedulerTest, TheNextRowIsPlannedWhileItsTokenIsInFlight) {
  Start({});
  Add(Spec(1, 4, 3));
  Plan();
  Plan();
  EXPECT_THAT(Chunks(), ElementsAre("1: 4-5"));
  EXPECT_TRUE(step_.chunks[0].token_in_flight);
  EXPECT_TRUE(step_.chunks[0].samples);
  Commit();
  Plan();
  EXPECT_THAT(Chunks(), ElementsAre("1: 5-6"));
  // Three tokens have been planned: no row beyond them, though their values are not known.
  Commit();
  EXPECT_THAT(Plan().chunks, IsEmpty());
  Commit();
  EXPECT_EQ(scheduler_->tokens(1).size(), 7u);
}

TEST_F(SchedulerTest, EndGivesMemoryBackWhileTheStepIsInFlight) {
  Start({});
  Add(Spec(1, 300, 3));
  Plan();
  scheduler_->End(1);
  EXPECT_TRUE(scheduler_->InFlight(1));
  EXPECT_EQ(pools_->blocks.num_free(), pools_->blocks.size());
  EXPECT_EQ(pools_->slots.num_free(), pools_->slots.size());
  EXPECT_FALSE(scheduler_->idle());
  Commit();
  EXPECT_FALSE(scheduler_->InFlight(1));
  EXPECT_TRUE(scheduler_->idle());
  EXPECT_EQ(scheduler_->tokens(1).size(), 300u);  // its late token is ignored
  scheduler_->End(1);
  Add(Spec(1, 5, 1));  // the id is free
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 0-5"));
}

TEST_F(SchedulerTest, EndWorksInEveryPhase) {
  Start({.max_num_seqs = 1});
  SequenceSpec held = Spec(1, 10, 1);
  held.held = true;
  Add(held);
  Add(Spec(2, 10, 5));
  Add(Spec(3, 10, 5));
  Step();
  EXPECT_EQ(scheduler_->num_held(), 1);
  EXPECT_EQ(scheduler_->num_waiting(), 1);
  EXPECT_EQ(scheduler_->num_running(), 1);
  for (const SeqId id : {1, 2, 3}) scheduler_->End(id);
  EXPECT_TRUE(scheduler_->idle());
  EXPECT_EQ(scheduler_->num_held() + scheduler_->num_waiting() + scheduler_->num_running(), 0);
  EXPECT_EQ(pools_->blocks.num_free(), pools_->blocks.size());
}

TEST_F(SchedulerTest, DeadlinesEndSequencesInEveryPhase) {
  Start({.max_num_seqs = 1});
  for (const SeqId id : {1, 2, 3}) {
    SequenceSpec spec = Spec(id, 10, 50);
    spec.deadline = 5;
    spec.held = id == 3;
    Add(spec);
  }
  now_ = 4.9;
  EXPECT_THAT(Step().expired, IsEmpty());
  now_ = 5;
  EXPECT_THAT(Step().expired, ::testing::UnorderedElementsAre(1, 2, 3));
  EXPECT_THAT(step_.chunks, IsEmpty());
  EXPECT_TRUE(scheduler_->idle());
  EXPECT_EQ(scheduler_->counters().expired, 3);
  EXPECT_EQ(scheduler_->tokens(1).size(), 11u);  // still to be asked about
}

TEST_F(SchedulerTest, TheLastInServiceOrderGivesWay) {
  Start({}, /*blocks=*/4);
  Add(Spec(1, 127, 300));
  Add(Spec(2, 126, 300));
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 0-127", "2: 0-126"));
  int64_t steps = 0;
  while (scheduler_->counters().preemptions == 0 && ++steps < 400) Step();
  // With both at two blocks the older one takes its third from the younger one.
  EXPECT_EQ(scheduler_->preemptions(1), 0);
  EXPECT_EQ(scheduler_->preemptions(2), 1);
  EXPECT_EQ(scheduler_->num_running(), 1);
  // It comes back, with its tokens, as soon as the other one has ended.
  const size_t known = scheduler_->tokens(2).size();
  scheduler_->End(1);
  Step();
  EXPECT_THAT(Chunks(), ElementsAre(fmt::format("2: 0-{}", known)));
  EXPECT_EQ(step_.chunks[0].num_recomputed, static_cast<int64_t>(known) - 1);
}

TEST_F(SchedulerTest, APreemptedSequenceKeepsTheTokenThatArrivesLater) {
  Start({.forced_preemption_interval = 2});
  Add(Spec(1, 10, 5));
  Plan();
  // Preempted with its first token in flight: it does not come back before the token is in.
  EXPECT_THAT(Plan().chunks, IsEmpty());
  EXPECT_EQ(scheduler_->num_waiting(), 1);
  EXPECT_EQ(pools_->blocks.num_free(), pools_->blocks.size());
  Commit();
  EXPECT_EQ(scheduler_->tokens(1).size(), 11u);
  Plan();
  EXPECT_THAT(Chunks(), ElementsAre("1: 0-11"));
}

TEST_F(SchedulerTest, ASavedSequenceIsImportedAndGoesOnWhereItWas) {
  Start({.preemption = PreemptionMode::kSave, .forced_preemption_interval = 2});
  Add(Spec(1, 300, 5));
  Step();
  Step();
  ASSERT_EQ(step_.commands.size(), 2u);
  EXPECT_EQ(step_.commands[0].kind, StateCommand::Kind::kExport);
  EXPECT_EQ(step_.commands[1].kind, StateCommand::Kind::kImport);
  EXPECT_EQ(step_.commands[0].image, step_.commands[1].image);
  EXPECT_THAT(Chunks(), ElementsAre("1: 300-301"));
  EXPECT_EQ(step_.chunks[0].num_recomputed, 0);
  EXPECT_EQ(scheduler_->counters().preemptions_saved, 1);
}

TEST_F(SchedulerTest, AnExportWithoutRowsIsCarriedOutWithTheNextStep) {
  Start({.preemption = PreemptionMode::kSave, .forced_preemption_interval = 2});
  Add(Spec(1, 300, 5));
  Plan();
  EXPECT_THAT(Plan().chunks, IsEmpty());
  EXPECT_THAT(step_.commands, IsEmpty());
  Commit();
  Plan();
  ASSERT_EQ(step_.commands.size(), 2u);
  EXPECT_EQ(step_.commands[0].kind, StateCommand::Kind::kExport);
  EXPECT_THAT(Chunks(), ElementsAre("1: 300-301"));
}

TEST_F(SchedulerTest, ASequenceThatDoesNotFitIsOvertakenOnlySoOften) {
  Start({.max_overtakes = 3}, /*blocks=*/6);
  Add(Spec(1, 300, 300));
  Step();
  Add(Spec(2, 500, 1));
  for (SeqId id = 10; id < 20; ++id) Add(Spec(id, 10, 1));
  std::vector<SeqId> started;
  for (int i = 0; i < 20; ++i) {
    Step();
    for (const PlannedChunk& chunk : step_.chunks) {
      if (chunk.begin > 0 || chunk.id == 1) continue;
      started.push_back(chunk.id);
      if (chunk.id >= 10) scheduler_->End(chunk.id);
    }
  }
  EXPECT_THAT(started, ElementsAre(10, 11, 12));
  scheduler_->End(1);
  Step();
  EXPECT_EQ(step_.chunks.front().id, 2);
  EXPECT_EQ(scheduler_->counters().most_overtakes, 3);
}

TEST_F(SchedulerTest, AUserWithOneSequenceDoesNotWaitForAnothersHundred) {
  Start({.max_num_seqs = 2});
  for (SeqId id = 1; id <= 100; ++id) {
    SequenceSpec spec = Spec(id, 50, 1);
    spec.user = "many";
    Add(spec);
  }
  Step();
  SequenceSpec spec = Spec(200, 50, 1);
  spec.user = "one";
  Add(spec);
  scheduler_->End(1);
  scheduler_->End(2);
  Step();
  // Both have been served equally when the newcomer comes: the earlier arrival, then the newcomer.
  EXPECT_THAT(Chunks(), ElementsAre("3: 0-50", "200: 0-50"));
}

TEST_F(SchedulerTest, ALargerPriorityIsServedFirst) {
  Start({.max_num_seqs = 1});
  Add(Spec(1, 5, 5));
  SequenceSpec urgent = Spec(2, 5, 5);
  urgent.priority = 1;
  Add(urgent);
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("2: 0-5"));
}

TEST_F(SchedulerTest, HeldSequencesKeepNobodyWaiting) {
  Start({.max_num_seqs = 1});
  SequenceSpec held = Spec(1, 5, 1);
  held.held = true;
  Add(held);
  Add(Spec(2, 5, 1));
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("2: 0-5"));
  scheduler_->End(2);
  EXPECT_THAT(Step().chunks, IsEmpty());
  scheduler_->Release(1);
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 0-5"));
}

TEST_F(SchedulerTest, FollowersWaitForThePromptOfTheirLeader) {
  Start({.max_num_batched_tokens = 64});
  Add(Spec(1, 100, 3));
  SequenceSpec follower = Spec(2, 100, 3);
  follower.leader = 1;
  Add(follower);
  Add(Spec(3, 10, 3));
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 0-64"));
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 64-100", "3: 0-10"));
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 100-101", "2: 0-62", "3: 10-11"));
}

TEST_F(SchedulerTest, FollowersDoNotWaitForALeaderThatIsGone) {
  Start({});
  SequenceSpec leader = Spec(1, 100, 3);
  leader.held = true;
  Add(leader);
  for (const SeqId id : {2, 3}) {
    SequenceSpec follower = Spec(id, 100, 3);
    follower.leader = 1;
    Add(follower);
  }
  EXPECT_THAT(Step().chunks, IsEmpty());
  scheduler_->End(2);
  scheduler_->End(1);
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("3: 0-100"));
}

TEST_F(SchedulerTest, TheReplayedPartIsComputedFromThePromptAlone) {
  Start({.replay_keep_tokens = 30, .forced_preemption_interval = 4});
  Add(Spec(1, 100, 20));
  for (int i = 0; i < 8; ++i) {
    Step();
    ASSERT_EQ(step_.chunks.size(), 1u);
    EXPECT_EQ(step_.chunks[0].decoder_begin, 70) << "also when rows run again, in step " << i;
  }
  EXPECT_GE(scheduler_->preemptions(1), 1);
  SequenceSpec scored = Spec(2, 100, 20);
  scored.first_prompt_logit_row = 10;
  Add(scored);
  Add(Spec(3, 20, 20));
  Step();
  ASSERT_EQ(step_.chunks.size(), 3u);
  EXPECT_EQ(step_.chunks[1].decoder_begin, 0);
  EXPECT_EQ(step_.chunks[2].decoder_begin, 0);
}

TEST_F(SchedulerTest, ARepeatedPromptRunsOnlyItsLastTokens) {
  Start({}, 64, 64, 16, /*with_cache=*/true);
  Add(Spec(1, 300, 5));
  Step();
  scheduler_->End(1);
  SequenceSpec again = Spec(1, 300, 5);
  again.id = 2;
  Add(again);
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("2: 298-300"));
  EXPECT_EQ(scheduler_->cached_tokens(2), 298);
  EXPECT_EQ(scheduler_->counters().cached_tokens, 298);
  EXPECT_EQ(scheduler_->counters().prompt_tokens, 302);
  // Other salts, requests that opt out and those that want prompt logits do not share.
  SequenceSpec other = again;
  other.id = 3;
  other.cache_salt = "another";
  Add(other);
  other = again;
  other.id = 4;
  other.use_prefix_cache = false;
  Add(other);
  other = again;
  other.id = 5;
  other.first_prompt_logit_row = 0;
  Add(other);
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("2: 300-301", "3: 0-300", "4: 0-211"));
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("2: 301-302", "3: 300-301", "4: 211-300", "5: 0-257"));
  EXPECT_EQ(scheduler_->cached_tokens(5), 0);
}

TEST_F(SchedulerTest, RowsInFlightAreNotPublished) {
  Start({.max_num_batched_tokens = 256}, 64, 64, 16, /*with_cache=*/true);
  Add(Spec(1, 400, 5));
  Plan();
  Commit();
  Plan();
  scheduler_->End(1);  // rows 256 ... 399 are in flight
  SequenceSpec again = Spec(1, 400, 5);
  again.id = 2;
  Add(again);
  Plan();
  EXPECT_THAT(Chunks(), ElementsAre("2: 256-400"));
}

TEST_F(SchedulerTest, AFailedStepPublishesNothing) {
  Start({}, 64, 64, 16, /*with_cache=*/true);
  Add(Spec(1, 400, 5));
  Plan();
  Commit(/*ran=*/false);
  scheduler_->End(1);
  EXPECT_EQ(cache_->num_nodes(), 0);
}

TEST_F(SchedulerTest, FollowersFindThePromptOfTheirLeaderInTheCache) {
  Start({}, 64, 64, 16, /*with_cache=*/true);
  Add(Spec(1, 301, 5));
  for (const SeqId id : {2, 3}) {
    SequenceSpec follower = Spec(1, 301, 5);
    follower.id = id;
    follower.leader = 1;
    Add(follower);
  }
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 0-301"));
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 301-302", "2: 300-301", "3: 300-301"));
  // All three write to the block that they share now: two of them to a copy.
  int64_t copies = 0;
  for (const StateCommand& command : step_.commands)
    copies += command.kind == StateCommand::Kind::kCopyBlock;
  EXPECT_EQ(copies, 3);  // the cache keeps the original
}

TEST_F(SchedulerTest, WithReplayAHitEndsBeforeTheReplayedPart) {
  Start({.replay_keep_tokens = 140}, 64, 64, 16, /*with_cache=*/true);
  Add(Spec(1, 600, 5));
  Step();
  scheduler_->End(1);
  SequenceSpec again = Spec(1, 600, 5);
  again.id = 2;
  Add(again);
  Step();
  EXPECT_EQ(step_.chunks[0].decoder_begin, 460);
  EXPECT_LE(step_.chunks[0].begin, 460);
  EXPECT_GE(step_.chunks[0].begin, 384);
}

TEST_F(SchedulerTest, AnApproximateHitRunsItsWindowAgainAndIsNotPublished) {
  Start({.approximate_hit_tokens = 200}, 64, /*pages=*/3, 16, /*with_cache=*/true);
  Add(Spec(1, 600, 2));
  while (!Step().chunks.empty()) {
  }
  scheduler_->End(1);
  Add(Spec(2, 700, 2));  // its pages push out those of the first
  while (!Step().chunks.empty()) {
  }
  scheduler_->End(2);
  const int64_t nodes = cache_->num_nodes();
  SequenceSpec again = Spec(1, 700, 2);
  again.id = 3;
  Add(again);
  Step();
  ASSERT_EQ(step_.chunks.size(), 1u);
  const PlannedChunk& chunk = step_.chunks[0];
  EXPECT_EQ(chunk.entries_begin, 600);
  EXPECT_EQ(chunk.begin, 400);
  EXPECT_EQ(chunk.window_begin, 400);
  EXPECT_LE(chunk.first_window_page * kBlockTokens, 400);
  EXPECT_EQ(scheduler_->cached_tokens(3), 400);
  while (!Step().chunks.empty()) EXPECT_EQ(step_.chunks[0].window_begin, 400);
  scheduler_->End(3);
  EXPECT_EQ(cache_->num_nodes(), nodes);
}

TEST_F(SchedulerTest, ASequenceAsLargeAsThePoolRunsThoughTheCacheSharesItsEnd) {
  Start({}, /*blocks=*/3, /*pages=*/3, 4, /*with_cache=*/true);
  Add(Spec(1, 330, 2));
  Step();
  scheduler_->End(1);
  SequenceSpec again = Spec(1, 330, 50);
  again.id = 2;
  Add(again);
  int64_t steps = 0;
  while (!Step().chunks.empty() && steps < 100) ++steps;
  EXPECT_EQ(scheduler_->tokens(2).size(), 380u);
}

TEST_F(SchedulerTest, ALoneSequenceTakesBackWhatTheCacheSharesInsteadOfGivingWay) {
  Start({}, /*blocks=*/2, /*pages=*/3, 4, /*with_cache=*/true);
  Add(Spec(1, 250, 6));
  SequenceSpec follower = Spec(1, 250, 6);
  follower.id = 2;
  follower.leader = 1;
  Add(follower);
  Step();
  EXPECT_GT(cache_->num_nodes(), 0);
  // Both blocks are its own, but the cache shares the second one with it and there is no third.
  Step();
  EXPECT_THAT(Chunks(), ElementsAre("1: 250-251"));
  EXPECT_EQ(scheduler_->preemptions(1), 0);
}

TEST_F(SchedulerTest, StepsInWhichNoBlockBeginsAllocateNothing) {
  Start({.max_num_seqs = 64, .max_num_batched_tokens = 8192}, 256, 256, 64, /*with_cache=*/true);
  for (SeqId id = 1; id <= 64; ++id) Add(Spec(id, 5 + id, 60));
  std::vector<Scheduler::ChunkResult> results;
  results.reserve(64);
  int64_t allocations = 0;
  for (int i = 0; i < 40; ++i) {
    const int64_t before = AllocationCount();
    scheduler_->Schedule(0, &step_);
    results.clear();
    for (const PlannedChunk& chunk : step_.chunks) results.push_back({chunk.id, 7});
    scheduler_->Commit(results);
    if (i >= 2) allocations += AllocationCount() - before;
  }
  EXPECT_EQ(step_.chunks.size(), 64u);
  EXPECT_EQ(allocations, 0);
}

TEST_F(SchedulerTest, CountersAddUp) {
  Start({.max_num_batched_tokens = 64, .forced_preemption_interval = 5});
  Add(Spec(1, 100, 10));
  Add(Spec(2, 30, 10));
  int64_t rows = 0;
  while (!Step().chunks.empty()) rows += step_.num_rows;
  const SchedulerCounters& counters = scheduler_->counters();
  EXPECT_EQ(counters.prompt_tokens, 130);
  EXPECT_EQ(counters.decode_tokens, 18);
  EXPECT_GT(counters.preemptions, 0);
  EXPECT_EQ(counters.prompt_tokens + counters.decode_tokens + counters.recomputed_tokens, rows);
}

TEST_F(SchedulerTest, SequencesOfAFailedStepRunNoMore) {
  Start({.max_num_batched_tokens = 64});
  Add(Spec(1, 100, 10));
  Plan();
  Commit(/*ran=*/false);
  EXPECT_THAT(Plan().chunks, IsEmpty());
  scheduler_->End(1);
  EXPECT_TRUE(scheduler_->idle());
}

TEST_F(SchedulerTest, APoolForTwoAndAHalfSequencesServesSixteen) {
  Start({.max_num_seqs = 16}, /*blocks=*/10);
  std::vector<SeqId> living;
  for (SeqId id = 1; id <= 16; ++id) {
    Add(Spec(id, 250, 250));
    living.push_back(id);
  }
  int64_t steps = 0;
  Plan();
  while (!living.empty() && ++steps < 16 * 500) {
    Plan();
    Commit();
    std::erase_if(living, [this](SeqId id) {
      if (scheduler_->tokens(id).size() < 500) return false;
      scheduler_->End(id);
      return true;
    });
    if (flights_.empty()) Plan();
  }
  EXPECT_TRUE(scheduler_->idle());
  EXPECT_EQ(scheduler_->counters().decode_tokens, 16 * 249);
  // Two run at a time; hardly anything is thrown away.
  EXPECT_LE(steps, 16 * 260);
  EXPECT_LE(scheduler_->counters().preemptions, 16);
}

}  // namespace
}  // namespace deepinfer
