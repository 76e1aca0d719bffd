#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <numeric>
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

}  // namespace
}  // namespace deepinfer
