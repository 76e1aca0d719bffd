// `deepinfer logits`: the model's logits for given tokens, as tensors in a file. The diagnostic
// that comparisons with other implementations build on. Tensor names: docs/generate.md.
#pragma once

#include <cstdint>
#include <string>

#include "deepinfer/llm.h"

namespace deepinfer {

struct LogitsOptions {
  LLMOptions llm;
  std::string input = "-";  // lines {"id", "token_ids", "chunks"?}
  std::string output;       // a safetensors file
  int64_t last = 0;         // only the last rows of each line; 0: all
  std::string cache_format = "packed";
  bool dump_layers = false;  // also residual streams, selected entries and routed experts
  bool drafts = false;       // also a drafted block behind every step
};

// Returns the exit status of the program: kExitOk, or kExitFailure with nothing written.
int RunLogits(const LogitsOptions& options);

}  // namespace deepinfer
