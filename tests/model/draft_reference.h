// The draft layers in plain loops on one sequence, from the tensors as the checkpoint stores them
// (model description, section 13, production profile): an independent statement of what the model
// computes, slow, in double precision where the order of additions is free. It keeps the keys of
// every position, of which a block sees the last `window`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/config.h"
#include "weights/checkpoint.h"

namespace deepinfer::testing_support {

class DraftReference {
 public:
  DraftReference(const std::string& checkpoint_dir, const ModelConfig& config);

  // The next position: the four residual streams at the entry of every target layer.
  void AddPosition(const std::vector<std::vector<float>>& streams);

  struct Block {
    std::vector<std::vector<float>> logits;  // per slot, what its token is chosen from
    std::vector<int32_t> tokens;
    std::vector<float> scores;
  };
  // A block behind the first `length` positions; tokens are the first of the largest logits.
  Block Draft(int64_t length, int32_t anchor, int64_t slots) const;

 private:
  using Vector = std::vector<float>;

  TensorView Tensor(const std::string& name) const;
  // Rows [begin, begin + count) of a linear, rounded to bf16 unless `round` is false.
  Vector Linear(const std::string& name, const Vector& x, int64_t begin = 0, int64_t count = -1,
                bool round = true) const;
  Vector Norm(const std::string& name, const Vector& x) const;
  // Rotates the last channels, forwards or back.
  void Rotate(Vector* x, int64_t position, bool back, bool round) const;
  Vector Key(const std::string& prefix, const Vector& x, int64_t position) const;
  Vector Attention(const std::string& prefix, const Vector& x, int64_t position,
                   const std::vector<const Vector*>& keys) const;
  Vector MixtureOfExperts(const std::string& prefix, const Vector& x) const;
  Vector Expert(const std::string& prefix, const Vector& x, float weight) const;

  ModelConfig config_;
  Checkpoint checkpoint_;
  std::vector<std::vector<Vector>> keys_;  // [stage][position]
};

}  // namespace deepinfer::testing_support
