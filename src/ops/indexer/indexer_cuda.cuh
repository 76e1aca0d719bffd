// What the CUDA kernels of the indexer share: the description of a launch and visibility.
//
// Scores of a wave of rows lie in scratch memory, and beside them the maximum of every kScoreBlock
// consecutive scores. Position p of a score row is entry p of the sequence, or, where scores are
// `compact`, entry p % s of the row's candidate block p / s.
#pragma once

#include <cstdint>

#include "device.cuh"
#include "ops/indexer/indexer.h"
#include "tensor/stream.h"

namespace deepinfer::cuda {

inline constexpr int kScoreBlock = 8;

struct IndexerProblem {
  const uint16_t* q;  // bf16
  int64_t q_stride;   // all strides in elements, from row to row
  const uint16_t* weights;
  int64_t weights_stride;
  const uint8_t* blocks;
  int64_t block_stride;
  const int32_t* block_table;
  int64_t table_stride;
  int max_blocks;
  const int32_t* positions;
  const int32_t* row_sequence;
  const int32_t* sequence_start;
  const int32_t* candidates;  // null: all visible entries
  int64_t candidates_stride;
  int num_candidates;
  int32_t* candidates_out;  // null: not wanted
  int64_t candidates_out_stride;
  int num_candidates_out;
  int candidate_block_size;
  int32_t* selected;
  int64_t selected_stride;
  int topk;
  int ratio;
  int heads;
  int channels;
  int entries_per_block;
  int record_bytes;
  bool packed;   // Q4P records, else bf16
  bool rounded;  // reference numerics
  bool compact;
  // The wave: rows [row_begin, row_end), whose scores begin at row 0 of `scores`.
  int row_begin;
  int row_end;
  int score_stride;  // a multiple of 128
  float* scores;
  float* maxima;            // [rows, score_stride / kScoreBlock]
  float* candidate_maxima;  // of blocks of candidate_block_size; is `maxima` where sizes agree
  int candidate_maxima_stride;
};

__device__ inline int VisibleEntries(const IndexerProblem& problem, int row) {
  const int visible = (problem.positions[row] + 1) / problem.ratio;
  return min(max(visible, 0), problem.max_blocks * problem.entries_per_block);
}

__device__ inline int CeilDiv(int a, int b) {
  return (a + b - 1) / b;
}

// False where everything visible is chosen, whatever the scores: none are computed.
__device__ inline bool ScoresMatter(const IndexerProblem& problem, int n_vis) {
  return n_vis > problem.topk ||
         (problem.candidates_out != nullptr &&
          CeilDiv(n_vis, problem.candidate_block_size) > problem.num_candidates_out);
}

// Positions of a row's scores that may be visible: what is scored.
__device__ inline int ScoredPositions(const IndexerProblem& problem, int n_vis) {
  if (!problem.compact) return n_vis;
  return min(problem.num_candidates, CeilDiv(n_vis, problem.candidate_block_size)) *
         problem.candidate_block_size;
}

// The cache record of an entry. Blocks that do not exist read block 0: what is scored there is not
// visible.
__device__ inline const uint8_t* Record(const IndexerProblem& problem, int sequence, int entry) {
  const int32_t* table = problem.block_table + sequence * problem.table_stride;
  const int index = min(entry / problem.entries_per_block, problem.max_blocks - 1);
  return problem.blocks + max(table[index], 0) * problem.block_stride +
         static_cast<int64_t>(entry % problem.entries_per_block) * problem.record_bytes;
}

// Everything but the wave and its scratch memory.
IndexerProblem DescribeProblem(const IndexerArgs& args);
// Scratch memory for the scores of a wave; returns how many of the rows a wave has.
int64_t PlaceScores(int64_t rows, IndexerProblem* problem, ScratchScope* scratch);

// Whether the tensor kernel takes this problem; else the plain one does.
bool TensorScoresSupported(const IndexerProblem& problem);
// Scores and maxima of the wave. `sequences` is the number of sequences of the step.
Status LaunchTensorScores(const IndexerProblem& problem, int64_t sequences, Stream& stream);
Status LaunchPlainScores(const IndexerProblem& problem, Stream& stream);
// Maxima over blocks of `block_size` positions that the selection looks at. `listed`: positions
// count the entries of the row's candidate blocks, while scores lie by entry.
Status LaunchBlockMaxima(const IndexerProblem& problem, bool listed, int block_size, float* maxima,
                         int maxima_stride, Stream& stream);
// Writes `selected` and `candidates_out` of the wave.
Status LaunchSelection(const IndexerProblem& problem, Stream& stream);
// Whether shared memory holds what is chosen from; the scores have their places.
bool SelectionSupported(const IndexerProblem& problem);

}  // namespace deepinfer::cuda
