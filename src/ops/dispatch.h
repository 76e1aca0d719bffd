// Choice between an operation's plain reference and its vector implementation, and the splitting of
// element-wise work.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tensor/stream.h"

namespace deepinfer {

// Vectors of the widest compiled level have 16 fp32 lanes; vector implementations handle whole
// vectors only.
inline constexpr int64_t kVectorChannels = 16;

// True when the plain reference must run: asked for, no vector code for this machine, or a width
// that is not whole vectors. The published model and every test configuration have whole vectors
// only.
inline bool UseReference(const Stream& stream, int64_t channels) {
  return stream.use_reference() || stream.cpu_level() < CpuLevel::kAvx2 ||
         channels % kVectorChannels != 0;
}

// Calls body(row, begin, end) for pieces of at most 1024 channels of every row, spread over the
// stream's threads: for operations whose channels (in groups that divide 1024) are independent, so
// that one row keeps all threads busy. Few pieces use few threads.
template <class Body>
void ForChannelBlocks(Stream& stream, int64_t rows, int64_t channels, const Body& body) {
  constexpr int64_t kBlock = 1024;
  constexpr int64_t kMinBlocksPerThread = 2;  // less costs more to hand out than to do
  const int64_t blocks = (channels + kBlock - 1) / kBlock;
  stream.pool().ParallelFor(
      rows * blocks,
      [&](int64_t first, int64_t last, int) {
        for (int64_t i = first; i < last; ++i) {
          const int64_t begin = i % blocks * kBlock;
          body(i / blocks, begin, std::min(channels, begin + kBlock));
        }
      },
      kMinBlocksPerThread);
}

}  // namespace deepinfer
