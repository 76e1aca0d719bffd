#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/hyper_connection/hyper_connection_impl.h"
#include "ops/quantize/group_quantize.h"
#include "ops/rms_norm/rms_norm_impl.h"
#include "ops/row_access.h"

namespace deepinfer {
namespace {

float Sigmoid(float x) {
  return 1.0f / (1.0f + std::exp(-x));
}

}  // namespace

void HcCoefficients(const float* m, const float* base, const float* scale,
                    int64_t sinkhorn_iterations, float eps, float* pre, float* post, float* comb) {
  for (int i = 0; i < 4; ++i) {
    pre[i] = Sigmoid(m[i] * scale[0] + base[i]) + eps;
    post[i] = 2.0f * Sigmoid(m[4 + i] * scale[1] + base[4 + i]);
  }
  float c[4][4];
  for (int i = 0; i < 4; ++i) {
    float largest = -INFINITY;
    for (int j = 0; j < 4; ++j) {
      c[i][j] = m[8 + 4 * i + j] * scale[2] + base[8 + 4 * i + j];
      largest = std::max(largest, c[i][j]);
    }
    float sum = 0.0f;
    for (int j = 0; j < 4; ++j) {
      c[i][j] = std::exp(c[i][j] - largest);
      sum += c[i][j];
    }
    for (int j = 0; j < 4; ++j) c[i][j] = c[i][j] / sum + eps;
  }
  const auto normalise_columns = [&] {
    for (int j = 0; j < 4; ++j) {
      const float sum = c[0][j] + c[1][j] + c[2][j] + c[3][j] + eps;
      for (int i = 0; i < 4; ++i) c[i][j] /= sum;
    }
  };
  normalise_columns();
  for (int64_t iteration = 1; iteration < sinkhorn_iterations; ++iteration) {
    for (int i = 0; i < 4; ++i) {
      const float sum = c[i][0] + c[i][1] + c[i][2] + c[i][3] + eps;
      for (int j = 0; j < 4; ++j) c[i][j] /= sum;
    }
    normalise_columns();
  }
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) comb[4 * i + j] = c[i][j];
  }
}

namespace reference {

void HcMix(const HcMixArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t width = args.streams.row_size();
  std::vector<float> v(static_cast<size_t>(width));
  for (int64_t t = row_begin; t < row_end; ++t) {
    LoadBf16(args.streams.Row<Bf16>(t), width, v.data());
    double square_sum = 0.0;
    for (int64_t i = 0; i < width; ++i)
      square_sum += static_cast<double>(v[static_cast<size_t>(i)]) * v[static_cast<size_t>(i)];
    const float r = 1.0f / std::sqrt(static_cast<float>(square_sum / static_cast<double>(width)) +
                                     args.norm_eps);
    float m[kHcCoefficients];
    for (int64_t k = 0; k < kHcCoefficients; ++k) {
      const float* fn = args.fn.Row<float>(k);
      double sum = 0.0;
      for (int64_t i = 0; i < width; ++i)
        sum += static_cast<double>(v[static_cast<size_t>(i)]) * fn[i];
      m[k] = static_cast<float>(sum) * r;
    }
    HcCoefficients(m, args.base.Row<float>(0), args.scale.Row<float>(0), args.sinkhorn_iterations,
                   args.eps, args.pre.Row<float>(t), args.post.Row<float>(t),
                   args.comb.Row<float>(t));
  }
}

void HcCollapseNorm(const HcCollapseNormArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t hidden = args.streams.dim(2);
  std::vector<float> x(static_cast<size_t>(hidden));
  for (int64_t r = row_begin; r < row_end; ++r) {
    const int64_t t = args.row_index.empty() ? r : args.row_index.Row<int32_t>(r)[0];
    const Bf16* streams = args.streams.Row<Bf16>(t);
    const float* pre = args.pre.Row<float>(t);
    for (int64_t d = 0; d < hidden; ++d) {
      float sum = pre[0] * Bf16ToF32(streams[d]);
      for (int64_t s = 1; s < kHcStreams; ++s)
        sum = std::fma(pre[s], Bf16ToF32(streams[s * hidden + d]), sum);
      x[static_cast<size_t>(d)] = RoundToBf16(sum);
    }
    RmsNormRow(x.data(), args.weight.Row<Bf16>(0), hidden, args.norm_eps, x.data());
    StoreRowBf16(x.data(), hidden, args.y.Row<Bf16>(r));
    if (args.y_grid.empty()) continue;
    Q8InPlace(x.data(), hidden);
    StoreRowBf16(x.data(), hidden, args.y_grid.Row<Bf16>(r));
  }
}

void HcExpand(const HcExpandArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t hidden = args.x.dim(1);
  for (int64_t t = row_begin; t < row_end; ++t) {
    const Bf16* x = args.x.Row<Bf16>(t);
    const float* post = args.post.Row<float>(t);
    const float* comb = args.comb.Row<float>(t);
    Bf16* streams = args.streams.Row<Bf16>(t);
    for (int64_t d = 0; d < hidden; ++d) {
      float h[kHcStreams];
      for (int64_t s = 0; s < kHcStreams; ++s) h[s] = Bf16ToF32(streams[s * hidden + d]);
      const float y = Bf16ToF32(x[d]);
      for (int64_t j = 0; j < kHcStreams; ++j) {
        float sum = post[j] * y;
        for (int64_t i = 0; i < kHcStreams; ++i) sum = std::fma(comb[4 * i + j], h[i], sum);
        streams[j * hidden + d] = F32ToBf16(sum);
      }
    }
  }
}

}  // namespace reference
}  // namespace deepinfer
