// Implementations behind ops/sparse_attention/sparse_attention.h.
#pragma once

#include <vector>

#include "ops/sparse_attention/sparse_attention.h"

namespace deepinfer {

// Keys per block of the running softmax.
inline constexpr int64_t kAttentionBlock = 64;

// The records of a row's key list, window first, then selection; `num_window` of them are Q8 records, the rest Q4E records.
struct KeyList {
  std::vector<const uint8_t*> records;
  int64_t num_window = 0;
};
void CollectKeys(const SparseAttentionArgs& args, int64_t row, KeyList* keys);

namespace reference {
void SparseAttention(const SparseAttentionArgs& args, int64_t row_begin, int64_t row_end);
}  // namespace reference

}  // namespace deepinfer
