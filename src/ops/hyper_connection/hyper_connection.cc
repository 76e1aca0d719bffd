#include "ops/hyper_connection/hyper_connection.h"

#include <algorithm>
#include <cmath>

#include "ops/dispatch.h"
#include "ops/hyper_connection/hyper_connection_impl.h"
#include "ops/quantize/group_quantize.h"
#include "ops/validate.h"

namespace deepinfer {
namespace {

Status CheckMix(const HcMixArgs& args) {
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.streams, DType::kBf16, {-1, kHcStreams, -1}, "HcMix", "streams"));
  const int64_t rows = args.streams.rows();
  const int64_t width = args.streams.row_size();
  DI_RETURN_IF_ERROR(ExpectTensor(args.fn, DType::kF32, {kHcCoefficients, width}, "HcMix", "fn"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.base, DType::kF32, {kHcCoefficients}, "HcMix", "base"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.scale, DType::kF32, {3}, "HcMix", "scale"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.pre, DType::kF32, {rows, 4}, "HcMix", "pre"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.post, DType::kF32, {rows, 4}, "HcMix", "post"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.comb, DType::kF32, {rows, 16}, "HcMix", "comb"));
  return {};
}

Status CheckCollapse(const HcCollapseNormArgs& args) {
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.streams, DType::kBf16, {-1, kHcStreams, -1}, "HcCollapseNorm", "streams"));
  const int64_t hidden = args.streams.dim(2);
  const int64_t rows = args.row_index.empty() ? args.streams.rows() : args.row_index.rows();
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.pre, DType::kF32, {args.streams.rows(), 4}, "HcCollapseNorm", "pre"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.weight, DType::kBf16, {hidden}, "HcCollapseNorm", "weight"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.y, DType::kBf16, {rows, hidden}, "HcCollapseNorm", "y"));
  if (!args.y_grid.empty()) {
    DI_RETURN_IF_ERROR(
        ExpectTensor(args.y_grid, DType::kBf16, {rows, hidden}, "HcCollapseNorm", "y_grid"));
    if (hidden % kQ8Group != 0) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("HcCollapseNorm: hidden {} is not a multiple of 32.", hidden));
    }
  }
  return {};
}

Status CheckExpand(const HcExpandArgs& args) {
  DI_RETURN_IF_ERROR(ExpectTensor(args.x, DType::kBf16, {-1, -1}, "HcExpand", "x"));
  const int64_t rows = args.x.rows();
  DI_RETURN_IF_ERROR(ExpectTensor(args.post, DType::kF32, {rows, 4}, "HcExpand", "post"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.comb, DType::kF32, {rows, 16}, "HcExpand", "comb"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.streams, DType::kBf16, {rows, kHcStreams, args.x.dim(1)},
                                  "HcExpand", "streams"));
  return {};
}

void MixVector(const HcMixArgs& args, Stream& stream) {
  ThreadPool& pool = stream.pool();
  const int64_t rows = args.streams.rows();
  const auto width = static_cast<double>(args.streams.row_size());
  ScratchScope scope(stream);
  auto* sums = scope.Allocate<double>(rows * kHcCoefficients);
  auto* squares = scope.Allocate<double>(rows);
  std::fill_n(sums, rows * kHcCoefficients, 0.0);
  std::fill_n(squares, rows, 0.0);
  if (rows >= 2 * pool.num_threads()) {
    pool.ParallelFor(rows, [&](int64_t begin, int64_t end, int) {
      cpu::HcMixSums(stream.cpu_level(), args, begin, end, 0, kHcCoefficients, sums, squares);
    });
  } else {
    pool.ParallelFor(kHcCoefficients / cpu::kHcOutputTile, [&](int64_t begin, int64_t end, int) {
      cpu::HcMixSums(stream.cpu_level(), args, 0, rows, begin * cpu::kHcOutputTile,
                     end * cpu::kHcOutputTile, sums, squares);
    });
  }
  pool.ParallelFor(
      rows,
      [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
          const float r = 1.0f / std::sqrt(static_cast<float>(squares[t] / width) + args.norm_eps);
          float m[kHcCoefficients];
          for (int64_t k = 0; k < kHcCoefficients; ++k)
            m[k] = static_cast<float>(sums[t * kHcCoefficients + k]) * r;
          HcCoefficients(m, args.base.Row<float>(0), args.scale.Row<float>(0),
                         args.sinkhorn_iterations, args.eps, args.pre.Row<float>(t),
                         args.post.Row<float>(t), args.comb.Row<float>(t));
        }
      },
      4);
}

}  // namespace

Status HcMix(const HcMixArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(CheckMix(args));
  if (stream.device().kind == DeviceKind::kCuda) return cuda::HcMix(args, stream);
  const int64_t rows = args.streams.rows();
  if (UseReference(stream, args.streams.row_size())) {
    stream.pool().ParallelFor(
        rows, [&](int64_t begin, int64_t end, int) { reference::HcMix(args, begin, end); });
  } else {
    MixVector(args, stream);
  }
  return {};
}

Status HcCollapseNorm(const HcCollapseNormArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(CheckCollapse(args));
  if (stream.device().kind == DeviceKind::kCuda) return cuda::HcCollapseNorm(args, stream);
  const int64_t rows = args.y.rows();
  const bool use_reference = UseReference(stream, args.streams.dim(2));
  stream.pool().ParallelFor(rows, [&](int64_t begin, int64_t end, int) {
    if (use_reference) return reference::HcCollapseNorm(args, begin, end);
    cpu::HcCollapseNorm(stream.cpu_level(), args, begin, end);
  });
  return {};
}

Status HcExpand(const HcExpandArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(CheckExpand(args));
  if (stream.device().kind == DeviceKind::kCuda) return cuda::HcExpand(args, stream);
  const int64_t rows = args.x.rows();
  if (UseReference(stream, args.x.dim(1))) {
    stream.pool().ParallelFor(
        rows, [&](int64_t begin, int64_t end, int) { reference::HcExpand(args, begin, end); });
  } else {
    ForChannelBlocks(stream, rows, args.x.dim(1), [&](int64_t row, int64_t begin, int64_t end) {
      cpu::HcExpand(stream.cpu_level(), args, row, begin, end);
    });
  }
  return {};
}

Status HcBoundary(const HcBoundaryArgs& args, Stream& stream) {
  const void* streams = args.mix.streams.data();
  if (args.collapse.streams.data() != streams || !args.collapse.row_index.empty() ||
      (!args.expand.x.empty() && args.expand.streams.data() != streams)) {
    return Fail(Code::kInvalidArgument,
                "HcBoundary: its parts must work on the same streams, all rows in order.",
                "streams");
  }
  if (stream.device().kind == DeviceKind::kCuda) {
    if (!args.expand.x.empty()) DI_RETURN_IF_ERROR(CheckExpand(args.expand));
    DI_RETURN_IF_ERROR(CheckMix(args.mix));
    DI_RETURN_IF_ERROR(CheckCollapse(args.collapse));
    return cuda::HcBoundary(args, stream);
  }
  if (!args.expand.x.empty()) DI_RETURN_IF_ERROR(HcExpand(args.expand, stream));
  DI_RETURN_IF_ERROR(HcMix(args.mix, stream));
  return HcCollapseNorm(args.collapse, stream);
}

}  // namespace deepinfer
