#include "ops/sample_rows/sample_rows.h"

#include <vector>

#include "ops/sample_rows/sample_row.h"
#include "ops/sample_rows/sample_rows_impl.h"
#include "ops/validate.h"

namespace deepinfer {
namespace {

template <class T>
std::span<const T> Range(const TensorView& array, int32_t begin, int32_t end) {
  return std::span<const T>(static_cast<const T*>(array.data()) + begin,
                            static_cast<size_t>(end - begin));
}

}  // namespace

Status SampleRows(const SampleRowsArgs& args, Stream& stream) {
  constexpr const char* kOp = "SampleRows";
  const int64_t count = args.draws.rows();
  if (count == 0) return {};
  DI_RETURN_IF_ERROR(ExpectTensor(args.logits, DType::kF32, {-1, -1}, kOp, "logits"));
  const int64_t vocab = args.logits.dim(1);
  if (vocab < 1 || vocab > kMaxSampledVocab) {
    return Fail(Code::kInvalidArgument,
                fmt::format("SampleRows: 'logits' has {} columns; allowed are 1 to {}.", vocab,
                            kMaxSampledVocab),
                "logits");
  }
  DI_RETURN_IF_ERROR(ExpectTensor(args.draws, DType::kU8, {count, sizeof(RowDraw)}, kOp, "draws"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.edits, DType::kU8, {-1, sizeof(RowEdit)}, kOp, "edits"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.tokens, DType::kI32, {-1}, kOp, "tokens"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.masks, DType::kI32, {-1, (vocab + 31) / 32}, kOp, "masks"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.sampled, DType::kI32, {-1}, kOp, "sampled"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.out, DType::kU8, {count, sizeof(SampledRow)}, kOp, "out"));
  if (stream.device().kind == DeviceKind::kCuda) return cuda::SampleRows(args, stream);
  const auto* draws = static_cast<const RowDraw*>(args.draws.data());
  auto* out = static_cast<SampledRow*>(args.out.data());
  std::vector<RowScratch> scratch(static_cast<size_t>(stream.pool().num_threads()));
  stream.pool().ParallelForDynamic(count, 1, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t i = begin; i < end; ++i) {
      const RowDraw& draw = draws[i];
      RowLists lists;
      if (draw.mask >= 0) {
        lists.mask = std::span<const uint32_t>(
            reinterpret_cast<const uint32_t*>(args.masks.Row<int32_t>(draw.mask)),
            static_cast<size_t>((vocab + 31) / 32));
      }
      lists.edits = Range<RowEdit>(args.edits, draw.edits_begin, draw.edits_end);
      lists.excluded = Range<int32_t>(args.tokens, draw.excluded_begin, draw.excluded_end);
      lists.ends = Range<int32_t>(args.tokens, draw.ends_begin, draw.ends_end);
      const std::span<const float> row(args.logits.Row<float>(draw.logit_row),
                                       static_cast<size_t>(vocab));
      out[i] = SampleRow(row, draw, lists, scratch[static_cast<size_t>(worker)]);
      if (draw.slot >= 0) {
        args.sampled.Row<int32_t>(0)[draw.slot] =
            out[i].status == RowStatus::kDrawn ? out[i].token : 0;
      }
    }
  });
  return {};
}

Status PlaceSampledTokens(const PlaceSampledTokensArgs& args, Stream& stream) {
  constexpr const char* kOp = "PlaceSampledTokens";
  const int64_t rows = args.token_ids.rows();
  DI_RETURN_IF_ERROR(ExpectTensor(args.token_ids, DType::kI32, {rows}, kOp, "token_ids"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.slots, DType::kI32, {rows}, kOp, "slots"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.sampled, DType::kI32, {-1}, kOp, "sampled"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.token_map, DType::kI32, {-1}, kOp, "token_map"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.lookback, DType::kI32, {rows, -1}, kOp, "lookback"));
  if (stream.device().kind == DeviceKind::kCuda) return cuda::PlaceSampledTokens(args, stream);
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t slot = args.slots.Row<int32_t>(0)[row];
    if (slot < 0) continue;
    const int32_t token = args.sampled.Row<int32_t>(0)[slot];
    args.token_ids.Row<int32_t>(0)[row] = token;
    args.lookback.Row<int32_t>(row)[0] = args.token_map.Row<int32_t>(0)[token];
  }
  return {};
}

}  // namespace deepinfer
