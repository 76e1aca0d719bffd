#include "sched/scheduler.h"

#include <gtest/gtest.h>

namespace deepinfer {
namespace {

TEST(Scheduler, RunsOne) {
  StatePools pools(8, 8, 4, 128, 7);
  Scheduler scheduler({}, pools, nullptr);
  ASSERT_TRUE(scheduler.Add({.id = 1, .prompt = {1, 2, 3}, .max_new_tokens = 2}, 0).has_value());
  SchedulerStep step;
  scheduler.Schedule(0, &step);
  ASSERT_EQ(step.chunks.size(), 1u);
  EXPECT_EQ(step.chunks[0].end, 3);
  scheduler.Schedule(0, &step);
  ASSERT_EQ(step.chunks.size(), 1u);
  EXPECT_TRUE(step.chunks[0].token_in_flight);
  EXPECT_EQ(scheduler.FindViolation(), "");
}

}  // namespace
}  // namespace deepinfer
