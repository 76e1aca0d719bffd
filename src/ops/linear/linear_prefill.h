// Linears with many rows per weight on Hopper's warpgroup matrix instructions. Called by the
// dispatcher of ops/linear and ops/gated_linear (linear_cuda.cu), which has validated the
// arguments; not for other GPUs (Stream::compute_major() must be 9, or the emulation).
//
// The bits of y[r, n] are those of the kernel for few rows: sums of a segment of K (cuda_pack.h)
// start from zero and take k16 steps in ascending order, segments' sums are added in ascending
// order, then one multiplication by a power of two and one rounding.
#pragma once

#include <cstdint>
#include <span>

#include "ops/gated_linear/gated_linear.h"
#include "ops/linear/linear.h"

namespace deepinfer::cuda {

// Whether these kernels are expected to beat the kernel for few rows, for `weights` weights that
// are used by `rows` rows each (a gated pair counts as one weight with the outputs of both).
bool PrefillPays(int64_t rows, WeightFormat format, int64_t n, int64_t k, int64_t weights = 1);
// Whether rows can be copied in pieces of 16 bytes, which these kernels need.
bool PrefillTakes(const TensorView& x);

// All weights of one format. Errors: those of a launch.
Status PrefillLinear(std::span<const LinearArgs> batch, Stream& stream);
// Errors: kInvalidArgument for weights that do not follow each other at one distance in memory, in
// the order of the groups (PackLinearStack), and those of a launch.
Status PrefillGroupedLinear(const GroupedLinearArgs& args, Stream& stream);
Status PrefillGatedLinear(const GatedLinearArgs& args, Stream& stream);

}  // namespace deepinfer::cuda
