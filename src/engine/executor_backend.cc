#include "engine/executor_backend.h"

#include <utility>

#include "base/check.h"

namespace deepinfer {

Result<ModelBackend::SequenceId> ExecutorBackend::Open() {
  DI_ASSIGN_OR_RETURN(Sequence sequence, Sequence::Create(executor_.pool()));
  const SequenceId id = next_++;
  sequences_.emplace(id, std::move(sequence));
  return id;
}

void ExecutorBackend::Close(SequenceId sequence) {
  DI_CHECK_EQ(sequences_.erase(sequence), size_t{1});
}

Status ExecutorBackend::Reserve(SequenceId sequence, int64_t tokens) {
  return sequences_.at(sequence).Reserve(tokens);
}

Result<std::span<const float>> ExecutorBackend::Step(std::span<const Chunk> chunks) {
  chunks_.clear();
  int64_t rows = 0;
  for (const Chunk& chunk : chunks) {
    chunks_.push_back({&sequences_.at(chunk.sequence), chunk.token_ids, chunk.num_logit_rows});
    rows += chunk.num_logit_rows;
  }
  DI_ASSIGN_OR_RETURN(const TensorView logits, executor_.Step(chunks_));
  if (rows == 0) return std::span<const float>();
  DI_CHECK_EQ(logits.rows(), rows);
  DI_CHECK_EQ(logits.row_size(), vocab_size());
  DI_CHECK(logits.contiguous() && logits.dtype() == DType::kF32);
  return std::span<const float>(static_cast<const float*>(logits.data()),
                                static_cast<size_t>(logits.num_elements()));
}

}  // namespace deepinfer
