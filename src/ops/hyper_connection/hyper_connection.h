// Manifold-constrained hyper-connections (mHC): the four residual streams and their mixing (model
// description, section 6). Rows depend on themselves only. The number of streams is fixed at 4, as
// in every checkpoint of this architecture.
#pragma once

#include "base/error.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

inline constexpr int64_t kHcStreams = 4;
inline constexpr int64_t kHcCoefficients = kHcStreams * (2 + kHcStreams);  // pre, post, comb: 24

// With v = the row's streams flattened in fp32 and r = rsqrt(mean(v^2) + norm_eps):
//   m = (fn v) * r
//   pre[i]  = sigmoid(m[i] * scale[0] + base[i]) + eps
//   post[i] = 2 sigmoid(m[4+i] * scale[1] + base[4+i])
//   comb    = Sinkhorn(m[8..23] * scale[2] + base[8..23]): row softmax + eps, then column / row
//   normalisations, ending on columns
struct HcMixArgs {
  TensorView streams;  // [rows, 4, hidden] bf16
  TensorView fn;       // [24, 4 * hidden] f32, norm weight multiplied in
  TensorView base;     // [24] f32
  TensorView scale;    // [3] f32
  TensorView pre;      // [rows, 4] f32
  TensorView post;     // [rows, 4] f32
  TensorView comb;     // [rows, 16] f32, comb[i][j] at 4i + j
  int64_t sinkhorn_iterations = 20;
  float eps = 1e-6f;
  float norm_eps = 1e-20f;
};
Status HcMix(const HcMixArgs& args, Stream& stream);

// x = bf16( sum_i pre[i] * streams[i] ), ascending i with fused multiply-adds; y = RMSNorm(x)
// (ops/rms_norm).
struct HcCollapseNormArgs {
  TensorView streams;    // [any, 4, hidden] bf16
  TensorView pre;        // [any, 4] f32
  TensorView row_index;  // [rows] i32 rows to collapse, or empty: all in order
  TensorView weight;     // [hidden] bf16
  TensorView y;          // [rows, hidden] bf16
  TensorView y_grid;     // [rows, hidden] bf16, Q8(y); may be empty
  float norm_eps = 1e-20f;
};
Status HcCollapseNorm(const HcCollapseNormArgs& args, Stream& stream);

// streams'[j] = bf16( post[j] * x + sum_i comb[i][j] * streams[i] ), started with post[j] * x,
// ascending i, fused.
struct HcExpandArgs {
  TensorView x;        // [rows, hidden] bf16
  TensorView post;     // [rows, 4] f32
  TensorView comb;     // [rows, 16] f32
  TensorView streams;  // [rows, 4, hidden] bf16, updated in place
};
Status HcExpand(const HcExpandArgs& args, Stream& stream);

// Everything between two sub-layers: HcExpand of the output of the one before (unless expand.x is
// empty), HcMix of the new streams, HcCollapseNorm of them with weights from the boundary before;
// the three have the same streams, and `expand` may use the post and comb that `mix` overwrites. On
// a GPU one launch, or two with many rows.
struct HcBoundaryArgs {
  HcExpandArgs expand;
  HcMixArgs mix;
  HcCollapseNormArgs collapse;  // without row_index
};
Status HcBoundary(const HcBoundaryArgs& args, Stream& stream);

// The scalar part of HcMix for one row: 24 products m (already multiplied by r) to pre, post and
// comb. Also its specification.
void HcCoefficients(const float* m, const float* base, const float* scale,
                    int64_t sinkhorn_iterations, float eps, float* pre, float* post, float* comb);

}  // namespace deepinfer
