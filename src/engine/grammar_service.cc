#include "engine/grammar_service.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace deepinfer {

GrammarService::GrammarService(ConstraintCompiler compiler, const GrammarServiceOptions& options)
    : compiler_(std::move(compiler)), options_(options) {
  DI_CHECK(compiler_ != nullptr);
  DI_CHECK_GE(options_.num_threads, 1);
}

GrammarService::~GrammarService() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    queue_.clear();
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void GrammarService::Start(int64_t ticket, StructuredOutput output) {
  auto job = std::make_unique<Job>();
  job->ticket = ticket;
  job->output = std::move(output);
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(job));
  if (std::ssize(queue_) > num_idle_ && std::ssize(threads_) < options_.num_threads) {
    threads_.emplace_back([this] { Loop(); });
  }
  work_.notify_one();
}

void GrammarService::Cancel(int64_t ticket) {
  const std::lock_guard lock(mutex_);
  std::erase_if(queue_, [ticket](const auto& job) { return job->ticket == ticket; });
  std::erase_if(finished_, [ticket](const Finished& one) { return one.ticket == ticket; });
  for (Job* job : running_) {
    if (job->ticket == ticket) job->wanted = false;
  }
}

void GrammarService::Loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    ++num_idle_;
    work_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    --num_idle_;
    if (stop_) return;
    const std::unique_ptr<Job> job = std::move(queue_.front());
    queue_.pop_front();
    job->began = Clock::now();
    running_.push_back(job.get());
    lock.unlock();
    Result<ConstraintFactory> factory = compiler_(job->output);
    lock.lock();
    std::erase(running_, job.get());
    if (!job->wanted) continue;
    ++(factory.has_value() ? counters_.compiled : counters_.failed);
    finished_.push_back({job->ticket, std::move(factory)});
    done_.notify_all();
  }
}

// Under the lock.
void GrammarService::GiveUpLateOnes() {
  const auto give_up = [this](int64_t ticket, std::string message) {
    ++counters_.failed;
    finished_.push_back({ticket, Fail(Code::kDeadline, std::move(message), "structured_output")});
  };
  const Clock::time_point now = Clock::now();
  int num_late = 0;
  for (Job* job : running_) {
    if (std::chrono::duration<double>(now - job->began).count() < options_.max_seconds) continue;
    ++num_late;
    if (!std::exchange(job->wanted, false)) continue;
    give_up(job->ticket, fmt::format("compiling structured_output took more than {} seconds.",
                                     options_.max_seconds));
  }
  if (num_late < options_.num_threads) return;
  for (const std::unique_ptr<Job>& job : queue_) {
    give_up(job->ticket,
            fmt::format("structured_output could not be compiled: all {} threads for it are busy "
                        "with others that take more than {} seconds.",
                        options_.num_threads, options_.max_seconds));
  }
  queue_.clear();
}

std::vector<GrammarService::Finished> GrammarService::Poll() {
  const std::lock_guard lock(mutex_);
  GiveUpLateOnes();
  return std::exchange(finished_, {});
}

void GrammarService::Wait(double seconds) {
  std::unique_lock lock(mutex_);
  done_.wait_for(lock, std::chrono::duration<double>(seconds),
                 [this] { return !finished_.empty(); });
}

GrammarCounters GrammarService::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

}  // namespace deepinfer
