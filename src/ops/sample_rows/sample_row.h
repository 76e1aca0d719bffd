// One row's draw on the host, by the law of row_draw.h: what the CPU half of SampleRows runs, and
// what the sampler uses for rows that it has at hand.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "ops/sample_rows/row_draw.h"

namespace deepinfer {

// The lists of one draw; the ranges in RowDraw are not looked at.
struct RowLists {
  std::span<const uint32_t> mask = {};  // a bit per token; empty: all are allowed
  std::span<const RowEdit> edits = {};
  std::span<const int32_t> excluded = {};
  std::span<const int32_t> ends = {};
};

// A draw with its lists in place of ranges.
struct ListedDraw {
  RowDraw draw;
  RowLists lists = {};
};

// What a step's draws gave, and the logits [host rows, vocab] that the host wanted to see.
struct DrawnRows {
  std::span<const SampledRow> rows;
  std::span<const float> logits;
};

// Work space of one thread, and what the last draw leaves for further questions about its row.
class RowScratch {
 public:
  // The row after its edits: the caller's own memory if there were none.
  std::span<const float> edited() const {
    return edited_;
  }
  // Of a draw that was not greedy: the token's mass if it could have been drawn, else 0.
  uint64_t KeptMass(int32_t token) const;

 private:
  friend SampledRow SampleRow(std::span<const float>, const RowDraw&, const RowLists&, RowScratch&);
  friend std::span<const uint64_t> BestKeys(std::span<const float>, int64_t, RowScratch&);

  // The kept tokens are those whose key does not exceed last_key and whose mass is at least
  // min_mass.
  struct DrawSet {
    uint64_t last_key = std::numeric_limits<uint64_t>::max();
    uint64_t min_mass = 1;
    uint64_t total = 0;
    bool Keeps(uint64_t key, uint64_t mass) const {
      return mass >= min_mass && key <= last_key;
    }
  };
  void SelectTokens(const RowDraw& draw, float largest);
  int32_t DrawToken(uint64_t random) const;
  std::span<uint64_t> FillKeys(std::span<const float> logits);

  std::span<const float> edited_;
  std::vector<float> logits_;
  std::vector<uint64_t> masses_;
  std::vector<uint64_t> keys_;
  DrawSet set_;
};

// Draws from `logits`, at most kMaxSampledVocab of them. A pure function of its arguments.
SampledRow SampleRow(std::span<const float> logits, const RowDraw& draw, const RowLists& lists,
                     RowScratch& scratch);

// The `count` best tokens of a row, fewer when it has fewer, by logit descending, then id
// ascending; the lower 32 bits of each are the id. Valid until the scratch is used again.
std::span<const uint64_t> BestKeys(std::span<const float> logits, int64_t count,
                                   RowScratch& scratch);

}  // namespace deepinfer
