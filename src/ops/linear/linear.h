// y = x * W^T for the checkpoint's weight formats, and the same for groups of rows with one weight
// each (experts).
//
//   y[r, n] = round( sum_k x[r, k] * W[n, k] )        fp32 accumulation, one rounding to y's dtype
//   at the end
//
// x is bf16. Where the model quantises the input of a linear to FP8 (model description 5.4), the
// producer has already put the values on the FP8 grid (ops/quantize); q * s is exact in bf16, and
// so is every weight (E4M3 * 2^k, E2M1 * 2^k), so all products are exact and results differ from
// block-wise FP8 accumulation in the order of fp32 additions only.
//
// Invariance, part of the contract: the bits of y[r, n] depend on x[r, :], W[n, :] and the stream's
// cpu_level only. Never on the number of rows, on the row's place, on other rows, on grouping, or
// on the number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/error.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

enum class WeightFormat : uint8_t {
  kBf16,      // weight [n, k] bf16, no scale
  kFp8Block,  // weight [n, k] E4M3, scale [ceil(n/32), ceil(k/32)] E8M0: one scale per 32 x 32
              // block
  kFp4Group,  // weight [n, k/2] E2M1 pairs, scale [n, k/32] E8M0: one scale per row and 32 columns
};

// One weight matrix as stored in the checkpoint, row-major. k is a multiple of 32 for the quantised
// formats.
struct LinearSource {
  WeightFormat format = WeightFormat::kBf16;
  int64_t n = 0;
  int64_t k = 0;
  TensorView weight;  // host memory, e.g. the mapped file
  TensorView scale;   // empty for kBf16
};

// A weight matrix in the layout the kernels of one instruction-set level want (4- and 8-bit codes
// stay packed). Immutable after packing; may be shared by any number of streams of that level.
class LinearWeight {
 public:
  LinearWeight();
  LinearWeight(LinearWeight&&) noexcept;
  LinearWeight& operator=(LinearWeight&&) noexcept;
  ~LinearWeight();

  WeightFormat format() const {
    return format_;
  }
  int64_t n() const {
    return n_;
  }
  int64_t k() const {
    return k_;
  }
  // Bytes that one pass over the matrix reads.
  int64_t bytes() const;

  struct Packed;  // defined by the implementation
  const Packed* packed() const {
    return packed_.get();
  }

 private:
  friend Result<LinearWeight> PackLinearWeight(const LinearSource&, Stream&);
  friend class CudaLinearPacker;
  WeightFormat format_ = WeightFormat::kBf16;
  int64_t n_ = 0;
  int64_t k_ = 0;
  std::unique_ptr<Packed> packed_;
};

// Repacks for stream.cpu_level() on stream's device. Errors: kInvalidArgument (shapes or dtypes
// that do not match the format), kResourceExhausted. Scale byte 255 (NaN) is carried through: the
// affected outputs are NaN.
Result<LinearWeight> PackLinearWeight(const LinearSource& source, Stream& stream);
// Weights of one shape and format that will be used together by GroupedLinear or GatedLinear. On a
// GPU those need weights that were packed in one call, because they share one piece of memory.
// Errors: as above, and kInvalidArgument for different shapes or formats.
Result<std::vector<LinearWeight>> PackLinearStack(std::span<const LinearSource> sources,
                                                  Stream& stream);
// Bytes that a weight of n outputs and k columns takes in the layouts of tiles: those of all levels
// but the scalar one.
int64_t LinearTiledBytes(WeightFormat format, int64_t n, int64_t k);

struct LinearArgs {
  TensorView x;  // [rows, k] bf16, rows may be strided
  const LinearWeight* weight = nullptr;
  TensorView y;  // [rows, n] bf16 | f32, rows may be strided; must not alias x
  // y = Q8(bf16(sum)) (ops/quantize): for a y in bf16 and an n that is a multiple of 32.
  bool quantize_y = false;
};

// Errors: kInvalidArgument for shapes, dtypes or views that do not fit, and for a weight packed for
// another level than the stream runs at (unless the stream runs the reference, which reads every
// layout).
Status Linear(const LinearArgs& args, Stream& stream);
// Linears that do not depend on each other, as if they were called one by one; on a GPU few
// launches.
Status LinearBatch(std::span<const LinearArgs> batch, Stream& stream);

// Rows are grouped by weight: group g owns output rows [group_offsets[g], group_offsets[g+1]).
//   y[r, :] = x[row_index[r], :] * weights[g]^T
struct GroupedLinearArgs {
  TensorView x;              // [any, k] bf16, rows may be strided
  TensorView row_index;      // [rows] i32 into x, or empty: r itself
  TensorView group_offsets;  // [groups + 1] i32, ascending, first 0, last rows
  std::span<const LinearWeight* const>
      weights;   // groups, all of one shape and format; not null where the group has rows
  TensorView y;  // [rows, n] bf16 | f32
};

Status GroupedLinear(const GroupedLinearArgs& args, Stream& stream);

// The specification in plain loops, on the calling thread, from the weight as stored. Arguments
// must be valid.
void LinearReference(const LinearSource& source, const TensorView& x, const TensorView& y);

}  // namespace deepinfer
