#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ops/moe/moe_impl.h"
#include "ops/quantize/group_quantize.h"
#include "ops/row_access.h"

namespace deepinfer::reference {

float SqrtSoftplus(float z) {
  return std::sqrt(z > 20.0f ? z : std::log1p(std::exp(z)));
}

void RouterSelect(const RouterSelectArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t experts = args.logits.dim(1);
  const int64_t k = args.experts.dim(1);
  const float* bias = args.bias.Row<float>(0);
  std::vector<float> score(static_cast<size_t>(experts));
  std::vector<int32_t> order(static_cast<size_t>(experts));
  for (int64_t t = row_begin; t < row_end; ++t) {
    const float* logits = args.logits.Row<float>(t);
    for (int64_t e = 0; e < experts; ++e)
      score[static_cast<size_t>(e)] = SqrtSoftplus(logits[e] / args.gate_temp);
    std::iota(order.begin(), order.end(), 0);
    const auto biased = [&](int32_t e) {
      const float value = score[static_cast<size_t>(e)] + bias[e];
      return std::isnan(value) ? -INFINITY : value;
    };
    std::partial_sort(order.begin(), order.begin() + k, order.end(), [&](int32_t a, int32_t b) {
      const float x = biased(a);
      const float y = biased(b);
      return x != y ? x > y : a < b;
    });
    float sum = 0.0f;
    for (int64_t i = 0; i < k; ++i)
      sum += score[static_cast<size_t>(order[static_cast<size_t>(i)])];
    for (int64_t i = 0; i < k; ++i) {
      const int32_t e = order[static_cast<size_t>(i)];
      args.experts.Row<int32_t>(t)[i] = e;
      args.weights.Row<float>(t)[i] = score[static_cast<size_t>(e)] / (sum + 1e-20f) * args.scale;
    }
  }
}

void Swiglu(const SwigluArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t channels = args.gate.dim(1);
  std::vector<float> a(static_cast<size_t>(channels));
  for (int64_t r = row_begin; r < row_end; ++r) {
    const Bf16* gate = args.gate.Row<Bf16>(r);
    const Bf16* up = args.up.Row<Bf16>(r);
    const float weight = args.row_weight.empty() ? 1.0f : args.row_weight.Row<float>(r)[0];
    for (int64_t i = 0; i < channels; ++i) {
      const float g = std::min(Bf16ToF32(gate[i]), args.limit);
      const float u = std::clamp(Bf16ToF32(up[i]), -args.limit, args.limit);
      const float silu = g / (1.0f + std::exp(-g));
      const float value = weight * (silu * u);
      a[static_cast<size_t>(i)] =
          args.numerics == Numerics::kReference ? RoundToBf16(value) : value;
    }
    Q8InPlace(a.data(), channels);
    StoreRowBf16(a.data(), channels, args.out.Row<Bf16>(r));
  }
}

void MoeCombine(const MoeCombineArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t hidden = args.shared.dim(1);
  const int64_t k = args.slot_position.dim(1);
  std::vector<float> sum(static_cast<size_t>(hidden));
  std::vector<int64_t> slots(static_cast<size_t>(k));
  for (int64_t t = row_begin; t < row_end; ++t) {
    const bool reference_order = args.numerics == Numerics::kReference;
    std::iota(slots.begin(), slots.end(), 0);
    if (reference_order) {
      const int32_t* experts = args.experts.Row<int32_t>(t);
      std::sort(slots.begin(), slots.end(),
                [&](int64_t a, int64_t b) { return experts[a] < experts[b]; });
      std::fill(sum.begin(), sum.end(), 0.0f);
    } else {
      LoadBf16(args.shared.Row<Bf16>(t), hidden, sum.data());
    }
    const auto add = [&](const Bf16* x) {
      for (int64_t d = 0; d < hidden; ++d) sum[static_cast<size_t>(d)] += Bf16ToF32(x[d]);
    };
    for (int64_t slot : slots) add(args.routed.Row<Bf16>(args.slot_position.Row<int32_t>(t)[slot]));
    if (reference_order) add(args.shared.Row<Bf16>(t));
    StoreRowBf16(sum.data(), hidden, args.y.Row<Bf16>(t));
  }
}

}  // namespace deepinfer::reference
