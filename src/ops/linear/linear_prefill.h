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

// Products that one launch would take: `weights` weights of one shape, used by `rows` rows each (on
// average). A gated pair is one weight; n are the outputs of one half.
struct PrefillWork {
  int64_t rows = 0;
  int64_t n = 0;
  int64_t k = 0;
  int64_t weights = 1;
};
// Whether these kernels are expected to beat the kernel for few rows, for work of one format.
bool PrefillPays(WeightFormat format, bool gated, std::span<const PrefillWork> work, int sm_count);
// Whether rows can be copied in pieces of 16 bytes, which these kernels need.
bool PrefillTakes(const TensorView& x);

// What is decided by shapes otherwise and does not show in the results: for tests and benchmarks.
struct PrefillChoice {
  int tile_tokens = 0;  // 64, 128, 192 or 256 (at most 192 where segments are chained)
  enum class Segments { kChosen, kChained, kSplit } segments = Segments::kChosen;
};

// Scratch that one call takes at most.
inline constexpr int64_t kPrefillScratchBytes = int64_t{48} << 20;

// All weights of one format.
// Errors: kInvalidArgument for a choice that the shapes do not have (split segments whose sums do
// not fit into kPrefillScratchBytes, say), and those of a launch.
Status PrefillLinear(std::span<const LinearArgs> batch, Stream& stream,
                     const PrefillChoice& choice = {});
// Errors: kInvalidArgument for weights that do not follow each other at one distance in memory, in
// the order of the groups (PackLinearStack), and those of a launch.
Status PrefillGroupedLinear(const GroupedLinearArgs& args, Stream& stream,
                            const PrefillChoice& choice = {});
Status PrefillGatedLinear(const GatedLinearArgs& args, Stream& stream,
                          const PrefillChoice& choice = {});

}  // namespace deepinfer::cuda
