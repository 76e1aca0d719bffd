// Every tensor of the text model in the form the operations take. Loaded once, immutable
// afterwards. The draft layers (mtp.*) are loaded where drafting is asked for; the vision tower is
// checked with the inventory but not loaded here.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/error.h"
#include "model/config.h"
#include "model/engram_constants.h"
#include "ops/linear/linear.h"
#include "tensor/buffer.h"
#include "tensor/stream.h"
#include "weights/checkpoint.h"

namespace deepinfer {

// Three linears of one expert kind, as columns over experts so that GroupedLinear can take them as
// they are.
struct ExpertWeights {
  std::vector<LinearWeight> w1, w2, w3;                     // gate, down, up
  std::vector<const LinearWeight*> w1_ptr, w2_ptr, w3_ptr;  // pointers into the above
};

struct HcWeights {
  TensorView fn;     // [24, 4 * hidden] f32
  TensorView base;   // [24] f32
  TensorView scale;  // [3] f32
};

struct EngramWeights {
  TensorView table;     // [table rows, channels] E4M3; see TableMemory
  TensorView scale;     // [table rows, channels / 32] E8M0
  LinearWeight wkv;     // [5 * hidden, lookups * channels]
  TensorView q_weight;  // [4, hidden] bf16
  TensorView k_weight;  // [4, hidden] bf16
};

struct CompressorWeights {
  LinearWeight wkv;         // [head_dim, hidden] bf16
  LinearWeight wgate;       // ratio 2 only
  TensorView norm;          // [head_dim] bf16
  LinearWeight index_wk;    // [index_head_dim, head_dim] bf16
  TensorView index_k_norm;  // [index_head_dim] bf16
};

struct IndexerWeights {
  LinearWeight wq_b;          // [index heads * index_head_dim, q_lora_rank]
  LinearWeight weights_proj;  // [index heads, hidden] bf16
};

struct LayerWeights {
  TensorView attn_norm, ffn_norm;  // [hidden] bf16
  LinearWeight wq_a;               // [q_lora_rank, hidden]
  TensorView q_norm;               // [q_lora_rank] bf16
  LinearWeight wq_b;               // [heads * head_dim, q_lora_rank]
  LinearWeight wkv;                // [head_dim, hidden]
  TensorView kv_norm;              // [head_dim] bf16
  std::vector<LinearWeight> wo_a;  // per group: [o_lora_rank, heads / groups * head_dim]
  LinearWeight wo_b;               // [hidden, groups * o_lora_rank]
  TensorView attn_sink;            // [heads] f32
  HcWeights hc_attn, hc_ffn;
  LinearWeight gate;     // [experts, hidden] bf16
  TensorView gate_bias;  // [experts] f32
  LinearWeight shared_w1, shared_w2, shared_w3;
  ExpertWeights experts;
  std::unique_ptr<CompressorWeights> compressor;  // KV source layers
  std::unique_ptr<IndexerWeights> indexer;        // index source layers
  std::unique_ptr<EngramWeights> engram;          // Engram layers
};

// What the draft layers have beside three ordinary layers (model description, section 13). They
// share the embedding and the head of the model.
struct DraftWeights {
  LinearWeight main_proj;    // [hidden, target layers * hidden]
  TensorView main_norm;      // [hidden] bf16
  TensorView norm;           // [hidden] bf16
  TensorView markov_embed;   // [vocab, rank] bf16, left in the mapped file on a CPU
  LinearWeight markov_head;  // [vocab, rank] bf16
  TensorView confidence;     // [1, hidden + rank] bf16
};

struct ModelWeights {
  TensorView embed;                     // [vocab, hidden] bf16, left in the mapped file on a CPU
  TensorView norm;                      // [hidden] bf16
  LinearWeight head;                    // [vocab, hidden] bf16
  std::vector<LayerWeights> layers;     // and behind them the draft stages, if those are loaded
  std::unique_ptr<DraftWeights> draft;  // null: the model does not draft
  TensorView window_frequencies;        // [pairs] f32, layers of ratio 0
  TensorView compressed_frequencies;    // [pairs] f32, layers of ratio > 0
  EngramConstants engram_constants;
  int64_t packed_bytes = 0;  // of the device's memory taken by repacked and copied tensors
  int64_t host_bytes = 0;    // page-locked tables for a GPU

  std::vector<Buffer> buffers;                   // own the small tensors above
  std::shared_ptr<const Checkpoint> checkpoint;  // keeps the mapped tensors alive
};

// Where the Engram tables of a GPU are. (A CPU leaves them in the mapped files.)
enum class TableMemory : uint8_t { kDevice, kPinnedHost };

// `drafting`: also the draft layers. The checkpoint must have passed CheckInventory. Errors:
// kResourceExhausted, kUnsupported.
Result<ModelWeights> LoadModelWeights(std::shared_ptr<const Checkpoint> checkpoint,
                                      const ModelConfig& config, TableMemory engram_memory,
                                      bool drafting, Stream& stream);

}  // namespace deepinfer
