#include "apps/roofline.h"

#include <algorithm>
#include <cmath>

#include "ops/hyper_connection/hyper_connection.h"
#include "ops/quantize/group_quantize.h"

namespace deepinfer {
namespace {

constexpr double kFp4Bytes = 0.5 + 1.0 / 32;  // per parameter, with its share of a scale
constexpr double kFp8Bytes = 1 + 1.0 / 1024;
constexpr double kBf16Bytes = 2;

// Sizes as floating-point numbers: parameters, or bytes where the name says so.
struct Sizes {
  explicit Sizes(const ModelConfig& c)
      : hidden(static_cast<double>(c.hidden_size)),
        dim(static_cast<double>(c.head_dim)),
        low(static_cast<double>(c.q_lora_rank)),
        wide(static_cast<double>(c.num_attention_heads * c.head_dim)),
        o_rank(static_cast<double>(c.o_groups * c.o_lora_rank)),
        heads(static_cast<double>(c.num_attention_heads)),
        k(static_cast<double>(c.num_experts_per_tok)),
        expert(3 * hidden * static_cast<double>(c.moe_intermediate_size)),
        router(static_cast<double>(c.n_routed_experts) * hidden),
        wo_a(o_rank * wide / static_cast<double>(c.o_groups)),
        mhc(2.0 * static_cast<double>(kHcCoefficients * kHcStreams) * hidden),
        index_wide(static_cast<double>(c.index_n_heads * c.index_head_dim)),
        engram_width(static_cast<double>(c.engram_rows_per_token() * c.engram_head_dim)),
        engram(engram_width * static_cast<double>(kHcStreams + 1) * hidden),
        head(static_cast<double>(c.vocab_size) * hidden),
        window_bytes(static_cast<double>(c.sliding_window * Q8RecordBytes(c.head_dim))),
        selected_bytes(static_cast<double>(c.index_topk * Q4ERecordBytes(c.head_dim))),
        index_key_bytes(static_cast<double>(Q4PRecordBytes(c.index_head_dim))) {}

  double hidden, dim, low, wide, o_rank, heads, k;
  double expert;  // one expert, three matrices
  double router, wo_a;
  double mhc;  // coefficient projections of a layer's two sites
  double index_wide, engram_width, engram, head;
  double window_bytes, selected_bytes;  // keys that a row of attention reads
  double index_key_bytes;

  double attention() const {
    return low * hidden + dim * hidden + wide * low + wo_a + hidden * o_rank;
  }
  // Read and written by the two boundaries of a layer, per row: the streams twice each, input and
  // output of the sub-layers.
  double mhc_bytes() const {
    return 2.0 * static_cast<double>(2 * kHcStreams + 2) * hidden * 2;
  }
  double attention_flops(double keys) const {
    return 2 * heads * keys * 2 * dim;
  }
};

// bf16 parameters of a source of compressed keys: projections to key (and gate), and to index keys.
double CompressorParameters(const ModelConfig& config, const Sizes& s, int64_t layer) {
  return (config.ratio(layer) == 2 ? 2 : 1) * s.hidden * s.dim +
         static_cast<double>(config.index_head_dim) * s.dim;
}

double AttentionKeys(const ModelConfig& config, int64_t layer) {
  return static_cast<double>(config.sliding_window +
                             (config.ratio(layer) > 0 ? config.index_topk : 0));
}

// Entries that the indexer of a layer scores for a row which sees `context` tokens.
double IndexEntries(const ModelConfig& config, int64_t layer, double context) {
  const double visible = context / static_cast<double>(config.ratio(layer));
  const int64_t source = config.candidate_source_layer_id;
  if (source < 0 || layer <= source) return visible;
  return std::min(visible,
                  static_cast<double>(config.candidate_topk_blocks * config.candidate_block_size));
}

}  // namespace

double Cost::Seconds(const Ceilings& ceilings) const {
  return std::max(bytes / ceilings.bytes_per_s, flops / ceilings.flops_per_s);
}

SpeedOfLight DecodeSpeedOfLight(const ModelConfig& config, int64_t batch, int64_t context,
                                int64_t ranks, const Ceilings& ceilings) {
  const Sizes s(config);
  const auto rows = static_cast<double>(batch);
  const auto layers = static_cast<double>(config.num_hidden_layers);
  const auto all = static_cast<double>(config.n_routed_experts);
  const double touched = all / static_cast<double>(ranks) *
                         (1 - std::pow(1 - s.k / all, rows * static_cast<double>(ranks)));
  const Cost experts{.bytes = layers * touched * s.expert * kFp4Bytes,
                     .flops = rows * layers * s.k * 2 * s.expert};

  double parameters = layers * (s.attention() + s.expert + s.router + s.mhc) + s.head;
  Cost dense{.bytes = layers * ((s.attention() + s.expert) * kFp8Bytes + s.router * kBf16Bytes +
                                s.mhc * 4) +
                      s.head * kBf16Bytes,
             .flops = 0};
  Cost attention, indexer;
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    if (config.engram_index(layer) >= 0) {
      parameters += s.engram;
      dense.bytes += s.engram * kFp8Bytes;
    }
    if (config.is_kv_source(layer)) {
      parameters += CompressorParameters(config, s, layer);
      dense.bytes += CompressorParameters(config, s, layer) * kBf16Bytes;
    }
    if (config.is_index_source(layer)) {
      const double weights = static_cast<double>(config.index_n_heads) * s.hidden;
      parameters += s.index_wide * s.low + weights;
      dense.bytes += s.index_wide * s.low * kFp8Bytes + weights * kBf16Bytes;
      const double entries = rows * IndexEntries(config, layer, static_cast<double>(context));
      indexer.bytes += entries * s.index_key_bytes;
      indexer.flops += entries * 2 * s.index_wide;
    }
    attention.bytes += rows * (s.window_bytes + (config.ratio(layer) > 0 ? s.selected_bytes : 0));
    attention.flops += rows * s.attention_flops(AttentionKeys(config, layer));
  }
  dense.flops = rows * 2 * parameters;
  return {.experts = experts.Seconds(ceilings),
          .dense = dense.Seconds(ceilings),
          .attention = attention.Seconds(ceilings),
          .indexer = indexer.Seconds(ceilings),
          .hyper_connections = rows * layers * s.mhc_bytes() / ceilings.bytes_per_s};
}

SpeedOfLight PrefillSpeedOfLight(const ModelConfig& config, int64_t before, int64_t tokens,
                                 const Ceilings& ceilings) {
  const Sizes s(config);
  const auto rows = static_cast<double>(tokens);
  const double context = static_cast<double>(before) + rows / 2;  // seen by a row, on average
  const int64_t end = config.decoder_start();
  const auto layers = static_cast<double>(end);
  double parameters = layers * (s.attention() + s.expert + s.router + s.mhc);
  double attention = 0;
  double indexer = 0;
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    if (layer <= end && config.is_kv_source(layer))
      parameters += CompressorParameters(config, s, layer);
    if (layer >= end) continue;
    if (config.engram_index(layer) >= 0) parameters += s.engram;
    if (config.is_index_source(layer)) {
      parameters += s.index_wide * s.low;
      indexer += IndexEntries(config, layer, context) * 2 * s.index_wide;
    }
    attention += s.attention_flops(AttentionKeys(config, layer));
  }
  const double per_flop = rows / ceilings.flops_per_s;
  return {.experts = layers * s.k * 2 * s.expert * per_flop,
          .dense = 2 * parameters * per_flop,
          .attention = attention * per_flop,
          .indexer = indexer * per_flop,
          .hyper_connections = rows * layers * s.mhc_bytes() / ceilings.bytes_per_s};
}

std::array<Cost, kNumStepParts> StepCosts(const ModelConfig& config, const StepWork& work) {
  const Sizes s(config);
  std::array<Cost, kNumStepParts> costs{};
  const auto add = [&](StepPart part, double bytes, double flops) {
    costs[static_cast<size_t>(part)].bytes += bytes;
    costs[static_cast<size_t>(part)].flops += flops;
  };
  // A linear of so many parameters: its weights, its inputs and its outputs.
  const auto add_linear = [&](StepPart part, double rows, double parameters, double bytes,
                              double columns) {
    add(part, parameters * bytes + rows * columns * 2, rows * 2 * parameters);
  };
  const auto sequences = static_cast<double>(work.sequences);
  const double all_rows = sequences * static_cast<double>(work.rows);
  const double kept_rows = sequences * static_cast<double>(work.decoder_rows);
  const int64_t decoder = config.decoder_start();
  add(StepPart::kInputs, all_rows * static_cast<double>(1 + kHcStreams) * s.hidden * 2, 0);
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const double rows = layer < decoder ? all_rows : kept_rows;
    const double before =
        static_cast<double>(work.before + (layer < decoder ? 0 : work.rows - work.decoder_rows));
    const double rows_each = rows / sequences;
    if (config.engram_index(layer) >= 0) {
      add_linear(StepPart::kEngram, rows, s.engram, kFp8Bytes, 0);
      add(StepPart::kEngram,
          rows * (s.engram_width * (1 + 1.0 / 32) +
                  2 * static_cast<double>(kHcStreams) * s.hidden * 2),
          0);
    }
    add(StepPart::kHyperConnection, rows * s.mhc_bytes() + s.mhc * 4, rows * 2 * s.mhc);
    if (config.is_kv_source(layer)) {
      // Every row leaves its keys, also one that goes no further.
      add_linear(StepPart::kCompressor, all_rows, CompressorParameters(config, s, layer),
                 kBf16Bytes, s.hidden);
    }
    add_linear(StepPart::kDownProjections, rows, (s.low + s.dim) * s.hidden, kFp8Bytes,
               s.hidden + s.low + s.dim);
    add(StepPart::kLatentInputs,
        rows * (2 * s.low * 2 + s.dim * 2 + static_cast<double>(Q8RecordBytes(config.head_dim))),
        0);
    add_linear(StepPart::kUpProjections, rows, s.wide * s.low, kFp8Bytes, s.low + s.wide);
    if (config.is_index_source(layer)) {
      add_linear(StepPart::kDownProjections, rows,
                 static_cast<double>(config.index_n_heads) * s.hidden, kBf16Bytes,
                 static_cast<double>(config.index_n_heads));
      add_linear(StepPart::kUpProjections, rows, s.index_wide * s.low, kFp8Bytes, s.index_wide);
      // Rows of one sequence read its keys once.
      const double last = IndexEntries(config, layer, before + rows_each);
      const double mean = IndexEntries(config, layer, before + (rows_each + 1) / 2);
      add(StepPart::kIndexer,
          sequences * last * s.index_key_bytes +
              rows * (s.index_wide * 2 + 4 * static_cast<double>(config.index_topk)),
          rows * mean * 2 * s.index_wide);
    }
    // Rows of one sequence share their window keys.
    const double window = static_cast<double>(config.sliding_window);
    const double window_rows = window + rows_each - 1;
    add(StepPart::kAttention,
        sequences * s.window_bytes * window_rows / window + rows * s.wide * 2 * 2,
        rows * s.attention_flops(AttentionKeys(config, layer)));
    if (config.ratio(layer) > 0) add(StepPart::kAttention, rows * s.selected_bytes, 0);
    add_linear(StepPart::kOutputProjections, rows, s.wo_a + s.hidden * s.o_rank, kFp8Bytes,
               s.wide + 2 * s.o_rank + s.hidden);
    add_linear(StepPart::kRouter, rows, s.router, kBf16Bytes, s.hidden);
    const auto grouped = static_cast<double>(work.expert_rows[static_cast<size_t>(layer)]);
    const auto touched = static_cast<double>(work.touched_experts[static_cast<size_t>(layer)]);
    add(StepPart::kExperts, touched * s.expert * kFp4Bytes + grouped * s.hidden * 2 * 2,
        grouped * 2 * s.expert);
    add_linear(StepPart::kSharedExpert, rows, s.expert, kFp8Bytes, 2 * s.hidden);
    add(StepPart::kCombine, rows * (s.k + 2) * s.hidden * 2, 0);
  }
  add(StepPart::kHead, s.head * kBf16Bytes + sequences * static_cast<double>(config.vocab_size) * 4,
      sequences * 2 * s.head);
  return costs;
}

}  // namespace deepinfer
