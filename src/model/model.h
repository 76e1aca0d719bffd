// The forward pass of the text model over one step: the layer graph of the model description,
// sections 6 to 12, in terms of operations. Knows tensors and caches, not requests; state of
// sequences is reached through the views in a step.
#pragma once

#include <memory>

#include "base/error.h"
#include "model/config.h"
#include "model/draft_batch.h"
#include "model/layer_trace.h"
#include "model/model_weights.h"
#include "model/step_batch.h"
#include "model/step_probe.h"
#include "ops/hyper_connection/hyper_connection.h"
#include "ops/numerics.h"
#include "tensor/stream.h"

namespace deepinfer {

class Model {
 public:
  Model(ModelConfig config, ModelWeights weights, Numerics numerics);

  const ModelConfig& config() const {
    return config_;
  }
  const ModelWeights& weights() const {
    return weights_;
  }

  // Runs every row of the batch through the layers, those from the decoder's start on with the kept
  // rows only, updates the caches, and writes the logits of batch.logit_rows to `logits` [n, vocab]
  // f32. The bits of a row depend on its own sequence only:
  // not on other rows, on how the sequence is cut into steps, or on the number of threads. `trace`
  // and `probe` may be null. With draft layers, also the keys that these keep of every row: for the
  // rows that run their target layers.
  Status Forward(const StepBatch& batch, const CacheViews& caches, const TensorView& logits,
                 LayerTrace* trace, Stream& stream, StepProbe* probe = nullptr) const;

  // Drafts a block of tokens behind each of any set of sequences, from the keys that their steps
  // have left: a pass through the draft layers, and a chain of K choices. Reads the caches and
  // writes nothing to them. `chooser` chooses the tokens; null: the first of the largest logits.
  // The bits of a block depend on its own sequence only. Needs weights().draft. batch.block may
  // differ from what the layers were trained on (model/drafting.h). Takes DraftScratchBytes of
  // scratch at most (model/step_memory.h).
  Status Draft(const DraftBatch& batch, const CacheViews& caches, const DraftOutput& output,
               DraftChooser* chooser, Stream& stream) const;

 private:
  struct Step;

  // Tells the probe, if there is one, what runs next.
  static Status Enter(StepPart part, const Step& step, Stream& stream);
  Status Attention(int64_t layer, Step& step, Stream& stream) const;
  // Goes on with batch.kept_rows only; what is needed of them is moved to `scratch`.
  Status KeepRows(Step& step, ScratchScope& scratch, Stream& stream) const;
  Status CompressKeys(int64_t layer, Step& step, Stream& stream) const;
  Status SelectEntries(int64_t layer, const TensorView& q, const TensorView& weights, Step& step,
                       Stream& stream) const;
  Status MixtureOfExperts(int64_t layer, Step& step, Stream& stream) const;
  Status AddEngram(int64_t layer, Step& step, Stream& stream) const;
  // Memory of a step of `rows` rows through layers of `experts_per_row` experts. Batch, layout and
  // caches are still to be set.
  Step MakeStep(int64_t rows, int64_t experts_per_row, ScratchScope& scratch) const;
  // Remembers the streams at the entry of a layer that the draft layers read, and after the last
  // such layer writes the rows' keys.
  Status CaptureForDraft(int64_t layer, Step& step, ScratchScope& scratch, Stream& stream) const;
  Status WriteDraftContext(const Step& step, Stream& stream) const;
  // The heads behind the last draft layer.
  Status ChooseDrafts(const DraftBatch& batch, const DraftOutput& output, DraftChooser* chooser,
                      const Step& step, Stream& stream) const;
  HcMixArgs MixArgs(const HcWeights& hc, const Step& step) const;
  HcCollapseNormArgs CollapseArgs(const TensorView& norm, const Step& step) const;
  // Adds a sub-layer's output to the streams, if there is one that has not been added.
  Status Expand(Step& step, Stream& stream) const;
  // The same, and the input of the next sub-layer.
  Status EnterSubLayer(const HcWeights& hc, const TensorView& norm, Step& step,
                       Stream& stream) const;
  Status RecordLayer(int64_t layer, const Step& step, LayerTrace& trace, Stream& stream) const;

  ModelConfig config_;
  ModelWeights weights_;
  Numerics numerics_;
  std::vector<int64_t>
      producer_of_layer_;  // index of a KV source layer among the producers, -1 otherwise
};

}  // namespace deepinfer
