#include "ops/linear/linear_prefill.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/ceil_div.h"
#include "base/check.h"
#include "ops/linear/cuda_pack.h"
#include "ops/linear/linear_pack.h"
#include "ops/linear/linear_prefill.cuh"
#include "tensor/dtype.h"

namespace deepinfer::cuda {
namespace {

using prefill::Params;
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

PrefillWork GroupedWork(int64_t rows, const LinearWeight& weight, int groups) {
  return {.rows = std::max<int64_t>(1, rows / groups),
          .n = weight.n(),
          .k = weight.k(),
          .weights = groups};
}

const LinearWeight* FirstOf(std::span<const LinearWeight* const> weights) {
  for (const LinearWeight* weight : weights)
    if (weight != nullptr) return weight;
  return nullptr;
}

// ---- The plan ------------------------------------------------------------------------

constexpr int64_t kL2BytesPerClock = 36;
// What storing a tile and starting the next one costs beside its stages.
constexpr int64_t kTileClocks = 3000;
// Sums of a segment of 128 outputs, per token, to or from the L2.
constexpr int64_t kSumsClocks = 128 * 4 / 20;

int64_t MultipleOf64(int64_t tokens) {
  return CeilDiv(tokens, int64_t{64}) * 64;
}

// Clocks per stage of 64 columns of a tile. With codes as measured (at 1.6 GHz): most of what a
// small tile takes does not depend on its rows. Otherwise those of the tensor cores or the L2.
int64_t StageClocks(WeightFormat format, int64_t tokens) {
  if (format != WeightFormat::kBf16) return 660 + 33 * tokens / 10;
  const int64_t bytes = (128 + tokens) * prefill::kRowBytes;
  return std::max(4 * tokens + 40, bytes / kL2BytesPerClock);
}

// Tiles of a launch.
struct TileCount {
  int64_t tiles = 0;
  int64_t columns = 0;   // of an item, at most
  int64_t segments = 1;  // items per tile
  int64_t tile_tokens = 0;
  int64_t tokens = 0;  // that a tile really has, at most
};

// Clocks of the multiprocessor that has most to do.
int64_t LaunchClocks(WeightFormat format, const TileCount& count, int64_t sm_count) {
  const prefill::TileCut cut =
      prefill::CutTiles(static_cast<int>(count.tiles), static_cast<int>(count.segments),
                        static_cast<int>(count.tile_tokens), static_cast<int>(sm_count));
  const int64_t stages = CeilDiv(count.columns, int64_t{prefill::kStageColumns});
  const auto item_clocks = [&](int64_t tokens) {
    const int64_t computed = MultipleOf64(tokens);
    int64_t clocks = stages * StageClocks(format, computed) + kTileClocks;
    if (count.segments > 1) clocks += 2 * computed * kSumsClocks;
    return clocks;
  };
  const int64_t rounds = CeilDiv(int64_t{cut.items}, sm_count);
  const int64_t whole_rounds = std::min(rounds, cut.whole * count.segments / sm_count);
  const int64_t part = CeilDiv(std::min(count.tokens, count.tile_tokens), int64_t{cut.parts});
  int64_t clocks = whole_rounds * item_clocks(count.tokens);
  clocks += (rounds - whole_rounds) * item_clocks(cut.parts > 1 ? part : count.tokens);
  // The last tile's sums are added when nothing else is left to do.
  if (count.segments > 1)
    clocks += (count.segments - 1) * kSumsClocks * (cut.parts > 1 ? part : count.tokens);
  return clocks;
}

struct Plan {
  bool split = false;
  int tile_tokens = 0;
  int64_t clocks = std::numeric_limits<int64_t>::max();
  int64_t tiles = 0;
};

struct PlanInput {
  WeightFormat format;
  bool gated = false;
  bool grouped = false;  // rows are an average
  std::span<const PrefillWork> work;
};

// The split of segments and the rows per tile with the fewest clocks. Small tiles fill the device
// where large ones are too few, but move more bytes per product.
Plan PlanOf(const PlanInput& input, const PrefillChoice& choice, int64_t sm_count) {
  using Segments = PrefillChoice::Segments;
  sm_count = std::max<int64_t>(1, sm_count);
  const int64_t tile_outputs = input.gated ? 64 : 128;
  int64_t segments = 0;  // of all weights, if that is one number
  bool segmented = false;
  for (const PrefillWork& work : input.work) {
    const int64_t count = SegmentsOf(input.format, work.n, work.k).count;
    segmented |= count > 1;
    segments = segments == 0 || segments == count ? count : -1;
  }
  Plan best;
  for (const bool split : {false, true}) {
    // The workspace is for tiles that the host can count.
    if (split && (segments <= 1 || input.grouped || choice.segments == Segments::kChained))
      continue;
    if (!split && segments > 1 && !input.grouped && choice.segments == Segments::kSplit) continue;
    const int most = segmented && !split ? 192 : 256;
    for (int tokens = most; tokens >= 64; tokens -= 64) {
      if (choice.tile_tokens != 0 && tokens != choice.tile_tokens) continue;
      TileCount count;
      count.tile_tokens = tokens;
      count.segments = split ? segments : 1;
      for (const PrefillWork& work : input.work) {
        const int64_t token_tiles = CeilDiv(work.rows, int64_t{tokens});
        count.tiles += work.weights * CeilDiv(work.n, tile_outputs) * token_tiles;
        count.columns = std::max(count.columns,
                                 split ? SegmentsOf(input.format, work.n, work.k).columns : work.k);
        count.tokens = std::max(
            count.tokens, std::min<int64_t>(tokens, MultipleOf64(CeilDiv(work.rows, token_tiles))));
      }
      // Groups differ: room for a quarter more rows than on average.
      if (input.grouped && choice.tile_tokens == 0 && tokens < most &&
          tokens < input.work[0].rows * 5 / 4)
        continue;
      if (split && (count.tiles * count.segments * tokens * 512 > kPrefillScratchBytes ||
                    count.tiles * prefill::kMaxParts * prefill::kConsumerWarpgroups >
                        Stream::kArrivalCounters))
        continue;
      const int64_t clocks = LaunchClocks(input.format, count, sm_count);
      if (clocks > best.clocks) continue;
      best = {.split = split, .tile_tokens = tokens, .clocks = clocks, .tiles = count.tiles};
    }
  }
  return best;
}

Status LaunchFormat(WeightFormat format, bool gated, Params params,
                    std::span<const PrefillWork> work, const PrefillChoice& choice,
                    Stream& stream) {
  const bool grouped = params.group_offsets != nullptr;
  const Plan plan = PlanOf({.format = format, .gated = gated, .grouped = grouped, .work = work},
                           choice, stream.sm_count());
  if (plan.tile_tokens == 0) {
    return Fail(Code::kInvalidArgument,
                fmt::format("Linear: tiles of {} rows with the segments of K as chosen do not fit.",
                            choice.tile_tokens),
                "choice");
  }
  params.tile_tokens = plan.tile_tokens;
  bool segmented = false;
  for (const PrefillWork& one : work) segmented |= SegmentsOf(format, one.n, one.k).count > 1;
  ScratchScope scratch(stream);
  if (plan.split) {
    params.segments = static_cast<int>(SegmentsOf(format, work[0].n, work[0].k).count);
    params.segment_sums = static_cast<float4*>(
        scratch.AllocateBytes(plan.tiles * params.segments * plan.tile_tokens * 512));
    params.arrivals = stream.arrival_counters();
  }
  const bool chained = segmented && !plan.split;
  switch (format) {
    case WeightFormat::kFp4Group:
      return prefill::LaunchPrefillKernel<WeightFormat::kFp4Group>(gated, chained, params, stream);
    case WeightFormat::kFp8Block:
      return prefill::LaunchPrefillKernel<WeightFormat::kFp8Block>(gated, chained, params, stream);
    case WeightFormat::kBf16:
      return prefill::LaunchPrefillKernel<WeightFormat::kBf16>(gated, chained, params, stream);
  }
  return {};
}

}  // namespace

bool PrefillPays(WeightFormat format, bool gated, std::span<const PrefillWork> work, int sm_count) {
  constexpr double kClocksPerMicrosecond = 1600.0;
  constexpr double kLaunchMicroseconds = 4.0;
  double few = kLaunchMicroseconds;
  bool grouped = false;
  for (const PrefillWork& one : work) {
    if (one.rows < 48) return false;
    grouped |= one.weights > 1;
    // The kernel for few rows takes the weight once per 16 rows: measured, 4.7 million codes per
    // microsecond, then 5.8 from the L2. Half as many of bf16, which is bound by bytes.
    const auto elements = static_cast<double>(one.weights * one.n * one.k * (gated ? 2 : 1));
    const double codes = format == WeightFormat::kBf16 ? 2.0 * elements : elements;
    few += codes / 4.7e6 + static_cast<double>(CeilDiv(one.rows, int64_t{16}) - 1) * codes / 5.8e6;
  }
  const Plan plan =
      PlanOf({.format = format, .gated = gated, .grouped = grouped, .work = work}, {}, sm_count);
  return kLaunchMicroseconds + static_cast<double>(plan.clocks) / kClocksPerMicrosecond < few;
}

bool PrefillTakes(const TensorView& x) {
  return IsAligned16(x.data()) && x.row_stride() % 8 == 0 && x.dim(1) % 8 == 0 &&
         x.rows() * (x.row_stride() / 8) < std::numeric_limits<uint32_t>::max();
}

Status PrefillLinear(std::span<const LinearArgs> batch, Stream& stream,
                     const PrefillChoice& choice) {
  size_t begin = 0;
  while (begin < batch.size()) {
    Params params = {};
    std::vector<PrefillWork> work;
    size_t next = begin;
    for (; next < batch.size() && params.units < prefill::kMaxProblems; ++next) {
      const LinearArgs& args = batch[next];
      DI_CHECK(args.weight->format() == batch[0].weight->format());
      if (args.y.rows() == 0) continue;
      Problem& problem = params.problems[params.units++];
      problem = ProblemOf(args.x, *args.weight, args.y);
      problem.quantize_y = args.quantize_y;
      work.push_back({.rows = args.y.rows(), .n = args.weight->n(), .k = args.weight->k()});
    }
    if (params.units > 0)
      DI_RETURN_IF_ERROR(
          LaunchFormat(batch[0].weight->format(), false, params, work, choice, stream));
    begin = next;
  }
  return {};
}

Status PrefillGroupedLinear(const GroupedLinearArgs& args, Stream& stream,
                            const PrefillChoice& choice) {
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
  const PrefillWork work = GroupedWork(args.y.rows(), *weight, params.units);
  return LaunchFormat(weight->format(), false, params, {&work, 1}, choice, stream);
}

Status PrefillGatedLinear(const GatedLinearArgs& args, Stream& stream,
                          const PrefillChoice& choice) {
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
  const PrefillWork work = GroupedWork(args.out.rows(), *weight, params.units);
  return LaunchFormat(weight->format(), true, params, {&work, 1}, choice, stream);
}

}  // namespace deepinfer::cuda
