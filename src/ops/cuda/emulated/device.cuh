// Device primitives for kernels, on the CPU: the interface of src/ops/cuda/native/device.cuh, for
// tests without a GPU; keep the two in step. See fibers.h for what the emulation shows and what it
// does not.
#pragma once

#include <bit>
#include <cfloat>
#include <cstdint>
#include <tuple>
#include <type_traits>

#include "base/error.h"
#include "ops/cuda/emulated/fibers.h"
#include "ops/cuda/emulated/language.h"
#include "ops/cuda/emulated/matrix.h"
#include "ops/cuda/launch_config.h"
#include "tensor/float_formats.h"
#include "tensor/stream.h"

namespace deepinfer::cuda {

// ---- Launch -------------------------------------------------------------------------------------

// Runs the kernel before it returns.
template <class... Parameters, class... Arguments>
Status Launch(const char* name, void (*kernel)(Parameters...), const LaunchConfig& config,
              Stream& stream, Arguments&&... arguments) {
  if (config.grid.x == 0 || config.grid.y == 0 || config.grid.z == 0) return {};
  if (stream.device().kind != DeviceKind::kCuda)
    return Fail(Code::kInternal, fmt::format("Kernel '{}' is launched in a CPU stream.", name));
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> parameters;
  };
  Call call{kernel, std::tuple<Parameters...>(Parameters(arguments)...)};
  return emulated::RunGrid(
      name, config,
      [](void* opaque) {
        const Call& thread_call = *static_cast<const Call*>(opaque);
        std::apply(thread_call.kernel, thread_call.parameters);
      },
      &call);
}

// As many as the number of multiprocessors that the emulated device reports has room for.
template <class... Parameters>
Result<int> MaxActiveClusters(const char* name, void (*)(Parameters...),
                              const LaunchConfig& config) {
  LaunchConfig one = config;
  one.grid = {.x = static_cast<uint32_t>(config.cluster)};
  DI_RETURN_IF_ERROR(emulated::CheckShape(name, one));
  return 4;
}

inline void WaitForPreviousKernel() {}
inline void AllowNextKernel() {}

// ---- Threads ------------------------------------------------------------------------------------

inline int LaneId() {
  return static_cast<int>(threadIdx.x & 31u);
}
inline int UniformWarpId() {
  return static_cast<int>(threadIdx.x / 32u);
}
inline int WarpId() {
  return static_cast<int>(threadIdx.x / 32u);
}

template <class T>
inline T* DynamicShared() {
  return reinterpret_cast<T*>(emulated::DynamicSharedBase());
}

inline void NamedBarrierSync(int id, int threads) {
  if (id < 1 || threads < 32) emulated::KernelFailed("NamedBarrierSync(%d, %d)", id, threads);
  emulated::BlockBarrier("NamedBarrierSync", id, threads, true);
}
inline void NamedBarrierArrive(int id, int threads) {
  if (id < 1 || threads < 32) emulated::KernelFailed("NamedBarrierArrive(%d, %d)", id, threads);
  emulated::BlockBarrier("NamedBarrierArrive", id, threads, false);
}

template <int kCount>
inline void IncreaseRegisters() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256);
}
template <int kCount>
inline void DecreaseRegisters() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256);
}

// ---- Numbers ------------------------------------------------------------------------------------

// The device's conversions give one NaN, without a sign.
inline uint16_t FloatToBf16(float x) {
  return x != x ? uint16_t{0x7fff} : F32ToBf16(x).bits;
}
inline uint32_t FloatsToBf16x2(float low, float high) {
  return FloatToBf16(low) | (static_cast<uint32_t>(FloatToBf16(high)) << 16);
}
inline float Bf16LowToFloat(uint32_t pair) {
  return __uint_as_float(pair << 16);
}
inline float Bf16HighToFloat(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}
inline float Bf16ToFloat(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}
inline uint32_t MulBf16x2(uint32_t a, uint32_t b) {
  const auto product = [](float x, float y) -> uint32_t {
    const double exact = static_cast<double>(x) * static_cast<double>(y);
    // Subnormal results are rounded once, to multiples of 2^-133: fp32 in between would be a second
    // time.
    if (::fabs(exact) < 0x1p-126)
      return FloatToBf16(static_cast<float>(::nearbyint(exact * 0x1p133) * 0x1p-133));
    return FloatToBf16(static_cast<float>(exact));
  };
  return product(Bf16LowToFloat(a), Bf16LowToFloat(b)) |
         (product(Bf16HighToFloat(a), Bf16HighToFloat(b)) << 16);
}
inline uint32_t MulBf16x2ByLow(uint32_t a, uint32_t b) {
  return MulBf16x2(a, (b & 0xffffu) | (b << 16));
}
inline uint32_t MulBf16x2ByHigh(uint32_t a, uint32_t b) {
  return MulBf16x2(a, (b >> 16) | (b & 0xffff0000u));
}
inline uint32_t SelectBits(uint32_t mask, uint32_t a, uint32_t b) {
  return (a & mask) | (b & ~mask);
}
inline float Exp2(float x) {
  const float y = ::exp2f(x);
  return y < FLT_MIN ? 0.0f : y;
}
inline float Reciprocal(float x) {
  const float y = 1.0f / (::fabsf(x) < FLT_MIN ? ::copysignf(0.0f, x) : x);
  return ::fabsf(y) < FLT_MIN ? ::copysignf(0.0f, y) : y;
}
inline uint16_t FloatsToE4M3x2(float low, float high) {
  const auto convert = [](float x) -> uint32_t { return x != x ? 0x7fu : F32ToE4M3(x); };
  return static_cast<uint16_t>(convert(low) | (convert(high) << 8));
}

// ---- Memory -------------------------------------------------------------------------------------

inline uint4 LoadStreaming(const void* global) {
  emulated::CheckAligned(global, 16, "LoadStreaming");
  return *static_cast<const uint4*>(global);
}
inline void PrefetchL2(const void* global, uint32_t bytes) {
  emulated::CheckAligned(global, 16, "PrefetchL2");
  if (bytes == 0 || bytes % 16 != 0) emulated::KernelFailed("PrefetchL2 of %u bytes", bytes);
}
inline void StoreVector(void* global, const uint4& v) {
  emulated::CheckAligned(global, 16, "StoreVector");
  *static_cast<uint4*>(global) = v;
}
// Works for dynamic shared memory only.
inline uint32_t SharedAddress(const void* shared) {
  return emulated::SharedAddressOf(shared);
}

inline void CopyAsync16OrZero(void* shared, const void* global, bool valid) {
  emulated::CheckAligned(shared, 16, "CopyAsync16 to shared");
  emulated::CheckAligned(global, 16, "CopyAsync16 from global");
  emulated::StartCopy(shared, valid ? global : nullptr);
}
inline void CopyAsync16(void* shared, const void* global) {
  CopyAsync16OrZero(shared, global, true);
}
inline void CommitCopies() {
  emulated::CommitCopyGroup();
}
template <int kPending>
inline void WaitCopies() {
  static_assert(kPending >= 0);
  emulated::WaitForCopyGroups(kPending);
}

using Barrier = uint64_t;
inline void BarrierInit(Barrier* barrier, int arrivals) {
  emulated::InitBarrier(barrier, arrivals);
}
inline void FenceBarrierInit() {}
inline void BarrierArrive(Barrier* barrier) {
  emulated::AddToBarrier(barrier, 1, 0, "BarrierArrive");
}
inline void BarrierArriveExpect(Barrier* barrier, uint32_t bytes) {
  emulated::AddToBarrier(barrier, 1, -static_cast<int64_t>(bytes), "BarrierArriveExpect");
}
inline void BarrierArriveOnCopies(Barrier* barrier) {
  emulated::ArriveOnCopies(barrier);
}
inline void BarrierWait(Barrier* barrier, uint32_t parity) {
  emulated::WaitForBarrier(barrier, parity);
}
inline void BulkCopy(void* shared, const void* global, uint32_t bytes, Barrier* barrier) {
  emulated::CheckAligned(shared, 16, "BulkCopy to shared");
  emulated::CheckAligned(global, 16, "BulkCopy from global");
  if (bytes == 0 || bytes % 16 != 0) emulated::KernelFailed("BulkCopy of %u bytes", bytes);
  emulated::StartBulkCopy(shared, global, bytes, barrier);
}
inline void FenceAsyncProxy() {}

// ---- Clusters -----------------------------------------------------------------------------------

inline uint32_t ClusterRank() {
  return emulated::RankInCluster();
}
inline void ClusterSync() {
  emulated::ArriveAtGroupBarrier("ClusterSync");
  emulated::WaitForGroupBarrier("ClusterSync");
}
inline void ClusterArrive() {
  emulated::ArriveAtGroupBarrier("ClusterArrive");
}
inline void ClusterWait() {
  emulated::WaitForGroupBarrier("ClusterWait");
}
inline void StoreClusterFloat(float* shared, uint32_t rank, float value) {
  emulated::CheckAligned(shared, 4, "StoreClusterFloat");
  *static_cast<float*>(emulated::ClusterPeer(shared, rank)) = value;
}
inline float LoadClusterFloat(const float* shared, uint32_t rank) {
  emulated::CheckAligned(shared, 4, "LoadClusterFloat");
  return *static_cast<const float*>(emulated::ClusterPeer(shared, rank));
}
inline float4 LoadClusterFloat4(const float* shared, uint32_t rank) {
  emulated::CheckAligned(shared, 16, "LoadClusterFloat4");
  return *static_cast<const float4*>(emulated::ClusterPeer(shared, rank));
}

inline uint32_t LoadClusterWord(const uint32_t* shared, uint32_t rank) {
  emulated::CheckAligned(shared, 4, "LoadClusterWord");
  return *static_cast<const uint32_t*>(emulated::ClusterPeer(shared, rank));
}
inline uint64_t LoadClusterLong(const uint64_t* shared, uint32_t rank) {
  emulated::CheckAligned(shared, 8, "LoadClusterLong");
  return *static_cast<const uint64_t*>(emulated::ClusterPeer(shared, rank));
}

template <class T>
inline void StoreClusterAsync(T* shared, uint32_t rank, const std::type_identity_t<T>& value,
                              Barrier* barrier) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  emulated::CheckAligned(shared, sizeof(T), "StoreClusterAsync");
  *static_cast<T*>(emulated::ClusterPeer(shared, rank)) = value;
  emulated::AddToPeerBarrier(barrier, rank, 0, sizeof(T), "StoreClusterAsync");
}
inline void ClusterBarrierArrive(Barrier* barrier, uint32_t rank) {
  emulated::AddToPeerBarrier(barrier, rank, 1, 0, "ClusterBarrierArrive");
}
inline void ClusterBarrierWait(Barrier* barrier, uint32_t parity) {
  emulated::WaitForBarrier(barrier, parity);
}

// ---- Matrix instructions of a warp --------------------------------------------------------------

inline void LoadMatrix4(uint32_t (&r)[4], const void* shared) {
  emulated::CheckAligned(shared, 16, "LoadMatrix4");
  emulated::WarpLoad load{r, shared};
  emulated::WarpCollective("LoadMatrix4", &load, &emulated::RunWarpLoad);
}
inline void LoadMatrix4Transposed(uint32_t (&r)[4], const void* shared) {
  emulated::CheckAligned(shared, 16, "LoadMatrix4Transposed");
  emulated::WarpLoad load{r, shared};
  emulated::WarpCollective("LoadMatrix4Transposed", &load, &emulated::RunWarpLoadTransposed);
}
inline void StoreMatrix4(void* shared, const uint32_t (&r)[4]) {
  emulated::CheckAligned(shared, 16, "StoreMatrix4");
  emulated::WarpStore store{r, shared};
  emulated::WarpCollective("StoreMatrix4", &store, &emulated::RunWarpStore);
}
inline void StoreMatrix4Transposed(void* shared, const uint32_t (&r)[4]) {
  emulated::CheckAligned(shared, 16, "StoreMatrix4Transposed");
  emulated::WarpStore store{r, shared};
  emulated::WarpCollective("StoreMatrix4Transposed", &store, &emulated::RunWarpStoreTransposed);
}
inline void MmaBf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulated::WarpMma mma{d, a, b};
  emulated::WarpCollective("MmaBf16", &mma, &emulated::RunWarpMmaBf16);
}
inline void MmaE4M3(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulated::WarpMma mma{d, a, b};
  emulated::WarpCollective("MmaE4M3", &mma, &emulated::RunWarpMmaE4M3);
}

}  // namespace deepinfer::cuda
