#include "ops/draft_block/draft_block.h"

#include <algorithm>
#include <cmath>

#include "ops/draft_block/draft_block_impl.h"
#include "ops/validate.h"
#include "tensor/float_formats.h"

namespace deepinfer {
namespace {

// The first of the largest logits after the bias has been added, or -1.
int64_t AddBias(float* logits, const float* bias, int64_t vocab) {
  int64_t best = -1;
  for (int64_t i = 0; i < vocab; ++i) {
    logits[i] += bias[i];
    if (std::isnan(logits[i])) continue;
    if (best < 0 || logits[i] > logits[best]) best = i;
  }
  return best;
}

}  // namespace

Status BlockRows(const BlockRowsArgs& args, Stream& stream) {
  const int64_t sequences = args.anchors.rows();
  const int64_t rows = args.token_ids.rows();
  DI_RETURN_IF_ERROR(ExpectTensor(args.anchors, DType::kI32, {sequences}, "BlockRows", "anchors"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.lengths, DType::kI32, {sequences}, "BlockRows", "lengths"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.token_ids, DType::kI32, {rows}, "BlockRows", "token_ids"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.positions, DType::kI32, {rows}, "BlockRows", "positions"));
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.row_sequence, DType::kI32, {rows}, "BlockRows", "row_sequence"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.sequence_start, DType::kI32, {sequences + 1}, "BlockRows",
                                  "sequence_start"));
  if (sequences == 0 || rows % sequences != 0) {
    return Fail(Code::kInvalidArgument,
                fmt::format("BlockRows: {} rows are not blocks of {} sequences.", rows, sequences),
                "token_ids");
  }
  if (stream.device().kind == DeviceKind::kCuda) return cuda::BlockRows(args, stream);
  const int64_t slots = rows / sequences;
  for (int64_t r = 0; r < sequences; ++r) {
    args.sequence_start.Row<int32_t>(0)[r] = static_cast<int32_t>(r * slots);
    for (int64_t s = 0; s < slots; ++s) {
      const int64_t row = r * slots + s;
      args.token_ids.Row<int32_t>(0)[row] = s == 0 ? args.anchors.Row<int32_t>(0)[r] : args.filler;
      args.positions.Row<int32_t>(0)[row] =
          args.lengths.Row<int32_t>(0)[r] + static_cast<int32_t>(s);
      args.row_sequence.Row<int32_t>(0)[row] = static_cast<int32_t>(r);
    }
  }
  args.sequence_start.Row<int32_t>(0)[sequences] = static_cast<int32_t>(rows);
  return {};
}

Status BiasedArgmax(const BiasedArgmaxArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(ExpectTensor(args.logits, DType::kF32, {-1, -1}, "BiasedArgmax", "logits"));
  const int64_t rows = args.logits.rows();
  const int64_t vocab = args.logits.dim(1);
  DI_RETURN_IF_ERROR(ExpectTensor(args.bias, DType::kF32, {rows, vocab}, "BiasedArgmax", "bias"));
  if (args.tokens.rank() > 0)
    DI_RETURN_IF_ERROR(ExpectTensor(args.tokens, DType::kI32, {rows}, "BiasedArgmax", "tokens"));
  if (vocab == 0) return Fail(Code::kInvalidArgument, "BiasedArgmax: rows are empty.", "logits");
  if (stream.device().kind == DeviceKind::kCuda) return cuda::BiasedArgmax(args, stream);
  stream.pool().ParallelFor(rows, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t best = AddBias(args.logits.Row<float>(r), args.bias.Row<float>(r), vocab);
      if (args.tokens.rank() > 0)
        args.tokens.Row<int32_t>(0)[r] = static_cast<int32_t>(std::max<int64_t>(0, best));
    }
  });
  return {};
}

Status BlockConfidence(const BlockConfidenceArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(ExpectTensor(args.x, DType::kBf16, {-1, -1}, "BlockConfidence", "x"));
  const int64_t width = args.x.dim(1);
  const int64_t slots = args.temperatures.rows();
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.temperatures, DType::kF32, {slots}, "BlockConfidence", "temperatures"));
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.score, DType::kF32, {slots, -1}, "BlockConfidence", "score"));
  const int64_t sequences = args.score.dim(1);
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.x, DType::kBf16, {slots * sequences, width}, "BlockConfidence", "x"));
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.weight, DType::kBf16, {1, width}, "BlockConfidence", "weight"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.probability, DType::kF32, {slots, sequences},
                                  "BlockConfidence", "probability"));
  if (stream.device().kind == DeviceKind::kCuda) return cuda::BlockConfidence(args, stream);
  stream.pool().ParallelFor(slots * sequences, [&](int64_t begin, int64_t end, int) {
    const Bf16* weight = args.weight.Row<Bf16>(0);
    for (int64_t row = begin; row < end; ++row) {
      const Bf16* x = args.x.Row<Bf16>(row);
      double sum = 0.0;
      for (int64_t i = 0; i < width; ++i)
        sum += static_cast<double>(Bf16ToF32(weight[i])) * Bf16ToF32(x[i]);
      const int64_t slot = row % slots;
      const int64_t sequence = row / slots;
      const auto score = static_cast<float>(sum);
      const float scaled = score / args.temperatures.Row<float>(0)[slot];
      args.score.Row<float>(slot)[sequence] = score;
      args.probability.Row<float>(slot)[sequence] =
          1.0f / (1.0f + std::exp(-std::clamp(scaled, -60.0f, 60.0f)));
    }
  });
  return {};
}

}  // namespace deepinfer
