#include "sched/policy.h"

#include <gtest/gtest.h>

#include "sched/user_service.h"

namespace deepinfer {
namespace {

TEST(Policy, PriorityComesBeforeEverythingElse) {
  EXPECT_TRUE(ServedBefore({.priority = 1, .user_service = 100, .arrival = 2},
                           {.priority = 0, .overtaken = true, .preempted = true, .arrival = 1}));
}

TEST(Policy, OvertakenThenPreemptedThenNewSequencesAreServed) {
  const WaitingKey overtaken{.overtaken = true, .user_service = 9, .arrival = 9};
  const WaitingKey preempted{.preempted = true, .user_service = 5, .arrival = 5};
  const WaitingKey fresh{.arrival = 1};
  EXPECT_TRUE(ServedBefore(overtaken, preempted));
  EXPECT_TRUE(ServedBefore(preempted, fresh));
  EXPECT_FALSE(ServedBefore(fresh, overtaken));
}

TEST(Policy, TheUserWithLessServiceIsServedFirstAndThenTheEarlierArrival) {
  EXPECT_TRUE(ServedBefore({.user_service = 1, .arrival = 2}, {.user_service = 2, .arrival = 1}));
  EXPECT_TRUE(ServedBefore({.user_service = 1, .arrival = 1}, {.user_service = 1, .arrival = 2}));
}

TEST(Policy, RunningSequencesKeepTheirPlaceByArrivalWithinAPriority) {
  EXPECT_TRUE(RunsBefore({.priority = 0, .arrival = 1}, {.priority = 0, .arrival = 2}));
  EXPECT_TRUE(RunsBefore({.priority = 1, .arrival = 2}, {.priority = 0, .arrival = 1}));
  EXPECT_FALSE(RunsBefore({.priority = 0, .arrival = 1}, {.priority = 0, .arrival = 1}));
}

TEST(Policy, APromptLeavesHalfOfTheRowsToThoseThatWait) {
  EXPECT_EQ(PromptShare(9, false), 9);
  EXPECT_EQ(PromptShare(9, true), 5);
  EXPECT_EQ(PromptShare(1, true), 1);
  EXPECT_EQ(PromptShare(0, true), 0);
}

TEST(UserService, ANewUserStartsAtTheLeastServiceOfThosePresent) {
  UserService users;
  const size_t a = users.Join("a");
  EXPECT_EQ(users.service(a), 0);
  users.Serve(a, 100);
  const size_t b = users.Join("b");
  EXPECT_EQ(users.service(b), 100);
  users.Serve(a, 50);
  users.Serve(b, 20);
  EXPECT_EQ(users.service(users.Join("c")), 120);
}

TEST(UserService, AUserThatComesBackHasNeitherCreditNorDebt) {
  UserService users;
  const size_t a = users.Join("a");
  users.Serve(a, 10);
  const size_t b = users.Join("b");
  users.Serve(b, 990);
  EXPECT_EQ(users.Join("a"), a);
  users.Leave(a);
  EXPECT_EQ(users.num_present(), 2u);
  users.Leave(a);
  EXPECT_EQ(users.num_present(), 1u);
  EXPECT_EQ(users.service(users.Join("a")), 1000);
}

}  // namespace
}  // namespace deepinfer
