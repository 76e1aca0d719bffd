// The arithmetic and operand layouts of matrix instructions, for the emulation of kernels. Products
// are exact in fp32 and are added to the accumulator in the order of k, so that the same k steps
// give the same bits whatever the instruction and its shape.
#pragma once

#include <cstdint>

namespace deepinfer::cuda::emulated {

// What a lane brings to d[16x8] += a * b.
struct WarpMma {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};
void RunWarpMmaBf16(void* const* lanes);
void RunWarpMmaE4M3(void* const* lanes);

// What a lane brings to ldmatrix of four matrices: the address of a row, and where its part goes.
struct WarpLoad {
  uint32_t* r;
  const void* row;
};
void RunWarpLoad(void* const* lanes);
void RunWarpLoadTransposed(void* const* lanes);

// What a lane brings to stmatrix of four matrices.
struct WarpStore {
  const uint32_t* r;
  void* row;
};
void RunWarpStore(void* const* lanes);
void RunWarpStoreTransposed(void* const* lanes);

// What a thread brings to d[64 x N] (+)= a * b of a warpgroup.
struct WarpgroupMma {
  float* d;
  int count;                    // accumulators per thread
  const uint32_t* a_registers;  // null: `a` describes shared memory
  uint64_t a;
  uint64_t b;
  bool accumulate;
  bool transposed_b;
};
void RunWarpgroupMmaBf16(void* const* threads);
void RunWarpgroupMmaE4M3(void* const* threads);

}  // namespace deepinfer::cuda::emulated
