// GatedLinear on a GPU: the kernel for few rows of ops/linear/linear_decode.cuh with gate and up
// strips of the same outputs in one block, and the activation and quantisation where it writes
// outputs.
#include "device.cuh"
#include "ops/gated_linear/gated_linear_impl.h"
#include "ops/linear/linear_decode.h"
#include "ops/linear/linear_pack.h"
#include "ops/linear/linear_prefill.h"
#include "ops/moe/moe.h"

namespace deepinfer::cuda {
namespace {

// The formula step by step.
Status RunReference(const GatedLinearArgs& args, DecodeWork work, Stream& stream) {
  ScratchScope scratch(stream);
  const WeightFormat format = args.gate_weights[0]->format();
  const TensorView up = scratch.Tensor(DType::kBf16, {args.out.rows(), args.out.dim(1)});
  DecodeWork up_work = work;
  work.problems[0].up = nullptr;
  DI_RETURN_IF_ERROR(LaunchLinearReference(format, work, stream));
  DecodeProblem& problem = up_work.problems[0];
  problem.weight = problem.up;
  problem.weight_step = problem.up_step;
  problem.weight_factor = problem.up_factor;
  problem.up = nullptr;
  problem.y = up.data();
  problem.y_stride = up.row_stride();
  DI_RETURN_IF_ERROR(LaunchLinearReference(format, up_work, stream));
  return Swiglu({.gate = args.out,
                 .up = up,
                 .row_weight = args.row_weight,
                 .limit = args.limit,
                 .out = args.out,
                 .numerics = args.numerics},
                stream);
}

}  // namespace

Status GatedLinear(const GatedLinearArgs& args, Stream& stream) {
  if (args.out.rows() == 0) return {};
  for (const std::span<const LinearWeight* const> weights : {args.gate_weights, args.up_weights}) {
    for (const LinearWeight* weight : weights) {
      if (weight->packed()->layout == LinearLayout::kCuda) continue;
      return Fail(Code::kInvalidArgument,
                  "A weight of a gated linear was packed for another device than the stream's.",
                  "gate_weights");
    }
  }
  if (TakesManyRows(args.out.rows(), std::ssize(args.gate_weights), true, *args.gate_weights[0],
                    args.x, stream))
    return PrefillGatedLinear(args, stream);
  const LinearWeight& up = *args.up_weights[0];
  DecodeWork work;
  work.num_problems = 1;
  DecodeProblem& problem = work.problems[0];
  problem = DecodeProblemOf(*args.gate_weights[0], args.x, args.out);
  problem.quantize = true;
  problem.up = up.packed()->cuda->data;
  problem.up_factor = DecodeProblemOf(up, args.x, args.out).weight_factor;
  DI_ASSIGN_OR_RETURN(problem.weight_step, WeightStep(args.gate_weights));
  DI_ASSIGN_OR_RETURN(problem.up_step, WeightStep(args.up_weights));
  if (!args.group_offsets.empty()) {
    work.groups = static_cast<int>(args.gate_weights.size());
    work.group_offsets = args.group_offsets.Row<int32_t>(0);
  }
  if (!args.row_index.empty()) work.row_index = args.row_index.Row<int32_t>(0);
  if (!args.row_weight.empty()) work.row_weight = args.row_weight.Row<float>(0);
  work.limit = args.limit;
  work.reference_numerics = args.numerics == Numerics::kReference;
  if (stream.use_reference()) return RunReference(args, work, stream);
  return LaunchDecode(args.gate_weights[0]->format(), work, stream);
}

}  // namespace deepinfer::cuda
