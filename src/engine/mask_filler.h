// Fills the masks of a step's constrained draws on threads of its own while the step's rows run.
// Used by the step runner.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "base/trace.h"
#include "sample/sampler.h"

namespace deepinfer {

class MaskFiller {
 public:
  // `num_threads` 0: everything is filled by Finish. Threads begin with the first mask. `trace` may
  // be null.
  MaskFiller(int64_t vocab_size, int num_threads, TraceRecorder* trace);
  ~MaskFiller();
  MaskFiller(const MaskFiller&) = delete;
  MaskFiller& operator=(const MaskFiller&) = delete;

  // A step's constrained samplers one by one, then Start. They belong to the filler until Finish
  // has returned. Allocates nothing once as many have been seen before.
  void Add(SequenceSampler* sampler) {
    samplers_.push_back(sampler);
  }
  void Start();
  // Fills what nobody has begun, and waits for the rest.
  void Finish();

  int64_t size() const {
    return static_cast<int64_t>(samplers_.size());
  }
  // In the order of Add, after Finish; valid until Clear.
  const DrawMask& mask(int64_t index) const {
    return masks_[static_cast<size_t>(index)];
  }
  void Clear() {
    samplers_.clear();
  }
  // Of the filled masks, summed over threads.
  double fill_seconds() const {
    return fill_seconds_;
  }

 private:
  void Loop();
  // Takes one after the other while there are any; the lock is held at the beginning and the end.
  void FillAll(std::unique_lock<std::mutex>& lock);

  const size_t words_;  // of a mask
  const int num_threads_;
  TraceRecorder* const trace_;
  std::vector<SequenceSampler*> samplers_;
  std::vector<DrawMask> masks_;
  std::vector<uint32_t> bits_;
  double fill_seconds_ = 0;

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  // Masks [0, next_) are taken, and num_done_ of them are filled; [next_, limit_) wait.
  size_t limit_ = 0;
  size_t next_ = 0;
  size_t num_done_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace deepinfer
