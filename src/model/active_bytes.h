// How many bytes of weights one decode step reads at least: the memory-bandwidth bound that
// whole-model decode is measured against.
#pragma once

#include <cstdint>

#include "model/config.h"

namespace deepinfer {

struct ActiveBytes {
  int64_t attention = 0;       // projections, compressors, indexers
  int64_t routed_experts = 0;  // `experts_per_layer` experts in every layer
  int64_t shared_experts = 0;
  int64_t router_and_mhc = 0;
  int64_t engram = 0;  // projection; the table rows are negligible
  int64_t head = 0;
  int64_t draft_context = 0;  // what the draft layers keep of every row, where the model drafts

  int64_t total() const {
    return attention + routed_experts + shared_experts + router_and_mhc + engram + head +
           draft_context;
  }
};

// `experts_per_layer`: distinct routed experts that the rows of the step touch, at least
// num_experts_per_tok for one row.
ActiveBytes ActiveBytesPerStep(const ModelConfig& config, int64_t experts_per_layer,
                               bool drafting = false);

// The same of a drafting pass through the draft layers and a chain of `block` choices.
// `experts_per_layer`: at least dspark_num_experts_per_tok.
ActiveBytes ActiveBytesPerDraft(const ModelConfig& config, int64_t experts_per_layer,
                                int64_t block);

}  // namespace deepinfer
