// How much scratch memory a step of the model takes at most, from the shapes alone, so that it can
// be planned and reserved before anything runs. Mirrors Model::Forward, the operations it calls and
// the arrays that the executor uploads; a test compares it with what steps really take.
#pragma once

#include <cstdint>

#include "model/config.h"

namespace deepinfer {

struct StepShape {
  int64_t rows = 1;
  int64_t sequences = 1;
  int64_t logit_rows = 1;
  int64_t context = 1;      // tokens of the longest sequence, rows of the step included
  int64_t table_pages = 1;  // window pages of the sequence that has most
  bool drops_rows = false;  // the decoder half runs on a copy of the rows that are kept
  bool drafts = false;      // the draft layers keep something of every row
  int num_threads = 1;
  bool gpu = false;  // what the operations of a GPU take beyond the graph's own tensors
};

// Bytes of scratch, every allocation rounded up as a stream does. Logits are not part of it.
int64_t StepScratchBytes(const ModelConfig& config, const StepShape& shape);

struct DraftShape {
  int64_t sequences = 1;
  int64_t block = 1;
  int64_t table_pages = 1;  // window pages of the sequence that has most
  int num_threads = 1;
  bool gpu = false;
};

// The same of a drafting pass: Model::Draft and the arrays that are uploaded for it.
int64_t DraftScratchBytes(const ModelConfig& config, const DraftShape& shape);

}  // namespace deepinfer
