// Linears on a GPU: chooses between the kernels for few and for many rows, by the number of rows
// and the shape, and collects what one launch can do. Both give the same bits.
#include <vector>

#include "device.cuh"
#include "ops/linear/linear_decode.h"
#include "ops/linear/linear_impl.h"
#include "ops/linear/linear_pack.h"
#include "ops/linear/linear_prefill.h"
#include "ops/quantize/quantize.h"

namespace deepinfer::cuda {
namespace {

constexpr WeightFormat kFormats[] = {WeightFormat::kBf16, WeightFormat::kFp8Block,
                                     WeightFormat::kFp4Group};

Status LaunchProblems(WeightFormat format, std::span<const DecodeProblem> problems,
                      Stream& stream) {
  while (!problems.empty()) {
    DecodeWork work;
    work.num_problems =
        static_cast<int>(std::min<size_t>(problems.size(), size_t{kMaxDecodeProblems}));
    std::copy_n(problems.begin(), work.num_problems, work.problems);
    problems = problems.subspan(static_cast<size_t>(work.num_problems));
    DI_RETURN_IF_ERROR(stream.use_reference() ? LaunchLinearReference(format, work, stream)
                                              : LaunchDecode(format, work, stream));
  }
  return {};
}

}  // namespace

bool TakesManyRows(int64_t rows, int64_t groups, bool gated, const LinearWeight& weight,
                   const TensorView& x, const Stream& stream) {
  const PrefillWork work{
      .rows = rows / groups, .n = weight.n(), .k = weight.k(), .weights = groups};
  return stream.compute_major() == 9 && !stream.use_reference() && PrefillTakes(x) &&
         PrefillPays(weight.format(), gated, {&work, 1}, stream.sm_count());
}

Status LinearBatch(std::span<const LinearArgs> batch, Stream& stream) {
  std::vector<DecodeProblem> few_rows;
  std::vector<LinearArgs> many_rows;
  std::vector<PrefillWork> work;
  const bool has_many_rows = stream.compute_major() == 9 && !stream.use_reference();
  for (const WeightFormat format : kFormats) {
    few_rows.clear();
    many_rows.clear();
    work.clear();
    // What the kernel for many rows could take, which decides as one launch.
    if (has_many_rows) {
      for (const LinearArgs& args : batch) {
        if (args.weight->format() != format || args.y.rows() == 0 || !PrefillTakes(args.x))
          continue;
        work.push_back({.rows = args.y.rows(), .n = args.weight->n(), .k = args.weight->k()});
      }
    }
    const bool pays = !work.empty() && PrefillPays(format, false, work, stream.sm_count());
    for (const LinearArgs& args : batch) {
      if (args.weight->format() != format || args.y.rows() == 0) continue;
      if (pays && PrefillTakes(args.x)) {
        many_rows.push_back(args);
        continue;
      }
      few_rows.push_back(DecodeProblemOf(*args.weight, args.x, args.y));
      few_rows.back().quantize = args.quantize_y;
    }
    DI_RETURN_IF_ERROR(LaunchProblems(format, few_rows, stream));
    if (!many_rows.empty()) DI_RETURN_IF_ERROR(PrefillLinear(many_rows, stream));
  }
  if (!stream.use_reference()) return {};
  for (const LinearArgs& args : batch) {
    if (args.quantize_y) DI_RETURN_IF_ERROR(QuantizeFp8({.x = args.y, .y = args.y}, stream));
  }
  return {};
}

Status GroupedLinear(const GroupedLinearArgs& args, Stream& stream) {
  if (args.y.rows() == 0) return {};
  if (TakesManyRows(args.y.rows(), std::ssize(args.weights), false, *args.weights[0], args.x,
                    stream))
    return PrefillGroupedLinear(args, stream);
  DecodeWork work;
  work.num_problems = 1;
  work.problems[0] = DecodeProblemOf(*args.weights[0], args.x, args.y);
  DI_ASSIGN_OR_RETURN(work.problems[0].weight_step, WeightStep(args.weights));
  work.groups = static_cast<int>(args.weights.size());
  work.group_offsets = args.group_offsets.Row<int32_t>(0);
  if (!args.row_index.empty()) work.row_index = args.row_index.Row<int32_t>(0);
  const WeightFormat format = args.weights[0]->format();
  return stream.use_reference() ? LaunchLinearReference(format, work, stream)
                                : LaunchDecode(format, work, stream);
}

}  // namespace deepinfer::cuda
