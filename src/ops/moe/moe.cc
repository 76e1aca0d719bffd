#include "ops/moe/moe.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/dispatch.h"
#include "ops/moe/moe_impl.h"
#include "ops/quantize/group_quantize.h"
#include "ops/validate.h"

namespace deepinfer {

namespace {

// All but the logits, of so many rows and experts.
Status CheckSelect(const RouterSelectArgs& args, int64_t rows, int64_t experts) {
  DI_RETURN_IF_ERROR(ExpectTensor(args.bias, DType::kF32, {experts}, "RouterSelect", "bias"));
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.experts, DType::kI32, {rows, -1}, "RouterSelect", "experts"));
  const int64_t k = args.experts.dim(1);
  DI_RETURN_IF_ERROR(ExpectTensor(args.weights, DType::kF32, {rows, k}, "RouterSelect", "weights"));
  if (k > experts) {
    return Fail(Code::kInvalidArgument, fmt::format("RouterSelect: {} of {} experts.", k, experts),
                "experts");
  }
  return {};
}

Status CheckSelect(const RouterSelectArgs& args) {
  DI_RETURN_IF_ERROR(ExpectTensor(args.logits, DType::kF32, {-1, -1}, "RouterSelect", "logits"));
  return CheckSelect(args, args.logits.rows(), args.logits.dim(1));
}

Status CheckGroup(const GroupByExpertArgs& args) {
  DI_RETURN_IF_ERROR(ExpectTensor(args.experts, DType::kI32, {-1, -1}, "GroupByExpert", "experts"));
  const int64_t rows = args.experts.rows();
  const int64_t k = args.experts.dim(1);
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.weights, DType::kF32, {rows, k}, "GroupByExpert", "weights"));
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.row_index, DType::kI32, {rows * k}, "GroupByExpert", "row_index"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.grouped_weight, DType::kF32, {rows * k}, "GroupByExpert",
                                  "grouped_weight"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.group_offsets, DType::kI32, {args.num_experts + 1},
                                  "GroupByExpert", "group_offsets"));
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.slot_position, DType::kI32, {rows, k}, "GroupByExpert", "slot_position"));
  return {};
}

Status ExpectHalvesOfOne(const RouterSelectArgs& select, const GroupByExpertArgs& group,
                         int64_t experts) {
  if (group.experts.data() == select.experts.data() &&
      group.weights.data() == select.weights.data() && group.num_experts >= experts)
    return {};
  return Fail(Code::kInvalidArgument,
              "RouteExperts: its halves must share the experts and their weights.", "experts");
}

}  // namespace

Status RouterSelect(const RouterSelectArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(CheckSelect(args));
  if (stream.device().kind == DeviceKind::kCuda) return cuda::RouterSelect(args, stream);
  const int64_t rows = args.logits.rows();
  stream.pool().ParallelFor(
      rows, [&](int64_t begin, int64_t end, int) { reference::RouterSelect(args, begin, end); }, 4);
  return {};
}

Status GroupByExpert(const GroupByExpertArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(CheckGroup(args));
  if (stream.device().kind == DeviceKind::kCuda) return cuda::GroupByExpert(args, stream);
  const int64_t rows = args.experts.rows();
  const int64_t k = args.experts.dim(1);
  const int32_t* experts = args.experts.Row<int32_t>(0);
  const float* weights = args.weights.Row<float>(0);
  int32_t* offsets = args.group_offsets.Row<int32_t>(0);
  std::fill(offsets, offsets + args.num_experts + 1, 0);
  for (int64_t i = 0; i < rows * k; ++i) {
    DI_CHECK(experts[i] >= 0 && experts[i] < args.num_experts);
    ++offsets[experts[i] + 1];
  }
  for (int64_t e = 0; e < args.num_experts; ++e) offsets[e + 1] += offsets[e];
  std::vector<int32_t> next(offsets, offsets + args.num_experts);
  for (int64_t i = 0; i < rows * k; ++i) {
    const int32_t position = next[static_cast<size_t>(experts[i])]++;
    args.row_index.Row<int32_t>(0)[position] = static_cast<int32_t>(i / k);
    args.grouped_weight.Row<float>(0)[position] = weights[i];
    args.slot_position.Row<int32_t>(0)[i] = position;
  }
  return {};
}

Status RouteExperts(const RouterSelectArgs& select, const GroupByExpertArgs& group,
                    Stream& stream) {
  DI_RETURN_IF_ERROR(CheckSelect(select));
  DI_RETURN_IF_ERROR(CheckGroup(group));
  DI_RETURN_IF_ERROR(ExpectHalvesOfOne(select, group, select.logits.dim(1)));
  if (stream.device().kind == DeviceKind::kCuda) return cuda::RouteExperts(select, group, stream);
  DI_RETURN_IF_ERROR(RouterSelect(select, stream));
  return GroupByExpert(group, stream);
}

Status Route(const RouteArgs& args, Stream& stream) {
  if (args.weight == nullptr)
    return Fail(Code::kInvalidArgument, "Route has no weight for its logits.", "weight");
  DI_RETURN_IF_ERROR(ExpectTensor(args.x, DType::kBf16, {-1, args.weight->k()}, "Route", "x"));
  const int64_t rows = args.x.rows();
  const int64_t experts = args.weight->n();
  if (!args.select.logits.empty()) {
    return Fail(Code::kInvalidArgument, "Route: 'logits' are its own, none may be given.",
                "logits");
  }
  DI_RETURN_IF_ERROR(CheckSelect(args.select, rows, experts));
  DI_RETURN_IF_ERROR(CheckGroup(args.group));
  DI_RETURN_IF_ERROR(ExpectHalvesOfOne(args.select, args.group, experts));
  if (stream.device().kind == DeviceKind::kCuda) return cuda::Route(args, stream);
  ScratchScope scratch(stream);
  RouterSelectArgs select = args.select;
  select.logits = scratch.Tensor(DType::kF32, {rows, experts});
  DI_RETURN_IF_ERROR(Linear({.x = args.x, .weight = args.weight, .y = select.logits}, stream));
  return RouteExperts(select, args.group, stream);
}

Status Swiglu(const SwigluArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(ExpectTensor(args.gate, DType::kBf16, {-1, -1}, "Swiglu", "gate"));
  const int64_t rows = args.gate.rows();
  const int64_t channels = args.gate.dim(1);
  DI_RETURN_IF_ERROR(ExpectTensor(args.up, DType::kBf16, {rows, channels}, "Swiglu", "up"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.out, DType::kBf16, {rows, channels}, "Swiglu", "out"));
  if (!args.row_weight.empty())
    DI_RETURN_IF_ERROR(ExpectTensor(args.row_weight, DType::kF32, {rows}, "Swiglu", "row_weight"));
  if (channels % kQ8Group != 0) {
    return Fail(Code::kInvalidArgument,
                fmt::format("Swiglu: {} channels are not a multiple of 32.", channels), "gate");
  }
  if (stream.device().kind == DeviceKind::kCuda) return cuda::Swiglu(args, stream);
  if (UseReference(stream, channels)) {
    stream.pool().ParallelFor(
        rows, [&](int64_t begin, int64_t end, int) { reference::Swiglu(args, begin, end); });
  } else {
    ForChannelBlocks(stream, rows, channels, [&](int64_t row, int64_t begin, int64_t end) {
      cpu::Swiglu(stream.cpu_level(), args, row, begin, end);
    });
  }
  return {};
}

Status MoeCombine(const MoeCombineArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(ExpectTensor(args.shared, DType::kBf16, {-1, -1}, "MoeCombine", "shared"));
  const int64_t rows = args.shared.rows();
  const int64_t hidden = args.shared.dim(1);
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.slot_position, DType::kI32, {rows, -1}, "MoeCombine", "slot_position"));
  const int64_t k = args.slot_position.dim(1);
  DI_RETURN_IF_ERROR(ExpectTensor(args.experts, DType::kI32, {rows, k}, "MoeCombine", "experts"));
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.routed, DType::kBf16, {rows * k, hidden}, "MoeCombine", "routed"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.y, DType::kBf16, {rows, hidden}, "MoeCombine", "y"));
  if (stream.device().kind == DeviceKind::kCuda) return cuda::MoeCombine(args, stream);
  if (UseReference(stream, hidden)) {
    stream.pool().ParallelFor(
        rows, [&](int64_t begin, int64_t end, int) { reference::MoeCombine(args, begin, end); });
  } else {
    ForChannelBlocks(stream, rows, hidden, [&](int64_t row, int64_t begin, int64_t end) {
      cpu::MoeCombine(stream.cpu_level(), args, row, begin, end);
    });
  }
  return {};
}

}  // namespace deepinfer
