#include "ops/rms_norm/rms_norm.h"

#include "ops/dispatch.h"
#include "ops/quantize/group_quantize.h"
#include "ops/rms_norm/rms_norm_impl.h"
#include "ops/validate.h"

namespace deepinfer {

Status RmsNorm(const RmsNormArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(ExpectTensor(args.x, DType::kBf16, {-1, -1}, "RmsNorm", "x"));
  const int64_t rows = args.x.rows();
  const int64_t channels = args.x.dim(1);
  DI_RETURN_IF_ERROR(ExpectTensor(args.weight, DType::kBf16, {channels}, "RmsNorm", "weight"));
  if (!args.y.empty())
    DI_RETURN_IF_ERROR(ExpectTensor(args.y, DType::kBf16, {rows, channels}, "RmsNorm", "y"));
  if (!args.y_grid.empty()) {
    DI_RETURN_IF_ERROR(
        ExpectTensor(args.y_grid, DType::kBf16, {rows, channels}, "RmsNorm", "y_grid"));
    if (channels % kQ8Group != 0) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("RmsNorm: {} channels are not a multiple of 32.", channels), "x");
    }
  }
  if (stream.device().kind == DeviceKind::kCuda) return cuda::RmsNorm(args, stream);
  const bool use_reference = UseReference(stream, channels);
  stream.pool().ParallelFor(rows, [&](int64_t begin, int64_t end, int) {
    if (use_reference) return reference::RmsNorm(args, begin, end);
    cpu::RmsNorm(stream.cpu_level(), args, begin, end);
  });
  return {};
}

}  // namespace deepinfer
