// Device primitives for kernels: launches, shared memory, asynchronous copies, barriers and matrix
// instructions of Hopper. The only place with inline PTX. src/ops/cuda/emulated has the same
// interface on the CPU; keep the two in step.
//
// Conventions: "shared" pointers are generic pointers into shared memory. Functions whose name says
// Warp must be reached by all 32 lanes, those with Warpgroup by four consecutive warps that begin
// at a multiple of four.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "base/error.h"
#include "ops/cuda/launch_config.h"
#include "tensor/stream.h"

namespace deepinfer::cuda {

// ---- Launch --------------------------------------------------------------------------------------

// Puts `kernel` into the stream. `name` appears in the error, which is about the launch itself;
// errors inside the kernel show when the stream is synchronised.
template <class... Parameters, class... Arguments>
Status Launch(const char* name, void (*kernel)(Parameters...), const LaunchConfig& config,
              Stream& stream, Arguments&&... arguments) {
  if (config.grid.x == 0 || config.grid.y == 0 || config.grid.z == 0) return {};
  const auto failure = [&](cudaError_t status) -> Status {
    cudaGetLastError();
    return Fail(Code::kInternal,
                fmt::format("The launch of kernel '{}' failed: {} (grid {}x{}x{}, block {}, {} bytes "
                            "of shared memory, cluster {}).",
                            name, cudaGetErrorString(status), config.grid.x, config.grid.y,
                            config.grid.z, config.block, config.shared_bytes, config.cluster));
  };
  if (config.shared_bytes > 48 * 1024) {
    const cudaError_t status =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, config.shared_bytes);
    if (status != cudaSuccess) return failure(status);
  }
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(config.grid.x, config.grid.y, config.grid.z);
  launch.blockDim = dim3(static_cast<unsigned>(config.block));
  launch.dynamicSmemBytes = static_cast<size_t>(config.shared_bytes);
  launch.stream = static_cast<cudaStream_t>(stream.cuda_stream());
  cudaLaunchAttribute attributes[3];
  launch.attrs = attributes;
  launch.numAttrs = 0;
  if (config.cluster > 1) {
    if (config.cluster > 8) {
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    }
    cudaLaunchAttribute& attribute = attributes[launch.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(config.cluster);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
  }
  if (config.overlap_previous) {
    cudaLaunchAttribute& attribute = attributes[launch.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (config.cooperative) {
    cudaLaunchAttribute& attribute = attributes[launch.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  const cudaError_t status = cudaLaunchKernelEx(&launch, kernel, Parameters(arguments)...);
  if (status != cudaSuccess) return failure(status);
  return {};
}

// Clusters of this kernel that can run at once on the current device.
template <class... Parameters>
Result<int> MaxActiveClusters(const char* name, void (*kernel)(Parameters...),
                              const LaunchConfig& config) {
  const void* function = reinterpret_cast<const void*>(kernel);
  // Never lowered below what every launch may use without asking.
  cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       config.shared_bytes > 48 * 1024 ? config.shared_bytes : 48 * 1024);
  cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(config.cluster);
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(config.cluster));
  launch.blockDim = dim3(static_cast<unsigned>(config.block));
  launch.dynamicSmemBytes = static_cast<size_t>(config.shared_bytes);
  launch.attrs = &attribute;
  launch.numAttrs = 1;
  int clusters = 0;
  const cudaError_t status = cudaOccupancyMaxActiveClusters(&clusters, function, &launch);
  if (status == cudaSuccess && clusters > 0) return clusters;
  cudaGetLastError();
  return Fail(Code::kUnsupported,
              fmt::format("Kernel '{}' does not run in clusters of {} blocks of {} threads with {} "
                          "bytes of shared memory on this device: {}.",
                          name, config.cluster, config.block, config.shared_bytes,
                          cudaGetErrorString(status)));
}

// For kernels launched with overlap_previous: waits until the kernel before has ended and its writes
// are visible. Everything before this call may run while that kernel is still running.
__device__ inline void WaitForPreviousKernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Lets the next kernel, if launched with overlap_previous, start its prologue.
__device__ inline void AllowNextKernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Threads -------------------------------------------------------------------------------------

__device__ inline int LaneId() {
  return static_cast<int>(threadIdx.x & 31u);
}
__device__ inline int WarpId() {
  return static_cast<int>(threadIdx.x / 32u);
}
// The same, known to the compiler to be the same for all lanes. All lanes must get here.
__device__ inline int UniformWarpId() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32u), 0);
}

// Dynamic shared memory of the block, 1024-byte aligned.
template <class T>
__device__ inline T* DynamicShared() {
  extern __shared__ __align__(1024) unsigned char di_dynamic_shared[];
  return reinterpret_cast<T*>(di_dynamic_shared);
}

// Barrier `id` (1 to 15) among `threads` threads of the block, a multiple of 32.
__device__ inline void NamedBarrierSync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void NamedBarrierArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Registers per thread of a warpgroup that specialises; needs a register cap on the kernel.
template <int kCount>
__device__ inline void IncreaseRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void DecreaseRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// ---- Numbers -------------------------------------------------------------------------------------

// Two bf16 values in a word, the first in the low half.
__device__ inline uint32_t MulBf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// Both values of `a` times the low (high) one of `b`.
__device__ inline uint32_t MulBf16x2ByLow(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("{\n"
      ".reg .b16 low, high;\n"
      ".reg .b32 both;\n"
      "mov.b32 {low, high}, %2;\n"
      "mov.b32 both, {low, low};\n"
      "mul.rn.bf16x2 %0, %1, both;\n"
      "}\n"
      : "=r"(d)
      : "r"(a), "r"(b));
  return d;
}
__device__ inline uint32_t MulBf16x2ByHigh(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("{\n"
      ".reg .b16 low, high;\n"
      ".reg .b32 both;\n"
      "mov.b32 {low, high}, %2;\n"
      "mov.b32 both, {high, high};\n"
      "mul.rn.bf16x2 %0, %1, both;\n"
      "}\n"
      : "=r"(d)
      : "r"(a), "r"(b));
  return d;
}
// Bits of `a` where the mask has ones, of `b` elsewhere; one instruction.
__device__ inline uint32_t SelectBits(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
  return d;
}
__device__ inline uint32_t FloatsToBf16x2(float low, float high) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ inline uint16_t FloatToBf16(float x) {
  return static_cast<uint16_t>(FloatsToBf16x2(x, 0.0f) & 0xffffu);
}
__device__ inline float Bf16LowToFloat(uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ inline float Bf16HighToFloat(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}
__device__ inline float Bf16ToFloat(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}
// 2^x with about 2 ulp; the hardware's approximation, the same for every call.
__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x within 1 ulp, subnormals being zero; the hardware's approximation.
__device__ inline float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Two E4M3 codes from two floats (saturating, ties to even): low byte from `low`.
__device__ inline uint16_t FloatsToE4M3x2(float low, float high) {
  uint16_t d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
}

// ---- Memory --------------------------------------------------------------------------------------

// 16 bytes that are read once: not kept in the first-level cache.
__device__ inline uint4 LoadStreaming(const void* global) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global));
  return v;
}
// Brings bytes (a multiple of 16, 16-byte aligned) into the L2, some time.
__device__ inline void PrefetchL2(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}
// Stores 16 bytes at once. The compiler splits some plain stores of a uint4 into four.
__device__ inline void StoreVector(void* global, const uint4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ inline uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// 16-byte copies global -> shared in groups per thread.
__device__ inline void CopyAsync16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(SharedAddress(shared)),
               "l"(global)
               : "memory");
}
// Writes zeros instead where not `valid`; `global` must be a readable address all the same.
__device__ inline void CopyAsync16OrZero(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(SharedAddress(shared)),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most kPending of the thread's latest groups are still under way.
template <int kPending>
__device__ inline void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Barriers in shared memory whose phase ends when all arrivals and announced bytes are in.
using Barrier = uint64_t;
__device__ inline void BarrierInit(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals)
               : "memory");
}
// After BarrierInit, before other threads (a block barrier follows) and bulk copies use them.
__device__ inline void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void BarrierArrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
// Arrives and announces bytes that bulk copies will bring in this phase.
__device__ inline void BarrierArriveExpect(Barrier* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   SharedAddress(barrier)),
               "r"(bytes)
               : "memory");
}
// Arrives when all earlier CopyAsync16 of this thread have landed. The arrival is one of those that
// BarrierInit counted.
__device__ inline void BarrierArriveOnCopies(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(SharedAddress(barrier))
               : "memory");
}
// Waits for the end of the phase with this parity (0 for the first).
__device__ inline void BarrierWait(Barrier* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "di_wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
      "@done bra di_done;\n"
      "bra di_wait;\n"
      "di_done:\n"
      "}\n" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}
// One thread copies bytes (a multiple of 16, both addresses 16-byte aligned) global -> shared; they
// count for the barrier.
__device__ inline void BulkCopy(void* shared, const void* global, uint32_t bytes,
                                Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}
// Shared memory written by ordinary stores or CopyAsync16 is seen by wgmma and bulk copies after
// this fence in each writing thread and a barrier.
__device__ inline void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Clusters ------------------------------------------------------------------------------------

__device__ inline uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// A barrier of all threads of the cluster; orders their shared memory accesses.
__device__ inline void ClusterSync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}
// The two halves of ClusterSync, alternating in every thread: what a thread stored before its arrival
// is seen after the others' wait.
__device__ inline void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void ClusterWait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Writes a float at the same place in the shared memory of a block of the cluster.
__device__ inline void StoreClusterFloat(float* shared, uint32_t rank, float value) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.f32 [remote], %2;\n"
      "}\n" ::"r"(SharedAddress(shared)),
      "r"(rank), "f"(value)
      : "memory");
}
// Reads a float (four floats, an integer) at the same place in the shared memory of another block
// of the cluster.
__device__ inline float LoadClusterFloat(const float* shared, uint32_t rank) {
  float v;
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [remote];\n"
      "}\n"
      : "=f"(v)
      : "r"(SharedAddress(shared)), "r"(rank)
      : "memory");
  return v;
}
__device__ inline float4 LoadClusterFloat4(const float* shared, uint32_t rank) {
  float4 v;
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n"
      "}\n"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(SharedAddress(shared)), "r"(rank)
      : "memory");
  return v;
}

__device__ inline uint32_t LoadClusterWord(const uint32_t* shared, uint32_t rank) {
  uint32_t v;
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.u32 %0, [remote];\n"
      "}\n"
      : "=r"(v)
      : "r"(SharedAddress(shared)), "r"(rank)
      : "memory");
  return v;
}
__device__ inline uint64_t LoadClusterLong(const uint64_t* shared, uint32_t rank) {
  uint64_t v;
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.u64 %0, [remote];\n"
      "}\n"
      : "=l"(v)
      : "r"(SharedAddress(shared)), "r"(rank)
      : "memory");
  return v;
}
// Stores of 4, 8 and 16 bytes at the same place in the shared memory of a block of the cluster, this
// one too. Nobody waits for them but those who wait for the barrier at the same place there: they
// count for it as bytes of bulk copies do.
__device__ inline void StoreClusterAsync(float* shared, uint32_t rank, float value,
                                         Barrier* barrier) {
  asm volatile(
      "{\n"
      ".reg .b32 remote, remote_barrier;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\n"
      "mapa.shared::cluster.u32 remote_barrier, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [remote], %3, "
      "[remote_barrier];\n"
      "}\n" ::"r"(SharedAddress(shared)),
      "r"(SharedAddress(barrier)), "r"(rank), "r"(__float_as_uint(value))
      : "memory");
}
__device__ inline void StoreClusterAsync(float2* shared, uint32_t rank, const float2& value,
                                         Barrier* barrier) {
  asm volatile(
      "{\n"
      ".reg .b32 remote, remote_barrier;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\n"
      "mapa.shared::cluster.u32 remote_barrier, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [remote], {%3, %4}, "
      "[remote_barrier];\n"
      "}\n" ::"r"(SharedAddress(shared)),
      "r"(SharedAddress(barrier)), "r"(rank), "r"(__float_as_uint(value.x)),
      "r"(__float_as_uint(value.y))
      : "memory");
}
__device__ inline void StoreClusterAsync(uint4* shared, uint32_t rank, const uint4& value,
                                         Barrier* barrier) {
  asm volatile(
      "{\n"
      ".reg .b32 remote, remote_barrier;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\n"
      "mapa.shared::cluster.u32 remote_barrier, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [remote], "
      "{%3, %4, %5, %6}, [remote_barrier];\n"
      "}\n" ::"r"(SharedAddress(shared)),
      "r"(SharedAddress(barrier)), "r"(rank), "r"(value.x), "r"(value.y), "r"(value.z),
      "r"(value.w)
      : "memory");
}
// Arrives at the barrier at the same place in a block of the cluster, this one too. What this thread
// has stored or seen before is seen by threads there after ClusterBarrierWait.
__device__ inline void ClusterBarrierArrive(Barrier* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(SharedAddress(barrier)),
      "r"(rank)
      : "memory");
}
__device__ inline void ClusterBarrierWait(Barrier* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "di_wait:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1, 0x989680;\n"
      "@done bra di_done;\n"
      "bra di_wait;\n"
      "di_done:\n"
      "}\n" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// ---- Matrix instructions of a warp -----------------------------------------------------------------

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void LoadMatrix4(uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(SharedAddress(shared))
               : "memory");
}
__device__ inline void LoadMatrix4Transposed(uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(SharedAddress(shared))
               : "memory");
}
// The way back: lane i gives the address of row i % 8 of matrix i / 8. Transposed: registers hold
// columns of what is written, as for LoadMatrix4Transposed.
__device__ inline void StoreMatrix4(void* shared, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   SharedAddress(shared)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ inline void StoreMatrix4Transposed(void* shared, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   SharedAddress(shared)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
// d[16x8] += a[16x16] * b[16x8] in bf16 with fp32 sums. With g = lane / 4 and t = lane % 4:
//   a[0] = A[g][2t..], a[1] = A[g+8][2t..], a[2] = A[g][2t+8..], a[3] = A[g+8][2t+8..]
//   b[0] = B[2t..][g], b[1] = B[2t+8..][g]
//   d[0], d[1] = D[g][2t, 2t+1]; d[2], d[3] = D[g+8][2t, 2t+1]
__device__ inline void MmaBf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// The same with E4M3 operands: d[16x8] += a[16x32] * b[32x8]; registers hold four codes where those
// above hold two values (columns 4t.. and 4t+16..).
__device__ inline void MmaE4M3(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace deepinfer::cuda
