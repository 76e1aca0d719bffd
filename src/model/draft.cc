// The draft layers' part of the model (model description, section 13): what the model's own steps
// leave for them, and the drafting of blocks.
#include <algorithm>
#include <vector>

#include "model/model_step.h"
#include "ops/draft_block/draft_block.h"
#include "ops/embedding/embedding.h"
#include "ops/gather_rows/gather_rows.h"
#include "ops/hyper_connection/hc_collapse.h"
#include "ops/latent_inputs/latent_inputs.h"
#include "ops/linear/linear.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rope/rope.h"

namespace deepinfer {

Status Model::CaptureForDraft(int64_t layer, Step& step, ScratchScope& scratch,
                              Stream& stream) const {
  const std::vector<int64_t>& targets = config_.dspark_target_layer_ids;
  const auto found = std::find(targets.begin(), targets.end(), layer);
  if (found == targets.end()) return {};
  const int64_t hidden = config_.hidden_size;
  const int64_t index = found - targets.begin();
  DI_RETURN_IF_ERROR(Enter(StepPart::kDraftContext, step, stream));
  if (index == 0)
    step.targets = scratch.Tensor(DType::kBf16, {step.rows, std::ssize(targets) * hidden});
  DI_RETURN_IF_ERROR(HcCollapse({.streams = step.streams,
                                 .pre = {},
                                 .y = step.targets.Columns(index * hidden, (index + 1) * hidden),
                                 .quantize = true},
                                stream));
  if (index + 1 < std::ssize(targets)) return {};
  return WriteDraftContext(step, stream);
}

// The keys of all stages come from the same vector of a row and pass through no draft layer.
Status Model::WriteDraftContext(const Step& step, Stream& stream) const {
  const DraftWeights& draft = *weights_.draft;
  const int64_t rows = step.rows;
  const auto first = static_cast<size_t>(config_.num_hidden_layers);
  const size_t layers = weights_.layers.size();
  ScratchScope scratch(stream);
  const TensorView projected = scratch.Tensor(DType::kBf16, {rows, config_.hidden_size});
  const TensorView grid = scratch.Tensor(DType::kBf16, {rows, config_.hidden_size});
  DI_RETURN_IF_ERROR(
      Linear({.x = step.targets, .weight = &draft.main_proj, .y = projected}, stream));
  DI_RETURN_IF_ERROR(RmsNorm({.x = projected,
                              .weight = draft.main_norm,
                              .y = {},
                              .y_grid = grid,
                              .eps = config_.rms_norm_eps},
                             stream));
  std::vector<LinearArgs> products;
  for (size_t layer = first; layer < layers; ++layer) {
    products.push_back({.x = grid,
                        .weight = &weights_.layers[layer].wkv,
                        .y = scratch.Tensor(DType::kBf16, {rows, config_.head_dim})});
  }
  DI_RETURN_IF_ERROR(LinearBatch(products, stream));
  for (size_t layer = first; layer < layers; ++layer) {
    const TensorView& pages = step.caches->window_pages[layer];
    DI_RETURN_IF_ERROR(LatentInputs({.q = {},
                                     .q_weight = {},
                                     .q_grid = {},
                                     .kv = products[layer - first].y,
                                     .kv_weight = weights_.layers[layer].kv_norm,
                                     .table = step.window_table,
                                     .records = scratch.Tensor(DType::kU8, {rows, pages.dim(2)}),
                                     .layout = *step.layout,
                                     .pages = pages,
                                     .eps = config_.rms_norm_eps},
                                    stream));
  }
  return {};
}

Status Model::Draft(const DraftBatch& batch, const CacheViews& caches, const DraftOutput& output,
                    DraftChooser* chooser, Stream& stream) const {
  DI_CHECK(weights_.draft != nullptr);
  const int64_t sequences = batch.anchors.rows();
  const int64_t rows = sequences * batch.block;
  const int64_t first = config_.num_hidden_layers;
  ScratchScope scratch(stream);
  const TensorView token_ids = scratch.Tensor(DType::kI32, {rows});
  // Slots and blocks play no part in layers without compressed keys.
  BatchLayout layout;
  layout.positions = scratch.Tensor(DType::kI32, {rows});
  layout.row_sequence = scratch.Tensor(DType::kI32, {rows});
  layout.sequence_start = scratch.Tensor(DType::kI32, {sequences + 1});
  layout.window_table = batch.window_table;
  layout.window_first_page = batch.window_first_page;
  layout.window_begin = batch.window_begin;
  DI_RETURN_IF_ERROR(BlockRows({.anchors = batch.anchors,
                                .lengths = batch.lengths,
                                .filler = static_cast<int32_t>(config_.dspark_noise_token_id),
                                .token_ids = token_ids,
                                .positions = layout.positions,
                                .row_sequence = layout.row_sequence,
                                .sequence_start = layout.sequence_start},
                               stream));
  Step step = MakeStep(rows, config_.experts_per_row(first), scratch);
  step.caches = &caches;
  step.layout = &layout;
  step.block_rows = batch.block;
  DI_RETURN_IF_ERROR(RopeTable({.positions = layout.positions,
                                .frequencies = weights_.window_frequencies,
                                .table = step.window_table},
                               stream));
  DI_RETURN_IF_ERROR(Embedding(
      {.ids = token_ids, .table = weights_.embed, .streams = step.streams, .first_pre = step.pre},
      stream));
  for (int64_t layer = first; layer < std::ssize(weights_.layers); ++layer) {
    const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
    DI_RETURN_IF_ERROR(EnterSubLayer(w.hc_attn, w.attn_norm, step, stream));
    DI_RETURN_IF_ERROR(Attention(layer, step, stream));
    step.has_output = true;
    DI_RETURN_IF_ERROR(EnterSubLayer(w.hc_ffn, w.ffn_norm, step, stream));
    DI_RETURN_IF_ERROR(MixtureOfExperts(layer, step, stream));
    step.has_output = true;
  }
  DI_RETURN_IF_ERROR(Expand(step, stream));
  return ChooseDrafts(batch, output, chooser, step, stream);
}

Status Model::ChooseDrafts(const DraftBatch& batch, const DraftOutput& output,
                           DraftChooser* chooser, const Step& step, Stream& stream) const {
  const DraftWeights& draft = *weights_.draft;
  const int64_t sequences = batch.anchors.rows();
  const int64_t slots = batch.block;
  const int64_t hidden = config_.hidden_size;
  const int64_t rank = config_.dspark_markov_rank;
  const int64_t vocab = config_.vocab_size;
  ScratchScope scratch(stream);
  // What the confidence reads: the row's vector, before any norm, and the embedding of the token
  // that the slot follows. The latter is also what the Markov head reads.
  const TensorView features = scratch.Tensor(DType::kBf16, {step.rows, hidden + rank});
  const TensorView vectors = features.Columns(0, hidden);
  DI_RETURN_IF_ERROR(HcCollapse({.streams = step.streams, .pre = step.pre, .y = vectors}, stream));
  const TensorView normed = scratch.Tensor(DType::kBf16, {step.rows, hidden});
  DI_RETURN_IF_ERROR(RmsNorm(
      {.x = vectors, .weight = draft.norm, .y = normed, .y_grid = {}, .eps = config_.rms_norm_eps},
      stream));
  DI_RETURN_IF_ERROR(Linear({.x = normed, .weight = &weights_.head, .y = output.logits}, stream));

  const TensorView bias = scratch.Tensor(DType::kF32, {sequences, vocab});
  const TensorView slot_features = features.Reshape({sequences, slots * (hidden + rank)});
  const TensorView slot_logits = output.logits.Reshape({sequences, slots * vocab});
  TensorView previous = batch.anchors;
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t end = (slot + 1) * (hidden + rank);
    const TensorView embedding = slot_features.Columns(end - rank, end);
    const TensorView logits = slot_logits.Columns(slot * vocab, (slot + 1) * vocab);
    const TensorView tokens = output.tokens.Rows(slot, slot + 1).Reshape({sequences});
    DI_RETURN_IF_ERROR(GatherRows(
        {.source = draft.markov_embed, .row_index = previous, .out = embedding}, stream));
    DI_RETURN_IF_ERROR(Linear({.x = embedding, .weight = &draft.markov_head, .y = bias}, stream));
    DI_RETURN_IF_ERROR(BiasedArgmax(
        {.logits = logits, .bias = bias, .tokens = chooser == nullptr ? tokens : TensorView()},
        stream));
    if (chooser != nullptr) DI_RETURN_IF_ERROR(chooser->Choose(slot, logits, tokens, stream));
    previous = tokens;
  }
  return BlockConfidence({.x = features,
                          .weight = draft.confidence,
                          .temperatures = batch.temperatures,
                          .score = output.score,
                          .probability = output.confidence},
                         stream);
}

}  // namespace deepinfer
