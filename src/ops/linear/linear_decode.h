// Linears with few rows per weight on mma.sync: what one launch of the kernel works on. Used by
// linear_cuda.cu and gated_linear_cuda.cu, which fill a DecodeWork; the kernel is in
// linear_decode.cuh.
#pragma once

#include <cstdint>

#include "base/error.h"
#include "ops/linear/cuda_layout.h"
#include "ops/linear/cuda_pack.h"
#include "ops/linear/linear.h"
#include "tensor/stream.h"

namespace deepinfer::cuda {

inline constexpr int kMaxDecodeProblems = 16;
// Rows of x that are multiplied at a time; more are taken in blocks.
inline constexpr int kMaxDecodeRows = 16;
// Warps of a block that multiply.
inline constexpr int kDecodeWarps = 8;
// Blocks that share a multiprocessor. Three, or longer rings, put more than about 140 KB per
// multiprocessor under way, with which the memory gets slower (the LM head by a half), and blocks
// of the next kernel gather on the multiprocessors that have room.
inline constexpr int kDecodeBlocks = 2;
// Strips that a warp works on side by side.
constexpr int StripsPerWarp(WeightFormat format, int block_rows) {
  return format == WeightFormat::kFp4Group && block_rows > 8 ? 2 : 1;
}
// Bytes from row to row of a stage of x in shared memory.
constexpr int DecodeXPitch(WeightFormat format) {
  return 2 * static_cast<int>(CudaChunkColumns(format)) + 16;
}

// Rows of x in a stage: those of all segments that warps of a block work on at a time.
inline constexpr int kMaxXRows = 64;

// One linear; with `up` a pair of linears of the same input whose results are combined.
struct DecodeProblem {
  const uint8_t* weight = nullptr;  // of the first group
  const uint8_t* up = nullptr;      // gated only
  const uint16_t* x = nullptr;
  void* y = nullptr;
  int64_t x_stride = 0;  // elements
  int64_t y_stride = 0;
  int64_t weight_step = 0;  // bytes from a group's weight to the next one's
  int64_t up_step = 0;
  int64_t strip_bytes = 0;
  float weight_factor = 1.0f;  // 2^output_exponent
  float up_factor = 1.0f;
  int rows = 0;  // of all groups
  int n = 0;
  int k = 0;
  int padded_k = 0;
  int segments = 1;
  int segment_columns = 0;
  int strips_per_item = 1;     // of outputs, that is without those of `up`
  int segments_per_round = 1;  // that different warps work on at the same time
  int rounds = 1;
  int slot_shift = 0;      // log2 of the warps that work on a segment
  bool direct = true;      // outputs are one warp's sums: no other segments, no pairs, no groups
  int strip_blocks = 0;    // of strips_per_item
  int first_item = 0;      // in the launch; ungrouped work only
  bool vector_x = true;    // rows of x can be copied in pieces of 16 bytes
  bool aligned_x = false;  // and K has no padding, and x no more than 4 GB
  bool y_is_f32 = false;
  bool quantize = false;
};

struct DecodeWork {
  DecodeProblem problems[kMaxDecodeProblems];
  int num_problems = 0;
  int items = 0;       // ungrouped work only
  int block_rows = 0;  // rows per item: 8 or 16
  // Shared memory: stages in each warp's ring, stages of x, and the table of sums.
  int ring_slots = 0;
  int x_slots = 0;
  int x_slot_bytes = 0;
  bool aligned_x = false;  // all problems
  int sum_stride = 0;      // floats per row of sums
  int sum_floats = 0;      // of a segment
  int table_floats = 0;    // of all
  int shared_bytes = 0;
  // Groups: one problem whose rows are distributed over `groups` weights.
  const int32_t* group_offsets = nullptr;
  const int32_t* row_index = nullptr;
  const float* row_weight = nullptr;
  int groups = 0;
  float limit = 0.0f;
  bool reference_numerics = false;
};

// Decides how the work is cut (a function of shapes) and puts the kernel into the stream. Problems
// have rows.
Status LaunchDecode(WeightFormat format, DecodeWork work, Stream& stream);
// The same results in plain loops, a thread per output (as ops/linear/linear_ref.cc); not for gated
// problems.
Status LaunchLinearReference(WeightFormat format, const DecodeWork& work, Stream& stream);

// Whether the kernels for many rows (linear_prefill.h) take rows in groups of one weight each, or
// of one gated pair.
bool TakesManyRows(int64_t rows, int64_t groups, bool gated, const LinearWeight& weight,
                   const TensorView& x, const Stream& stream);

// A problem of a weight, x and y; groups, pairs and quantisation are the caller's to add.
DecodeProblem DecodeProblemOf(const LinearWeight& weight, const TensorView& x, const TensorView& y);
// Bytes from each weight to the next. Errors: kInvalidArgument where that is not one number or
// output exponents differ.
Result<int64_t> WeightStep(std::span<const LinearWeight* const> weights);

}  // namespace deepinfer::cuda
