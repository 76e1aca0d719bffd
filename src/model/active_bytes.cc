#include "model/active_bytes.h"

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

}  // namespace

ActiveBytes ActiveBytesPerStep(const ModelConfig& config, int64_t experts_per_layer) {
  const int64_t hidden = config.hidden_size;
  const int64_t heads_width = config.num_attention_heads * config.head_dim;
  const int64_t intermediate = config.moe_intermediate_size;
  ActiveBytes bytes;
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    bytes.attention +=
        Fp8Bytes(config.q_lora_rank, hidden) + Fp8Bytes(heads_width, config.q_lora_rank) +
        Fp8Bytes(config.head_dim, hidden) +
        Fp8Bytes(config.o_groups * config.o_lora_rank, heads_width / config.o_groups) +
        Fp8Bytes(hidden, config.o_groups * config.o_lora_rank);
    if (config.is_kv_source(layer)) {
      bytes.attention += (config.ratio(layer) == 2 ? 2 : 1) * Bf16Bytes(config.head_dim, hidden) +
                         Bf16Bytes(config.index_head_dim, config.head_dim);
    }
    if (config.is_index_source(layer)) {
      bytes.attention +=
          Fp8Bytes(config.index_n_heads * config.index_head_dim, config.q_lora_rank) +
          Bf16Bytes(config.index_n_heads, hidden);
    }
    bytes.routed_experts +=
        experts_per_layer * (2 * Fp4Bytes(intermediate, hidden) + Fp4Bytes(hidden, intermediate));
    bytes.shared_experts += 2 * Fp8Bytes(intermediate, hidden) + Fp8Bytes(hidden, intermediate);
    bytes.router_and_mhc +=
        Bf16Bytes(config.n_routed_experts, hidden) + 2 * 24 * config.hc_mult * hidden * 4;
    if (config.engram_index(layer) >= 0) {
      bytes.engram += Fp8Bytes((config.hc_mult + 1) * hidden,
                               config.engram_rows_per_token() * config.engram_head_dim);
    }
  }
  bytes.head = Bf16Bytes(config.vocab_size, hidden);
  return bytes;
}

}  // namespace deepinfer
