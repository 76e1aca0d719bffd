#include "base/thread_pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <system_error>

#include "base/check.h"

namespace deepinfer {
namespace {

// A wait first spins, for the gaps between the loops of one step; then it yields between looks, for
// loops whose shares end at different times, so that another process can have the core; only then
// does the thread sleep, because waking it takes tens of microseconds.
constexpr std::chrono::microseconds kSpinTime(50);
constexpr std::chrono::microseconds kYieldTime(1000);

constexpr int kWorkerBits = 16;
constexpr int kMaxThreads = (1 << kWorkerBits) - 1;
constexpr int kCallerAsleep = 1 << 20;

// Waits for `done()` without sleeping. False: it has not come true within kSpinTime + kYieldTime.
template <class Done>
bool SpinUntil(const Done& done) {
  const auto begin = std::chrono::steady_clock::now();
  auto now = begin;
  do {
    // PAUSE takes between 10 and 150 cycles, so the clock and not a count bounds the time.
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      _mm_pause();
    }
    now = std::chrono::steady_clock::now();
    if (now - begin > kSpinTime) ::sched_yield();
  } while (now - begin < kSpinTime + kYieldTime);
  return false;
}

// std::atomic::wait would do, but libstdc++'s yields the core several times before it sleeps, and
// beside busy processes each yield costs a time slice of theirs.
static_assert(sizeof(std::atomic<int>) == sizeof(int) && std::atomic<int>::is_always_lock_free);

// Sleeps while `word` is `value`; may return early.
void FutexWait(std::atomic<int>& word, int value) {
  ::syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void FutexWakeOne(std::atomic<int>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

}  // namespace

int UsableCores() {
  cpu_set_t set;
  // Fails where the kernel knows more processors than the set has bits: plenty of cores.
  if (::sched_getaffinity(0, sizeof(set), &set) != 0)
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return std::max(1, CPU_COUNT(&set));
}

Result<std::unique_ptr<ThreadPool>> ThreadPool::Create(int num_threads) {
  std::unique_ptr<ThreadPool> pool(new ThreadPool(num_threads, Unstarted{}));
  DI_RETURN_IF_ERROR(pool->Start());
  return pool;
}

ThreadPool::ThreadPool(int num_threads) : ThreadPool(num_threads, Unstarted{}) {
  const Status started = Start();
  DI_CHECK(started.has_value());
}

ThreadPool::ThreadPool(int num_threads, Unstarted)
    : num_threads_(std::max(1, num_threads)),
      spin_(num_threads_ <= UsableCores()),
      beds_(static_cast<size_t>(num_threads_)) {
  DI_CHECK_LE(num_threads_, kMaxThreads);
}

Status ThreadPool::Start() {
  threads_.reserve(static_cast<size_t>(num_threads_ - 1));
  for (int worker = 1; worker < num_threads_; ++worker) {
    try {
      threads_.emplace_back([this, worker] { WorkerLoop(worker); });
    } catch (const std::system_error& error) {
      // The destructor ends the threads that run.
      return Fail(Code::kResourceExhausted,
                  fmt::format("Cannot start thread {} of {}: {}.", worker + 1, num_threads_,
                              error.code().message()),
                  "num_threads");
    }
  }
  return {};
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  // A loop in which nobody takes part; every thread looks at stop_ before it looks at that.
  loop_.fetch_add(uint64_t{1} << kWorkerBits);
  for (size_t i = 0; i < threads_.size(); ++i) Wake(static_cast<int>(i) + 1);
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::Wake(int worker) {
  std::atomic<int>& asleep = beds_[static_cast<size_t>(worker)].asleep;
  if (asleep.load(std::memory_order_seq_cst) == 0) return;
  asleep.store(0, std::memory_order_seq_cst);
  FutexWakeOne(asleep);
}

void ThreadPool::Run(const std::function<void(int)>& body) {
  RunOn(num_threads_, body);
}

void ThreadPool::RunOn(int num_workers, const std::function<void(int)>& body) {
  if (num_workers == 1) {
    body(0);
    return;
  }
  DI_CHECK(body_ == nullptr);
  body_ = &body;
  remaining_.store(num_workers - 1, std::memory_order_relaxed);
  const uint64_t number = (loop_.load(std::memory_order_relaxed) >> kWorkerBits) + 1;
  // A worker announces that it falls asleep and then looks at loop_ once more; here it is the other
  // way round. In the single order of these four accesses one of the two sees the other.
  loop_.store((number << kWorkerBits) + static_cast<uint64_t>(num_workers),
              std::memory_order_seq_cst);
  if (num_asleep_.load(std::memory_order_seq_cst) > 0) {
    for (int worker = 1; worker < num_workers; ++worker) Wake(worker);
  }
  body(0);
  const auto finished = [&] { return remaining_.load(std::memory_order_acquire) == 0; };
  if (!(spin_ ? SpinUntil(finished) : finished())) {
    int value = remaining_.fetch_add(kCallerAsleep, std::memory_order_acq_rel) + kCallerAsleep;
    while (value != kCallerAsleep) {
      FutexWait(remaining_, value);
      value = remaining_.load(std::memory_order_acquire);
    }
  }
  body_ = nullptr;
}

void ThreadPool::WorkerLoop(int worker) {
  std::atomic<int>& asleep = beds_[static_cast<size_t>(worker)].asleep;
  uint64_t seen = 0;
  while (true) {
    const auto begun = [&] { return loop_.load(std::memory_order_seq_cst) != seen; };
    if (!(spin_ ? SpinUntil(begun) : begun())) {
      num_asleep_.fetch_add(1, std::memory_order_seq_cst);
      asleep.store(1, std::memory_order_seq_cst);
      // Only the caller clears the flag, and only for loops with this worker.
      if (begun()) {
        asleep.store(0, std::memory_order_seq_cst);
      } else {
        while (asleep.load(std::memory_order_seq_cst) != 0) FutexWait(asleep, 1);
      }
      num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
    }
    if (stop_.load()) return;
    const uint64_t loop = loop_.load(std::memory_order_acquire);
    // A caller that was slow to wake this worker for a loop in which it had noticed by itself wakes
    // it afterwards, for nothing.
    if (loop == seen) continue;
    seen = loop;
    if (static_cast<uint64_t>(worker) >= (seen & kMaxThreads)) continue;
    (*body_)(worker);
    // The last one wakes the caller; earlier ones would wake it for nothing.
    if (remaining_.fetch_sub(1, std::memory_order_acq_rel) == kCallerAsleep + 1)
      FutexWakeOne(remaining_);
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
  RunOn(static_cast<int>(parts), [&](int worker) {
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
  const int64_t chunks = (count - 1) / grain + 1;
  std::atomic<int64_t> next{0};
  RunOn(static_cast<int>(std::min<int64_t>(num_threads_, chunks)), [&](int worker) {
    while (true) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count) return;
      body(begin, std::min(count, begin + grain), worker);
    }
  });
}

}  // namespace deepinfer
