#include "ops/indexer/indexer.h"

#include "ops/indexer/indexer_impl.h"
#include "ops/quantize/group_quantize.h"
#include "ops/validate.h"

namespace deepinfer {

Status Indexer(const IndexerArgs& args, Stream& stream) {
  const int64_t rows = args.layout.num_rows();
  DI_RETURN_IF_ERROR(ExpectTensor(args.q, DType::kBf16, {rows, -1, -1}, "Indexer", "q"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.weights, DType::kBf16, {rows, args.q.dim(1)}, "Indexer", "weights"));
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.blocks, DType::kU8, {-1, -1, Q4PRecordBytes(args.q.dim(2))}, "Indexer", "blocks"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.selected, DType::kI32, {rows, -1}, "Indexer", "selected"));
  if (!args.candidates_in.empty()) {
    DI_RETURN_IF_ERROR(ExpectTensor(args.candidates_in, DType::kI32, {rows, -1}, "Indexer", "candidates_in"));
  }
  if (!args.candidates_out.empty()) {
    DI_RETURN_IF_ERROR(ExpectTensor(args.candidates_out, DType::kI32, {rows, -1}, "Indexer", "candidates_out"));
  }
  const int32_t* positions = args.layout.positions.Row<int32_t>(0);
  stream.pool().ParallelForDynamic(rows, 1, [&](int64_t begin, int64_t end, int) {
    std::vector<float> scores;
    for (int64_t r = begin; r < end; ++r) {
      const int64_t n_vis = (positions[r] + 1) / args.ratio;
      scores.resize(static_cast<size_t>(n_vis));
      reference::IndexerScores(args, r, n_vis, scores.data());
      IndexerSelectRow(args, r, n_vis, scores.data());
    }
  });
  return {};
}

}  // namespace deepinfer
