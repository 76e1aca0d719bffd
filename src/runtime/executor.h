// Runs steps of the model over a batch of sequences: checks a step's plan, builds its arrays, moves
// cache bytes, calls the model. Knows rows and the units of state they use, not users: who runs
// when and on which units is decided above (engine, SequenceState), what is computed below (model).
// One thread uses an executor at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/cpu_features.h"
#include "base/error.h"
#include "base/thread_pool.h"
#include "model/config.h"
#include "model/draft_batch.h"
#include "model/layer_trace.h"
#include "model/model_weights.h"
#include "ops/numerics.h"
#include "ops/sample_rows/sample_row.h"
#include "runtime/drafter.h"
#include "runtime/memory_plan.h"
#include "state/cache_memory.h"
#include "state/step_plan.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

// What a chunk's decoder_begin does (decoder bounded replay).
enum class ReplayMode : uint8_t {
  kOff,      // it must be 0: every row runs all layers
  kMask,     // every row runs all layers, with the windows of kCompact: for tests
  kCompact,  // rows before it are dropped where the decoder half begins
};

struct ExecutorOptions {
  std::string model_dir;
  Device device;  // runtime/device_choice.h
  // Of a GPU: where the Engram tables are, and whether decoding steps are replayed from recorded
  // graphs. Of any device: whether tokens are drawn where the logits are, so that the host is one
  // step behind; absent: on a GPU. None of them changes a bit of the results.
  TableMemory engram_memory = TableMemory::kPinnedHost;
  bool use_graphs = true;
  std::optional<bool> draw_on_device;
  Numerics numerics = Numerics::kProduction;
  int num_threads = 0;         // 0: one per core this process may use; host work only on a GPU
  int64_t max_sequences = 64;  // sequence slots
  int64_t cache_tokens =
      0;  // capacity of the block pool over all sequences; 0: PlanMemory's choice
  int64_t max_model_len = 0;            // prompt + output of a sequence; 0: what the model supports
  int64_t max_batched_tokens = 2048;    // rows of a step that memory is planned for
  int64_t max_prompt_logit_rows = 256;  // whose logits are wanted beyond one per sequence
  int64_t rollback_tokens = 6;          // by which a sequence can be set back in place
  int64_t window_cache_pages = -1;  // window pages for the prefix cache; -1: PlanMemory's choice
  int64_t memory_bytes = 0;         // that may be used; 0: what the device has
  // Tokens of a drafted block; 0: no drafting, and nothing of the draft layers is loaded. Another
  // length than the layers were trained on has to be forced (model/drafting.h). A step that
  // verifies a block needs rollback_tokens to be larger.
  int64_t draft_tokens = 0;
  bool force_draft_tokens = false;
  ReplayMode replay = ReplayMode::kOff;
  CacheFormat cache_format = CacheFormat::kPacked;
  bool use_reference_ops =
      false;  // run the plain scalar reference of every operation (slow; for selfcheck)
  CpuLevel max_cpu_level = CpuLevel::kAmx;  // upper limit on the kernels' instruction set
};

struct MemoryUse {
  int64_t weight_bytes = 0;
  int64_t peak_scratch_bytes = 0;  // of any step
  int64_t held_scratch_bytes = 0;
  int64_t logits_bytes = 0;
  ProcessMemory process;
};

class Executor {
 public:
  // Loads config, checkpoint and weights. Errors carry what is wrong with which file.
  static Result<std::unique_ptr<Executor>> Create(const ExecutorOptions& options);
  ~Executor();

  const ModelConfig& config() const;
  const ExecutorOptions& options() const;
  // What was planned and allocated at start, and what has really been used, for comparison.
  const MemoryPlan& memory_plan() const;
  MemoryUse memory_use() const;
  // The memory that steps use; its counts are the sizes of the pools to create.
  CacheMemory& memory();
  int num_threads() const;
  // The threads that run steps, for work between steps.
  ThreadPool& thread_pool();

  // Carries out the plan's commands, then runs all chunks as one batch. Result: [sum of
  // num_logit_rows, vocab] F32 in host memory, chunk by chunk, valid until the next call. The bits
  // of a row depend on its own sequence only. Errors: kInvalidArgument (ids, positions or units
  // that do not fit), kDataLoss (an image); then no byte of state has changed. `trace` may be null.
  Result<TensorView> Step(const StepPlan& plan, LayerTrace* trace = nullptr);

  // The same in three parts, so that a step can be in the stream before the tokens of the one in
  // front of it have reached the host. BeginStep puts the rows into the stream; a chunk without
  // tokens runs what DrawStep drew last for its slot. DrawStep, after each BeginStep, puts draws
  // behind them, and takes the logits of `host_rows` to the host as well. FinishStep waits for the
  // oldest drawn step; its results are valid until the next one. In a draw, `logit_row` counts the
  // step's logit rows, and `slot` is a slot or -1. A step may be begun while one is drawn and not
  // finished. On a CPU each part runs at once. Errors: of BeginStep those of Step, and then the
  // step is not drawn; of FinishStep what could not be drawn, and what has failed on the device.
  Status BeginStep(const StepPlan& plan);
  void DrawStep(std::span<const ListedDraw> draws, std::span<const int32_t> host_rows);
  Result<DrawnRows> FinishStep();

  // Drafts a block behind every chunk's sequence, whose steps have run with this executor. Nothing
  // of any state changes. Errors: kInvalidArgument, also without drafting (draft_tokens is 0).
  Result<Drafts> Draft(std::span<const DraftChunk> chunks, bool want_logits = false,
                       DraftChooser* chooser = nullptr);
  // Calibration of the confidences, as of Drafter::SetTemperatures; 1 at first.
  Status SetDraftTemperatures(std::span<const float> temperatures);

  // Records the token that was sampled last for a slot: what a chunk without tokens runs.
  void SetSampledToken(int32_t slot, int32_t token);

 private:
  Executor();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace deepinfer
