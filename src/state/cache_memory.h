// The bytes of the state pools on the device: cache blocks (compressed keys and index keys), window
// pages (window keys of all layers) and slots (what a compressor carries over). Executes state
// commands. Which id belongs to whom is decided by SequenceState and PrefixCache.
// Contract page: docs/state.md.
#pragma once

#include <cstdint>
#include <vector>

#include "base/error.h"
#include "state/sequence_state.h"
#include "state/state_command.h"
#include "tensor/buffer.h"
#include "tensor/stream.h"

namespace deepinfer {

// Sizes of the records, all derived from the model configuration by the runtime.
struct CacheGeometry {
  struct Producer {  // one per KV source layer, in layer order
    int64_t ratio = 1;
    int64_t kv_record_bytes = 0;
    int64_t index_record_bytes = 0;
    // fp32 values held per token for an incomplete group (key and gate: 2 * head_dim); 0 for
    // ratio 1.
    int64_t remainder_floats = 0;
  };
  std::vector<Producer> producers;
  int64_t num_layers = 0;
  int64_t window_record_bytes = 0;
  // Latest tokens whose compressor projections a slot keeps; row = position mod remainder_rows.
  int64_t remainder_rows = 1;

  int64_t BytesPerBlock() const;
  int64_t BytesPerWindowPage() const;
  int64_t BytesPerSlot() const;
};

class CacheMemory {
 public:
  // Memory is reserved at once and committed when first touched. With `padding_unit` there is one
  // unit more of each kind than the counts say, for rows of a step that belong to nobody: its
  // number is the count.
  static Result<CacheMemory> Create(const CacheGeometry& geometry, Device device,
                                    int64_t num_blocks, int64_t num_window_pages, int64_t num_slots,
                                    bool padding_unit = false);

  const CacheGeometry& geometry() const {
    return geometry_;
  }
  int64_t num_blocks() const {
    return num_blocks_;
  }
  int64_t num_window_pages() const {
    return num_window_pages_;
  }
  int64_t num_slots() const {
    return num_slots_;
  }

  // [blocks, entries per block, record bytes] U8, one per producer.
  TensorView KvBlocks(int64_t producer) const;
  TensorView IndexBlocks(int64_t producer) const;
  // [pages, kBlockTokens, record bytes] U8.
  TensorView WindowPages(int64_t layer) const;
  // [slots, remainder rows, 2 * head_dim] F32, or empty for ratio 1.
  TensorView Remainders(int64_t producer) const;

  // Carries out the commands in order, or none of them: kInvalidArgument for ids out of range,
  // kDataLoss for an image of another geometry or of the wrong size.
  Status Execute(const std::vector<StateCommand>& commands, Stream& stream);

 private:
  CacheMemory() = default;
  Status CheckCommands(const std::vector<StateCommand>& commands) const;
  Status Export(const StateCommand& command, Stream& stream) const;
  Status Import(const StateCommand& command, Stream& stream) const;
  // Calls visit(view) for every piece of a sequence in the order of its image: entries below
  // num_tokens, remainder rows and window records from where the image says on. The view has no
  // memory where the command has no page.
  template <class Visit>
  Status VisitSequence(const StateCommand& command, const Visit& visit) const;
  int64_t ImageBytes(const StateImage& image) const;

  CacheGeometry geometry_;
  int64_t num_blocks_ = 0;
  int64_t num_window_pages_ = 0;
  int64_t num_slots_ = 0;
  int64_t padding_units_ = 0;
  std::vector<Buffer> kv_;
  std::vector<Buffer> index_;
  std::vector<Buffer> window_;
  std::vector<Buffer> remainders_;
};

}  // namespace deepinfer
