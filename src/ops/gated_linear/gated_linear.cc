#include "ops/gated_linear/gated_linear.h"

#include "ops/gated_linear/gated_linear_impl.h"
#include "ops/moe/moe.h"
#include "ops/quantize/group_quantize.h"
#include "ops/validate.h"

namespace deepinfer {
namespace {

Status RunGrouped(const GatedLinearArgs& args, std::span<const LinearWeight* const> weights,
                  const TensorView& y, Stream& stream) {
  if (args.group_offsets.empty() && args.row_index.empty())
    return Linear({.x = args.x, .weight = weights[0], .y = y}, stream);
  GroupedLinearArgs grouped{.x = args.x,
                            .row_index = args.row_index,
                            .group_offsets = args.group_offsets,
                            .weights = weights,
                            .y = y};
  ScratchScope scratch(stream);
  if (args.group_offsets.empty()) {
    grouped.group_offsets = scratch.Tensor(DType::kI32, {2});
    grouped.group_offsets.Row<int32_t>(0)[0] = 0;
    grouped.group_offsets.Row<int32_t>(0)[1] = static_cast<int32_t>(y.rows());
  }
  return GroupedLinear(grouped, stream);
}

}  // namespace

Status GatedLinear(const GatedLinearArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(ExpectTensor(args.x, DType::kBf16, {-1, -1}, "GatedLinear", "x"));
  const auto groups = static_cast<int64_t>(args.gate_weights.size());
  if (groups == 0 || std::ssize(args.up_weights) != groups ||
      (args.group_offsets.empty() && groups != 1)) {
    return Fail(Code::kInvalidArgument,
                fmt::format("GatedLinear: {} gate weights and {} up weights{}.", groups,
                            args.up_weights.size(),
                            args.group_offsets.empty() ? " without group offsets" : ""),
                "gate_weights");
  }
  if (!args.group_offsets.empty()) {
    DI_RETURN_IF_ERROR(ExpectTensor(args.group_offsets, DType::kI32, {groups + 1}, "GatedLinear",
                                    "group_offsets"));
  }
  DI_RETURN_IF_ERROR(ExpectTensor(args.out, DType::kBf16, {-1, -1}, "GatedLinear", "out"));
  const int64_t rows = args.out.rows();
  const int64_t intermediate = args.out.dim(1);
  if (!args.row_index.empty())
    DI_RETURN_IF_ERROR(
        ExpectTensor(args.row_index, DType::kI32, {rows}, "GatedLinear", "row_index"));
  if (!args.row_weight.empty())
    DI_RETURN_IF_ERROR(
        ExpectTensor(args.row_weight, DType::kF32, {rows}, "GatedLinear", "row_weight"));
  if (intermediate % kQ8Group != 0) {
    return Fail(
        Code::kInvalidArgument,
        fmt::format("GatedLinear: {} outputs are not a multiple of {}.", intermediate, kQ8Group),
        "out");
  }
  if (stream.device().kind == DeviceKind::kCuda) {
    for (const std::span<const LinearWeight* const> weights :
         {args.gate_weights, args.up_weights}) {
      for (const LinearWeight* weight : weights) {
        if (weight != nullptr && weight->packed() != nullptr && weight->n() == intermediate &&
            weight->k() == args.x.dim(1) && weight->format() == args.gate_weights[0]->format())
          continue;
        return Fail(
            Code::kInvalidArgument,
            fmt::format("GatedLinear: a weight is missing or not of [{}, {}] and one format.",
                        intermediate, args.x.dim(1)),
            "gate_weights");
      }
    }
    return cuda::GatedLinear(args, stream);
  }
  ScratchScope scratch(stream);
  const TensorView up = scratch.Tensor(DType::kBf16, {rows, intermediate});
  DI_RETURN_IF_ERROR(RunGrouped(args, args.gate_weights, args.out, stream));
  DI_RETURN_IF_ERROR(RunGrouped(args, args.up_weights, up, stream));
  return Swiglu({.gate = args.out,
                 .up = up,
                 .row_weight = args.row_weight,
                 .limit = args.limit,
                 .out = args.out,
                 .numerics = args.numerics},
                stream);
}

}  // namespace deepinfer
