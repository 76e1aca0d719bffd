// A plain sequence on an executor: its state, its tokens, and steps over one or several of them.
// For programs that run sequences themselves; the engine plans its steps on its own.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/error.h"
#include "model/layer_trace.h"
#include "runtime/executor.h"
#include "state/sequence_state.h"
#include "state/step_plan.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

// Pools as large as the executor's memory. They must outlive the sessions that use them.
StatePools MakeStatePools(Executor& executor);

class Session {
 public:
  // An empty sequence. Errors: kResourceExhausted (slots).
  static Result<Session> Create(Executor& executor, StatePools& pools);
  // A sequence that begins with `tokens`, of which `prefix` shares the state. Errors: as above.
  static Result<Session> Continue(Executor& executor, StatePools& pools, const SharedPrefix& prefix,
                                  std::span<const int32_t> tokens);
  // A sequence of these tokens from a saved state. Errors: kResourceExhausted.
  static Result<Session> Restore(Executor& executor, StatePools& pools,
                                 std::shared_ptr<StateImage> image,
                                 std::span<const int32_t> tokens);

  // Rows before this position need no decoder half (bounded replay).
  void set_decoder_begin(int64_t position) {
    decoder_begin_ = position;
  }
  const SequenceState& state() const {
    return state_;
  }
  const std::vector<int32_t>& tokens() const {
    return tokens_;
  }

  struct Part {
    Session* session = nullptr;
    std::span<const int32_t> ids;  // follow what the sequence holds
    int64_t num_logit_rows = 1;
  };
  // Runs the parts as one step; result as of Executor::Step. Errors: those, and kResourceExhausted
  // (blocks, pages); then no sequence has become longer.
  static Result<TensorView> Step(std::span<const Part> parts, LayerTrace* trace = nullptr);
  // A step of this sequence alone.
  Result<TensorView> Append(std::span<const int32_t> ids, int64_t num_logit_rows,
                            LayerTrace* trace = nullptr);

  // Drafts a block behind the sequence, of which `anchor` is the next token. Result as of
  // Executor::Draft; several sequences at once by their chunks.
  Result<Drafts> Draft(int32_t anchor, bool want_logits = false) const;
  DraftChunk ChunkForDraft(int32_t anchor) const;

  // Forgets all but the first tokens. False, with nothing changed, where SequenceState cannot.
  bool Truncate(int64_t tokens);
  // The state as bytes.
  Result<std::shared_ptr<StateImage>> Save();

 private:
  Session(Executor& executor, SequenceState state, std::span<const int32_t> tokens)
      : executor_(&executor), state_(std::move(state)), tokens_(tokens.begin(), tokens.end()) {}

  // Makes room for the part and adds its chunk to the plan.
  Status Plan(const Part& part, StepPlan* plan);

  Executor* executor_;
  SequenceState state_;
  std::vector<int32_t> tokens_;
  int64_t decoder_begin_ = 0;
};

}  // namespace deepinfer
