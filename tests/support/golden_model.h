// Reading the recorded answers of the reference implementation (tests/data/model/README.md) and
// judging logits against them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/mapped_file.h"
#include "tensor/tensor_view.h"
#include "weights/safetensors.h"

namespace deepinfer::testing_support {

struct RecordedSequence {
  std::string id;
  std::vector<int32_t> token_ids;
  std::vector<int64_t> chunks;
};

// Figures over all recorded rows, as in floor.json.
struct Divergence {
  int64_t rows = 0;
  double kl_med = 0;
  double kl_mean = 0;
  double kl_p90 = 0;
  double beyond_1e3 = 0;   // share of rows with KL > 1e-3
  double argmax_miss = 0;  // share of rows
};

class GoldenModel {
 public:
  // `dir` holds checkpoint/, tokens.jsonl, <profile>.safetensors and floor.json.
  static Result<GoldenModel> Open(const std::string& dir, const std::string& profile);

  const std::vector<RecordedSequence>& sequences() const {
    return sequences_;
  }
  // The recorded tensor, e.g. "p017/lse".
  Result<TensorView> Find(const std::string& name) const;
  // Floor figures of floor.json: `run` is "exact" or "noise1" ... "noise3".
  const Divergence& floor(const std::string& run) const;

  // KL(recorded || ours) of row `row` of the recorded rows of sequence `id`, and whether the
  // arg-max differs. `logits` has vocab entries.
  double RowDivergence(const std::string& id, int64_t row, const float* logits, int64_t vocab,
                       bool* argmax_miss) const;

 private:
  std::vector<RecordedSequence> sequences_;
  std::vector<MappedFile> file_;
  SafetensorsHeader header_;
  std::vector<std::pair<std::string, Divergence>> floors_;
};

Divergence Summarise(std::vector<double> kl, int64_t argmax_misses);

}  // namespace deepinfer::testing_support
