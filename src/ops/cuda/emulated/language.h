// What nvcc knows without an include, for g++: qualifiers, vector types, the built-in variables and
// functions that kernels use. Functions that make threads wait are in fibers.h; those declared here
// call them.
#pragma once

#include <math.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#define DI_CUDA_EMULATED 1

// ---- Qualifiers ---------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))
// A block runs on one thread of the host, and blocks that run together on a thread each.
#define __shared__ static thread_local

// ---- Vector types -------------------------------------------------------------------------------

#define DI_VECTOR_TYPES(scalar, name)                                     \
  struct name##2 {                                                        \
    scalar x, y;                                                          \
  }                                                                       \
  __attribute__((aligned(2 * sizeof(scalar))));                           \
  struct name##3 {                                                        \
    scalar x, y, z;                                                       \
  };                                                                      \
  struct name##4 {                                                        \
    scalar x, y, z, w;                                                    \
  }                                                                       \
  __attribute__((aligned(sizeof(scalar) > 4 ? 16 : 4 * sizeof(scalar)))); \
  inline name##2 make_##name##2(scalar x, scalar y) {                     \
    return {x, y};                                                        \
  }                                                                       \
  inline name##3 make_##name##3(scalar x, scalar y, scalar z) {           \
    return {x, y, z};                                                     \
  }                                                                       \
  inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { \
    return {x, y, z, w};                                                  \
  }

DI_VECTOR_TYPES(signed char, char)
DI_VECTOR_TYPES(unsigned char, uchar)
DI_VECTOR_TYPES(short, short)
DI_VECTOR_TYPES(unsigned short, ushort)
DI_VECTOR_TYPES(int, int)
DI_VECTOR_TYPES(unsigned int, uint)
DI_VECTOR_TYPES(long long, longlong)
DI_VECTOR_TYPES(unsigned long long, ulonglong)
DI_VECTOR_TYPES(float, float)
DI_VECTOR_TYPES(double, double)
#undef DI_VECTOR_TYPES

struct dim3 {
  unsigned int x = 1, y = 1, z = 1;
};

// ---- Built-in variables -------------------------------------------------------------------------

// Of the fiber that runs; the scheduler writes them.
inline thread_local constinit uint3 threadIdx = {};
inline thread_local constinit uint3 blockIdx = {};
inline thread_local constinit dim3 blockDim = {};
inline thread_local constinit dim3 gridDim = {};
inline constexpr int warpSize = 32;

// ---- Bits ---------------------------------------------------------------------------------------

inline unsigned int __float_as_uint(float x) {
  return std::bit_cast<unsigned int>(x);
}
inline int __float_as_int(float x) {
  return std::bit_cast<int>(x);
}
inline float __uint_as_float(unsigned int x) {
  return std::bit_cast<float>(x);
}
inline float __int_as_float(int x) {
  return std::bit_cast<float>(x);
}
inline long long __double_as_longlong(double x) {
  return std::bit_cast<long long>(x);
}
inline double __longlong_as_double(long long x) {
  return std::bit_cast<double>(x);
}
inline int __popc(unsigned int x) {
  return std::popcount(x);
}
inline int __popcll(unsigned long long x) {
  return std::popcount(x);
}
inline int __clz(int x) {
  return std::countl_zero(static_cast<unsigned int>(x));
}
inline int __clzll(long long x) {
  return std::countl_zero(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __ffsll(long long x) {
  return __builtin_ffsll(x);
}
inline unsigned int __brev(unsigned int x) {
  unsigned int reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= ((x >> bit) & 1u) << (31 - bit);
  return reversed;
}
inline unsigned int __byte_perm(unsigned int x, unsigned int y, unsigned int selector) {
  const uint64_t bytes = (static_cast<uint64_t>(y) << 32) | x;
  unsigned int result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned int choice = (selector >> (4 * i)) & 0xfu;
    unsigned int byte = static_cast<unsigned int>(bytes >> (8 * (choice & 7u))) & 0xffu;
    if ((choice & 8u) != 0) byte = (byte & 0x80u) != 0 ? 0xffu : 0u;
    result |= byte << (8 * i);
  }
  return result;
}
inline unsigned int __funnelshift_l(unsigned int low, unsigned int high, unsigned int shift) {
  const uint64_t value = (static_cast<uint64_t>(high) << 32) | low;
  return static_cast<unsigned int>((value << (shift & 31u)) >> 32);
}
inline unsigned int __funnelshift_r(unsigned int low, unsigned int high, unsigned int shift) {
  const uint64_t value = (static_cast<uint64_t>(high) << 32) | low;
  return static_cast<unsigned int>(value >> (shift & 31u));
}
inline unsigned int __umulhi(unsigned int a, unsigned int b) {
  return static_cast<unsigned int>((static_cast<uint64_t>(a) * b) >> 32);
}
inline int __mulhi(int a, int b) {
  return static_cast<int>((static_cast<int64_t>(a) * b) >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}

// ---- Numbers ------------------------------------------------------------------------------------

inline float __fmaf_rn(float a, float b, float c) {
  return ::fmaf(a, b, c);
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float x) {
  return 1.0f / x;
}
inline float __fsqrt_rn(float x) {
  return ::sqrtf(x);
}
inline float __frsqrt_rn(float x) {
  return static_cast<float>(1.0 / ::sqrt(static_cast<double>(x)));
}
inline float rsqrtf(float x) {
  return __frsqrt_rn(x);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __saturatef(float x) {
  return ::fminf(::fmaxf(x, 0.0f), 1.0f);
}
// glibc declares functions of these names without offering them, hence the macros.
#define __expf(x) ::expf(x)
#define __logf(x) ::logf(x)
#define __log2f(x) ::log2f(x)
#define __sinf(x) ::sinf(x)
#define __cosf(x) ::cosf(x)

inline int __float2int_rn(float x) {
  return static_cast<int>(::nearbyintf(x));
}
inline int __float2int_rz(float x) {
  return static_cast<int>(x);
}
inline int __float2int_rd(float x) {
  return static_cast<int>(::floorf(x));
}
inline int __float2int_ru(float x) {
  return static_cast<int>(::ceilf(x));
}
inline unsigned int __float2uint_rn(float x) {
  return static_cast<unsigned int>(::nearbyintf(x));
}
inline unsigned int __float2uint_rz(float x) {
  return static_cast<unsigned int>(x);
}
inline float __int2float_rn(int x) {
  return static_cast<float>(x);
}
inline float __uint2float_rn(unsigned int x) {
  return static_cast<float>(x);
}

#define DI_MIN_MAX(type)            \
  inline type min(type a, type b) { \
    return b < a ? b : a;           \
  }                                 \
  inline type max(type a, type b) { \
    return a < b ? b : a;           \
  }
DI_MIN_MAX(int)
DI_MIN_MAX(unsigned int)
DI_MIN_MAX(long)
DI_MIN_MAX(unsigned long)
DI_MIN_MAX(long long)
DI_MIN_MAX(unsigned long long)
#undef DI_MIN_MAX
inline unsigned int min(int a, unsigned int b) {
  return min(static_cast<unsigned int>(a), b);
}
inline unsigned int min(unsigned int a, int b) {
  return min(a, static_cast<unsigned int>(b));
}
inline unsigned int max(int a, unsigned int b) {
  return max(static_cast<unsigned int>(a), b);
}
inline unsigned int max(unsigned int a, int b) {
  return max(a, static_cast<unsigned int>(b));
}
inline float min(float a, float b) {
  return ::fminf(a, b);
}
inline float max(float a, float b) {
  return ::fmaxf(a, b);
}
inline double min(double a, double b) {
  return ::fmin(a, b);
}
inline double max(double a, double b) {
  return ::fmax(a, b);
}

// ---- Memory -------------------------------------------------------------------------------------

template <class T>
inline T __ldg(const T* p) {
  return *p;
}
template <class T>
inline T __ldcg(const T* p) {
  return *p;
}
template <class T>
inline T __ldcs(const T* p) {
  return *p;
}
template <class T>
inline T __ldca(const T* p) {
  return *p;
}
template <class T>
inline void __stcg(T* p, std::type_identity_t<T> value) {
  *p = value;
}
template <class T>
inline void __stcs(T* p, std::type_identity_t<T> value) {
  *p = value;
}

namespace deepinfer::cuda::emulated {
void Yield();
void YieldToOtherBlocks();
[[noreturn]] void KernelFailed(const char* format, ...) __attribute__((format(printf, 1, 2)));
void BlockBarrier(const char* what, int id, int threads, bool wait);
int BlockVote(const char* what, bool value);
const uint64_t* WarpExchange(const char* what, uint32_t mask, uint64_t value);
}  // namespace deepinfer::cuda::emulated

inline void __threadfence() {
  deepinfer::cuda::emulated::YieldToOtherBlocks();
}
inline void __threadfence_block() {}
inline void __threadfence_system() {
  deepinfer::cuda::emulated::YieldToOtherBlocks();
}

// Fibers do not run at once, but other launches may: the host's atomics. Only integers: sums of
// floats in the order of arrival are not reproducible.
template <class T>
inline T atomicAdd(T* address, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>);
  deepinfer::cuda::emulated::YieldToOtherBlocks();
  return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}
template <class T>
inline T atomicSub(T* address, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>);
  return __atomic_fetch_sub(address, value, __ATOMIC_SEQ_CST);
}
template <class T>
inline T atomicAnd(T* address, std::type_identity_t<T> value) {
  return __atomic_fetch_and(address, value, __ATOMIC_SEQ_CST);
}
template <class T>
inline T atomicOr(T* address, std::type_identity_t<T> value) {
  return __atomic_fetch_or(address, value, __ATOMIC_SEQ_CST);
}
template <class T>
inline T atomicXor(T* address, std::type_identity_t<T> value) {
  return __atomic_fetch_xor(address, value, __ATOMIC_SEQ_CST);
}
template <class T>
inline T atomicExch(T* address, std::type_identity_t<T> value) {
  T old;
  __atomic_exchange(address, &value, &old, __ATOMIC_SEQ_CST);
  return old;
}
template <class T>
inline T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>);
  deepinfer::cuda::emulated::YieldToOtherBlocks();
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
template <class T>
inline T atomicMax(T* address, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>);
  T old = __atomic_load_n(address, __ATOMIC_SEQ_CST);
  while (old < value && !__atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_SEQ_CST,
                                                     __ATOMIC_SEQ_CST)) {
  }
  return old;
}
template <class T>
inline T atomicMin(T* address, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>);
  T old = __atomic_load_n(address, __ATOMIC_SEQ_CST);
  while (value < old && !__atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_SEQ_CST,
                                                     __ATOMIC_SEQ_CST)) {
  }
  return old;
}

// ---- Threads ------------------------------------------------------------------------------------

inline void __syncthreads() {
  deepinfer::cuda::emulated::BlockBarrier("__syncthreads", 0, 0, true);
}
inline int __syncthreads_count(int predicate) {
  return deepinfer::cuda::emulated::BlockVote("__syncthreads_count", predicate != 0);
}
inline int __syncthreads_or(int predicate) {
  return deepinfer::cuda::emulated::BlockVote("__syncthreads_or", predicate != 0) != 0;
}
inline int __syncthreads_and(int predicate) {
  return deepinfer::cuda::emulated::BlockVote("__syncthreads_and", predicate == 0) == 0;
}
inline void __syncwarp(unsigned int mask = 0xffffffffu) {
  deepinfer::cuda::emulated::WarpExchange("__syncwarp", mask, 0);
}
inline void __nanosleep(unsigned int) {
  deepinfer::cuda::emulated::Yield();
}
[[noreturn]] inline void __trap() {
  deepinfer::cuda::emulated::KernelFailed("__trap");
}
inline long long clock64() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

namespace deepinfer::cuda::emulated {

template <class T>
uint64_t ToWord(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}
template <class T>
T FromWord(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

// The value of lane `source`; of the own lane where `source` is outside the segment.
template <class T>
T Shuffle(const char* what, unsigned int mask, T value, int source, bool inside) {
  const uint64_t* values = WarpExchange(what, mask, ToWord(value));
  if (!inside) return value;
  if (((mask >> source) & 1u) == 0)
    KernelFailed("%s reads lane %d, which is not in mask 0x%08x", what, source, mask);
  return FromWord<T>(values[source]);
}

template <class T, class Combine>
T Reduce(const char* what, unsigned int mask, T value, Combine combine) {
  const uint64_t* values = WarpExchange(what, mask, ToWord(value));
  T result = value;
  for (int lane = 0; lane < 32; ++lane)
    if (((mask >> lane) & 1u) != 0 && lane != static_cast<int>(threadIdx.x & 31u))
      result = combine(result, FromWord<T>(values[lane]));
  return result;
}

}  // namespace deepinfer::cuda::emulated

template <class T>
inline T __shfl_sync(unsigned int mask, T value, int source, int width = 32) {
  const int lane = static_cast<int>(threadIdx.x & 31u);
  const int from = (lane & ~(width - 1)) | (source & (width - 1));
  return deepinfer::cuda::emulated::Shuffle("__shfl_sync", mask, value, from, true);
}
template <class T>
inline T __shfl_up_sync(unsigned int mask, T value, unsigned int delta, int width = 32) {
  const int lane = static_cast<int>(threadIdx.x & 31u);
  const int from = lane - static_cast<int>(delta);
  return deepinfer::cuda::emulated::Shuffle("__shfl_up_sync", mask, value, from,
                                            from >= (lane & ~(width - 1)));
}
template <class T>
inline T __shfl_down_sync(unsigned int mask, T value, unsigned int delta, int width = 32) {
  const int lane = static_cast<int>(threadIdx.x & 31u);
  const int from = lane + static_cast<int>(delta);
  return deepinfer::cuda::emulated::Shuffle("__shfl_down_sync", mask, value, from,
                                            from <= (lane | (width - 1)));
}
template <class T>
inline T __shfl_xor_sync(unsigned int mask, T value, int lane_mask, int width = 32) {
  const int lane = static_cast<int>(threadIdx.x & 31u);
  const int from = lane ^ lane_mask;
  return deepinfer::cuda::emulated::Shuffle("__shfl_xor_sync", mask, value, from,
                                            from <= (lane | (width - 1)));
}
inline unsigned int __ballot_sync(unsigned int mask, int predicate) {
  const uint64_t* values =
      deepinfer::cuda::emulated::WarpExchange("__ballot_sync", mask, predicate != 0 ? 1 : 0);
  unsigned int ballot = 0;
  for (int lane = 0; lane < 32; ++lane)
    if (((mask >> lane) & 1u) != 0) ballot |= static_cast<unsigned int>(values[lane]) << lane;
  return ballot;
}
inline int __any_sync(unsigned int mask, int predicate) {
  return __ballot_sync(mask, predicate) != 0;
}
inline int __all_sync(unsigned int mask, int predicate) {
  return __ballot_sync(mask, predicate == 0) == 0;
}
template <class T>
inline unsigned int __match_any_sync(unsigned int mask, T value) {
  const uint64_t word = deepinfer::cuda::emulated::ToWord(value);
  const uint64_t* values = deepinfer::cuda::emulated::WarpExchange("__match_any_sync", mask, word);
  unsigned int same = 0;
  for (int lane = 0; lane < 32; ++lane)
    if (((mask >> lane) & 1u) != 0 && values[lane] == word) same |= 1u << lane;
  return same;
}
template <class T>
inline T __reduce_add_sync(unsigned int mask, T value) {
  static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned int>);
  return deepinfer::cuda::emulated::Reduce("__reduce_add_sync", mask, value, [](T a, T b) {
    return static_cast<T>(static_cast<unsigned int>(a) + static_cast<unsigned int>(b));
  });
}
template <class T>
inline T __reduce_min_sync(unsigned int mask, T value) {
  static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned int>);
  return deepinfer::cuda::emulated::Reduce("__reduce_min_sync", mask, value,
                                           [](T a, T b) { return b < a ? b : a; });
}
template <class T>
inline T __reduce_max_sync(unsigned int mask, T value) {
  static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned int>);
  return deepinfer::cuda::emulated::Reduce("__reduce_max_sync", mask, value,
                                           [](T a, T b) { return a < b ? b : a; });
}
inline unsigned int __reduce_and_sync(unsigned int mask, unsigned int value) {
  return deepinfer::cuda::emulated::Reduce("__reduce_and_sync", mask, value,
                                           [](unsigned int a, unsigned int b) { return a & b; });
}
inline unsigned int __reduce_or_sync(unsigned int mask, unsigned int value) {
  return deepinfer::cuda::emulated::Reduce("__reduce_or_sync", mask, value,
                                           [](unsigned int a, unsigned int b) { return a | b; });
}
inline unsigned int __reduce_xor_sync(unsigned int mask, unsigned int value) {
  return deepinfer::cuda::emulated::Reduce("__reduce_xor_sync", mask, value,
                                           [](unsigned int a, unsigned int b) { return a ^ b; });
}
