#include "base/thread_pool.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

namespace deepinfer {
namespace {

TEST(ThreadPool, EveryItemRunsExactlyOnceForAnySplit) {
  for (int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    for (int64_t count : {0, 1, 2, 5, 100, 1001}) {
      std::vector<std::atomic<int>> hits(static_cast<size_t>(count));
      const auto body = [&](int64_t begin, int64_t end, int worker) {
        EXPECT_GE(worker, 0);
        EXPECT_LT(worker, threads);
        for (int64_t i = begin; i < end; ++i) hits[static_cast<size_t>(i)].fetch_add(1);
      };
      pool.ParallelFor(count, body);
      pool.ParallelForDynamic(count, 3, body);
      for (const auto& hit : hits) EXPECT_EQ(hit.load(), 2);
    }
  }
}

TEST(ThreadPool, SurvivesManyShortLoopsAndSleepsInBetween) {
  ThreadPool pool(3);
  std::atomic<int64_t> sum{0};
  for (int round = 0; round < 3000; ++round) {
    pool.Run([&](int worker) { sum.fetch_add(worker + 1); });
    if (round % 1000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(sum.load(), 3000 * 6);
}

TEST(ThreadPool, LoopsOfAnyWidthFollowEachOtherWithMoreThreadsThanCores) {
  ThreadPool pool(UsableCores() + 5);
  int64_t sum = 0;
  int64_t expected = 0;
  for (int64_t round = 0; round < 2000; ++round) {
    const int64_t count = 1 + round % (pool.num_threads() + 2);
    std::vector<int64_t> items(static_cast<size_t>(count), 0);
    const auto body = [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) items[static_cast<size_t>(i)] += round;
    };
    pool.ParallelFor(count, body);
    pool.ParallelForDynamic(count, 1, body);
    sum += std::accumulate(items.begin(), items.end(), int64_t{0});
    expected += 2 * count * round;
  }
  EXPECT_EQ(sum, expected);
}

TEST(ThreadPool, ASmallLoopDoesNotWakeTheOtherWorkers) {
  ThreadPool pool(4);
  std::mutex mutex;
  std::set<std::thread::id> ids;
  for (int round = 0; round < 200; ++round) {
    pool.ParallelFor(2, [&](int64_t, int64_t, int) {
      std::lock_guard lock(mutex);
      ids.insert(std::this_thread::get_id());
    });
  }
  EXPECT_EQ(ids.size(), 2u);
}

// CPU time of all threads of the process.
std::chrono::nanoseconds CpuTime() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

TEST(ThreadPool, WaitingThreadsDoNotBurnTheProcessor) {
  for (const int threads : {2, UsableCores() + 4}) {
    ThreadPool pool(threads);
    const auto before = CpuTime();
    // The caller waits for a worker, and the other workers wait for the next loop.
    pool.Run([&](int worker) {
      if (worker == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    });
    EXPECT_LT(CpuTime() - before, std::chrono::milliseconds(100)) << threads;
  }
}

TEST(ThreadPool, ARefusedThreadIsAnErrorAndTheStartedOnesEnd) {
  pthread_attr_t old_attributes;
  ASSERT_EQ(::pthread_getattr_default_np(&old_attributes), 0);
  pthread_attr_t huge;
  ASSERT_EQ(::pthread_attr_init(&huge), 0);
  // The address space has 128 TiB, so that a few of these stacks fit.
  ASSERT_EQ(::pthread_attr_setstacksize(&huge, size_t{16} << 40), 0);
  ASSERT_EQ(::pthread_setattr_default_np(&huge), 0);
  const Result<std::unique_ptr<ThreadPool>> pool = ThreadPool::Create(64);
  ::pthread_setattr_default_np(&old_attributes);
  ::pthread_attr_destroy(&huge);
  ::pthread_attr_destroy(&old_attributes);
  ASSERT_FALSE(pool.has_value());
  EXPECT_EQ(pool.error().code, Code::kResourceExhausted);
  EXPECT_EQ(pool.error().message.find("Cannot start thread "), 0u) << pool.error().message;
  EXPECT_NE(pool.error().message.find(" of 64: "), std::string::npos) << pool.error().message;
  EXPECT_EQ((*ThreadPool::Create(3))->num_threads(), 3);
}

}  // namespace
}  // namespace deepinfer
