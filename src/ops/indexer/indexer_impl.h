// Implementations behind ops/indexer/indexer.h.
#pragma once

#include "ops/indexer/indexer.h"

namespace deepinfer::cuda {

Status Indexer(const IndexerArgs& args, Stream& stream);

}  // namespace deepinfer::cuda

namespace deepinfer {

// Turns a row's scores into its selection and candidates: shared by all implementations.
void IndexerSelectRow(const IndexerArgs& args, int64_t row, int64_t n_vis, const float* scores);

namespace reference {

// Scores of row `row` against entries [0, n_vis) into `scores`.
void IndexerScores(const IndexerArgs& args, int64_t row, int64_t n_vis, float* scores);

}  // namespace reference

// Vector code for production numerics; needs AVX2. Keys are scored in tiles of 8 consecutive
// entries.
namespace cpu {

inline constexpr int64_t kIndexTile = 8;

inline constexpr int64_t kIndexHeads = 4;  // heads that share a loaded key quad

// A query on the integer grid: codes doubled to [-12, 12], one scale per head and group of 32
// channels. Arrays are laid out as PrepareIndexQuery and the scoring loop agree: by tiles of
// kIndexHeads heads, then group, then four channels, then head.
struct IndexQuery {
  int8_t* codes;    // heads * channels
  float* scales;    // heads * groups, half of the group's scale
  int32_t* starts;  // heads * groups, takes back the offset of the key codes
  float* weights;   // [heads]
  float* scores;    // [tiles * 8], written
  int64_t tiles;    // tiles that the row sees
};
void PrepareIndexQuery(const IndexerArgs& args, int64_t row, const IndexQuery& query);

// Scores tiles list[begin ... end) (tile numbers, or null: the numbers themselves) of one sequence
// for all `queries`.
void ScoreIndexTiles(const IndexerArgs& args, int64_t sequence, std::span<const IndexQuery> queries,
                     const int32_t* list, int64_t begin, int64_t end);

}  // namespace cpu
}  // namespace deepinfer
