#include "base/thread_pool.h"

#include <immintrin.h>

#include <algorithm>

#include "base/check.h"

namespace deepinfer {
namespace {

// About 50 us of PAUSE: longer than the gaps between the loops of one step, shorter than a person
// notices in idle power.
constexpr int kSpinsBeforeSleep = 2000;

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(std::max(1, num_threads)) {
  threads_.reserve(static_cast<size_t>(num_threads_ - 1));
  for (int worker = 1; worker < num_threads_; ++worker) {
    threads_.emplace_back([this, worker] { WorkerLoop(worker); });
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_.store(true);
    generation_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::Run(const std::function<void(int)>& body) {
  if (num_threads_ == 1) {
    body(0);
    return;
  }
  DI_CHECK(body_ == nullptr);
  body_ = &body;
  remaining_.store(num_threads_ - 1, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard lock(mutex_);
    wake_.notify_all();
  }
  body(0);
  int spins = 0;
  while (remaining_.load(std::memory_order_acquire) != 0) {
    // On an oversubscribed machine the last worker may be waiting for this very core.
    if (++spins % 4096 == 0) std::this_thread::yield();
    _mm_pause();
  }
  body_ = nullptr;
}

void ThreadPool::WorkerLoop(int worker) {
  uint64_t seen = 0;
  while (true) {
    int spins = 0;
    while (generation_.load(std::memory_order_acquire) == seen) {
      if (++spins < kSpinsBeforeSleep) {
        _mm_pause();
        continue;
      }
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_seq_cst) != seen; });
      }
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
      break;
    }
    seen = generation_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    (*body_)(worker);
    remaining_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

void ThreadPool::ParallelFor(int64_t count, const std::function<void(int64_t, int64_t, int)>& body,
                             int64_t min_per_thread) {
  if (count <= 0) return;
  const int64_t useful = std::max<int64_t>(1, count / std::max<int64_t>(1, min_per_thread));
  const int64_t parts = std::min<int64_t>(num_threads_, useful);
  if (parts == 1) {
    body(0, count, 0);
    return;
  }
  Run([&](int worker) {
    if (worker >= parts) return;
    const int64_t begin = count * worker / parts;
    const int64_t end = count * (worker + 1) / parts;
    if (begin < end) body(begin, end, worker);
  });
}

void ThreadPool::ParallelForDynamic(int64_t count, int64_t grain,
                                    const std::function<void(int64_t, int64_t, int)>& body) {
  if (count <= 0) return;
  grain = std::max<int64_t>(1, grain);
  if (num_threads_ == 1 || count <= grain) {
    body(0, count, 0);
    return;
  }
  std::atomic<int64_t> next{0};
  Run([&](int worker) {
    while (true) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count) return;
      body(begin, std::min(count, begin + grain), worker);
    }
  });
}

}  // namespace deepinfer
