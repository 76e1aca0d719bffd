#include "ops/embedding/embedding.h"

#include <cstring>

#include "ops/embedding/embedding_impl.h"
#include "ops/validate.h"

namespace deepinfer {

Status Embedding(const EmbeddingArgs& args, Stream& stream) {
  const int64_t rows = args.ids.rows();
  DI_RETURN_IF_ERROR(ExpectTensor(args.ids, DType::kI32, {rows}, "Embedding", "ids"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.table, DType::kBf16, {-1, -1}, "Embedding", "table"));
  const int64_t hidden = args.table.dim(1);
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.streams, DType::kBf16, {rows, -1, hidden}, "Embedding", "streams"));
  const int64_t streams = args.streams.dim(1);
  if (!args.first_pre.empty()) {
    DI_RETURN_IF_ERROR(
        ExpectTensor(args.first_pre, DType::kF32, {rows, streams}, "Embedding", "first_pre"));
  }
  if (stream.device().kind == DeviceKind::kCuda) return cuda::Embedding(args, stream);
  const int32_t* ids = args.ids.Row<int32_t>(0);
  const size_t row_bytes = static_cast<size_t>(hidden) * 2;
  stream.pool().ParallelFor(
      rows,
      [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; ++r) {
          const char* source = static_cast<const char*>(args.table.data()) +
                               static_cast<int64_t>(row_bytes) * ids[r];
          char* target = reinterpret_cast<char*>(args.streams.Row<uint16_t>(r));
          for (int64_t s = 0; s < streams; ++s)
            std::memcpy(target + s * static_cast<int64_t>(row_bytes), source, row_bytes);
          if (args.first_pre.empty()) continue;
          for (int64_t s = 0; s < streams; ++s)
            args.first_pre.Row<float>(r)[s] = s == 0 ? 1.0f : 0.0f;
        }
      },
      16);
  return {};
}

}  // namespace deepinfer
