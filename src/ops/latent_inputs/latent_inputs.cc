#include "ops/latent_inputs/latent_inputs.h"

#include "ops/cache_records/cache_records.h"
#include "ops/latent_inputs/latent_inputs_impl.h"
#include "ops/quantize/group_quantize.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/validate.h"

namespace deepinfer {

Status LatentInputs(const LatentInputsArgs& args, Stream& stream) {
  const int64_t rows = args.layout.num_rows();
  const bool has_q = args.q.rank() > 0;
  int64_t rank = 0;
  if (has_q) {
    DI_RETURN_IF_ERROR(ExpectTensor(args.q, DType::kBf16, {rows, -1}, "LatentInputs", "q"));
    rank = args.q.dim(1);
    DI_RETURN_IF_ERROR(
        ExpectTensor(args.q_weight, DType::kBf16, {rank}, "LatentInputs", "q_weight"));
    DI_RETURN_IF_ERROR(
        ExpectTensor(args.q_grid, DType::kBf16, {rows, rank}, "LatentInputs", "q_grid"));
  }
  DI_RETURN_IF_ERROR(ExpectTensor(args.kv, DType::kBf16, {rows, -1}, "LatentInputs", "kv"));
  const int64_t dim = args.kv.dim(1);
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.kv_weight, DType::kBf16, {dim}, "LatentInputs", "kv_weight"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.table, DType::kF32, {rows, -1, 2}, "LatentInputs", "table"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.records, DType::kU8, {rows, -1}, "LatentInputs", "records"));
  DI_RETURN_IF_ERROR(ExpectRecords(args.records, Q8RecordBytes(dim), Bf16RecordBytes(dim),
                                   "LatentInputs", "records"));
  if (!args.pages.empty()) {
    DI_RETURN_IF_ERROR(ExpectTensor(args.pages, DType::kU8, {-1, -1, args.records.dim(1)},
                                    "LatentInputs", "pages"));
  }
  if (rank % kQ8Group != 0 || dim % kQ8Group != 0 || 2 * args.table.dim(1) > dim) {
    return Fail(Code::kInvalidArgument,
                fmt::format("LatentInputs: {} and {} channels must be multiples of {}, and hold {} "
                            "rotated pairs.",
                            rank, dim, kQ8Group, args.table.dim(1)),
                "q");
  }
  if (stream.device().kind == DeviceKind::kCuda) return cuda::LatentInputs(args, stream);
  if (has_q) {
    DI_RETURN_IF_ERROR(RmsNorm(
        {.x = args.q, .weight = args.q_weight, .y = {}, .y_grid = args.q_grid, .eps = args.eps},
        stream));
  }
  DI_RETURN_IF_ERROR(
      RmsNorm({.x = args.kv, .weight = args.kv_weight, .y = args.kv, .y_grid = {}, .eps = args.eps},
              stream));
  DI_RETURN_IF_ERROR(
      WindowRecords({.kv = args.kv, .table = args.table, .records = args.records}, stream));
  if (args.pages.empty()) return {};
  return WriteWindowPages({.records = args.records, .layout = args.layout, .pages = args.pages},
                          stream);
}

}  // namespace deepinfer
