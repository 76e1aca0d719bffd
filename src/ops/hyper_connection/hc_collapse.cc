#include "ops/hyper_connection/hc_collapse.h"

#include <cmath>
#include <vector>

#include "ops/hyper_connection/hc_collapse_impl.h"
#include "ops/hyper_connection/hyper_connection.h"
#include "ops/quantize/group_quantize.h"
#include "ops/row_access.h"
#include "ops/validate.h"

namespace deepinfer {
namespace {

// The bits of the fused sum with weights of 1/4, which scale exactly: fused operations would be
// calls on a CPU of the lowest level, and the mean is taken of every row of a prompt.
void Mean(const Bf16* streams, int64_t hidden, float* out) {
  for (int64_t d = 0; d < hidden; ++d) {
    float sum = Bf16ToF32(streams[d]);
    for (int64_t s = 1; s < kHcStreams; ++s) sum += Bf16ToF32(streams[s * hidden + d]);
    out[d] = RoundToBf16(0.25f * sum);
  }
}

void WeightedSum(const Bf16* streams, const float* pre, int64_t hidden, float* out) {
  for (int64_t d = 0; d < hidden; ++d) {
    float sum = pre[0] * Bf16ToF32(streams[d]);
    for (int64_t s = 1; s < kHcStreams; ++s)
      sum = std::fma(pre[s], Bf16ToF32(streams[s * hidden + d]), sum);
    out[d] = RoundToBf16(sum);
  }
}

}  // namespace

Status HcCollapse(const HcCollapseArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.streams, DType::kBf16, {-1, kHcStreams, -1}, "HcCollapse", "streams"));
  const int64_t rows = args.streams.rows();
  const int64_t hidden = args.streams.dim(2);
  const bool weighted = args.pre.rank() > 0;
  if (weighted)
    DI_RETURN_IF_ERROR(ExpectTensor(args.pre, DType::kF32, {rows, 4}, "HcCollapse", "pre"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.y, DType::kBf16, {rows, hidden}, "HcCollapse", "y"));
  if (args.quantize && hidden % kQ8Group != 0) {
    return Fail(Code::kInvalidArgument,
                fmt::format("HcCollapse: hidden {} is not a multiple of 32.", hidden), "y");
  }
  if (stream.device().kind == DeviceKind::kCuda) return cuda::HcCollapse(args, stream);
  stream.pool().ParallelFor(rows, [&](int64_t begin, int64_t end, int) {
    std::vector<float> x(static_cast<size_t>(hidden));
    for (int64_t t = begin; t < end; ++t) {
      if (weighted) {
        WeightedSum(args.streams.Row<Bf16>(t), args.pre.Row<float>(t), hidden, x.data());
      } else {
        Mean(args.streams.Row<Bf16>(t), hidden, x.data());
      }
      if (args.quantize) Q8InPlace(x.data(), hidden);
      StoreRowBf16(x.data(), hidden, args.y.Row<Bf16>(t));
    }
  });
  return {};
}

}  // namespace deepinfer
