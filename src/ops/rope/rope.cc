#include "ops/rope/rope.h"

#include <cmath>

#include "ops/dispatch.h"
#include "ops/quantize/group_quantize.h"
#include "ops/rope/rope_impl.h"
#include "ops/validate.h"

namespace deepinfer {

Status RopeTable(const RopeTableArgs& args, Stream& stream) {
  const int64_t rows = args.positions.rows();
  const int64_t pairs = args.frequencies.rows();
  DI_RETURN_IF_ERROR(ExpectTensor(args.positions, DType::kI32, {rows}, "RopeTable", "positions"));
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.frequencies, DType::kF32, {pairs}, "RopeTable", "frequencies"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.table, DType::kF32, {rows, pairs, 2}, "RopeTable", "table"));
  if (stream.device().kind == DeviceKind::kCuda) return cuda::RopeTable(args, stream);
  const int32_t* positions = args.positions.Row<int32_t>(0);
  const float* frequencies = args.frequencies.Row<float>(0);
  stream.pool().ParallelFor(
      rows,
      [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; ++r) {
          float* out = args.table.Row<float>(r);
          const auto position = static_cast<float>(static_cast<int64_t>(positions[r]) * args.scale);
          for (int64_t i = 0; i < pairs; ++i) {
            const float angle = position * frequencies[i];
            out[2 * i] = static_cast<float>(std::cos(static_cast<double>(angle)));
            out[2 * i + 1] = static_cast<float>(std::sin(static_cast<double>(angle)));
          }
        }
      },
      8);
  return {};
}

Status Rope(const RopeArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(ExpectTensor(args.x, DType::kBf16, {-1, -1, -1}, "Rope", "x"));
  const int64_t rows = args.x.rows();
  const int64_t heads = args.x.dim(1);
  const int64_t channels = args.x.dim(2);
  DI_RETURN_IF_ERROR(ExpectTensor(args.table, DType::kF32, {rows, -1, 2}, "Rope", "table"));
  const int64_t pairs = args.table.dim(1);
  if (2 * pairs > channels || (args.quantize_q4p && channels % kQ4PGroup != 0)) {
    return Fail(Code::kInvalidArgument,
                fmt::format("Rope: {} channels do not fit {} rotated pairs{}.", channels, pairs,
                            args.quantize_q4p ? " in groups of 32" : ""),
                "x");
  }
  if (stream.device().kind == DeviceKind::kCuda) return cuda::Rope(args, stream);
  const bool use_reference = UseReference(stream, 2 * pairs);
  stream.pool().ParallelFor(
      rows * heads,
      [&](int64_t begin, int64_t end, int) {
        if (use_reference) return reference::Rope(args, begin, end);
        cpu::Rope(stream.cpu_level(), args, begin, end);
      },
      32);
  return {};
}

}  // namespace deepinfer
