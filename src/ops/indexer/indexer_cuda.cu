// The indexer on a GPU: scores into scratch memory (indexer_score.cu on tensor cores for the
// released model's shape, indexer_plain.cu for every other and for reference numerics), then
// selection (indexer_select_cuda.cu).
//
// The host does not know positions. Grids are sized by shapes; how much is visible, and which rows
// need scores at all, the kernels read from the layout. Rows are processed in waves whose scores
// fit a fixed amount of scratch memory. Neither waves nor the division of keys among blocks changes
// a bit: a score depends on its query and its key only.
#include <algorithm>

#include "ops/indexer/indexer_cuda.cuh"
#include "ops/indexer/indexer_impl.h"
#include "ops/quantize/group_quantize.h"

namespace deepinfer::cuda {
namespace {

constexpr int64_t kWaveScoreBytes = int64_t{256} << 20;
constexpr int64_t kWaveRows = 2048;
constexpr int64_t kScoreRowMultiple = 128;  // keys of the largest tile

int64_t RoundUp(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

// Rows per wave: as many as fit, whole groups of eight where there are many.
int64_t WaveRows(int64_t rows, int64_t score_stride) {
  int64_t fitting = std::clamp<int64_t>(
      kWaveScoreBytes / (score_stride * static_cast<int64_t>(sizeof(float))), 1, kWaveRows);
  if (fitting >= 8) fitting -= fitting % 8;
  return std::min(rows, fitting);
}

}  // namespace

IndexerProblem DescribeProblem(const IndexerArgs& args) {
  IndexerProblem problem = {};
  problem.q = reinterpret_cast<const uint16_t*>(args.q.data());
  problem.q_stride = args.q.row_stride();
  problem.weights = reinterpret_cast<const uint16_t*>(args.weights.data());
  problem.weights_stride = args.weights.row_stride();
  problem.blocks = static_cast<const uint8_t*>(args.blocks.data());
  problem.block_stride = args.blocks.row_stride();
  problem.block_table = static_cast<const int32_t*>(args.layout.block_table.data());
  problem.table_stride = args.layout.block_table.row_stride();
  problem.max_blocks = static_cast<int>(args.layout.block_table.dim(1));
  problem.positions = static_cast<const int32_t*>(args.layout.positions.data());
  problem.row_sequence = static_cast<const int32_t*>(args.layout.row_sequence.data());
  problem.sequence_start = static_cast<const int32_t*>(args.layout.sequence_start.data());
  if (!args.candidates_in.empty()) {
    problem.candidates = static_cast<const int32_t*>(args.candidates_in.data());
    problem.candidates_stride = args.candidates_in.row_stride();
    problem.num_candidates = static_cast<int>(args.candidates_in.dim(1));
  }
  if (!args.candidates_out.empty()) {
    problem.candidates_out = static_cast<int32_t*>(args.candidates_out.data());
    problem.candidates_out_stride = args.candidates_out.row_stride();
    problem.num_candidates_out = static_cast<int>(args.candidates_out.dim(1));
  }
  problem.candidate_block_size = static_cast<int>(args.candidate_block_size);
  problem.selected = static_cast<int32_t*>(args.selected.data());
  problem.selected_stride = args.selected.row_stride();
  problem.topk = static_cast<int>(args.selected.dim(1));
  problem.ratio = static_cast<int>(args.ratio);
  problem.heads = static_cast<int>(args.q.dim(1));
  problem.channels = static_cast<int>(args.q.dim(2));
  problem.entries_per_block = static_cast<int>(args.blocks.dim(1));
  problem.record_bytes = static_cast<int>(args.blocks.dim(2));
  problem.packed = problem.record_bytes == Q4PRecordBytes(problem.channels);
  problem.rounded = args.numerics == Numerics::kReference;
  problem.compact = problem.candidates != nullptr && problem.candidates_out == nullptr;
  return problem;
}

int64_t PlaceScores(int64_t rows, IndexerProblem* problem, ScratchScope* scratch) {
  // A restricted choice has a position for every entry of a row's candidate blocks.
  int64_t positions = int64_t{problem->num_candidates} * problem->candidate_block_size;
  if (!problem->compact) {
    positions = std::max(positions, int64_t{problem->max_blocks} * problem->entries_per_block);
  }
  const int64_t score_stride = RoundUp(std::max<int64_t>(positions, 1), kScoreRowMultiple);
  const int64_t wave_rows = WaveRows(rows, score_stride);
  problem->score_stride = static_cast<int>(score_stride);
  problem->scores = scratch->Allocate<float>(wave_rows * score_stride);
  problem->maxima = scratch->Allocate<float>(wave_rows * score_stride / kScoreBlock);
  const bool own_candidate_maxima =
      problem->candidates_out != nullptr &&
      (problem->candidate_block_size != kScoreBlock || problem->candidates != nullptr);
  problem->candidate_maxima = problem->maxima;
  problem->candidate_maxima_stride = problem->score_stride / kScoreBlock;
  if (own_candidate_maxima) {
    problem->candidate_maxima_stride = static_cast<int>(
        (score_stride + problem->candidate_block_size - 1) / problem->candidate_block_size);
    problem->candidate_maxima =
        scratch->Allocate<float>(wave_rows * problem->candidate_maxima_stride);
  }
  return wave_rows;
}

Status Indexer(const IndexerArgs& args, Stream& stream) {
  const int64_t rows = args.layout.num_rows();
  if (rows == 0) return {};
  IndexerProblem problem = DescribeProblem(args);
  ScratchScope scratch(stream);
  const int64_t wave_rows = PlaceScores(rows, &problem, &scratch);
  if (!SelectionSupported(problem)) {
    return Fail(Code::kUnsupported,
                fmt::format("Indexer: the selection of {} entries and {} candidate blocks among {} "
                            "positions does not fit a GPU's shared memory.",
                            problem.topk, problem.num_candidates_out, problem.score_stride),
                "selected");
  }
  const bool tensor = TensorScoresSupported(problem) && !stream.use_reference();
  for (int64_t begin = 0; begin < rows; begin += wave_rows) {
    problem.row_begin = static_cast<int>(begin);
    problem.row_end = static_cast<int>(std::min(rows, begin + wave_rows));
    if (tensor) {
      DI_RETURN_IF_ERROR(LaunchTensorScores(problem, args.layout.num_sequences(), stream));
    } else {
      DI_RETURN_IF_ERROR(LaunchPlainScores(problem, stream));
    }
    const bool listed = problem.candidates != nullptr && !problem.compact;
    if (!tensor || listed) {
      DI_RETURN_IF_ERROR(LaunchBlockMaxima(problem, listed, kScoreBlock, problem.maxima,
                                           problem.score_stride / kScoreBlock, stream));
    }
    if (problem.candidates_out != nullptr && problem.candidate_maxima != problem.maxima) {
      DI_RETURN_IF_ERROR(LaunchBlockMaxima(problem, false, problem.candidate_block_size,
                                           problem.candidate_maxima,
                                           problem.candidate_maxima_stride, stream));
    }
    DI_RETURN_IF_ERROR(LaunchSelection(problem, stream));
  }
  return {};
}

}  // namespace deepinfer::cuda
