#include "ops/sparse_attention/sparse_attention.h"

#include <algorithm>

#include "ops/dispatch.h"
#include "ops/quantize/group_quantize.h"
#include "ops/rope/rope.h"
#include "ops/sparse_attention/sparse_attention_impl.h"
#include "ops/validate.h"

namespace deepinfer {
namespace {

cpu::AttentionScratch AllocateScratch(int64_t heads, int64_t head_dim, ScratchScope* scope) {
  const int64_t stride = cpu::AttentionStride(head_dim);
  cpu::AttentionScratch scratch;
  scratch.keys = scope->Allocate<float>(kAttentionBlock * stride);
  scratch.q = scope->Allocate<float>(heads * stride);
  scratch.out = scope->Allocate<float>(heads * stride);
  scratch.p = scope->Allocate<float>(heads * kAttentionBlock);
  scratch.rescale = scope->Allocate<float>(heads);
  std::fill_n(scratch.p, heads * kAttentionBlock, 0.0f);
  return scratch;
}

// Enough rows for every thread: whole rows. Else the heads of one row after the other are spread
// over the threads. A head's bits depend on its own query and the row's keys only, so both give the
// same.
void RunVector(const SparseAttentionArgs& args, Stream& stream) {
  ThreadPool& pool = stream.pool();
  const CpuLevel level = stream.cpu_level();
  const int64_t rows = args.layout.num_rows();
  const int64_t heads = args.q.dim(1);
  const int64_t dim = args.q.dim(2);
  ScratchScope scope(stream);
  std::vector<cpu::AttentionScratch> scratch;
  for (int i = 0; i < pool.num_threads(); ++i)
    scratch.push_back(AllocateScratch(heads, dim, &scope));
  if (rows >= 2 * pool.num_threads() || pool.num_threads() == 1) {
    pool.ParallelForDynamic(rows, 1, [&](int64_t begin, int64_t end, int worker) {
      KeyList keys;
      for (int64_t row = begin; row < end; ++row) {
        CollectKeys(args, row, &keys);
        cpu::SparseAttention(level, args, row, keys, nullptr, 0, heads,
                             scratch[static_cast<size_t>(worker)]);
      }
    });
    return;
  }
  const int64_t max_keys =
      args.window + args.block_rows + (args.kv_blocks.empty() ? 0 : args.selected.dim(1));
  float* decoded = scope.Allocate<float>(max_keys * cpu::AttentionStride(dim));
  KeyList keys;
  constexpr int64_t kHeadsPerPart = 4;
  for (int64_t row = 0; row < rows; ++row) {
    CollectKeys(args, row, &keys);
    pool.ParallelFor(
        static_cast<int64_t>(keys.records.size()),
        [&](int64_t begin, int64_t end, int) {
          cpu::DecodeKeys(level, keys, begin, end, dim, decoded);
        },
        16);
    pool.ParallelFor((heads + kHeadsPerPart - 1) / kHeadsPerPart,
                     [&](int64_t begin, int64_t end, int worker) {
                       cpu::SparseAttention(level, args, row, keys, decoded, begin * kHeadsPerPart,
                                            std::min(heads, end * kHeadsPerPart),
                                            scratch[static_cast<size_t>(worker)]);
                     });
  }
}

}  // namespace

Status SparseAttention(const SparseAttentionArgs& args, Stream& stream) {
  const int64_t rows = args.layout.num_rows();
  DI_RETURN_IF_ERROR(ExpectTensor(args.q, DType::kBf16, {rows, -1, -1}, "SparseAttention", "q"));
  const int64_t heads = args.q.dim(1);
  const int64_t dim = args.q.dim(2);
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.window_pages, DType::kU8, {-1, -1, -1}, "SparseAttention", "window_pages"));
  DI_RETURN_IF_ERROR(ExpectRecords(args.window_pages, Q8RecordBytes(dim), Bf16RecordBytes(dim),
                                   "SparseAttention", "window_pages"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.window_records, DType::kU8, {rows, args.window_pages.dim(2)},
                                  "SparseAttention", "window_records"));
  if (!args.kv_blocks.empty()) {
    DI_RETURN_IF_ERROR(
        ExpectTensor(args.kv_blocks, DType::kU8, {-1, -1, -1}, "SparseAttention", "kv_blocks"));
    DI_RETURN_IF_ERROR(ExpectRecords(args.kv_blocks, Q4ERecordBytes(dim), Bf16RecordBytes(dim),
                                     "SparseAttention", "kv_blocks"));
    DI_RETURN_IF_ERROR(
        ExpectTensor(args.selected, DType::kI32, {rows, -1}, "SparseAttention", "selected"));
  }
  DI_RETURN_IF_ERROR(ExpectTensor(args.sink, DType::kF32, {heads}, "SparseAttention", "sink"));
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.table, DType::kF32, {rows, -1, 2}, "SparseAttention", "table"));
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.out, DType::kBf16, {rows, heads * dim}, "SparseAttention", "out"));
  if (args.window < 1 || args.block_rows < 0) {
    return Fail(Code::kInvalidArgument,
                fmt::format("SparseAttention: window is {} and block_rows {}; allowed are at least "
                            "1 and 0.",
                            args.window, args.block_rows),
                "window");
  }
  if (dim % kQ8Group != 0 || 2 * args.table.dim(1) > dim) {
    return Fail(
        Code::kInvalidArgument,
        fmt::format(
            "SparseAttention: heads of {} channels do not fit groups of {} and {} rotated pairs.",
            dim, kQ8Group, args.table.dim(1)),
        "q");
  }
  if (stream.device().kind == DeviceKind::kCuda) return cuda::SparseAttention(args, stream);
  if (args.rotate_q) DI_RETURN_IF_ERROR(Rope({.x = args.q, .table = args.table}, stream));
  if (UseReference(stream, 2 * args.table.dim(1)) || heads > cpu::kMaxAttentionHeads) {
    stream.pool().ParallelForDynamic(rows, 1, [&](int64_t begin, int64_t end, int) {
      reference::SparseAttention(args, begin, end);
    });
  } else {
    RunVector(args, stream);
  }
  return {};
}

}  // namespace deepinfer
