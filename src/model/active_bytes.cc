#include "model/active_bytes.h"

#include <iterator>

namespace deepinfer {
namespace {

int64_t Bf16Bytes(int64_t n, int64_t k) {
  return n * k * 2;
}

int64_t Fp8Bytes(int64_t n, int64_t k) {
  return n * k + (n + 31) / 32 * (k / 32);
}

int64_t Fp4Bytes(int64_t n, int64_t k) {
  return n * k / 2 + n * (k / 32);
}

// What every layer has, whatever its role; draft stages count as layers behind the backbone.
void AddLayer(const ModelConfig& config, int64_t layer, int64_t experts, ActiveBytes* bytes) {
  const int64_t hidden = config.hidden_size;
  const int64_t heads_width = config.num_attention_heads * config.head_dim;
  const int64_t intermediate = config.moe_intermediate_size;
  bytes->attention +=
      Fp8Bytes(config.q_lora_rank, hidden) + Fp8Bytes(heads_width, config.q_lora_rank) +
      Fp8Bytes(config.head_dim, hidden) +
      Fp8Bytes(config.o_groups * config.o_lora_rank, heads_width / config.o_groups) +
      Fp8Bytes(hidden, config.o_groups * config.o_lora_rank);
  bytes->routed_experts +=
      experts * (2 * Fp4Bytes(intermediate, hidden) + Fp4Bytes(hidden, intermediate));
  bytes->shared_experts += 2 * Fp8Bytes(intermediate, hidden) + Fp8Bytes(hidden, intermediate);
  bytes->router_and_mhc +=
      Bf16Bytes(config.num_experts(layer), hidden) + 2 * 24 * config.hc_mult * hidden * 4;
}

}  // namespace

ActiveBytes ActiveBytesPerStep(const ModelConfig& config, int64_t experts_per_layer,
                               bool drafting) {
  const int64_t hidden = config.hidden_size;
  ActiveBytes bytes;
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    AddLayer(config, layer, experts_per_layer, &bytes);
    if (config.is_kv_source(layer)) {
      bytes.attention += (config.ratio(layer) == 2 ? 2 : 1) * Bf16Bytes(config.head_dim, hidden) +
                         Bf16Bytes(config.index_head_dim, config.head_dim);
    }
    if (config.is_index_source(layer)) {
      bytes.attention +=
          Fp8Bytes(config.index_n_heads * config.index_head_dim, config.q_lora_rank) +
          Bf16Bytes(config.index_n_heads, hidden);
    }
    if (config.engram_index(layer) >= 0) {
      bytes.engram += Fp8Bytes((config.hc_mult + 1) * hidden,
                               config.engram_rows_per_token() * config.engram_head_dim);
    }
  }
  bytes.head = Bf16Bytes(config.vocab_size, hidden);
  if (drafting) {
    const int64_t targets = std::ssize(config.dspark_target_layer_ids);
    bytes.draft_context = Fp8Bytes(hidden, targets * hidden) +
                          config.num_nextn_predict_layers * Fp8Bytes(config.head_dim, hidden);
  }
  return bytes;
}

ActiveBytes ActiveBytesPerDraft(const ModelConfig& config, int64_t experts_per_layer,
                                int64_t block) {
  ActiveBytes bytes;
  for (int64_t stage = 0; stage < config.num_nextn_predict_layers; ++stage)
    AddLayer(config, config.num_hidden_layers + stage, experts_per_layer, &bytes);
  // The Markov head is read for every token of the chain.
  bytes.head = Bf16Bytes(config.vocab_size, config.hidden_size) +
               block * Bf16Bytes(config.vocab_size, config.dspark_markov_rank);
  return bytes;
}

}  // namespace deepinfer
