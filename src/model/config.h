// The model description of DeepSeek-V4.1-Flash as an immutable value: everything in config.json
// that the engine uses, under the published key names, and every size derived from it. Read once
// per process from the checkpoint directory. Source: the checkpoint's own config.json; nothing here
// has a hard-coded model size.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace deepinfer {

// What a layer does beyond its sliding window (docs/glossary.md).
enum class LayerRole : uint8_t {
  kWindowOnly,  // compress ratio 0
  kFull,        // owns a compressor, index keys and an indexer
  kReindex,     // runs its own indexer over the keys of an earlier layer
  kReuse,       // takes compressed keys and selection from earlier layers
};

struct VisionConfig {
  int64_t num_hidden_layers = 0;
  int64_t hidden_size = 0;
  int64_t num_attention_heads = 0;
  int64_t intermediate_size = 0;
  int64_t patch_size = 0;
  int64_t downsample_ratio = 0;
  int64_t max_image_tokens = 0;
  int64_t min_pixels = 0;
  double rope_theta = 10000;
  double max_wh_ratio = 0;  // 0: no limit (null in the file)
};

struct ModelConfig {
  // Top level.
  int64_t bos_token_id = 0;
  int64_t eos_token_id = 1;
  int64_t pad_token_id = 2;
  int64_t image_token_id = 0;

  // text_config.
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t moe_intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t head_dim = 0;
  int64_t qk_rope_head_dim = 0;
  int64_t q_lora_rank = 0;
  int64_t o_lora_rank = 0;
  int64_t o_groups = 0;
  float swiglu_limit = 0;
  float rms_norm_eps = 0;
  int64_t max_position_embeddings = 0;
  double rope_theta = 0;
  double compress_rope_theta = 0;
  double rope_factor = 1;  // rope_scaling.factor (YaRN)
  double rope_beta_fast = 32;
  double rope_beta_slow = 1;
  int64_t rope_original_positions = 0;  // rope_scaling.original_max_position_embeddings
  int64_t n_routed_experts = 0;
  int64_t num_experts_per_tok = 0;
  float routed_scaling_factor = 1;
  float gate_temp = 1;
  int64_t sliding_window = 0;
  std::vector<int64_t> compress_ratios;         // layers + draft layers entries
  std::vector<int64_t> kv_source_layer_ids;     // ascending
  std::vector<int64_t> index_source_layer_ids;  // ascending, contains the kv sources
  int64_t index_n_heads = 0;
  int64_t index_head_dim = 0;
  int64_t index_topk = 0;
  int64_t candidate_source_layer_id = -1;
  int64_t candidate_topk_blocks = 0;
  int64_t candidate_block_size = 0;
  int64_t hc_mult = 4;
  int64_t hc_sinkhorn_iters = 20;
  float hc_eps = 1e-6f;
  std::vector<int64_t> engram_layer_ids;
  std::vector<int64_t> engram_num_embeddings;  // rows of each Engram layer's table
  int64_t engram_max_ngram_size = 0;
  int64_t engram_vocab_size = 0;
  int64_t engram_n_heads = 0;
  int64_t engram_head_dim = 0;
  int64_t engram_pad_token_id = 2;
  int64_t engram_compressed_vocab_size = 0;
  int64_t num_nextn_predict_layers = 0;
  int64_t dspark_block_size = 0;
  int64_t dspark_noise_token_id = 0;
  std::vector<int64_t> dspark_target_layer_ids;
  int64_t dspark_markov_rank = 0;
  int64_t dspark_n_routed_experts = 0;
  int64_t dspark_num_experts_per_tok = 0;
  VisionConfig vision;

  // Derived; all take a backbone layer index 0 ... num_hidden_layers-1.
  LayerRole role(int64_t layer) const;
  int64_t ratio(int64_t layer) const {
    return compress_ratios[static_cast<size_t>(layer)];
  }
  // The layer whose compressed keys (index selection) `layer` uses: the largest source id <= layer,
  // -1 if its ratio is 0.
  int64_t kv_source(int64_t layer) const;
  int64_t index_source(int64_t layer) const;
  bool is_kv_source(int64_t layer) const;
  bool is_index_source(int64_t layer) const;
  // Index into engram_layer_ids, or -1.
  int64_t engram_index(int64_t layer) const;
  // First layer of the decoder half (ratio 1); num_hidden_layers when there is none.
  int64_t decoder_start() const;
  // Routed experts of a layer, and how many of them a row uses. Draft stages count as layers behind
  // those of the backbone: num_hidden_layers + stage.
  int64_t num_experts(int64_t layer) const {
    return layer < num_hidden_layers ? n_routed_experts : dspark_n_routed_experts;
  }
  int64_t experts_per_row(int64_t layer) const {
    return layer < num_hidden_layers ? num_experts_per_tok : dspark_num_experts_per_tok;
  }
  // Table rows read per token and Engram layer: (max_ngram - 1) * heads.
  int64_t engram_rows_per_token() const {
    return (engram_max_ngram_size - 1) * engram_n_heads;
  }
};

// Parses and validates the text of config.json. On failure the error lists *all* problems, one per
// line, each with its JSON path, value and what is allowed. A V4 (not V4.1) or foreign checkpoint
// gets a sentence of its own.
Result<ModelConfig> ParseModelConfig(std::string_view json);

// Reads DIR/config.json. `dir` may be what a user typed: a missing directory, a file, or a hub name
// such as "deepseek-ai/DeepSeek-V4.1-Flash" is explained.
Result<ModelConfig> LoadModelConfig(const std::string& dir);

}  // namespace deepinfer
