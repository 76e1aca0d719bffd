// What a measurement of a step may watch and replace: it is told which part of the layer graph runs
// next, and gives a rank of an expert-parallel deployment the expert rows that the other ranks send
// and the expert outputs that they return, so that one rank can run alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/error.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

// Parts of a step in the order in which a layer runs them.
enum class StepPart : uint8_t {
  kInputs,           // rotations and embedding
  kEngram,           // look-ups, their projection, and adding them
  kHyperConnection,  // everything between two sub-layers
  kCompressor,       // compressed keys and index keys of the step's rows
  kDownProjections,  // wq_a, wkv, and the indexer's weights
  kLatentInputs,
  kUpProjections,  // wq_b, of the indexer too
  kIndexer,
  kAttention,
  kOutputProjections,  // wo_a, wo_b
  kRouter,
  kExperts,
  kSharedExpert,
  kCombine,
  kDraftContext,  // what the draft layers keep of a step's rows, where the model drafts
  kHead,
};
inline constexpr size_t kNumStepParts = static_cast<size_t>(StepPart::kHead) + 1;

// The part of a layer's experts that this rank holds, and what runs there.
struct ExpertRows {
  TensorView x;               // [any, hidden] bf16 on the Q8 grid: rows of all ranks
  TensorView row_index;       // [grouped rows] i32 into x, by local expert
  TensorView grouped_weight;  // [grouped rows] f32
  TensorView group_offsets;   // [local experts + 1] i32
};

class StepProbe {
 public:
  virtual ~StepProbe() = default;
  // Called before the first operation of a part, also when the step comes back to it.
  virtual Status Enter(StepPart part, Stream& stream) = 0;
  // Per layer; empty: all experts are local, as in any other step.
  std::vector<ExpertRows> expert_rows;
  TensorView returned;  // [at least rows * k, hidden] bf16: outputs of all ranks for own rows
};

}  // namespace deepinfer
