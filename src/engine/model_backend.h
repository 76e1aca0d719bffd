// What the engine needs from a model: the sizes of its state memory, and steps over batches of
// sequences. The executor is the real one (engine/executor_backend.h); tests use a small function
// of the sequence's tokens. Steps are called by one thread at a time, in order, but not always the
// same thread (engine/step_runner.h).
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "base/check.h"
#include "base/error.h"
#include "ops/sample_rows/sample_row.h"
#include "state/step_plan.h"

namespace deepinfer {

struct StateCapacity {
  int64_t num_blocks = 0;
  int64_t num_window_pages = 0;
  int64_t num_slots = 0;
  int64_t window_tokens = 1;    // that a row sees of its neighbourhood, itself included
  int64_t rollback_tokens = 0;  // by which a sequence can be truncated in place
  int64_t block_bytes = 0;
  int64_t window_page_bytes = 0;
  int64_t slot_bytes = 0;
};

class ModelBackend {
 public:
  virtual ~ModelBackend() = default;

  virtual int64_t vocab_size() const = 0;
  virtual StateCapacity capacity() const = 0;

  // Runs the plan's commands, then all its rows as one batch: [sum of num_logit_rows, vocab_size],
  // chunk by chunk, valid until the next call. The bits of a row depend on its own sequence only.
  virtual Result<std::span<const float>> Step(const StepPlan& plan) = 0;
  // Whether the model's device draws tokens itself. Then BeginStep, DrawStep and FinishStep take
  // the place of Step: a step can be begun before the host knows the tokens of the one in front of
  // it, and a later chunk of a slot without ids takes what was drawn for it. Each begun step is
  // drawn, then finished, in order; one is begun while at most one is not finished. In a draw,
  // `logit_row` counts the step's logit rows, and `slot` is a slot or -1. Errors: of BeginStep
  // those of Step, and then it is neither drawn nor finished; of FinishStep, what the rows or draws
  // have met. Results are valid until the next FinishStep.
  virtual bool draws_tokens() const {
    return false;
  }
  virtual Status BeginStep(const StepPlan&) {
    DI_CHECK(false);
  }
  virtual void DrawStep(std::span<const ListedDraw>, std::span<const int32_t> /*host_rows*/) {
    DI_CHECK(false);
  }
  virtual Result<DrawnRows> FinishStep() {
    DI_CHECK(false);
  }

  // The token that a later chunk of this slot without ids takes.
  virtual void SetSampledToken(int32_t slot, int32_t token) = 0;

  // Work that follows a step and is independent by item, on the threads that ran the step.
  virtual int num_workers() const {
    return 1;
  }
  virtual void ForEach(int64_t count, const std::function<void(int64_t item, int worker)>& body) {
    for (int64_t item = 0; item < count; ++item) body(item, 0);
  }
};

}  // namespace deepinfer
