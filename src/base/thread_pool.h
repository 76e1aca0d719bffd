// A fixed set of threads for data-parallel loops inside one operation. A decode step runs hundreds
// of short loops, so threads that wait spin for a moment before they sleep; where there are more
// threads than cores, spinning would take the core from the thread that is waited for, and they
// sleep at once. Work is split statically by worker index: results never depend on timing.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/error.h"

namespace deepinfer {

// Cores that this process may run on; at least 1.
int UsableCores();

class ThreadPool {
 public:
  // `num_threads` counts the calling thread: 1 or less starts no threads. kResourceExhausted when
  // the system refuses a thread; those that had been started have ended.
  static Result<std::unique_ptr<ThreadPool>> Create(int num_threads);
  // Like Create, for callers to whom a refused thread is a bug.
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
  // thread use fewer threads; the others sleep on.
  void ParallelFor(int64_t count,
                   const std::function<void(int64_t begin, int64_t end, int worker)>& body,
                   int64_t min_per_thread = 1);

  // Like ParallelFor, but workers take chunks of `grain` items from a shared counter: for items of
  // unequal cost. Which worker runs an item depends on timing, so an item's result must not.
  void ParallelForDynamic(int64_t count, int64_t grain,
                          const std::function<void(int64_t begin, int64_t end, int worker)>& body);

 private:
  // Where one worker sleeps. On a cache line of its own: workers fall asleep at the same time.
  struct alignas(64) Bed {
    std::atomic<int> asleep{0};
  };

  struct Unstarted {};
  ThreadPool(int num_threads, Unstarted);
  Status Start();
  void RunOn(int num_workers, const std::function<void(int)>& body);
  void Wake(int worker);
  void WorkerLoop(int worker);

  int num_threads_;
  bool spin_;
  std::vector<std::thread> threads_;
  std::vector<Bed> beds_;                           // by worker
  const std::function<void(int)>* body_ = nullptr;  // valid while a loop is in progress
  // (number of the loop << kWorkerBits) + workers that take part in it. One word, so that a worker
  // never sees the one without the other.
  std::atomic<uint64_t> loop_{0};
  std::atomic<int> num_asleep_{0};
  std::atomic<bool> stop_{false};
  // Workers that have not finished the current loop. Plus kCallerAsleep while the caller sleeps.
  alignas(64) std::atomic<int> remaining_{0};
};

}  // namespace deepinfer
