// Choice between an operation's plain reference and its vector implementation.
#pragma once

#include "tensor/stream.h"

namespace deepinfer {

// Vectors of the widest compiled level have 16 fp32 lanes; vector implementations handle whole vectors only.
inline constexpr int64_t kVectorChannels = 16;

// True when the plain reference must run: asked for, no vector code for this machine, or a width that is not whole vectors. The
// published model and every test configuration have whole vectors only.
inline bool UseReference(const Stream& stream, int64_t channels) {
  return stream.use_reference() || stream.cpu_level() < CpuLevel::kAvx2 || channels % kVectorChannels != 0;
}

}  // namespace deepinfer
