// Implementations behind ops/indexer/indexer.h.
#pragma once

#include "ops/indexer/indexer.h"

namespace deepinfer::reference {

// Scores of row `row` against entries [0, n_vis) into `scores`.
void IndexerScores(const IndexerArgs& args, int64_t row, int64_t n_vis, float* scores);

}  // namespace deepinfer::reference

namespace deepinfer {

// Turns a row's scores into its selection and candidates: shared by all implementations.
void IndexerSelectRow(const IndexerArgs& args, int64_t row, int64_t n_vis, const float* scores);

}  // namespace deepinfer
