// Memory for everything the engine remembers about sequences, and its book-keeping: fixed pools of
// cache blocks (compressed keys and index keys, 128 tokens each) and of sequence slots (window
// rings, compressor remainders). Contract page: docs/state.md.
//
// Invariants: every block id is either on the free list or owned by exactly one sequence; every
// slot likewise. Block contents are meaningful only below the owning sequence's length: stale bytes
// are never read.
#pragma once

#include <cstdint>
#include <vector>

#include "base/error.h"
#include "tensor/buffer.h"

namespace deepinfer {

// Tokens per cache block: 128 entries in ratio-1 caches, 64 in ratio-2 caches. Must be a multiple
// of every ratio.
inline constexpr int64_t kBlockTokens = 128;

// Sizes of the records, all derived from the model configuration by the runtime.
struct CacheGeometry {
  struct Producer {  // one per KV source layer, in layer order
    int64_t ratio = 1;
    int64_t kv_record_bytes = 0;     // packed FP4 codes, then one E4M3 scale per 16 channels
    int64_t index_record_bytes = 0;  // packed FP4 codes, then one E8M0 scale per 32 channels
    int64_t remainder_floats =
        0;  // fp32 values held for an incomplete group (2 * head_dim), 0 for ratio 1
  };
  std::vector<Producer> producers;
  int64_t num_layers = 0;
  int64_t window_record_bytes = 0;  // E4M3 codes, then one E8M0 scale per 32 channels
  int64_t ring_rows = 0;  // rows of a window ring, >= sliding window; row = position mod ring_rows

  int64_t BytesPerBlock() const;
  int64_t BytesPerSlot() const;
};

class CachePool {
 public:
  // Memory is reserved at once and committed when first touched.
  static Result<CachePool> Create(const CacheGeometry& geometry, Device device, int64_t num_blocks,
                                  int64_t num_slots);

  const CacheGeometry& geometry() const {
    return geometry_;
  }
  int64_t num_blocks() const {
    return num_blocks_;
  }
  int64_t num_free_blocks() const {
    return static_cast<int64_t>(free_blocks_.size());
  }
  int64_t num_slots() const {
    return num_slots_;
  }
  int64_t num_free_slots() const {
    return static_cast<int64_t>(free_slots_.size());
  }

  // [blocks, entries per block, record bytes] U8, one per producer.
  TensorView KvBlocks(int64_t producer) const;
  TensorView IndexBlocks(int64_t producer) const;
  // [slots, ring rows, record bytes] U8.
  TensorView WindowRings(int64_t layer) const;
  // [slots, 2 * head_dim] F32, or empty for ratio 1.
  TensorView Remainders(int64_t producer) const;

 private:
  friend class Sequence;
  CacheGeometry geometry_;
  int64_t num_blocks_ = 0;
  int64_t num_slots_ = 0;
  Device device_;
  std::vector<Buffer> kv_;
  std::vector<Buffer> index_;
  std::vector<Buffer> rings_;
  std::vector<Buffer> remainders_;
  std::vector<int32_t> free_blocks_;
  std::vector<int32_t> free_slots_;
};

// One sequence's share of a pool. Move-only; returns everything when destroyed. The pool must
// outlive it.
class Sequence {
 public:
  // Takes a slot. Errors: kResourceExhausted.
  static Result<Sequence> Create(CachePool& pool);
  Sequence(Sequence&& other) noexcept;
  Sequence& operator=(Sequence&& other) noexcept;
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;
  ~Sequence();

  int64_t num_tokens() const {
    return static_cast<int64_t>(token_ids_.size());
  }
  // Every token processed so far; the n-gram tables look back through these.
  const std::vector<int32_t>& token_ids() const {
    return token_ids_;
  }
  int32_t slot() const {
    return slot_;
  }
  const std::vector<int32_t>& blocks() const {
    return blocks_;
  }

  // Blocks that Reserve would have to take for `tokens` more tokens.
  int64_t BlocksNeeded(int64_t tokens) const;
  // Makes room for `tokens` more. Errors: kResourceExhausted, with nothing changed.
  Status Reserve(int64_t tokens);
  // Records that `ids` have been processed; room must have been reserved.
  void Append(const int32_t* ids, int64_t count);

 private:
  Sequence() = default;
  void Release();
  CachePool* pool_ = nullptr;
  int32_t slot_ = -1;
  std::vector<int32_t> blocks_;
  std::vector<int32_t> token_ids_;
};

}  // namespace deepinfer
