// The executor as the engine's model backend.
#pragma once

#include <span>

#include "engine/model_backend.h"
#include "runtime/executor.h"

namespace deepinfer {

class ExecutorBackend : public ModelBackend {
 public:
  // `executor` must outlive the backend.
  explicit ExecutorBackend(Executor& executor) : executor_(executor) {}

  int64_t vocab_size() const override {
    return executor_.config().vocab_size;
  }
  StateCapacity capacity() const override;
  Result<std::span<const float>> Step(const StepPlan& plan) override;
  bool draws_tokens() const override {
    return executor_.options().draw_on_device.value_or(executor_.options().device.kind ==
                                                       DeviceKind::kCuda);
  }
  Status BeginStep(const StepPlan& plan) override {
    return executor_.BeginStep(plan);
  }
  void DrawStep(std::span<const ListedDraw> draws, std::span<const int32_t> host_rows) override {
    executor_.DrawStep(draws, host_rows);
  }
  Result<DrawnRows> FinishStep() override {
    return executor_.FinishStep();
  }
  void SetSampledToken(int32_t slot, int32_t token) override {
    executor_.SetSampledToken(slot, token);
  }
  int num_workers() const override {
    return executor_.num_threads();
  }
  void ForEach(int64_t count, const std::function<void(int64_t item, int worker)>& body) override;

 private:
  Executor& executor_;
};

}  // namespace deepinfer
