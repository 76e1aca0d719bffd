#include "ops/sparse_attention/sparse_attention.h"

#include "ops/quantize/group_quantize.h"
#include "ops/sparse_attention/sparse_attention_impl.h"
#include "ops/validate.h"

namespace deepinfer {

Status SparseAttention(const SparseAttentionArgs& args, Stream& stream) {
  const int64_t rows = args.layout.num_rows();
  DI_RETURN_IF_ERROR(ExpectTensor(args.q, DType::kBf16, {rows, -1, -1}, "SparseAttention", "q"));
  const int64_t heads = args.q.dim(1);
  const int64_t dim = args.q.dim(2);
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.window_records, DType::kU8, {rows, Q8RecordBytes(dim)}, "SparseAttention", "window_records"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.rings, DType::kU8, {-1, -1, Q8RecordBytes(dim)}, "SparseAttention", "rings"));
  if (args.rings.dim(1) < args.window) {
    return Fail(Code::kInvalidArgument,
                fmt::format("SparseAttention: a ring of {} rows cannot hold a window of {}.", args.rings.dim(1), args.window),
                "rings");
  }
  if (!args.kv_blocks.empty()) {
    DI_RETURN_IF_ERROR(
        ExpectTensor(args.kv_blocks, DType::kU8, {-1, -1, Q4ERecordBytes(dim)}, "SparseAttention", "kv_blocks"));
    DI_RETURN_IF_ERROR(ExpectTensor(args.selected, DType::kI32, {rows, -1}, "SparseAttention", "selected"));
  }
  DI_RETURN_IF_ERROR(ExpectTensor(args.sink, DType::kF32, {heads}, "SparseAttention", "sink"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.table, DType::kF32, {rows, -1, 2}, "SparseAttention", "table"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.out, DType::kBf16, {rows, heads * dim}, "SparseAttention", "out"));
  stream.pool().ParallelForDynamic(
      rows, 1, [&](int64_t begin, int64_t end, int) { reference::SparseAttention(args, begin, end); });
  return {};
}

}  // namespace deepinfer
