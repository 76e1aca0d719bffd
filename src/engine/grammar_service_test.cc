#include "engine/grammar_service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <future>
#include <mutex>
#include <set>
#include <thread>

namespace deepinfer {
namespace {

using ::testing::HasSubstr;
using Finished = GrammarService::Finished;

StructuredOutput Named(std::string name) {
  StructuredOutput output;
  output.schema = std::move(name);
  return output;
}

Result<ConstraintFactory> Compiled() {
  return ConstraintFactory([] { return std::unique_ptr<TokenConstraint>(); });
}

std::vector<Finished> WaitFor(GrammarService& service, size_t count) {
  std::vector<Finished> all;
  const auto start = std::chrono::steady_clock::now();
  while (all.size() < count &&
         std::chrono::steady_clock::now() - start < std::chrono::seconds(20)) {
    service.Wait(0.1);
    for (Finished& one : service.Poll()) all.push_back(std::move(one));
  }
  EXPECT_EQ(all.size(), count);
  return all;
}

TEST(GrammarService, CompilesEachAndReportsErrorsOfTheCompiler) {
  GrammarService service(
      [](const StructuredOutput& output) -> Result<ConstraintFactory> {
        if (output.schema == "bad") return Fail(Code::kInvalidArgument, "it is bad.", "schema");
        return Compiled();
      },
      {});
  EXPECT_TRUE(service.Poll().empty());
  for (int64_t ticket = 0; ticket < 30; ++ticket)
    service.Start(ticket, Named(ticket % 3 == 0 ? "bad" : "good"));
  std::set<int64_t> seen;
  for (const Finished& one : WaitFor(service, 30)) {
    EXPECT_TRUE(seen.insert(one.ticket).second);
    EXPECT_EQ(one.factory.has_value(), one.ticket % 3 != 0);
    if (!one.factory.has_value()) {
      EXPECT_EQ(one.factory.error().message, "it is bad.");
    }
  }
  EXPECT_EQ(service.counters().compiled, 20);
  EXPECT_EQ(service.counters().failed, 10);
}

TEST(GrammarService, AtMostSoManyCompileAtOnceAndTheyDoSoBesideEachOther) {
  std::mutex mutex;
  std::condition_variable changed;
  int running = 0;
  int most = 0;
  GrammarService service(
      [&](const StructuredOutput&) -> Result<ConstraintFactory> {
        std::unique_lock lock(mutex);
        most = std::max(most, ++running);
        changed.notify_all();
        // The first one waits for a second.
        EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(20), [&] { return most >= 2; }));
        --running;
        return Compiled();
      },
      {.num_threads = 2});
  for (int64_t ticket = 0; ticket < 12; ++ticket) service.Start(ticket, Named("x"));
  WaitFor(service, 12);
  EXPECT_EQ(most, 2);
}

TEST(GrammarService, WhatTakesTooLongIsGivenUpAndItsResultIsNotUsed) {
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  GrammarService service(
      [released](const StructuredOutput& output) -> Result<ConstraintFactory> {
        if (output.schema == "slow") released.wait();
        return Compiled();
      },
      {.num_threads = 1, .max_seconds = 0.02});
  service.Start(1, Named("slow"));
  const std::vector<Finished> late = WaitFor(service, 1);
  EXPECT_EQ(late[0].ticket, 1);
  EXPECT_EQ(late[0].factory.error().code, Code::kDeadline);
  EXPECT_THAT(late[0].factory.error().message, HasSubstr("more than 0.02 seconds"));
  // Nothing can begin while the only thread is held up.
  service.Start(2, Named("quick"));
  const std::vector<Finished> behind = WaitFor(service, 1);
  EXPECT_EQ(behind[0].ticket, 2);
  EXPECT_THAT(behind[0].factory.error().message, HasSubstr("could not be compiled"));
  release.set_value();
  // The thread comes back; the late result does not.
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  service.Start(3, Named("quick"));
  const std::vector<Finished> after = WaitFor(service, 1);
  EXPECT_EQ(after[0].ticket, 3);
  EXPECT_TRUE(after[0].factory.has_value());
  EXPECT_EQ(service.counters().compiled, 1);
  EXPECT_EQ(service.counters().failed, 2);
}

TEST(GrammarService, CancelledOnesAreNotReportedAndWaitingOnesNotCompiled) {
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  std::atomic<int> calls = 0;
  GrammarService service(
      [&calls, released](const StructuredOutput&) -> Result<ConstraintFactory> {
        ++calls;
        released.wait();
        return Compiled();
      },
      {.num_threads = 1});
  for (int64_t ticket = 0; ticket < 3; ++ticket) service.Start(ticket, Named("x"));
  while (calls == 0) std::this_thread::yield();
  service.Cancel(0);
  service.Cancel(1);
  release.set_value();
  const std::vector<Finished> finished = WaitFor(service, 1);
  EXPECT_EQ(finished[0].ticket, 2);
  EXPECT_EQ(calls, 2);
  service.Cancel(7);  // unknown: nothing
}

}  // namespace
}  // namespace deepinfer
