// The element-wise parts of the mixture of experts on vectors.
//
// Swiglu: 6 bytes per element moved; bound by arithmetic (an exponential, a division and Q8: about
// 50 vector operations per vector). Its exponential is ops/simd-inl.h's, so a value may differ from
// the reference's by 3e-7 before Q8. Measured 2026-11-30, 2-core AMD EPYC (AVX2), one thread,
// processor time: 6 x 2304 channels 26 us (3.2 GB/s). MoeCombine: k + 2 bf16 rows read or written
// per row, bound by memory; bitwise the reference's results. Measured on the same day, wall time on
// the busy machine: 5.8 GB/s, which was all that the machine's read bandwidth gave then.
#include <algorithm>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/moe/moe_cpu.cc"
// The order matters: targets first, then the header that includes this file once per instruction
// set.
// clang-format off
#include "ops/simd_targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "ops/moe/moe_impl.h"
#include "ops/simd-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace deepinfer {
namespace HWY_NAMESPACE {
#if DI_SIMD_PASS

void SwigluVector(const SwigluArgs& args, int64_t row, int64_t begin, int64_t end) {
  const F32 d;
  const Bf16* gate = args.gate.Row<Bf16>(row);
  const Bf16* up = args.up.Row<Bf16>(row);
  Bf16* out = args.out.Row<Bf16>(row);
  const VecF32 weight =
      hn::Set(d, args.row_weight.empty() ? 1.0f : args.row_weight.Row<float>(row)[0]);
  const VecF32 limit = hn::Set(d, args.limit);
  const VecF32 one = hn::Set(d, 1.0f);
  const bool rounded = args.numerics == Numerics::kReference;
  for (int64_t i = begin; i < end; i += kQ8Group) {
    HWY_ALIGN float group[kQ8Group];
    for (int64_t j = 0; j < kQ8Group; j += kLanes) {
      // Operand order: minimum and maximum return their second operand when one is NaN, and NaN
      // must stay visible.
      const VecF32 g = hn::Min(limit, LoadBf16(gate + i + j));
      const VecF32 u = hn::Min(limit, hn::Max(hn::Neg(limit), LoadBf16(up + i + j)));
      const VecF32 silu = hn::Div(g, hn::Add(one, Exp(hn::Neg(g))));
      const VecF32 value = hn::Mul(weight, hn::Mul(silu, u));
      hn::Store(rounded ? RoundBf16(value) : value, d, group + j);
    }
    Q8GroupToBf16(group, out + i);
  }
}

void MoeCombineVector(const MoeCombineArgs& args, int64_t row, int64_t begin, int64_t end) {
  const F32 d;
  const int64_t k = args.slot_position.dim(1);
  const int32_t* experts = args.experts.Row<int32_t>(row);
  const int32_t* position = args.slot_position.Row<int32_t>(row);
  const bool reference_order = args.numerics == Numerics::kReference;
  std::vector<int64_t> slots(static_cast<size_t>(k));
  for (int64_t i = 0; i < k; ++i) slots[static_cast<size_t>(i)] = i;
  if (reference_order)
    std::sort(slots.begin(), slots.end(),
              [&](int64_t a, int64_t b) { return experts[a] < experts[b]; });
  std::vector<const Bf16*> terms;
  if (!reference_order) terms.push_back(args.shared.Row<Bf16>(row));
  for (int64_t slot : slots) terms.push_back(args.routed.Row<Bf16>(position[slot]));
  if (reference_order) terms.push_back(args.shared.Row<Bf16>(row));
  Bf16* y = args.y.Row<Bf16>(row);
  for (int64_t i = begin; i < end; i += kLanes) {
    VecF32 sum = LoadBf16(terms[0] + i);
    if (reference_order)
      sum = hn::Add(hn::Zero(d), sum);  // starts from +0, which shows when all terms are -0
    for (size_t term = 1; term < terms.size(); ++term)
      sum = hn::Add(sum, LoadBf16(terms[term] + i));
    StoreBf16(sum, y + i);
  }
}

#endif  // DI_SIMD_PASS
}  // namespace HWY_NAMESPACE
}  // namespace deepinfer
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deepinfer::cpu {

void Swiglu(CpuLevel level, const SwigluArgs& args, int64_t row, int64_t begin, int64_t end) {
  DI_SIMD_FUNCTION(level, SwigluVector)(args, row, begin, end);
}

void MoeCombine(CpuLevel level, const MoeCombineArgs& args, int64_t row, int64_t begin,
                int64_t end) {
  DI_SIMD_FUNCTION(level, MoeCombineVector)(args, row, begin, end);
}

}  // namespace deepinfer::cpu
#endif  // HWY_ONCE
