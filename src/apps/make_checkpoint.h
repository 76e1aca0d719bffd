// `deepinfer make-checkpoint`: writes a checkpoint with random weights.
#pragma once

#include <cstdint>
#include <string>

#include "model/random_checkpoint.h"

namespace deepinfer {

struct MakeCheckpointOptions {
  std::string output;
  std::string preset = "tiny";  // "tiny" or "slice"
  SliceOptions slice;           // read for the preset "slice" only
  uint64_t seed = 0;
  int num_threads = 0;  // 0: all processors
};

// Returns the exit status of the program. Prints to standard output, errors and progress to
// standard error.
int RunMakeCheckpoint(const MakeCheckpointOptions& options);

}  // namespace deepinfer
