// A fixed set of threads for data-parallel loops inside one operation. A decode step runs hundreds
// of short loops, so workers spin for a while before they sleep. Work is split statically by worker
// index: results never depend on timing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace deepinfer {

class ThreadPool {
 public:
  // `num_threads` counts the calling thread: 1 starts no threads. At least 1.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const {
    return num_threads_;
  }

  // Calls body(worker) once for each worker 0 ... num_threads-1, worker 0 on the calling thread,
  // and returns when all have finished. Not reentrant: body must not call Run or ParallelFor, and
  // only one thread may use a pool at a time.
  void Run(const std::function<void(int worker)>& body);

  // Splits [0, count) into num_threads contiguous ranges that differ by at most one item and calls
  // body(begin, end, worker) for each non-empty one. Loops of fewer than `min_per_thread` items per
  // thread use fewer threads.
  void ParallelFor(int64_t count,
                   const std::function<void(int64_t begin, int64_t end, int worker)>& body,
                   int64_t min_per_thread = 1);

  // Like ParallelFor, but workers take chunks of `grain` items from a shared counter: for items of
  // unequal cost. Which worker runs an item depends on timing, so an item's result must not.
  void ParallelForDynamic(int64_t count, int64_t grain,
                          const std::function<void(int64_t begin, int64_t end, int worker)>& body);

 private:
  void WorkerLoop(int worker);

  int num_threads_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* body_ = nullptr;  // valid while a Run is in progress
  std::atomic<uint64_t> generation_{0};             // incremented once per Run
  std::atomic<int> remaining_{0};  // workers that have not finished the current Run
  std::atomic<bool> stop_{false};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace deepinfer
