// What happened inside a step, copied to the host for diagnostics. Row order is that of the step.
#pragma once

#include <cstdint>
#include <vector>

namespace deepinfer {

struct LayerTrace {
  bool want_streams = false;  // also copy the residual streams (large)
  // Per layer: rows that it ran, the last ones of every sequence. 0 for layers that did not run.
  std::vector<int64_t> num_rows;
  std::vector<std::vector<float>>
      streams;  // per layer: [rows, 4, hidden] after the layer; empty unless wanted
  std::vector<std::vector<int32_t>> experts;  // per layer: [rows, k] in slot order
  std::vector<std::vector<int32_t>>
      selected;  // per layer: [rows, topk] for index sources, else empty; -1 = none
};

}  // namespace deepinfer
