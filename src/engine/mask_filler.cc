#include "engine/mask_filler.h"

#include <chrono>

namespace deepinfer {

MaskFiller::MaskFiller(int64_t vocab_size, int num_threads, TraceRecorder* trace)
    : words_(static_cast<size_t>((vocab_size + 31) / 32)),
      num_threads_(num_threads),
      trace_(trace) {}

MaskFiller::~MaskFiller() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void MaskFiller::Start() {
  if (samplers_.empty()) return;
  if (masks_.size() < samplers_.size()) {
    masks_.resize(samplers_.size());
    bits_.resize(samplers_.size() * words_);
  }
  while (static_cast<int>(threads_.size()) < num_threads_)
    threads_.emplace_back([this] { Loop(); });
  {
    const std::lock_guard lock(mutex_);
    fill_seconds_ = 0;
    next_ = 0;
    num_done_ = 0;
    limit_ = samplers_.size();
  }
  if (samplers_.size() == 1) {
    work_.notify_one();
  } else {
    work_.notify_all();
  }
}

void MaskFiller::Finish() {
  if (samplers_.empty()) return;
  std::unique_lock lock(mutex_);
  FillAll(lock);
  done_.wait(lock, [this] { return num_done_ == limit_; });
}

void MaskFiller::FillAll(std::unique_lock<std::mutex>& lock) {
  while (next_ < limit_) {
    const size_t index = next_++;
    lock.unlock();
    const auto start = std::chrono::steady_clock::now();
    {
      TraceSpan span(trace_, "mask");
      masks_[index] = samplers_[index]->FillMask(std::span(bits_).subspan(index * words_, words_));
    }
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    lock.lock();
    fill_seconds_ += seconds;
    if (++num_done_ == limit_) done_.notify_all();
  }
}

void MaskFiller::Loop() {
  if (trace_ != nullptr) trace_->NameThread("masks");
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return stop_ || next_ < limit_; });
    if (stop_) return;
    FillAll(lock);
  }
}

}  // namespace deepinfer
