// How a kernel is launched, as plain values: what heuristics decide and what can be printed.
#pragma once

#include <cstdint>

namespace deepinfer::cuda {

struct GridShape {
  uint32_t x = 1;
  uint32_t y = 1;
  uint32_t z = 1;
};

struct LaunchConfig {
  GridShape grid;
  int block = 128;       // threads
  int shared_bytes = 0;  // dynamic
  int cluster = 1;       // blocks along x
  // The kernel may start before the one in front of it has ended; it calls WaitForPreviousKernel().
  bool overlap_previous = false;
  bool cooperative = false;  // all blocks run at once
};

}  // namespace deepinfer::cuda
