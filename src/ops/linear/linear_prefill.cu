#include "ops/linear/linear_prefill.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/ceil_div.h"
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

// Clocks per stage of 64 columns of a tile: of the tensor cores (8 per token, and some between
// stages), or of the L2, which gives a multiprocessor about 32 bytes per clock.
int64_t StageClocks(WeightFormat format, int64_t tokens) {
  const int64_t weight_bytes = format == WeightFormat::kFp4Group   ? 256 * 34
                               : format == WeightFormat::kFp8Block ? 256 * 64
                                                                   : 256 * 128;
  const int64_t computed = std::max<int64_t>(tokens, 64);
  return std::max(8 * computed + 80, (weight_bytes + tokens * prefill::kRowBytes) / 32);
}

// What storing a tile and starting the next one costs beside its stages.
constexpr int64_t kTileClocks = 2500;

// Clocks of all problems with tiles of `tokens` rows: the rounds that the busiest multiprocessor
// has, the last one with halves where those fit.
int64_t LaunchClocks(WeightFormat format, int64_t tiles, int64_t tokens, int64_t columns,
                     int64_t sm_count) {
  const int64_t stages = CeilDiv(columns, prefill::kStageColumns);
  const int64_t rest = tiles % sm_count;
  int64_t clocks = tiles / sm_count * (stages * StageClocks(format, tokens) + kTileClocks);
  if (rest > 0) {
    const int64_t last = 2 * rest <= sm_count ? tokens / 2 : tokens;
    clocks += stages * StageClocks(format, last) + kTileClocks;
  }
  return clocks;
}

// Rows per tile. Small tiles fill the chip where large ones are too few, but move more bytes per
// product. Where rows are in groups the host does not know how many there are.
template <class S>
int TileTokens(const Params& params, int sm_count) {
  if (params.group_offsets != nullptr) return S::kTokens;
  int best = S::kTokens;
  int64_t best_clocks = std::numeric_limits<int64_t>::max();
  for (int tokens = S::kTokens; tokens >= 64; tokens -= 32) {
    int64_t tiles = 0;
    int64_t columns = 0;
    for (int i = 0; i < params.units; ++i) {
      const Problem& problem = params.problems[i];
      tiles += CeilDiv(problem.n, S::kTileOutputs) * CeilDiv(problem.rows, tokens);
      columns = std::max<int64_t>(columns, problem.padded_k);
    }
    const int64_t clocks = LaunchClocks(S::kFormat, tiles, tokens, columns, std::max(1, sm_count));
    if (clocks >= best_clocks) continue;
    best_clocks = clocks;
    best = tokens;
  }
  return best;
}

template <class S>
Status LaunchShape(const char* name, Params params, Stream& stream) {
  params.tile_tokens = TileTokens<S>(params, stream.sm_count());
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

bool PrefillPays(int64_t rows, WeightFormat format, int64_t n, int64_t k, int64_t weights) {
  if (rows < 48) return false;
  constexpr int64_t kMultiprocessors = 132;
  constexpr double kClocksPerMicrosecond = 1600.0;
  const int64_t tokens = rows <= 64 ? 64 : 96;
  const int64_t tiles = weights * CeilDiv(n, int64_t{256}) * CeilDiv(rows, tokens);
  const double many =
      4.0 + static_cast<double>(LaunchClocks(format, tiles, tokens, k, kMultiprocessors)) /
                kClocksPerMicrosecond;
  // The kernel for few rows reads the weight once per 64 rows, at 3.5 MB per microsecond, or
  // multiplies at 250 TFLOP/s.
  const auto elements = static_cast<double>(weights * n * k);
  const double bytes_per_element = format == WeightFormat::kFp4Group   ? 0.53
                                   : format == WeightFormat::kFp8Block ? 1.0
                                                                       : 2.0;
  const double few =
      4.0 + static_cast<double>(CeilDiv(rows, int64_t{64})) *
                std::max(elements * bytes_per_element / 3.5e6, elements * 2.0 * 64.0 / 250e6);
  return many < few;
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
