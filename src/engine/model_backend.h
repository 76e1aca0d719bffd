// What the engine needs from a model: sequences with cache memory, and steps over batches of them.
// The executor is the real one (engine/executor_backend.h); tests use a small function of the
// sequence's tokens.
#pragma once

#include <cstdint>
#include <span>

#include "base/error.h"

namespace deepinfer {

class ModelBackend {
 public:
  using SequenceId = int64_t;

  struct Chunk {
    SequenceId sequence = 0;
    std::span<const int32_t>
        token_ids;  // follow what the sequence holds; at least one, each in [0, vocab_size)
    int64_t num_logit_rows = 0;  // the logits of that many last rows are returned
  };

  virtual ~ModelBackend() = default;

  virtual int64_t vocab_size() const = 0;
  virtual int64_t block_tokens() const = 0;  // tokens per cache block
  virtual int64_t num_blocks() const = 0;
  virtual int64_t num_free_blocks() const = 0;
  virtual int64_t num_slots() const = 0;  // sequences that can be open at once
  virtual int64_t num_free_slots() const = 0;

  // An empty sequence. Errors: kResourceExhausted without a free slot.
  virtual Result<SequenceId> Open() = 0;
  virtual void Close(SequenceId sequence) = 0;
  // Takes blocks for `tokens` more than the sequence holds, unless it has them already. Errors:
  // kResourceExhausted, with nothing changed.
  virtual Status Reserve(SequenceId sequence, int64_t tokens) = 0;

  // Runs all chunks as one batch: [sum of num_logit_rows, vocab_size], chunk by chunk, valid until
  // the next call. The bits of a row depend on its own sequence only. On error no sequence has
  // changed.
  virtual Result<std::span<const float>> Step(std::span<const Chunk> chunks) = 0;
};

}  // namespace deepinfer
