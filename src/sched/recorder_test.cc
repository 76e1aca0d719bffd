#include "sched/recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <random>

namespace deepinfer {
namespace {

using ::testing::HasSubstr;

SchedulerOptions Options() {
  return {.max_num_seqs = 4,
          .max_num_batched_tokens = 64,
          .preemption = PreemptionMode::kSave,
          .forced_preemption_interval = 7};
}

// A recorded run of 300 steps with all kinds of calls. `distort` changes what is recorded of one
// step, as if another scheduler had decided it.
std::string Record(int64_t max_bytes = int64_t{1} << 24, int64_t distort = -1) {
  StatePools pools(12, 12, 4, 128, 7);
  PrefixCache cache(pools);
  Scheduler scheduler(Options(), pools, &cache);
  ScheduleRecorder recorder(Options(), pools, true, max_bytes);
  std::mt19937_64 bits(5);
  SchedulerStep step;
  std::deque<std::vector<Scheduler::ChunkResult>> flights;
  std::vector<SeqId> living;
  std::string text;
  for (int64_t i = 0; i < 300; ++i) {
    const double now = 0.25 * static_cast<double>(i);
    if (i % 5 == 0) {
      SequenceSpec spec{.id = i, .user = i % 2 == 0 ? "a user" : ""};
      spec.prompt.resize(1 + bits() % 400);
      for (int32_t& token : spec.prompt) token = static_cast<int32_t>(bits() % 3);
      spec.max_new_tokens = static_cast<int64_t>(bits() % 40);
      spec.held = i % 15 == 0;
      if (i % 20 == 0) spec.deadline = now + 3;
      if (i % 25 == 0) spec.prompt.resize(5000);
      const bool accepted = scheduler.Add(spec, now).has_value();
      recorder.Add(spec, now, accepted);
      if (accepted) living.push_back(spec.id);
    }
    if (i % 15 == 7 && scheduler.num_held() > 0) {
      for (const SeqId id : living) {
        scheduler.Release(id);
        recorder.Release(id);
      }
    }
    if (flights.size() == 2 || (!flights.empty() && i % 3 == 0)) {
      scheduler.Commit(flights.front());
      recorder.Commit(flights.front());
      flights.pop_front();
    }
    if (i % 11 == 10 && !living.empty()) {
      scheduler.End(living.front());
      recorder.End(living.front());
      living.erase(living.begin());
    }
    scheduler.Schedule(now, &step);
    for (const SeqId id : step.expired) std::erase(living, id);
    if (!step.chunks.empty()) {
      flights.emplace_back();
      for (const PlannedChunk& chunk : step.chunks)
        flights.back().push_back({chunk.id, chunk.samples ? static_cast<int32_t>(bits() % 3) : -1});
    }
    if (i == distort) step.chunks.at(0).slot += 1;
    recorder.Schedule(now, step);
    text += recorder.TakeText();
  }
  EXPECT_GT(scheduler.counters().preemptions, 0);
  EXPECT_GT(scheduler.counters().cached_tokens, 0);
  EXPECT_GT(scheduler.counters().expired, 0);
  return text;
}

TEST(ScheduleRecorder, ARecordedRunReplaysWithTheSameDecisions) {
  const Result<ScheduleReplay> replay = ReplaySchedule(Record());
  ASSERT_TRUE(replay.has_value()) << replay.error().message;
  EXPECT_FALSE(replay->first_divergence.has_value()) << replay->first_divergence->description;
  EXPECT_GT(replay->num_steps, 200);
  EXPECT_GT(replay->num_calls, 600);
  EXPECT_GT(replay->counters.preemptions, 0);
}

TEST(ScheduleRecorder, TheFirstDecisionThatDiffersIsReported) {
  const std::string text = Record(int64_t{1} << 24, /*distort=*/150);
  const Result<ScheduleReplay> replay = ReplaySchedule(text);
  ASSERT_TRUE(replay.has_value()) << replay.error().message;
  ASSERT_TRUE(replay->first_divergence.has_value());
  EXPECT_THAT(replay->first_divergence->description, HasSubstr("not the same ones"));
  // It is the 151st line of its kind.
  size_t at = 0;
  int64_t line = 1;
  for (int64_t steps = 0; steps < 151; ++line) {
    steps += text.compare(at, 9, "schedule ") == 0;
    at = text.find('\n', at) + 1;
  }
  EXPECT_EQ(replay->first_divergence->line, line - 1);
}

TEST(ScheduleRecorder, AnyChangedByteIsDetected) {
  const std::string text = Record(20'000);
  std::mt19937_64 bits(1);
  for (int i = 0; i < 300; ++i) {
    std::string changed = text;
    char& at = changed[bits() % changed.size()];
    at = static_cast<char>(at ^ static_cast<char>(1u << (bits() % 7)));
    const Result<ScheduleReplay> replay = ReplaySchedule(changed);
    EXPECT_FALSE(replay.has_value());
  }
}

TEST(ScheduleRecorder, TextThatEndsAfterALineIsARecordingOfAShorterRun) {
  const std::string text = Record();
  const size_t end = text.rfind('\n', text.size() / 2);
  const Result<ScheduleReplay> replay = ReplaySchedule(text.substr(0, end + 1));
  ASSERT_TRUE(replay.has_value()) << replay.error().message;
  EXPECT_FALSE(replay->first_divergence.has_value());
  const Result<ScheduleReplay> cut = ReplaySchedule(text.substr(0, end));
  ASSERT_FALSE(cut.has_value());
  EXPECT_EQ(cut.error().code, Code::kDataLoss);
}

TEST(ScheduleRecorder, ARecordingStopsAtItsLimitAndStillReplays) {
  const std::string text = Record(/*max_bytes=*/30'000);
  EXPECT_LE(text.size(), 30'000u);
  EXPECT_GT(text.size(), 10'000u);
  const Result<ScheduleReplay> replay = ReplaySchedule(text);
  ASSERT_TRUE(replay.has_value()) << replay.error().message;
  EXPECT_FALSE(replay->first_divergence.has_value());
}

// Lines with the checksums that a recorder would have written.
std::string WithChecksums(const std::vector<std::string>& lines) {
  std::string text;
  uint64_t sum = 0;
  for (const std::string& line : lines) {
    sum ^= 0xcbf29ce484222325u;
    for (const char c : line) sum = (sum ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    text += fmt::format("{} #{:08x}\n", line, static_cast<uint32_t>(sum ^ (sum >> 32)));
  }
  return text;
}

TEST(ScheduleRecorder, WhatNoRunCanSayIsAnError) {
  const std::string first = "deepinfer-schedule 1";
  const std::string second = "pools 8 8 4 128 7 1 options 4 64 0 16 1 0 0 0 64 0 0";
  ASSERT_TRUE(ReplaySchedule(WithChecksums({first, second, "end 3"})).has_value());
  const std::string add = "add 0 1 0 inf 5 100 -1 0 1 1 x x 1 2 3";
  ASSERT_TRUE(
      ReplaySchedule(WithChecksums({first, second, add, "release 1", "end 1"})).has_value());
  for (const std::string& line :
       {std::string("commit 1"), std::string("release 1"), std::string("schedule 0"),
        std::string("add 0 1 0 inf 5"), std::string("add 0 1 0 inf 5 100 -1 0 1 1 x0 x 1"),
        std::string("frobnicate"), std::string(""), std::string("end 99999999999999999999")}) {
    const Result<ScheduleReplay> replay = ReplaySchedule(WithChecksums({first, second, line}));
    ASSERT_FALSE(replay.has_value()) << line;
    EXPECT_EQ(replay.error().code, Code::kInvalidArgument);
    EXPECT_THAT(replay.error().message, HasSubstr("line 3"));
  }
  EXPECT_FALSE(ReplaySchedule(WithChecksums({first, second, add, add})).has_value());
  // Pools that would take all memory.
  EXPECT_FALSE(
      ReplaySchedule(WithChecksums({first,
                                    "pools 999999999999 8 4 128 7 1 options 4 64 0 16 1 0 0 0 "
                                    "64 0 0"}))
          .has_value());
  EXPECT_EQ(ReplaySchedule(WithChecksums({"deepinfer-schedule 2", second})).error().code,
            Code::kUnsupported);
  EXPECT_EQ(ReplaySchedule("").error().code, Code::kDataLoss);
}

}  // namespace
}  // namespace deepinfer
