#include "ops/quantize/quantize.h"

#include "ops/dispatch.h"
#include "ops/quantize/group_quantize.h"
#include "ops/quantize/quantize_impl.h"
#include "ops/validate.h"

namespace deepinfer {

Status QuantizeFp8(const QuantizeFp8Args& args, Stream& stream) {
  const int64_t rows = args.x.rows();
  const int64_t channels = args.x.row_size();
  if (args.x.dtype() != DType::kBf16 && args.x.dtype() != DType::kF32) {
    return Fail(Code::kInvalidArgument, "QuantizeFp8: 'x' is neither bf16 nor f32.", "x");
  }
  DI_RETURN_IF_ERROR(ExpectTensor(args.y, DType::kBf16, {rows, channels}, "QuantizeFp8", "y"));
  if (channels % kQ8Group != 0) {
    return Fail(
        Code::kInvalidArgument,
        fmt::format("QuantizeFp8: {} channels are not a multiple of {}.", channels, kQ8Group), "x");
  }
  if (stream.device().kind == DeviceKind::kCuda) return cuda::QuantizeFp8(args, stream);
  if (UseReference(stream, channels)) {
    stream.pool().ParallelFor(
        rows, [&](int64_t begin, int64_t end, int) { reference::QuantizeFp8(args, begin, end); });
  } else {
    ForChannelBlocks(stream, rows, channels, [&](int64_t row, int64_t begin, int64_t end) {
      cpu::QuantizeFp8(stream.cpu_level(), args, row, begin, end);
    });
  }
  return {};
}

}  // namespace deepinfer
