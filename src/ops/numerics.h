// The two rounding-point profiles of the model (model description, section 18.1). Chosen once when
// a model is loaded and passed to the few operations whose result differs.
#pragma once

#include <cstdint>

namespace deepinfer {

enum class Numerics : uint8_t {
  kProduction,  // what the published serving engine computes; the default
  kReference,   // what the vendor's small program computes; for stage-by-stage comparison
};

}  // namespace deepinfer
