// Runs steps of the model over a batch of sequences: builds the step's arrays, calls the model,
// keeps the caches. Knows batches, not users: who runs when is decided above (engine), what is
// computed below (model). One thread uses an executor at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/cpu_features.h"
#include "base/error.h"
#include "model/config.h"
#include "model/layer_trace.h"
#include "ops/numerics.h"
#include "state/cache_pool.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

struct ExecutorOptions {
  std::string model_dir;
  Numerics numerics = Numerics::kProduction;
  int num_threads = 0;         // 0: one per core this process may use
  int64_t max_sequences = 64;  // sequence slots
  int64_t cache_tokens =
      0;  // capacity of the block pool over all sequences; 0: PlanMemory's choice
  bool use_reference_ops =
      false;  // run the plain scalar reference of every operation (slow; for selfcheck)
  CpuLevel max_cpu_level = CpuLevel::kAmx;  // upper limit on the kernels' instruction set
};

class Executor {
 public:
  // Loads config, checkpoint and weights. Errors carry what is wrong with which file.
  static Result<std::unique_ptr<Executor>> Create(const ExecutorOptions& options);
  ~Executor();

  const ModelConfig& config() const;
  const ExecutorOptions& options() const;
  CachePool& pool();
  int num_threads() const;

  // One sequence's part of a step: `token_ids` follow what the sequence already holds. The logits
  // of its last `num_logit_rows` rows (0 ... token_ids.size()) are returned.
  struct Chunk {
    Sequence* sequence = nullptr;
    std::span<const int32_t> token_ids;  // at least one, each in [0, vocab)
    int64_t num_logit_rows = 1;
  };

  // Runs all chunks as one batch. Result: [sum of num_logit_rows, vocab] F32 in host memory, chunk
  // by chunk, valid until the next call. The bits of a row depend on its own sequence only. Errors:
  // kInvalidArgument (id out of range, a sequence twice), kResourceExhausted (blocks); on error no
  // sequence has changed. `trace` may be null.
  Result<TensorView> Step(std::span<const Chunk> chunks, LayerTrace* trace = nullptr);

 private:
  Executor();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace deepinfer
