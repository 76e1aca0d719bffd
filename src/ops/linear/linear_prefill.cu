#include "ops/linear/linear_prefill.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/check.h"
#include "ops/linear/cuda_pack.h"
#include "ops/linear/linear_pack.h"
#include "ops/linear/linear_prefill.cuh"
#include "tensor/dtype.h"

namespace deepinfer::cuda {
namespace {

using prefill::Params;
using prefill::PrefillKernel;
using prefill::Problem;

bool IsAligned16(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

const CudaLinearWeight& PackedOf(const LinearWeight& weight) {
  DI_CHECK(weight.packed() != nullptr && weight.packed()->cuda != nullptr);
  return *weight.packed()->cuda;
}

Problem ProblemOf(const TensorView& x, const LinearWeight& weight, const TensorView& y) {
  const CudaLinearWeight& packed = PackedOf(weight);
  Problem problem = {};
  problem.x = static_cast<const uint16_t*>(x.data());
  problem.x_stride = x.row_stride();
  problem.weight = packed.data;
  problem.strip_bytes = packed.strip_bytes;
  problem.y = y.data();
  problem.y_stride = y.row_stride();
  problem.rows = static_cast<int>(y.rows());
  problem.n = static_cast<int>(weight.n());
  problem.k = static_cast<int>(weight.k());
  problem.padded_k = static_cast<int>(packed.padded_k);
  problem.strips = static_cast<int>(packed.strips);
  problem.segment_columns =
      static_cast<int>(packed.segments.count > 1 ? packed.segments.columns : packed.padded_k);
  problem.output_scale = std::ldexp(1.0f, packed.output_exponent);
  problem.y_is_float = y.dtype() == DType::kF32;
  problem.y_in_pieces = y.dtype() == DType::kBf16 && IsAligned16(y.data()) &&
                        y.row_stride() % 8 == 0 && weight.n() % 8 == 0;
  return problem;
}

// The first weight and the distance between weights, in bytes.
struct WeightRun {
  const uint8_t* first = nullptr;
  int64_t stride = 0;
};

Result<WeightRun> RunOf(std::span<const LinearWeight* const> weights, const char* op) {
  // Groups without rows may have no weight.
  int64_t first = -1;
  int64_t second = -1;
  for (int64_t group = 0; group < std::ssize(weights) && second < 0; ++group) {
    if (weights[static_cast<size_t>(group)] == nullptr) continue;
    (first < 0 ? first : second) = group;
  }
  if (first < 0) return WeightRun{};
  const auto data = [&](int64_t group) {
    return reinterpret_cast<intptr_t>(PackedOf(*weights[static_cast<size_t>(group)]).data);
  };
  int64_t stride = 0;
  if (second >= 0) stride = (data(second) - data(first)) / (second - first);
  for (int64_t group = first; group < std::ssize(weights); ++group) {
    if (weights[static_cast<size_t>(group)] == nullptr) continue;
    if (data(group) == data(first) + stride * (group - first)) continue;
    return Fail(Code::kInvalidArgument,
                fmt::format("{}: the weights of groups {} and {} were not packed as one stack.", op,
                            first, group),
                "weights");
  }
  return WeightRun{reinterpret_cast<const uint8_t*>(data(first) - stride * first), stride};
}

template <class S>
Status LaunchShape(const char* name, const Params& params, Stream& stream) {
  return Launch(name, &PrefillKernel<S>,
                {.grid = {static_cast<uint32_t>(std::max(1, stream.sm_count()))},
                 .block = prefill::kThreads,
                 .shared_bytes = S::SharedBytes(params.units),
                 .overlap_previous = true},
                stream, params);
}

// One format; `segmented` if the K of any problem is.
template <bool kGated>
Status LaunchFormat(WeightFormat format, bool segmented, const Params& params, Stream& stream) {
  const char* name = kGated ? "PrefillGatedLinear" : "PrefillLinear";
  switch (format) {
    case WeightFormat::kFp4Group:
      DI_CHECK(!segmented);
      return LaunchShape<prefill::Shape<WeightFormat::kFp4Group, kGated, false>>(name, params,
                                                                                 stream);
    case WeightFormat::kFp8Block:
      // A single segment is also a sum of segments; gated FP8 layers (shared experts) have several.
      if (!segmented && !kGated)
        return LaunchShape<prefill::Shape<WeightFormat::kFp8Block, false, false>>(name, params,
                                                                                  stream);
      return LaunchShape<prefill::Shape<WeightFormat::kFp8Block, kGated, true>>(name, params,
                                                                                stream);
    case WeightFormat::kBf16:
      return LaunchShape<prefill::Shape<WeightFormat::kBf16, kGated, true>>(name, params, stream);
  }
  return {};
}

bool IsSegmented(const LinearWeight& weight) {
  return PackedOf(weight).segments.count > 1;
}

const LinearWeight* FirstOf(std::span<const LinearWeight* const> weights) {
  for (const LinearWeight* weight : weights)
    if (weight != nullptr) return weight;
  return nullptr;
}

}  // namespace

bool PrefillPays(int64_t rows, WeightFormat format, int64_t n, int64_t k) {
  // A block of 256 outputs x 64 rows takes 8 clocks per column, and the kernel for few rows about
  // as long for 16 rows as reading the weight.
  (void)format;
  (void)n;
  (void)k;
  return rows >= 64;
}

bool PrefillTakes(const TensorView& x) {
  return IsAligned16(x.data()) && x.row_stride() % 8 == 0 && x.dim(1) % 8 == 0 &&
         x.rows() * (x.row_stride() / 8) < std::numeric_limits<uint32_t>::max();
}

Status PrefillLinear(std::span<const LinearArgs> batch, Stream& stream) {
  size_t begin = 0;
  while (begin < batch.size()) {
    Params params = {};
    bool segmented = false;
    size_t next = begin;
    for (; next < batch.size() && params.units < prefill::kMaxProblems; ++next) {
      const LinearArgs& args = batch[next];
      DI_CHECK(args.weight->format() == batch[0].weight->format());
      if (args.y.rows() == 0) continue;
      Problem& problem = params.problems[params.units++];
      problem = ProblemOf(args.x, *args.weight, args.y);
      problem.quantize_y = args.quantize_y;
      segmented |= IsSegmented(*args.weight);
    }
    if (params.units > 0)
      DI_RETURN_IF_ERROR(LaunchFormat<false>(batch[0].weight->format(), segmented, params, stream));
    begin = next;
  }
  return {};
}

Status PrefillGroupedLinear(const GroupedLinearArgs& args, Stream& stream) {
  const LinearWeight* weight = FirstOf(args.weights);
  if (weight == nullptr || args.y.rows() == 0) return {};
  const Result<WeightRun> run = RunOf(args.weights, "GroupedLinear");
  if (!run.has_value()) return tl::unexpected(run.error());
  Params params = {};
  params.problems[0] = ProblemOf(args.x, *weight, args.y);
  params.problems[0].weight = run->first;
  params.problems[0].weight_stride = run->stride;
  params.units = static_cast<int>(args.weights.size());
  params.group_offsets = static_cast<const int32_t*>(args.group_offsets.data());
  params.row_index = static_cast<const int32_t*>(args.row_index.data());
  return LaunchFormat<false>(weight->format(), IsSegmented(*weight), params, stream);
}

Status PrefillGatedLinear(const GatedLinearArgs& args, Stream& stream) {
  const LinearWeight* weight = FirstOf(args.gate_weights);
  if (weight == nullptr || args.out.rows() == 0) return {};
  const Result<WeightRun> gate = RunOf(args.gate_weights, "GatedLinear");
  if (!gate.has_value()) return tl::unexpected(gate.error());
  const Result<WeightRun> up = RunOf(args.up_weights, "GatedLinear");
  if (!up.has_value()) return tl::unexpected(up.error());
  if (gate->stride != up->stride) {
    return Fail(Code::kInvalidArgument,
                "GatedLinear: gate and up weights are not at the same distances in memory.",
                "up_weights");
  }
  Params params = {};
  params.problems[0] = ProblemOf(args.x, *weight, args.out);
  params.problems[0].weight = gate->first;
  params.problems[0].up_weight = up->first;
  params.problems[0].weight_stride = gate->stride;
  params.units = static_cast<int>(args.gate_weights.size());
  params.group_offsets = static_cast<const int32_t*>(args.group_offsets.data());
  params.row_index = static_cast<const int32_t*>(args.row_index.data());
  params.row_weight = static_cast<const float*>(args.row_weight.data());
  params.limit = args.limit;
  params.reference_numerics = args.numerics == Numerics::kReference;
  return LaunchFormat<true>(weight->format(), IsSegmented(*weight), params, stream);
}

}  // namespace deepinfer::cuda
