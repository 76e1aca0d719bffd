// One rank of an expert-parallel deployment, alone on a device: a model with random weights and the
// rank's share of the experts, caches as full as those of running sequences, and the rows of one
// step. What the wire would bring (rows for the local experts, outputs of the other ranks' experts)
// lies ready. Nothing here is measured.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "apps/roofline.h"
#include "base/error.h"
#include "model/config.h"
#include "model/model.h"
#include "model/step_batch.h"
#include "model/step_probe.h"
#include "state/cache_memory.h"
#include "tensor/buffer.h"
#include "tensor/stream.h"

namespace deepinfer {

struct RankSliceShape {
  int64_t ranks = 1;  // over which the experts of each layer are spread; divides their number
  int64_t sequences = 1;
  int64_t before = 0;        // tokens of each sequence in the caches
  int64_t rows = 1;          // of each sequence in the step
  int64_t decoder_rows = 1;  // last ones of each, that run the layers from decoder_start() on
  uint64_t seed = 0;
};

struct RankSliceBytes {
  int64_t weights = 0;
  int64_t caches = 0;
  int64_t scratch = 0;
  int64_t step = 0;  // logits, and what the wire would bring
  int64_t total() const {
    return weights + caches + scratch + step;
  }
};
// From the shape alone, a little too much rather than too little.
RankSliceBytes RankSliceMemory(const ModelConfig& config, const RankSliceShape& shape);

class RankSlice {
 public:
  // Errors: kResourceExhausted. `stream` must outlive the slice.
  static Result<std::unique_ptr<RankSlice>> Create(const ModelConfig& config,
                                                   const RankSliceShape& shape, Stream& stream);

  // Runs the step, or puts it into the stream. The same rows at the same positions every time. The
  // probe gets what the wire would bring.
  Status RunStep(StepProbe& probe);
  const StepWork& work() const {
    return work_;
  }
  // Of the last rows, [sequences, vocab] f32.
  const TensorView& logits() const {
    return logits_;
  }

 private:
  RankSlice(const ModelConfig& config, const RankSliceShape& shape, Stream& stream)
      : config_(config), shape_(shape), stream_(stream) {}
  Status MakeCaches();
  Status MakeBatch();
  Status DrawExperts();
  Result<TensorView> Upload(const std::vector<int32_t>& values,
                            std::initializer_list<int64_t> shape);
  Result<TensorView> Allocate(DType dtype, std::initializer_list<int64_t> shape);
  // Uniform in [0, bound).
  int32_t Draw(int64_t bound);

  const ModelConfig config_;
  const RankSliceShape shape_;
  Stream& stream_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<CacheMemory> memory_;
  CacheViews caches_;
  StepBatch batch_;
  TensorView logits_;
  std::vector<ExpertRows> expert_rows_;
  TensorView returned_;
  StepWork work_;
  std::vector<Buffer> buffers_;
  uint64_t draws_ = 0;
};

}  // namespace deepinfer
