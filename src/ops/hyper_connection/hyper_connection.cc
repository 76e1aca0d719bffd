#include "ops/hyper_connection/hyper_connection.h"

#include "ops/hyper_connection/hyper_connection_impl.h"
#include "ops/quantize/group_quantize.h"
#include "ops/validate.h"

namespace deepinfer {

Status HcMix(const HcMixArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(ExpectTensor(args.streams, DType::kBf16, {-1, kHcStreams, -1}, "HcMix", "streams"));
  const int64_t rows = args.streams.rows();
  const int64_t width = args.streams.row_size();
  DI_RETURN_IF_ERROR(ExpectTensor(args.fn, DType::kF32, {kHcCoefficients, width}, "HcMix", "fn"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.base, DType::kF32, {kHcCoefficients}, "HcMix", "base"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.scale, DType::kF32, {3}, "HcMix", "scale"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.pre, DType::kF32, {rows, 4}, "HcMix", "pre"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.post, DType::kF32, {rows, 4}, "HcMix", "post"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.comb, DType::kF32, {rows, 16}, "HcMix", "comb"));
  stream.pool().ParallelFor(rows, [&](int64_t begin, int64_t end, int) { reference::HcMix(args, begin, end); });
  return {};
}

Status HcCollapseNorm(const HcCollapseNormArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(ExpectTensor(args.streams, DType::kBf16, {-1, kHcStreams, -1}, "HcCollapseNorm", "streams"));
  const int64_t hidden = args.streams.dim(2);
  const int64_t rows = args.row_index.empty() ? args.streams.rows() : args.row_index.rows();
  DI_RETURN_IF_ERROR(ExpectTensor(args.pre, DType::kF32, {args.streams.rows(), 4}, "HcCollapseNorm", "pre"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.weight, DType::kBf16, {hidden}, "HcCollapseNorm", "weight"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.y, DType::kBf16, {rows, hidden}, "HcCollapseNorm", "y"));
  if (!args.y_grid.empty()) {
    DI_RETURN_IF_ERROR(ExpectTensor(args.y_grid, DType::kBf16, {rows, hidden}, "HcCollapseNorm", "y_grid"));
    if (hidden % kQ8Group != 0) {
      return Fail(Code::kInvalidArgument, fmt::format("HcCollapseNorm: hidden {} is not a multiple of 32.", hidden));
    }
  }
  stream.pool().ParallelFor(rows, [&](int64_t begin, int64_t end, int) { reference::HcCollapseNorm(args, begin, end); });
  return {};
}

Status HcExpand(const HcExpandArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(ExpectTensor(args.x, DType::kBf16, {-1, -1}, "HcExpand", "x"));
  const int64_t rows = args.x.rows();
  DI_RETURN_IF_ERROR(ExpectTensor(args.post, DType::kF32, {rows, 4}, "HcExpand", "post"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.comb, DType::kF32, {rows, 16}, "HcExpand", "comb"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.streams, DType::kBf16, {rows, kHcStreams, args.x.dim(1)}, "HcExpand", "streams"));
  stream.pool().ParallelFor(rows, [&](int64_t begin, int64_t end, int) { reference::HcExpand(args, begin, end); });
  return {};
}

}  // namespace deepinfer
