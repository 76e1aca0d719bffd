// Linear weights on a GPU: the layout that the matrix kernels want, and how K is cut. Internal to
// ops/linear and ops/gated_linear. No CUDA headers.
//
// Outputs are in strips of 16, the M of mma.sync.m16n8k16, and strips in tiles of four (64 outputs,
// the M of wgmma). A strip is one sequential stream of units of 512 bytes, 16 for each lane of a
// warp: the lane's A fragments (ops/cuda/native/device.cuh, MmaBf16) of the unit's k16 steps, in
// order. With g = lane / 4 and t = lane % 4 a fragment has eight codes: registers a0 ... a3, each
// with an even and an odd column.
//
//   bf16  unit = 16 columns, one step: the four registers as they are.
//   FP8   unit = 32 columns, two steps of 8 bytes. Word 0 of a step holds a0 and a1, word 1 holds
//   a2
//         and a3, the even columns in the low halves. The even register's codes have the places of
//         a bf16 number (sign 15, exponent 10 ... 7, mantissa 6 ... 4), the odd one's the bits in
//         between. After every four units (128 columns) come 16 bytes of scales: a word per unit,
//         the scale as a pair of bf16 numbers.
//   FP4   unit = 64 columns, four steps of 4 bytes. The words of two steps hold their eight
//         registers: a0, a1 and a2 of a step in its own word, each in a rotation of the places of a
//         bf16 number (sign 15, exponent 8 and 7, mantissa 6), a3 of both in what is left of both.
//         After every four units (256 columns) come 128 bytes of scales: [g][unit of the four], a
//         word with those of the rows g and g + 8 for both blocks of 32 columns.
//
// Why: few instructions per code (linear_convert.cuh). Where each bit is: cuda_layout.h.
//
// A scale field is the exponent field of the bf16 number that codes are multiplied by after they
// were put into place: 2^(scale + 126) for FP4 and 2^(scale + 120) for FP8, divided by
// 2^output_exponent, by which sums are multiplied at the end. Products of codes and scales are then
// exact bf16 numbers. Columns beyond k (to a multiple of 256 for FP4, of 128 for FP8, of 64 for
// bf16) and outputs beyond n (to a multiple of 64) are zero.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "ops/linear/linear.h"
#include "tensor/buffer.h"

namespace deepinfer {

// How K is cut: part of what a layer's results are, the same for every number of rows. Each segment
// is summed from zero in ascending k16 steps; the segments' sums are added in ascending order.
struct LinearSegments {
  int64_t count = 1;
  int64_t columns = 0;  // of every segment but the last: a multiple of 256
};
// Depends on the shape only. FP4 (experts) and large n have one segment.
LinearSegments SegmentsOf(WeightFormat format, int64_t n, int64_t k);

// One weight of a stack.
struct CudaLinearWeight {
  std::shared_ptr<const Buffer> memory;  // of the whole stack
  const uint8_t* data = nullptr;         // of this weight, on the device
  int64_t bytes = 0;                     // of this weight; weights of a stack follow each other
  int64_t strips = 0;                    // with padding: a multiple of 4
  int64_t strip_bytes = 0;
  int64_t padded_k = 0;
  int output_exponent = 0;  // the same for all weights of a stack
  LinearSegments segments;
};

// Bytes of a strip.
int64_t CudaStripBytes(WeightFormat format, int64_t k);
// k with padding.
int64_t CudaPaddedK(WeightFormat format, int64_t k);
// The output exponent of a stack, 0 where its scales allow that. Errors: kUnsupported for NaN
// scales and for scales too far apart.
Result<int> CudaOutputExponent(std::span<const LinearSource> sources, ThreadPool& pool);

// The bytes that the packing kernel writes for one weight, made on the host: the kernel's test, and
// weights for tests of other kernels.
std::vector<uint8_t> PackCudaWeightOnHost(const LinearSource& source, int output_exponent);
// The way back: all k values of one output.
void UnpackCudaOutput(WeightFormat format, int64_t k, int output_exponent,
                      std::span<const uint8_t> packed, int64_t output, std::span<float> values);

}  // namespace deepinfer
