// A model that costs nothing: every row has the same few logits. For measuring what the engine
// itself does on the host.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/model_backend.h"

namespace deepinfer {

class NullBackend : public ModelBackend {
 public:
  // `max_logit_rows`: of one step.
  NullBackend(int64_t vocab, int64_t max_logit_rows, const StateCapacity& capacity)
      : vocab_(vocab),
        capacity_(capacity),
        logits_(static_cast<size_t>(vocab * max_logit_rows), 0.0f) {}

  int64_t vocab_size() const override {
    return vocab_;
  }
  StateCapacity capacity() const override {
    return capacity_;
  }
  Result<std::span<const float>> Step(const StepPlan& plan) override {
    int64_t rows = 0;
    for (const StepChunk& chunk : plan.chunks) rows += chunk.num_logit_rows;
    return std::span<const float>(logits_).first(static_cast<size_t>(rows * vocab_));
  }
  void SetSampledToken(int32_t, int32_t) override {}

 private:
  int64_t vocab_;
  StateCapacity capacity_;
  std::vector<float> logits_;
};

}  // namespace deepinfer
