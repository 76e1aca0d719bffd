// The executor as the engine's model backend: hands out sequence numbers and forwards everything
// else.
#pragma once

#include <unordered_map>
#include <vector>

#include "engine/model_backend.h"
#include "runtime/executor.h"
#include "state/cache_pool.h"

namespace deepinfer {

class ExecutorBackend : public ModelBackend {
 public:
  // `executor` must outlive the backend.
  explicit ExecutorBackend(Executor& executor) : executor_(executor) {}

  int64_t vocab_size() const override {
    return executor_.config().vocab_size;
  }
  int64_t block_tokens() const override {
    return kBlockTokens;
  }
  int64_t num_blocks() const override {
    return executor_.pool().num_blocks();
  }
  int64_t num_free_blocks() const override {
    return executor_.pool().num_free_blocks();
  }
  int64_t num_slots() const override {
    return executor_.pool().num_slots();
  }
  int64_t num_free_slots() const override {
    return executor_.pool().num_free_slots();
  }
  Result<SequenceId> Open() override;
  void Close(SequenceId sequence) override;
  Status Reserve(SequenceId sequence, int64_t tokens) override;
  Result<std::span<const float>> Step(std::span<const Chunk> chunks) override;

 private:
  Executor& executor_;
  std::unordered_map<SequenceId, Sequence> sequences_;
  SequenceId next_ = 0;
  std::vector<Executor::Chunk> chunks_;
};

}  // namespace deepinfer
