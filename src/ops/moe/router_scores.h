// The router's product on a GPU for up to kMaxScoreRows rows: a matrix of 384 outputs has too few
// tiles to keep a GPU busy, so segments of K go to blocks of their own and what reads the logits
// adds the segments. The bits are those of Linear() with a y in fp32.
#pragma once

#include <cstdint>

#include "base/error.h"
#include "ops/linear/linear.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer::cuda {

inline constexpr int kMaxScoreRows = 512;
inline constexpr int kMaxScoreSegments = 8;  // as SegmentsOf gives

// Sums of the segments of K: a logit is sums[0] + sums[segment_stride] + ..., in this order.
struct RouterScores {
  float* sums = nullptr;  // [segment][row][outputs]
  int segments = 1;
  int64_t row_stride = 0;  // floats
  int64_t segment_stride = 0;
};

// Whether the kernel takes these rows and this weight.
bool TakesRouterScores(const TensorView& x, const LinearWeight& weight, const Stream& stream);
// What LaunchRouterScores will write for so many rows, without memory.
RouterScores RouterScoresOf(int64_t rows, const LinearWeight& weight);
// Fills `scores` and sets *arrivals to zero, which the next kernel counts its blocks with.
Status LaunchRouterScores(const TensorView& x, const LinearWeight& weight,
                          const RouterScores& scores, int* arrivals, Stream& stream);

}  // namespace deepinfer::cuda
