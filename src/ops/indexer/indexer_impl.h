// Implementations behind ops/indexer/indexer.h.
#pragma once

#include "ops/indexer/indexer.h"

namespace deepinfer {

// Turns a row's scores into its selection and candidates: shared by all implementations.
void IndexerSelectRow(const IndexerArgs& args, int64_t row, int64_t n_vis, const float* scores);

namespace reference {

// Scores of row `row` against entries [0, n_vis) into `scores`.
void IndexerScores(const IndexerArgs& args, int64_t row, int64_t n_vis, float* scores);

}  // namespace reference

// Vector code for production numerics; needs AVX2. Keys are scored in tiles of 8 consecutive entries.
namespace cpu {

inline constexpr int64_t kIndexTile = 8;

// A query on the integer grid: codes doubled to [-12, 12], one scale per head and group of 32 channels.
struct IndexQuery {
  int8_t* codes;    // [heads, channels], channels of a group reordered like decoded keys: even ones first
  float* scales;    // [heads, groups], half of the group's scale
  int32_t* offset;  // [heads, groups], 12 times the sum of the group's codes
  float* weights;   // [heads]
  float* scores;    // [tiles * 8], written
  int64_t tiles;    // tiles that the row sees
};
void PrepareIndexQuery(const IndexerArgs& args, int64_t row, const IndexQuery& query);

// Scores tiles list[begin ... end) (tile numbers, or null: the numbers themselves) of one sequence for all `queries`.
void ScoreIndexTiles(const IndexerArgs& args, int64_t sequence, std::span<const IndexQuery> queries, const int32_t* list,
                     int64_t begin, int64_t end);

}  // namespace cpu
}  // namespace deepinfer
