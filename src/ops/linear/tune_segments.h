// What the benchmark of batch invariance changes: see cuda_pack.h.
#pragma once

#include <cstdint>

namespace deepinfer {

// So many segments of K at most for weights that are not FP4, whatever their shape; zero: as built.
// Must be the same while a weight is packed and used.
int64_t& TuneSegments();

}  // namespace deepinfer
