// Decoding steps recorded as graphs, one for each padded shape: replaying one costs the host a few
// microseconds where launching kernel by kernel costs hundreds. What a graph reads and writes is at
// the addresses of its recording, which are the same in every step of one shape, because steps take
// their memory from the same scratch in the same order.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <tuple>

#include "base/error.h"
#include "tensor/stream.h"

namespace deepinfer {

class StepGraphs {
 public:
  struct Shape {
    int64_t rows = 0;    // all of different sequences
    int64_t blocks = 0;  // columns of the block table
    int64_t pages = 0;   // columns of the window table
  };

  StepGraphs() = default;
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;
  ~StepGraphs();

  // 1, 2, 4, then multiples of 8.
  static int64_t PaddedRows(int64_t rows);
  // Powers of two.
  static int64_t PaddedUnits(int64_t units);

  // The first step of a shape runs `forward` as it is (kernels are loaded then), the second records
  // it, and later ones replay the recording. Errors: those of `forward`, and of the recording.
  Status Run(const Shape& shape, Stream& stream, const std::function<Status()>& forward);
  // Forgets all recordings; the stream must have run them.
  void Clear();
  int64_t num_recorded() const;

 private:
  // Null: the shape has been seen once.
  std::map<std::tuple<int64_t, int64_t, int64_t>, void*> graphs_;
};

}  // namespace deepinfer
