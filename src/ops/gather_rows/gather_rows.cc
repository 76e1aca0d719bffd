#include "ops/gather_rows/gather_rows.h"

#include <cstring>

#include "ops/gather_rows/gather_rows_impl.h"
#include "ops/validate.h"

namespace deepinfer {

Status GatherRows(const GatherRowsArgs& args, Stream& stream) {
  const int64_t count = args.row_index.rows();
  DI_RETURN_IF_ERROR(ExpectTensor(args.row_index, DType::kI32, {count}, "GatherRows", "row_index"));
  if (args.out.dtype() != args.source.dtype() || args.out.rank() != args.source.rank() ||
      args.out.rows() != count || args.out.row_size() != args.source.row_size()) {
    return Fail(Code::kInvalidArgument,
                fmt::format("GatherRows: 'out' is {}, expected {} rows of {}.", args.out.ToString(),
                            count, args.source.ToString()),
                "out");
  }
  if (stream.device().kind == DeviceKind::kCuda) return cuda::GatherRows(args, stream);
  const int64_t size = DTypeBytes(args.source.dtype());
  const auto bytes = static_cast<size_t>(args.source.row_size() * size);
  const int32_t* rows = args.row_index.Row<int32_t>(0);
  const auto* source = static_cast<const uint8_t*>(args.source.data());
  auto* out = static_cast<uint8_t*>(args.out.data());
  stream.pool().ParallelFor(
      count,
      [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) {
          std::memcpy(out + i * args.out.row_stride() * size,
                      source + rows[i] * args.source.row_stride() * size, bytes);
        }
      },
      8);
  return {};
}

}  // namespace deepinfer
