#include "model/model.h"

#include <algorithm>
#include <cmath>

#include "model/model_step.h"
#include "ops/cache_records/cache_records.h"
#include "ops/compressor/compressor.h"
#include "ops/embedding/embedding.h"
#include "ops/engram/engram.h"
#include "ops/gated_linear/gated_linear.h"
#include "ops/gather_rows/gather_rows.h"
#include "ops/hyper_connection/hyper_connection.h"
#include "ops/indexer/indexer.h"
#include "ops/latent_inputs/latent_inputs.h"
#include "ops/linear/linear.h"
#include "ops/moe/moe.h"
#include "ops/quantize/group_quantize.h"
#include "ops/quantize/quantize.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rope/rope.h"
#include "ops/sparse_attention/sparse_attention.h"
#include "tensor/copy.h"
#include "tensor/float_formats.h"

namespace deepinfer {

Model::Model(ModelConfig config, ModelWeights weights, Numerics numerics)
    : config_(std::move(config)), weights_(std::move(weights)), numerics_(numerics) {
  producer_of_layer_.assign(static_cast<size_t>(config_.num_hidden_layers), -1);
  for (size_t i = 0; i < config_.kv_source_layer_ids.size(); ++i) {
    producer_of_layer_[static_cast<size_t>(config_.kv_source_layer_ids[i])] =
        static_cast<int64_t>(i);
  }
}

Status Model::Forward(const StepBatch& batch, const CacheViews& caches, const TensorView& logits,
                      LayerTrace* trace, Stream& stream, StepProbe* probe) const {
  const int64_t rows = batch.layout.num_rows();
  const int64_t hidden = config_.hidden_size;
  const int64_t pairs = config_.qk_rope_head_dim / 2;
  ScratchScope scratch(stream);
  Step step = MakeStep(rows, config_.num_experts_per_tok, scratch);
  step.batch = &batch;
  step.probe = probe;
  step.caches = &caches;
  step.layout = &batch.layout;
  step.compressed_table = scratch.Tensor(DType::kF32, {rows, pairs, 2});
  step.selected = scratch.Tensor(DType::kI32, {rows, config_.index_topk});
  step.candidates = scratch.Tensor(DType::kI32, {rows, config_.candidate_topk_blocks});

  DI_RETURN_IF_ERROR(Enter(StepPart::kInputs, step, stream));
  DI_RETURN_IF_ERROR(RopeTable({.positions = batch.layout.positions,
                                .frequencies = weights_.window_frequencies,
                                .table = step.window_table},
                               stream));
  DI_RETURN_IF_ERROR(RopeTable({.positions = batch.layout.positions,
                                .frequencies = weights_.compressed_frequencies,
                                .table = step.compressed_table},
                               stream));
  for (const CompressedEntries& entries : batch.entries) {
    step.entry_table.push_back(scratch.Tensor(DType::kF32, {entries.count(), pairs, 2}));
    DI_RETURN_IF_ERROR(RopeTable({.positions = entries.index,
                                  .scale = entries.ratio,
                                  .frequencies = weights_.compressed_frequencies,
                                  .table = step.entry_table.back()},
                                 stream));
  }

  DI_RETURN_IF_ERROR(Embedding({.ids = batch.token_ids,
                                .table = weights_.embed,
                                .streams = step.streams,
                                .first_pre = step.pre},
                               stream));
  if (trace != nullptr) {
    trace->num_rows.assign(static_cast<size_t>(config_.num_hidden_layers), 0);
    trace->streams.assign(static_cast<size_t>(config_.num_hidden_layers), {});
    trace->experts.assign(static_cast<size_t>(config_.num_hidden_layers), {});
    trace->selected.assign(static_cast<size_t>(config_.num_hidden_layers), {});
  }

  for (int64_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
    const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
    if (w.engram != nullptr) {
      DI_RETURN_IF_ERROR(Expand(step, stream));
      DI_RETURN_IF_ERROR(AddEngram(layer, step, stream));
    }
    const bool boundary = layer == config_.decoder_start();
    if (boundary && batch.drops_rows) {
      // The compressed keys of this layer are the decoder half's long-range memory, so every row
      // leaves its own; for rows that are dropped nothing else of the layer is needed.
      DI_RETURN_IF_ERROR(Expand(step, stream));
      DI_RETURN_IF_ERROR(Enter(StepPart::kHyperConnection, step, stream));
      DI_RETURN_IF_ERROR(HcCollapseNorm(CollapseArgs(w.attn_norm, step), stream));
      DI_RETURN_IF_ERROR(CompressKeys(layer, step, stream));
      if (batch.kept_rows.rows() == 0) return {};
      DI_RETURN_IF_ERROR(Enter(StepPart::kHyperConnection, step, stream));
      DI_RETURN_IF_ERROR(KeepRows(step, scratch, stream));
      DI_RETURN_IF_ERROR(HcMix(MixArgs(w.hc_attn, step), stream));
      std::swap(step.pre, step.next_pre);
    } else {
      DI_RETURN_IF_ERROR(EnterSubLayer(w.hc_attn, w.attn_norm, step, stream));
      if (w.compressor != nullptr) DI_RETURN_IF_ERROR(CompressKeys(layer, step, stream));
    }
    if (boundary) step.layout = &batch.decoder_layout;
    if (weights_.draft != nullptr)
      DI_RETURN_IF_ERROR(CaptureForDraft(layer, step, scratch, stream));
    DI_RETURN_IF_ERROR(Attention(layer, step, stream));
    step.has_output = true;
    DI_RETURN_IF_ERROR(EnterSubLayer(w.hc_ffn, w.ffn_norm, step, stream));
    DI_RETURN_IF_ERROR(MixtureOfExperts(layer, step, stream));
    step.has_output = true;
    if (trace != nullptr) {
      DI_RETURN_IF_ERROR(Expand(step, stream));
      DI_RETURN_IF_ERROR(RecordLayer(layer, step, *trace, stream));
    }
  }
  DI_RETURN_IF_ERROR(Expand(step, stream));

  const int64_t num_logits = batch.logit_rows.rows();
  if (num_logits == 0) return {};
  const TensorView last = scratch.Tensor(DType::kBf16, {num_logits, hidden});
  DI_RETURN_IF_ERROR(Enter(StepPart::kHead, step, stream));
  DI_RETURN_IF_ERROR(HcCollapseNorm({.streams = step.streams,
                                     .pre = step.pre,
                                     .row_index = batch.logit_rows,
                                     .weight = weights_.norm,
                                     .y = last,
                                     .y_grid = {},
                                     .norm_eps = config_.rms_norm_eps},
                                    stream));
  return Linear({.x = last, .weight = &weights_.head, .y = logits}, stream);
}

Model::Step Model::MakeStep(int64_t rows, int64_t experts_per_row, ScratchScope& scratch) const {
  const int64_t hidden = config_.hidden_size;
  const int64_t pairs = config_.qk_rope_head_dim / 2;
  Step step;
  step.rows = rows;
  step.streams = scratch.Tensor(DType::kBf16, {rows, kHcStreams, hidden});
  step.pre = scratch.Tensor(DType::kF32, {rows, kHcStreams});
  step.next_pre = scratch.Tensor(DType::kF32, {rows, kHcStreams});
  step.post = scratch.Tensor(DType::kF32, {rows, kHcStreams});
  step.comb = scratch.Tensor(DType::kF32, {rows, kHcStreams * kHcStreams});
  step.x = scratch.Tensor(DType::kBf16, {rows, hidden});
  step.x_grid = scratch.Tensor(DType::kBf16, {rows, hidden});
  step.y = scratch.Tensor(DType::kBf16, {rows, hidden});
  step.qr_grid = scratch.Tensor(DType::kBf16, {rows, config_.q_lora_rank});
  step.window_table = scratch.Tensor(DType::kF32, {rows, pairs, 2});
  step.experts = scratch.Tensor(DType::kI32, {rows, experts_per_row});
  return step;
}

Status Model::Enter(StepPart part, const Step& step, Stream& stream) {
  if (step.probe == nullptr) return {};
  return step.probe->Enter(part, stream);
}

Status Model::KeepRows(Step& step, ScratchScope& scratch, Stream& stream) const {
  const TensorView& kept = step.batch->kept_rows;
  const int64_t rows = kept.rows();
  const auto gather = [&](TensorView& view, const TensorView& out) {
    const TensorView source = std::exchange(view, out);
    return GatherRows({.source = source, .row_index = kept, .out = out}, stream);
  };
  const int64_t hidden = config_.hidden_size;
  DI_RETURN_IF_ERROR(
      gather(step.streams, scratch.Tensor(DType::kBf16, {rows, kHcStreams, hidden})));
  DI_RETURN_IF_ERROR(gather(step.pre, scratch.Tensor(DType::kF32, {rows, kHcStreams})));
  DI_RETURN_IF_ERROR(gather(step.x, scratch.Tensor(DType::kBf16, {rows, hidden})));
  DI_RETURN_IF_ERROR(gather(step.x_grid, scratch.Tensor(DType::kBf16, {rows, hidden})));
  const TensorView table = scratch.Tensor(
      DType::kF32, {rows, step.compressed_table.dim(1), step.compressed_table.dim(2)});
  DI_RETURN_IF_ERROR(gather(step.compressed_table, table));
  if (weights_.draft != nullptr) {
    const TensorView window_table =
        scratch.Tensor(DType::kF32, {rows, step.window_table.dim(1), step.window_table.dim(2)});
    DI_RETURN_IF_ERROR(gather(step.window_table, window_table));
  }
  // Nothing of the layers before is left in these that the layers to come would read.
  for (TensorView* view : {&step.next_pre, &step.post, &step.comb, &step.y, &step.qr_grid,
                           &step.selected, &step.candidates, &step.experts})
    *view = view->Rows(0, rows);
  step.rows = rows;
  return {};
}

HcMixArgs Model::MixArgs(const HcWeights& hc, const Step& step) const {
  return {.streams = step.streams,
          .fn = hc.fn,
          .base = hc.base,
          .scale = hc.scale,
          .pre = step.next_pre,
          .post = step.post,
          .comb = step.comb,
          .sinkhorn_iterations = config_.hc_sinkhorn_iters,
          .eps = config_.hc_eps,
          .norm_eps = config_.rms_norm_eps};
}

HcCollapseNormArgs Model::CollapseArgs(const TensorView& norm, const Step& step) const {
  return {.streams = step.streams,
          .pre = step.pre,
          .row_index = {},
          .weight = norm,
          .y = step.x,
          .y_grid = step.x_grid,
          .norm_eps = config_.rms_norm_eps};
}

Status Model::Expand(Step& step, Stream& stream) const {
  if (!std::exchange(step.has_output, false)) return {};
  DI_RETURN_IF_ERROR(Enter(StepPart::kHyperConnection, step, stream));
  return HcExpand({.x = step.y, .post = step.post, .comb = step.comb, .streams = step.streams},
                  stream);
}

// A site's `pre` is consumed by the next site, its `post` and `comb` by its own output (model
// description, 6.1).
Status Model::EnterSubLayer(const HcWeights& hc, const TensorView& norm, Step& step,
                            Stream& stream) const {
  HcBoundaryArgs args{.expand = {}, .mix = MixArgs(hc, step), .collapse = CollapseArgs(norm, step)};
  if (std::exchange(step.has_output, false)) {
    args.expand = {.x = step.y, .post = step.post, .comb = step.comb, .streams = step.streams};
  }
  DI_RETURN_IF_ERROR(Enter(StepPart::kHyperConnection, step, stream));
  DI_RETURN_IF_ERROR(HcBoundary(args, stream));
  std::swap(step.pre, step.next_pre);
  return {};
}

Status Model::Attention(int64_t layer, Step& step, Stream& stream) const {
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  const int64_t rows = step.rows;
  const int64_t heads = config_.num_attention_heads;
  const int64_t dim = config_.head_dim;
  const int64_t ratio = config_.ratio(layer);
  const TensorView& table = ratio == 0 ? step.window_table : step.compressed_table;
  ScratchScope scratch(stream);

  const IndexerWeights* indexer = w.indexer.get();
  const TensorView& pages = step.caches->window_pages[static_cast<size_t>(layer)];
  const TensorView qr = scratch.Tensor(DType::kBf16, {rows, config_.q_lora_rank});
  const TensorView kv = scratch.Tensor(DType::kBf16, {rows, dim});
  const TensorView records = scratch.Tensor(DType::kU8, {rows, pages.dim(2)});
  const TensorView q = scratch.Tensor(DType::kBf16, {rows, heads * dim});
  std::vector<LinearArgs> down{{.x = step.x_grid, .weight = &w.wq_a, .y = qr},
                               {.x = step.x_grid, .weight = &w.wkv, .y = kv}};
  std::vector<LinearArgs> up{{.x = step.qr_grid, .weight = &w.wq_b, .y = q}};
  TensorView index_q, index_weights;
  if (indexer != nullptr) {
    const int64_t index_heads = config_.index_n_heads;
    index_q = scratch.Tensor(DType::kBf16, {rows, index_heads * config_.index_head_dim});
    index_weights = scratch.Tensor(DType::kBf16, {rows, index_heads});
    down.push_back({.x = step.x, .weight = &indexer->weights_proj, .y = index_weights});
    up.push_back({.x = step.qr_grid, .weight = &indexer->wq_b, .y = index_q});
  }
  DI_RETURN_IF_ERROR(Enter(StepPart::kDownProjections, step, stream));
  DI_RETURN_IF_ERROR(LinearBatch(down, stream));
  DI_RETURN_IF_ERROR(Enter(StepPart::kLatentInputs, step, stream));
  DI_RETURN_IF_ERROR(LatentInputs({.q = qr,
                                   .q_weight = w.q_norm,
                                   .q_grid = step.qr_grid,
                                   .kv = kv,
                                   .kv_weight = w.kv_norm,
                                   .table = table,
                                   .records = records,
                                   .layout = *step.layout,
                                   .pages = step.block_rows > 0 ? TensorView() : pages,
                                   .eps = config_.rms_norm_eps},
                                  stream));
  DI_RETURN_IF_ERROR(Enter(StepPart::kUpProjections, step, stream));
  DI_RETURN_IF_ERROR(LinearBatch(up, stream));
  if (indexer != nullptr)
    DI_RETURN_IF_ERROR(SelectEntries(layer, index_q, index_weights, step, stream));

  SparseAttentionArgs attention{
      .q = q.Reshape({rows, heads, dim}),
      .rotate_q = true,
      .window_records = records,
      .window_pages = pages,
      .window = config_.sliding_window,
      .block_rows = step.block_rows,
      .kv_blocks = {},
      .selected = {},
      .layout = *step.layout,
      .sink = w.attn_sink,
      .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim))),
      .table = table,
      .out = scratch.Tensor(DType::kBf16, {rows, heads * dim}),
      .numerics = numerics_};
  if (ratio > 0) {
    const int64_t producer = producer_of_layer_[static_cast<size_t>(config_.kv_source(layer))];
    attention.kv_blocks = step.caches->kv_blocks[static_cast<size_t>(producer)];
    attention.selected = step.selected;
  }
  DI_RETURN_IF_ERROR(Enter(StepPart::kAttention, step, stream));
  DI_RETURN_IF_ERROR(SparseAttention(attention, stream));
  DI_RETURN_IF_ERROR(Enter(StepPart::kOutputProjections, step, stream));

  const int64_t group_width = heads * dim / config_.o_groups;
  const int64_t rank = config_.o_lora_rank;
  const TensorView u = scratch.Tensor(DType::kBf16, {rows, config_.o_groups * rank});
  const bool whole_groups = rank % kQ8Group == 0;
  std::vector<LinearArgs> outputs;
  for (int64_t group = 0; group < config_.o_groups; ++group) {
    outputs.push_back({.x = attention.out.Columns(group * group_width, (group + 1) * group_width),
                       .weight = &w.wo_a[static_cast<size_t>(group)],
                       .y = u.Columns(group * rank, (group + 1) * rank),
                       .quantize_y = whole_groups});
  }
  DI_RETURN_IF_ERROR(LinearBatch(outputs, stream));
  if (!whole_groups) DI_RETURN_IF_ERROR(QuantizeFp8({.x = u, .y = u}, stream));
  return Linear({.x = u, .weight = &w.wo_b, .y = step.y}, stream);
}

Status Model::CompressKeys(int64_t layer, Step& step, Stream& stream) const {
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  const CompressorWeights& c = *w.compressor;
  const auto producer = static_cast<size_t>(producer_of_layer_[static_cast<size_t>(layer)]);
  const int64_t dim = config_.head_dim;
  const float eps = config_.rms_norm_eps;
  size_t kind = 0;
  const CompressedEntries& entries = step.entries(config_.ratio(layer), &kind);
  ScratchScope scratch(stream);
  DI_RETURN_IF_ERROR(Enter(StepPart::kCompressor, step, stream));

  const TensorView pooled = scratch.Tensor(DType::kBf16, {entries.count(), dim});
  if (config_.ratio(layer) == 1) {
    // Every row is an entry of its own, except those whose entries are known already.
    if (entries.count() == 0) return {};
    TensorView x = step.x;
    if (entries.count() < step.rows) {
      x = scratch.Tensor(DType::kBf16, {entries.count(), config_.hidden_size});
      DI_RETURN_IF_ERROR(
          GatherRows({.source = step.x, .row_index = entries.last_row, .out = x}, stream));
    }
    DI_RETURN_IF_ERROR(Linear({.x = x, .weight = &c.wkv, .y = pooled}, stream));
  } else {
    const TensorView key = scratch.Tensor(DType::kF32, {step.rows, dim});
    const TensorView gate = scratch.Tensor(DType::kF32, {step.rows, dim});
    const LinearArgs projections[] = {{.x = step.x, .weight = &c.wkv, .y = key},
                                      {.x = step.x, .weight = &c.wgate, .y = gate}};
    DI_RETURN_IF_ERROR(LinearBatch(projections, stream));
    DI_RETURN_IF_ERROR(CompressPairs({.key = key,
                                      .gate = gate,
                                      .layout = step.batch->layout,
                                      .entries = entries,
                                      .remainders = step.caches->remainders[producer],
                                      .pooled = pooled},
                                     stream));
  }
  if (entries.count() == 0) return {};
  DI_RETURN_IF_ERROR(
      RmsNorm({.x = pooled, .weight = c.norm, .y = pooled, .y_grid = {}, .eps = eps}, stream));

  const TensorView index_key =
      scratch.Tensor(DType::kBf16, {entries.count(), config_.index_head_dim});
  DI_RETURN_IF_ERROR(Linear({.x = pooled, .weight = &c.index_wk, .y = index_key}, stream));
  DI_RETURN_IF_ERROR(
      RmsNorm({.x = index_key, .weight = c.index_k_norm, .y = index_key, .y_grid = {}, .eps = eps},
              stream));
  WriteEntriesArgs write{.kind = EntryRecord::kIndexKey,
                         .values = index_key,
                         .table = step.entry_table[kind],
                         .entries = entries,
                         .layout = step.batch->layout,
                         .blocks = step.caches->index_blocks[producer],
                         .numerics = numerics_};
  DI_RETURN_IF_ERROR(WriteEntries(write, stream));
  write.kind = EntryRecord::kCompressedKv;
  write.values = pooled;
  write.blocks = step.caches->kv_blocks[producer];
  return WriteEntries(write, stream);
}

Status Model::SelectEntries(int64_t layer, const TensorView& q, const TensorView& weights,
                            Step& step, Stream& stream) const {
  DI_RETURN_IF_ERROR(Enter(StepPart::kIndexer, step, stream));
  const TensorView q_heads = q.Reshape({step.rows, config_.index_n_heads, config_.index_head_dim});
  DI_RETURN_IF_ERROR(
      Rope({.x = q_heads, .table = step.compressed_table, .quantize_q4p = true}, stream));

  const auto producer =
      static_cast<size_t>(producer_of_layer_[static_cast<size_t>(config_.kv_source(layer))]);
  IndexerArgs args{.q = q_heads,
                   .weights = weights,
                   .blocks = step.caches->index_blocks[producer],
                   .layout = *step.layout,
                   .ratio = config_.ratio(layer),
                   .candidates_in = {},
                   .candidates_out = {},
                   .candidate_block_size = config_.candidate_block_size,
                   .selected = step.selected,
                   .numerics = numerics_};
  if (layer == config_.candidate_source_layer_id) args.candidates_out = step.candidates;
  if (layer > config_.candidate_source_layer_id && config_.candidate_source_layer_id >= 0)
    args.candidates_in = step.candidates;
  return Indexer(args, stream);
}

Status Model::MixtureOfExperts(int64_t layer, Step& step, Stream& stream) const {
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  const int64_t rows = step.rows;
  const int64_t k = config_.experts_per_row(layer);
  const int64_t experts = config_.num_experts(layer);
  const int64_t intermediate = config_.moe_intermediate_size;
  const int64_t hidden = config_.hidden_size;
  ScratchScope scratch(stream);

  DI_RETURN_IF_ERROR(Enter(StepPart::kRouter, step, stream));
  const TensorView weights = scratch.Tensor(DType::kF32, {rows, k});
  const RouterSelectArgs select{.logits = {},
                                .bias = w.gate_bias,
                                .gate_temp = config_.gate_temp,
                                .scale = config_.routed_scaling_factor,
                                .experts = step.experts,
                                .weights = weights};
  const GroupByExpertArgs group{.experts = step.experts,
                                .weights = weights,
                                .num_experts = experts,
                                .row_index = scratch.Tensor(DType::kI32, {rows * k}),
                                .grouped_weight = scratch.Tensor(DType::kF32, {rows * k}),
                                .group_offsets = scratch.Tensor(DType::kI32, {experts + 1}),
                                .slot_position = scratch.Tensor(DType::kI32, {rows, k})};
  DI_RETURN_IF_ERROR(
      Route({.x = step.x, .weight = &w.gate, .select = select, .group = group}, stream));

  ExpertRows here{.x = step.x_grid,
                  .row_index = group.row_index,
                  .grouped_weight = group.grouped_weight,
                  .group_offsets = group.group_offsets};
  const bool exchanges = step.probe != nullptr && !step.probe->expert_rows.empty();
  if (exchanges) here = step.probe->expert_rows[static_cast<size_t>(layer)];
  const int64_t grouped = here.row_index.rows();
  const TensorView inner = scratch.Tensor(DType::kBf16, {std::max(grouped, rows), intermediate});
  const TensorView outputs = scratch.Tensor(DType::kBf16, {grouped, hidden});
  DI_RETURN_IF_ERROR(Enter(StepPart::kExperts, step, stream));
  GatedLinearArgs gated{.x = here.x,
                        .row_index = here.row_index,
                        .group_offsets = here.group_offsets,
                        .gate_weights = w.experts.w1_ptr,
                        .up_weights = w.experts.w3_ptr,
                        .row_weight = here.grouped_weight,
                        .limit = config_.swiglu_limit,
                        .out = inner.Rows(0, grouped),
                        .numerics = numerics_};
  DI_RETURN_IF_ERROR(GatedLinear(gated, stream));
  DI_RETURN_IF_ERROR(GroupedLinear({.x = inner.Rows(0, grouped),
                                    .row_index = {},
                                    .group_offsets = here.group_offsets,
                                    .weights = w.experts.w2_ptr,
                                    .y = outputs},
                                   stream));
  DI_RETURN_IF_ERROR(Enter(StepPart::kSharedExpert, step, stream));

  const LinearWeight* shared_gate = &w.shared_w1;
  const LinearWeight* shared_up = &w.shared_w3;
  const TensorView shared_inner = inner.Rows(0, rows);
  gated.x = step.x_grid;
  gated.row_index = {};
  gated.group_offsets = {};
  gated.gate_weights = {&shared_gate, 1};
  gated.up_weights = {&shared_up, 1};
  gated.row_weight = {};
  gated.out = shared_inner;
  DI_RETURN_IF_ERROR(GatedLinear(gated, stream));
  const TensorView shared = scratch.Tensor(DType::kBf16, {rows, hidden});
  DI_RETURN_IF_ERROR(Linear({.x = shared_inner, .weight = &w.shared_w2, .y = shared}, stream));
  DI_RETURN_IF_ERROR(Enter(StepPart::kCombine, step, stream));
  return MoeCombine({.routed = exchanges ? step.probe->returned.Rows(0, rows * k) : outputs,
                     .slot_position = group.slot_position,
                     .experts = step.experts,
                     .shared = shared,
                     .y = step.y,
                     .numerics = numerics_},
                    stream);
}

Status Model::AddEngram(int64_t layer, Step& step, Stream& stream) const {
  const EngramWeights& w = *weights_.layers[static_cast<size_t>(layer)].engram;
  const EngramLayerConstants& constants =
      weights_.engram_constants.layers[static_cast<size_t>(config_.engram_index(layer))];
  const int64_t lookups = config_.engram_rows_per_token();
  ScratchScope scratch(stream);
  DI_RETURN_IF_ERROR(Enter(StepPart::kEngram, step, stream));
  const TensorView table_rows = scratch.Tensor(DType::kI64, {step.rows, lookups});
  DI_RETURN_IF_ERROR(EngramHash({.lookback = step.batch->engram_lookback,
                                 .multipliers = constants.multipliers,
                                 .primes = constants.primes,
                                 .offsets = constants.offsets,
                                 .table_rows = table_rows},
                                stream));
  const TensorView embedding =
      scratch.Tensor(DType::kBf16, {step.rows, lookups * config_.engram_head_dim});
  DI_RETURN_IF_ERROR(EngramGather(
      {.table_rows = table_rows, .weight = w.table, .scale = w.scale, .out = embedding}, stream));
  const TensorView kv =
      scratch.Tensor(DType::kBf16, {step.rows, (kHcStreams + 1) * config_.hidden_size});
  DI_RETURN_IF_ERROR(Linear({.x = embedding, .weight = &w.wkv, .y = kv}, stream));
  return EngramApply({.kv = kv,
                      .q_weight = w.q_weight,
                      .k_weight = w.k_weight,
                      .streams = step.streams,
                      .eps = config_.rms_norm_eps},
                     stream);
}

Status Model::RecordLayer(int64_t layer, const Step& step, LayerTrace& trace,
                          Stream& stream) const {
  const auto l = static_cast<size_t>(layer);
  trace.num_rows[l] = step.rows;
  trace.experts[l].resize(static_cast<size_t>(step.experts.num_elements()));
  DI_RETURN_IF_ERROR(CopyToHost(step.experts, trace.experts[l].data(), stream));
  if (config_.is_index_source(layer)) {
    trace.selected[l].resize(static_cast<size_t>(step.selected.num_elements()));
    DI_RETURN_IF_ERROR(CopyToHost(step.selected, trace.selected[l].data(), stream));
  }
  if (!trace.want_streams) return {};
  std::vector<Bf16> streams(static_cast<size_t>(step.streams.num_elements()));
  DI_RETURN_IF_ERROR(CopyToHost(step.streams, streams.data(), stream));
  trace.streams[l].reserve(streams.size());
  for (Bf16 value : streams) trace.streams[l].push_back(Bf16ToF32(value));
  return {};
}

}  // namespace deepinfer
