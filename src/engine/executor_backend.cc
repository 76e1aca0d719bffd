#include "engine/executor_backend.h"

#include "base/check.h"

namespace deepinfer {

StateCapacity ExecutorBackend::capacity() const {
  const CacheMemory& memory = executor_.memory();
  return {.num_blocks = memory.num_blocks(),
          .num_window_pages = memory.num_window_pages(),
          .num_slots = memory.num_slots(),
          .window_tokens = executor_.config().sliding_window,
          .rollback_tokens = executor_.options().rollback_tokens,
          .block_bytes = memory.geometry().BytesPerBlock(),
          .window_page_bytes = memory.geometry().BytesPerWindowPage(),
          .slot_bytes = memory.geometry().BytesPerSlot()};
}

Result<std::span<const float>> ExecutorBackend::Step(const StepPlan& plan) {
  DI_ASSIGN_OR_RETURN(const TensorView logits, executor_.Step(plan));
  if (logits.empty()) return std::span<const float>();
  DI_CHECK_EQ(logits.row_size(), vocab_size());
  DI_CHECK(logits.contiguous() && logits.dtype() == DType::kF32);
  return std::span<const float>(static_cast<const float*>(logits.data()),
                                static_cast<size_t>(logits.num_elements()));
}

void ExecutorBackend::ForEach(int64_t count,
                              const std::function<void(int64_t item, int worker)>& body) {
  executor_.thread_pool().ParallelForDynamic(count, 1,
                                             [&body](int64_t begin, int64_t end, int worker) {
                                               for (int64_t i = begin; i < end; ++i)
                                                 body(i, worker);
                                             });
}

}  // namespace deepinfer
