// Implementations behind ops/sparse_attention/sparse_attention.h.
#pragma once

#include <vector>

#include "ops/sparse_attention/sparse_attention.h"

namespace deepinfer::cuda {

Status SparseAttention(const SparseAttentionArgs& args, Stream& stream);

// Choices of the kernels for Hopper; they change no bit. Benchmarks and tests compare them.
struct SparseAttentionChoices {
  // Rows (times 64 heads) up to which a cluster of blocks takes a row: as many as run at once.
  int few_rows = 15;
  // Whether these blocks push probabilities to each other, or exchange them through the
  // second-level cache.
  bool push_probabilities = false;
};
inline SparseAttentionChoices sparse_attention_choices;

}  // namespace deepinfer::cuda

namespace deepinfer {

// Keys per block of the running softmax.
inline constexpr int64_t kAttentionBlock = 64;

// The records of a row's key list, window first, then selection; `num_window` of them are window
// keys (Q8 unless bf16), the rest compressed keys (Q4E unless bf16).
struct KeyList {
  std::vector<const uint8_t*> records;
  int64_t num_window = 0;
  bool window_bf16 = false;
  bool compressed_bf16 = false;
};
void CollectKeys(const SparseAttentionArgs& args, int64_t row, KeyList* keys);

namespace reference {
void SparseAttention(const SparseAttentionArgs& args, int64_t row_begin, int64_t row_end);
}  // namespace reference

// Vector code. Needs head_dim a multiple of 32, whole vectors of rotated channels and a level of at
// least AVX2.
namespace cpu {

inline constexpr int64_t kMaxAttentionHeads = 256;

// Memory that one worker needs to attend with `heads` heads.
struct AttentionScratch {
  float* keys;     // [kAttentionBlock, stride] decoded key block
  float* q;        // [heads, stride]
  float* out;      // [heads, stride] numerators
  float* p;        // [heads, kAttentionBlock] scores, then bf16-rounded probabilities
  float* rescale;  // [heads]
};
// Elements between decoded vectors. One cache line more than the vector, so that the same channels
// of 64 keys do not compete for two of the first-level cache's sets.
inline constexpr int64_t AttentionStride(int64_t head_dim) {
  return head_dim + 16;
}

// Decodes keys [begin, end) of a list to out[begin ...], `stride` elements apart.
void DecodeKeys(CpuLevel level, const KeyList& keys, int64_t begin, int64_t end, int64_t head_dim,
                float* out);

// Attends with heads [head_begin, head_end) of one row. `decoded` holds all keys of the list, or is
// null: then each block is decoded here. Both give the same bits.
void SparseAttention(CpuLevel level, const SparseAttentionArgs& args, int64_t row,
                     const KeyList& keys, const float* decoded, int64_t head_begin,
                     int64_t head_end, const AttentionScratch& scratch);

}  // namespace cpu
}  // namespace deepinfer
