// Kernels that use each device primitive in the ways that the operations do, with results known
// exactly. The same tests run on a GPU and emulated: what they agree on, the emulation may be
// trusted with.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "device.cuh"
#include "ops/cuda/cuda_test_util.h"
#include "tensor/float_formats.h"
#include "warpgroup.cuh"

namespace deepinfer::cuda {
namespace {

// Device memory with a vector's contents.
template <class T>
class DeviceVector {
 public:
  DeviceVector(const std::vector<T>& host, Stream& stream) : size_(host.size()), stream_(stream) {
    data_ = static_cast<T*>(Allocate(0, bytes()).value());
    EXPECT_TRUE(CopyToDevice(host.data(), data_, bytes(), stream.cuda_stream()).has_value());
    EXPECT_TRUE(stream.Synchronize().has_value());
  }
  // Filled with 0xff.
  DeviceVector(size_t size, Stream& stream) : size_(size), stream_(stream) {
    data_ = static_cast<T*>(Allocate(0, bytes()).value());
    EXPECT_TRUE(FillBytes(data_, 0xff, bytes(), stream.cuda_stream()).has_value());
  }
  ~DeviceVector() {
    Free(0, data_);
  }
  DeviceVector(const DeviceVector&) = delete;
  DeviceVector& operator=(const DeviceVector&) = delete;

  T* data() const {
    return data_;
  }
  int64_t bytes() const {
    return static_cast<int64_t>(size_ * sizeof(T));
  }
  std::vector<T> Download() const {
    std::vector<T> host(size_);
    EXPECT_TRUE(CopyToHost(data_, host.data(), bytes(), stream_.cuda_stream()).has_value());
    const Status done = stream_.Synchronize();
    EXPECT_TRUE(done.has_value()) << done.error().message;
    return host;
  }

 private:
  T* data_ = nullptr;
  size_t size_;
  Stream& stream_;
};

class DevicePrimitivesTest : public testing::CudaTest {
 protected:
  template <class... Parameters, class... Arguments>
  void Run(void (*kernel)(Parameters...), const LaunchConfig& config, Arguments... arguments) {
    const Status launched = Launch("test kernel", kernel, config, stream(), arguments...);
    ASSERT_TRUE(launched.has_value()) << launched.error().message;
  }
};

uint16_t Bf16Bits(float x) {
  return F32ToBf16(x).bits;
}

// Small integers: products and sums are exact in every order.
std::vector<float> Integers(size_t count, uint32_t seed, int limit) {
  std::mt19937 generator(seed);
  std::uniform_int_distribution<int> values(-limit, limit);
  std::vector<float> result(count);
  for (float& x : result) x = static_cast<float>(values(generator));
  return result;
}
std::vector<float> Normals(size_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> values;
  std::vector<float> result(count);
  for (float& x : result) x = RoundToBf16(values(generator));
  return result;
}
std::vector<uint16_t> ToBf16(const std::vector<float>& values) {
  std::vector<uint16_t> bits;
  for (const float x : values) bits.push_back(Bf16Bits(x));
  return bits;
}

// a[m x k] * b[n x k], both with k along the rows.
std::vector<float> Product(const std::vector<float>& a, const std::vector<float>& b, int m, int n,
                           int k) {
  std::vector<float> d(static_cast<size_t>(m * n));
  for (int row = 0; row < m; ++row)
    for (int column = 0; column < n; ++column) {
      double sum = 0.0;
      for (int i = 0; i < k; ++i) sum += double{a[row * k + i]} * b[column * k + i];
      d[row * n + column] = static_cast<float>(sum);
    }
  return d;
}

// ---- Threads ------------------------------------------------------------------------------------

__global__ void SumBlock(const int* values, int* sums) {
  __shared__ int warp_sums[8];
  int sum = values[blockIdx.x * blockDim.x + threadIdx.x];
  for (int distance = 16; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (LaneId() == 0) warp_sums[WarpId()] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = LaneId() < 8 ? warp_sums[LaneId()] : 0;
  for (int distance = 4; distance > 0; distance /= 2)
    sum += __shfl_down_sync(0xffffffffu, sum, static_cast<unsigned>(distance), 8);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

TEST_F(DevicePrimitivesTest, ABlockAddsItsValuesByShuffles) {
  constexpr int kBlocks = 100;
  std::vector<int> values(kBlocks * 256);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int>(i * i % 1009);
  std::vector<int> expected(kBlocks, 0);
  for (size_t i = 0; i < values.size(); ++i) expected[i / 256] += values[i];
  const DeviceVector<int> input(values, stream());
  const DeviceVector<int> sums(kBlocks, stream());
  Run(SumBlock, {.grid = {kBlocks}, .block = 256}, input.data(), sums.data());
  EXPECT_EQ(sums.Download(), expected);
}

// out: what each lane finds, one row of 32 per function.
__global__ void UseWarpFunctions(uint32_t* out) {
  const uint32_t all = 0xffffffffu;
  const uint32_t lane = threadIdx.x;
  int row = 0;
  const auto put = [&](uint32_t value) { out[row++ * 32 + lane] = value; };
  put(__ballot_sync(all, lane % 3 == 0));
  put(static_cast<uint32_t>(__any_sync(all, lane == 7) != 0));
  put(static_cast<uint32_t>(__all_sync(all, lane != 7) != 0));
  put(__match_any_sync(all, lane % 5));
  put(__reduce_add_sync(all, lane));
  put(__reduce_max_sync(all, lane ^ 9u));
  put(__shfl_up_sync(all, lane, 3, 16));
  put(__shfl_sync(all, lane, 5, 8));
  // Two halves that exchange apart from each other.
  if (lane < 16) {
    put(__reduce_add_sync(0x0000ffffu, lane));
  } else {
    put(__reduce_min_sync(0xffff0000u, lane));
  }
  put(static_cast<uint32_t>(__syncthreads_count(lane < 10)));
}

TEST_F(DevicePrimitivesTest, WarpFunctionsGiveWhatTheirDefinitionsSay) {
  const DeviceVector<uint32_t> out(10 * 32, stream());
  Run(UseWarpFunctions, {.grid = {1}, .block = 32}, out.data());
  const std::vector<uint32_t> found = out.Download();
  for (uint32_t lane = 0; lane < 32; ++lane) {
    uint32_t thirds = 0;
    uint32_t same = 0;
    for (uint32_t other = 0; other < 32; ++other) {
      thirds |= (other % 3 == 0 ? 1u : 0u) << other;
      same |= (other % 5 == lane % 5 ? 1u : 0u) << other;
    }
    const uint32_t expected[10] = {thirds,
                                   1,
                                   0,
                                   same,
                                   496,
                                   31,
                                   lane % 16 >= 3 ? lane - 3 : lane,
                                   lane / 8 * 8 + 5,
                                   lane < 16 ? 120u : 16u,
                                   10};
    for (uint32_t row = 0; row < 10; ++row)
      EXPECT_EQ(found[row * 32 + lane], expected[row]) << "row " << row << " lane " << lane;
  }
}

// One warp copies pieces into a ring of three stages, two warps add them up; at the end one of the
// two hands its sums to the other through a named barrier.
constexpr int kPieces = 11;
constexpr int kPieceFloats = 64;
constexpr int kStages = 3;
__global__ void SumThroughRing(const float* values, float* sums) {
  struct Ring {
    float stages[kStages][kPieceFloats];
    float other[32];
    Barrier full[kStages];
    Barrier empty[kStages];
  };
  Ring& ring = *DynamicShared<Ring>();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      BarrierInit(&ring.full[stage], 1);
      BarrierInit(&ring.empty[stage], 64);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  const int warp = WarpId();
  if (warp == 2) {
    if (LaneId() == 0) {
      for (int piece = 0; piece < kPieces; ++piece) {
        const int stage = piece % kStages;
        BarrierWait(&ring.empty[stage], static_cast<uint32_t>(piece / kStages % 2) ^ 1u);
        BarrierArriveExpect(&ring.full[stage], kPieceFloats * 4);
        BulkCopy(ring.stages[stage], values + piece * kPieceFloats, kPieceFloats * 4,
                 &ring.full[stage]);
      }
    }
    return;
  }
  float sum = 0.0f;
  for (int piece = 0; piece < kPieces; ++piece) {
    const int stage = piece % kStages;
    BarrierWait(&ring.full[stage], static_cast<uint32_t>(piece / kStages % 2));
    sum += ring.stages[stage][threadIdx.x];
    BarrierArrive(&ring.empty[stage]);
  }
  if (warp == 1) {
    ring.other[LaneId()] = sum;
    NamedBarrierArrive(3, 64);
  } else {
    NamedBarrierSync(3, 64);
    sums[LaneId()] = sum + ring.other[LaneId()];
  }
}

TEST_F(DevicePrimitivesTest, ARingOfBulkCopiesDeliversEveryPiece) {
  const std::vector<float> values = Integers(kPieces * kPieceFloats, 1, 100);
  std::vector<float> expected(32, 0.0f);
  for (size_t i = 0; i < values.size(); ++i) expected[i % 32] += values[i];
  const DeviceVector<float> input(values, stream());
  const DeviceVector<float> sums(32, stream());
  Run(SumThroughRing, {.grid = {1}, .block = 96, .shared_bytes = 2048}, input.data(), sums.data());
  EXPECT_EQ(sums.Download(), expected);
}

__global__ void CopyInGroups(const uint4* in, uint4* out, int count) {
  uint4* stage = DynamicShared<uint4>();
  uint32_t thread = threadIdx.x;
  for (int group = 0; group < 2; ++group) {
    const bool valid = group * 64 + static_cast<int>(thread) < count;
    CopyAsync16OrZero(&stage[group * 64 + thread], &in[valid ? group * 64 + thread : 0], valid);
    CommitCopies();
  }
  WaitCopies<1>();
  __syncthreads();
  out[thread] = stage[63 - thread];
  WaitCopies<0>();
  __syncthreads();
  out[64 + thread] = stage[127 - thread];
}

TEST_F(DevicePrimitivesTest, AsynchronousCopiesArriveAndFillWithZeros) {
  constexpr int kCount = 100;
  std::vector<uint32_t> values(kCount * 4);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint32_t>(i + 1);
  std::vector<uint32_t> expected(128 * 4);
  for (size_t i = 0; i < 128; ++i)
    for (size_t word = 0; word < 4; ++word) {
      const size_t source = i < 64 ? 63 - i : 127 - (i - 64);
      expected[i * 4 + word] = source < kCount ? values[source * 4 + word] : 0u;
    }
  const DeviceVector<uint32_t> input(values, stream());
  const DeviceVector<uint32_t> output(128 * 4, stream());
  Run(CopyInGroups, {.grid = {1}, .block = 64, .shared_bytes = 128 * 16},
      reinterpret_cast<const uint4*>(input.data()), reinterpret_cast<uint4*>(output.data()),
      kCount);
  EXPECT_EQ(output.Download(), expected);
}

// Every block adds the values of all blocks of its cluster. The last barrier keeps blocks from
// ending while others read or write their memory.
__global__ void SumCluster(float* sums) {
  __shared__ float own[32];
  __shared__ __align__(16) float fours[4];
  float* dynamic = DynamicShared<float>();
  const float value = static_cast<float>(blockIdx.x * 100 + threadIdx.x);
  own[threadIdx.x] = value;
  dynamic[threadIdx.x] = 2.0f * value;
  if (threadIdx.x < 4) fours[threadIdx.x] = value;
  ClusterSync();
  float sum = 0.0f;
  for (uint32_t rank = 0; rank < 4; ++rank) {
    sum += LoadClusterFloat(&own[threadIdx.x], rank);
    sum += LoadClusterFloat(&dynamic[threadIdx.x], rank);
    sum += LoadClusterFloat4(fours, rank).w;
  }
  // Each block hands its sums to the next one.
  __shared__ float from_neighbour[32];
  StoreClusterFloat(&from_neighbour[threadIdx.x], (ClusterRank() + 1) % 4,
                    sum + 10000.0f * static_cast<float>(ClusterRank()));
  ClusterArrive();
  const int out = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
  ClusterWait();
  sums[out] = from_neighbour[threadIdx.x];
}

// Every block pushes its values to all blocks of its cluster, in stores of three sizes, and tells
// them that others are in global memory.
struct Pushed {
  float ones[4][32];
  float2 twos[4][32];
  uint4 fours[4][32];
  Barrier full, ready;
};
__global__ void PushToCluster(uint32_t* exchange, uint32_t* sums) {
  auto& s = *DynamicShared<Pushed>();
  const uint32_t rank = ClusterRank();
  const uint32_t lane = threadIdx.x;
  if (lane == 0) {
    BarrierInit(&s.full, 1);
    BarrierInit(&s.ready, 4);
    FenceBarrierInit();
    BarrierArriveExpect(&s.full, 4 * 32 * (4 + 8 + 16));
  }
  __syncwarp();
  ClusterSync();
  const uint32_t value = blockIdx.x * 100 + lane;
  exchange[blockIdx.x * 32 + lane] = value;
  __syncwarp();
  const auto number = static_cast<float>(value);
  for (uint32_t peer = 0; peer < 4; ++peer) {
    StoreClusterAsync(&s.ones[rank][lane], peer, number, &s.full);
    StoreClusterAsync(&s.twos[rank][lane], peer, make_float2(number, 2.0f * number), &s.full);
    StoreClusterAsync(&s.fours[rank][lane], peer, make_uint4(value, 0u, 0u, 3 * value), &s.full);
  }
  if (lane < 4) ClusterBarrierArrive(&s.ready, lane);
  BarrierWait(&s.full, 0);
  ClusterBarrierWait(&s.ready, 0);
  uint32_t sum = 0;
  for (uint32_t source = 0; source < 4; ++source) {
    const uint32_t other = 31 - lane;
    sum += static_cast<uint32_t>(s.ones[source][other] + s.twos[source][other].x +
                                 s.twos[source][other].y);
    sum += s.fours[source][other].x + s.fours[source][other].w;
    sum += __ldcg(exchange + (blockIdx.x / 4 * 4 + source) * 32 + other);
  }
  sums[blockIdx.x * 32 + lane] = sum;
}

TEST_F(DevicePrimitivesTest, WhatABlockPushesToItsClusterIsCountedThere) {
  const DeviceVector<uint32_t> exchange(8 * 32, stream());
  const DeviceVector<uint32_t> sums(8 * 32, stream());
  Run(PushToCluster, {.grid = {8}, .block = 32, .shared_bytes = sizeof(Pushed), .cluster = 4},
      exchange.data(), sums.data());
  std::vector<uint32_t> expected(8 * 32);
  for (uint32_t i = 0; i < expected.size(); ++i)
    for (uint32_t source = 0; source < 4; ++source)
      expected[i] += 9 * ((i / 128 * 4 + source) * 100 + 31 - i % 32);
  EXPECT_EQ(sums.Download(), expected);
}

TEST_F(DevicePrimitivesTest, ABlockReadsTheSharedMemoryOfItsCluster) {
  const DeviceVector<float> sums(8 * 32, stream());
  Run(SumCluster, {.grid = {8}, .block = 32, .shared_bytes = 128, .cluster = 4}, sums.data());
  std::vector<float> expected(8 * 32);
  for (int block = 0; block < 8; ++block)
    for (int thread = 0; thread < 32; ++thread) {
      int sum = 0;  // of the block in front, which hands it on
      for (int peer = block / 4 * 4; peer < block / 4 * 4 + 4; ++peer)
        sum += 3 * (peer * 100 + thread) + peer * 100 + 3;
      expected[block * 32 + thread] = static_cast<float>(sum + 10000 * ((block + 3) % 4));
    }
  EXPECT_EQ(sums.Download(), expected);
}

// ---- Numbers ------------------------------------------------------------------------------------

__global__ void ConvertNumbers(const float* x, uint32_t* pairs, uint16_t* codes, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  pairs[i] = FloatsToBf16x2(x[i], -x[i]);
  codes[i] = FloatsToE4M3x2(x[i], -x[i]);
}

TEST_F(DevicePrimitivesTest, ConversionsRoundToNearestEven) {
  std::vector<float> values = {
      0.0f,    -0.0f,    448.0f,   449.0f,    464.0f,  1e9f,
      0x1p-9f, 0x1p-10f, 0x3p-11f, 0x1p-130f, 3.3e38f, std::numeric_limits<float>::infinity()};
  std::mt19937 generator(5);
  for (int i = 0; i < 5000; ++i) {
    const uint32_t bits = static_cast<uint32_t>(generator());
    values.push_back(std::bit_cast<float>((bits & 0x0fffffffu) | 0x38000000u));  // around 1
    // Halfway cases of both formats.
    values.push_back(std::bit_cast<float>((bits & 0x07f00000u) | 0x3c080000u));
    values.push_back(std::bit_cast<float>((bits & 0x7f7f0000u) | 0x8000u));
  }
  const int count = static_cast<int>(values.size());
  const DeviceVector<float> input(values, stream());
  const DeviceVector<uint32_t> pairs(values.size(), stream());
  const DeviceVector<uint16_t> codes(values.size(), stream());
  Run(ConvertNumbers, {.grid = {static_cast<uint32_t>(count + 127) / 128}}, input.data(),
      pairs.data(), codes.data(), count);
  const std::vector<uint32_t> found_pairs = pairs.Download();
  const std::vector<uint16_t> found_codes = codes.Download();
  for (size_t i = 0; i < values.size(); ++i) {
    const float x = values[i];
    EXPECT_EQ(found_pairs[i], Bf16Bits(x) | static_cast<uint32_t>(Bf16Bits(-x)) << 16) << x;
    EXPECT_EQ(found_codes[i], F32ToE4M3(x) | F32ToE4M3(-x) << 8) << x;
  }
}

__global__ void MultiplyPairs(const uint32_t* a, const uint32_t* b, uint32_t* products) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  products[i] = MulBf16x2(a[i], b[i]);
}

TEST_F(DevicePrimitivesTest, ProductsOfPairsAreRoundedOnce) {
  std::vector<uint32_t> a;
  std::vector<uint32_t> b;
  std::mt19937 generator(6);
  while (a.size() < 8192) {
    // Exponents that give normal, subnormal and vanishing products, but no infinity.
    a.push_back(static_cast<uint32_t>(generator()) & 0xbfffbfffu);
    b.push_back(static_cast<uint32_t>(generator()) & 0xbfffbfffu);
  }
  const DeviceVector<uint32_t> left(a, stream());
  const DeviceVector<uint32_t> right(b, stream());
  const DeviceVector<uint32_t> products(a.size(), stream());
  Run(MultiplyPairs, {.grid = {64}}, left.data(), right.data(), products.data());
  const std::vector<uint32_t> found = products.Download();
  for (size_t i = 0; i < a.size(); ++i)
    for (int half = 0; half < 2; ++half) {
      const double x = Bf16ToF32(Bf16{static_cast<uint16_t>(a[i] >> (16 * half))});
      const double y = Bf16ToF32(Bf16{static_cast<uint16_t>(b[i] >> (16 * half))});
      // The grid of bf16 around the exact product: 8 bits of mantissa, 2^-133 at least.
      int exponent = 0;
      std::frexp(x * y, &exponent);
      const double unit = std::ldexp(1.0, std::max(exponent - 8, -133));
      const double rounded = std::nearbyint(x * y / unit) * unit;
      const float product = Bf16ToF32(Bf16{static_cast<uint16_t>(found[i] >> (16 * half))});
      EXPECT_EQ(static_cast<double>(product), rounded) << x << " * " << y;
    }
}

// ---- Matrix instructions ------------------------------------------------------------------------

// d[16 x 8] = a[16 x 64] * b[8 x 64]^T in k16 steps. A through ldmatrix from rows of 128 bytes, B
// through ldmatrix from rows, or (kTransposed) from its transpose with rows of 8 values.
template <bool kTransposed>
__global__ void MultiplyBf16(const uint16_t* a, const uint16_t* b, float* d) {
  uint16_t* shared_a = DynamicShared<uint16_t>();
  uint16_t* shared_b = shared_a + 16 * 64;
  for (int i = LaneId(); i < 16 * 64; i += 32) shared_a[i] = a[i];
  for (int i = LaneId(); i < 8 * 64; i += 32)
    shared_b[kTransposed ? i % 64 * 8 + i / 64 : i] = b[i];
  __syncwarp();
  const int lane = LaneId();
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int step = 0; step < 4; step += 2) {
    uint32_t b_steps[4];
    if constexpr (kTransposed) {
      LoadMatrix4Transposed(b_steps, &shared_b[(step * 16 + lane) * 8]);
    } else {
      LoadMatrix4(b_steps, &shared_b[lane % 8 * 64 + step * 16 + lane / 8 * 8]);
    }
    for (int half = 0; half < 2; ++half) {
      uint32_t fragment[4];
      LoadMatrix4(fragment, &shared_a[lane % 16 * 64 + (step + half) * 16 + lane / 16 * 8]);
      const uint32_t column[2] = {b_steps[2 * half], b_steps[2 * half + 1]};
      MmaBf16(sums, fragment, column);
    }
  }
  for (int i = 0; i < 4; ++i) d[(lane / 4 + 8 * (i / 2)) * 8 + 2 * (lane % 4) + i % 2] = sums[i];
}

TEST_F(DevicePrimitivesTest, MmaOfFragmentsFromLdmatrixIsAProduct) {
  const std::vector<float> a = Integers(16 * 64, 11, 9);
  const std::vector<float> b = Integers(8 * 64, 12, 9);
  const DeviceVector<uint16_t> left(ToBf16(a), stream());
  const DeviceVector<uint16_t> right(ToBf16(b), stream());
  const DeviceVector<float> plain(16 * 8, stream());
  const DeviceVector<float> transposed(16 * 8, stream());
  const LaunchConfig config{.grid = {1}, .block = 32, .shared_bytes = 24 * 64 * 2};
  Run(MultiplyBf16<false>, config, left.data(), right.data(), plain.data());
  Run(MultiplyBf16<true>, config, left.data(), right.data(), transposed.data());
  const std::vector<float> expected = Product(a, b, 16, 8, 64);
  EXPECT_EQ(plain.Download(), expected);
  EXPECT_EQ(transposed.Download(), expected);
}

// Writes four matrices back whose rows were read to fragments, to other places.
__global__ void StoreFragments(const uint16_t* matrix, uint16_t* rows) {
  uint16_t* shared = DynamicShared<uint16_t>();
  const int lane = LaneId();
  for (int i = lane; i < 16 * 16; i += 32) shared[i] = matrix[i];
  __syncwarp();
  uint32_t fragment[4];
  LoadMatrix4(fragment, &shared[lane % 16 * 16 + lane / 16 * 8]);
  // Row i of the left half goes to row i of 8 columns, that of the right half behind them.
  StoreMatrix4(&shared[256 + lane * 8], fragment);
  __syncwarp();
  for (int i = lane; i < 16 * 16; i += 32) rows[i] = shared[256 + i];
}

TEST_F(DevicePrimitivesTest, FragmentsAreStoredWhereTheLanesSay) {
  std::vector<uint16_t> matrix(16 * 16);
  for (size_t i = 0; i < matrix.size(); ++i) matrix[i] = static_cast<uint16_t>(7 * i + 1);
  const DeviceVector<uint16_t> input(matrix, stream());
  const DeviceVector<uint16_t> rows(16 * 16, stream());
  Run(StoreFragments, {.grid = {1}, .block = 32, .shared_bytes = 2 * 256 * 2}, input.data(),
      rows.data());
  std::vector<uint16_t> expected;
  for (size_t half = 0; half < 2; ++half)
    for (size_t row = 0; row < 16; ++row)
      for (size_t i = 0; i < 8; ++i) expected.push_back(matrix[row * 16 + half * 8 + i]);
  EXPECT_EQ(rows.Download(), expected);
}

__global__ void MultiplyE4M3(const uint8_t* a, const uint8_t* b, float* d) {
  const int g = LaneId() / 4;
  const int t = LaneId() % 4;
  const auto word = [](const uint8_t* codes) { return *reinterpret_cast<const uint32_t*>(codes); };
  const uint32_t left[4] = {word(a + g * 32 + 4 * t), word(a + (g + 8) * 32 + 4 * t),
                            word(a + g * 32 + 4 * t + 16), word(a + (g + 8) * 32 + 4 * t + 16)};
  const uint32_t right[2] = {word(b + g * 32 + 4 * t), word(b + g * 32 + 4 * t + 16)};
  float sums[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  MmaE4M3(sums, left, right);
  for (int i = 0; i < 4; ++i) d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = sums[i];
}

std::vector<uint8_t> ToE4M3(const std::vector<float>& values) {
  std::vector<uint8_t> codes;
  for (const float x : values) codes.push_back(F32ToE4M3(x));
  return codes;
}

TEST_F(DevicePrimitivesTest, MmaOfE4M3CodesIsAProduct) {
  const std::vector<float> a = Integers(16 * 32, 13, 8);
  const std::vector<float> b = Integers(8 * 32, 14, 8);
  const DeviceVector<uint8_t> left(ToE4M3(a), stream());
  const DeviceVector<uint8_t> right(ToE4M3(b), stream());
  const DeviceVector<float> found(16 * 8, stream());
  Run(MultiplyE4M3, {.grid = {1}, .block = 32}, left.data(), right.data(), found.data());
  std::vector<float> expected = Product(a, b, 16, 8, 32);
  for (float& x : expected) x += 1.0f;
  EXPECT_EQ(found.Download(), expected);
}

// Where an operand's bytes are in shared memory, and how its descriptors say so.
struct OperandLayout {
  Swizzle swizzle = Swizzle::kNone;
  uint32_t leading_bytes = 0;
  uint32_t stride_bytes = 0;
  uint32_t step_bytes[4] = {};  // of each k step, from the beginning
  std::vector<uint8_t> image;
};

int SwizzleBytes(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::k128Bytes:
      return 128;
    case Swizzle::k64Bytes:
      return 64;
    case Swizzle::k32Bytes:
      return 32;
    default:
      return 16;
  }
}

// 16-byte piece `piece` of row `row` of a tile whose rows are `width` bytes.
int SwizzledOffset(int row, int piece, int width) {
  const int repeats = 128 / width;  // rows that share 128 bytes are moved alike
  return row * width + (piece ^ (row / repeats % (width / 16))) * 16;
}

// `rows` rows of 128 bytes with k along them: columns of `width` bytes, one after another.
OperandLayout KMajorLayout(const std::vector<uint8_t>& bytes, int rows, Swizzle swizzle) {
  const int width = SwizzleBytes(swizzle);
  OperandLayout layout;
  layout.swizzle = swizzle;
  layout.stride_bytes = static_cast<uint32_t>(8 * width);
  layout.leading_bytes = width == 16 ? static_cast<uint32_t>(rows * 16) : 0u;
  layout.image.resize(bytes.size());
  for (int row = 0; row < rows; ++row)
    for (int piece = 0; piece < 8; ++piece) {
      const int column = piece * 16 / width;
      const int offset = column * rows * width + SwizzledOffset(row, piece % (width / 16), width);
      std::copy_n(&bytes[row * 128 + piece * 16], 16, &layout.image[offset]);
    }
  for (int step = 0; step < 4; ++step)
    layout.step_bytes[step] = static_cast<uint32_t>(
        width >= 32 ? step * 32 / width * rows * width + step * 32 % width : step * 2 * rows * 16);
  return layout;
}

// The same operand with n along the rows: columns of `width` bytes of n, with 64 rows k each.
OperandLayout NMajorLayout(const std::vector<uint8_t>& bytes, int columns, Swizzle swizzle) {
  const int width = SwizzleBytes(swizzle);
  OperandLayout layout;
  layout.swizzle = swizzle;
  const uint32_t group = static_cast<uint32_t>(8 * width);        // of 8 rows k
  const uint32_t repetition = static_cast<uint32_t>(64 * width);  // of the width along n
  layout.leading_bytes = width == 16 ? group : repetition;
  layout.stride_bytes = width == 16 ? repetition : group;
  layout.image.resize(bytes.size());
  for (int n = 0; n < columns; ++n)
    for (int k = 0; k < 64; ++k) {
      const int column = n * 2 / width;
      const int inside = n * 2 % width;
      const int offset = column * 64 * width + SwizzledOffset(k, inside / 16, width) + inside % 16;
      std::copy_n(&bytes[n * 128 + k * 2], 2, &layout.image[offset]);
    }
  for (int step = 0; step < 4; ++step)
    layout.step_bytes[step] = static_cast<uint32_t>(step) * 2 * group;
  return layout;
}

struct OperandArguments {
  const uint8_t* image;
  uint32_t bytes;
  uint32_t leading_bytes;
  uint32_t stride_bytes;
  uint32_t step_bytes[4];
  Swizzle swizzle;
};

enum class Source { kShared, kRegisters, kSharedE4M3 };

// d[64 x N] = a[64 rows of 128 bytes] * b[N rows of 128 bytes]^T, in four steps of 32 bytes.
template <int kN, int kTransB, Source kSource>
__global__ void __launch_bounds__(128)
    MultiplyWarpgroup(OperandArguments a, OperandArguments b, const uint16_t* a_rows, float* d) {
  unsigned char* shared = DynamicShared<unsigned char>();
  __shared__ Barrier landed;
  if (threadIdx.x == 0) {
    BarrierInit(&landed, 1);
    FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    BarrierArriveExpect(&landed, a.bytes + b.bytes);
    BulkCopy(shared, a.image, a.bytes, &landed);
    BulkCopy(shared + a.bytes, b.image, b.bytes, &landed);
  }
  BarrierWait(&landed, 0);
  const uint64_t a_tile = SharedDescriptor(shared, a.leading_bytes, a.stride_bytes, a.swizzle);
  const uint64_t b_tile =
      SharedDescriptor(shared + a.bytes, b.leading_bytes, b.stride_bytes, b.swizzle);
  const int g = static_cast<int>(threadIdx.x) / 32 * 16 + LaneId() / 4;
  const int t = LaneId() % 4;
  uint32_t fragments[4][4];
  for (int step = 0; step < 4; ++step)
    for (int i = 0; i < 4; ++i)
      fragments[step][i] = *reinterpret_cast<const uint32_t*>(a_rows + (g + 8 * (i % 2)) * 64 +
                                                              step * 16 + 2 * t + 8 * (i / 2));
  float sums[kN / 2];
  WarpgroupFenceRegisters(sums);
  WarpgroupFence();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint64_t b_step = AdvanceDescriptor(b_tile, b.step_bytes[step]);
    const uint64_t a_step = AdvanceDescriptor(a_tile, a.step_bytes[step]);
    if constexpr (kSource == Source::kRegisters) {
      WarpgroupMmaRegisters<kTransB>(sums, fragments[step], b_step, step > 0);
    } else if constexpr (kSource == Source::kShared) {
      WarpgroupMmaShared<kTransB>(sums, a_step, b_step, step > 0);
    } else {
      WarpgroupMmaSharedE4M3(sums, a_step, b_step, step > 0);
    }
  }
  WarpgroupCommit();
  WarpgroupWait<0>();
  WarpgroupFenceRegisters(sums);
  for (int i = 0; i < kN / 2; ++i)
    d[(g + 8 * (i % 4 / 2)) * kN + i / 4 * 8 + 2 * t + i % 2] = sums[i];
}

class WarpgroupPrimitivesTest : public DevicePrimitivesTest {
 protected:
  void SetUp() override {
    DevicePrimitivesTest::SetUp();
    if (!IsSkipped() && stream().compute_major() != 9)
      GTEST_SKIP() << "This device has no warpgroup matrix instructions.";
  }

  template <int kN, int kTransB, Source kSource>
  std::vector<float> Multiply(const OperandLayout& a, const OperandLayout& b,
                              const std::vector<uint16_t>& a_rows) {
    const auto arguments = [](const OperandLayout& layout, const DeviceVector<uint8_t>& image) {
      OperandArguments result{.image = image.data(),
                              .bytes = static_cast<uint32_t>(image.bytes()),
                              .leading_bytes = layout.leading_bytes,
                              .stride_bytes = layout.stride_bytes,
                              .step_bytes = {},
                              .swizzle = layout.swizzle};
      std::copy_n(layout.step_bytes, 4, result.step_bytes);
      return result;
    };
    const DeviceVector<uint8_t> a_image(a.image, stream());
    const DeviceVector<uint8_t> b_image(b.image, stream());
    const DeviceVector<uint16_t> rows(a_rows, stream());
    const DeviceVector<float> d(64 * kN, stream());
    Run(MultiplyWarpgroup<kN, kTransB, kSource>,
        {.grid = {1},
         .block = 128,
         .shared_bytes = static_cast<int>(a_image.bytes() + b_image.bytes())},
        arguments(a, a_image), arguments(b, b_image), rows.data(), d.data());
    return d.Download();
  }
};

template <class T>
std::vector<uint8_t> Bytes(const std::vector<T>& values) {
  const uint8_t* begin = reinterpret_cast<const uint8_t*>(values.data());
  return {begin, begin + values.size() * sizeof(T)};
}

constexpr Swizzle kSwizzles[4] = {Swizzle::kNone, Swizzle::k32Bytes, Swizzle::k64Bytes,
                                  Swizzle::k128Bytes};

TEST_F(WarpgroupPrimitivesTest, EverySwizzleAndSourceOfOperandsGivesTheProduct) {
  constexpr int kN = 128;
  const std::vector<float> a = Integers(64 * 64, 21, 9);
  const std::vector<float> b = Integers(kN * 64, 22, 9);
  const std::vector<uint16_t> rows = ToBf16(a);
  const std::vector<uint8_t> a_bytes = Bytes(rows);
  const std::vector<uint8_t> b_bytes = Bytes(ToBf16(b));
  const std::vector<float> expected = Product(a, b, 64, kN, 64);
  for (const Swizzle swizzle : kSwizzles) {
    SCOPED_TRACE(SwizzleBytes(swizzle));
    const OperandLayout left = KMajorLayout(a_bytes, 64, swizzle);
    const OperandLayout right = KMajorLayout(b_bytes, kN, swizzle);
    const OperandLayout across = NMajorLayout(b_bytes, kN, swizzle);
    EXPECT_EQ((Multiply<kN, 0, Source::kShared>(left, right, rows)), expected);
    EXPECT_EQ((Multiply<kN, 0, Source::kRegisters>(left, right, rows)), expected);
    EXPECT_EQ((Multiply<kN, 1, Source::kShared>(left, across, rows)), expected);
    EXPECT_EQ((Multiply<kN, 1, Source::kRegisters>(left, across, rows)), expected);
  }
}

TEST_F(WarpgroupPrimitivesTest, NarrowAndWideTilesGiveTheProduct) {
  const std::vector<float> a = Integers(64 * 64, 23, 9);
  const std::vector<float> b = Integers(256 * 64, 24, 9);
  const std::vector<uint16_t> rows = ToBf16(a);
  const OperandLayout left = KMajorLayout(Bytes(rows), 64, Swizzle::k128Bytes);
  const auto check = [&]<int kN>() {
    SCOPED_TRACE(kN);
    const std::vector<float> columns(b.begin(), b.begin() + kN * 64);
    const OperandLayout right = KMajorLayout(Bytes(ToBf16(columns)), kN, Swizzle::k128Bytes);
    EXPECT_EQ((Multiply<kN, 0, Source::kShared>(left, right, rows)),
              Product(a, columns, 64, kN, 64));
  };
  check.operator()<8>();
  check.operator()<16>();
  check.operator()<32>();
  check.operator()<64>();
  check.operator()<80>();
  check.operator()<96>();
  check.operator()<192>();
  check.operator()<256>();
}

TEST_F(WarpgroupPrimitivesTest, E4M3OperandsGiveTheProduct) {
  constexpr int kN = 64;
  const std::vector<float> a = Integers(64 * 128, 25, 8);
  const std::vector<float> b = Integers(kN * 128, 26, 8);
  const OperandLayout left = KMajorLayout(ToE4M3(a), 64, Swizzle::k128Bytes);
  const OperandLayout right = KMajorLayout(ToE4M3(b), kN, Swizzle::k128Bytes);
  EXPECT_EQ((Multiply<kN, 0, Source::kSharedE4M3>(left, right, std::vector<uint16_t>(64 * 64))),
            Product(a, b, 64, kN, 128));
}

TEST_F(WarpgroupPrimitivesTest, MmaOfAWarpAndOfAWarpgroupGiveTheSameBits) {
  constexpr int kN = 64;
  const std::vector<float> a = Normals(64 * 64, 27);
  const std::vector<float> b = Normals(kN * 64, 28);
  const std::vector<uint16_t> a_rows = ToBf16(a);
  const std::vector<uint16_t> b_rows = ToBf16(b);
  const OperandLayout left = KMajorLayout(Bytes(a_rows), 64, Swizzle::k128Bytes);
  const OperandLayout right = KMajorLayout(Bytes(b_rows), kN, Swizzle::k128Bytes);
  const std::vector<float> shared = Multiply<kN, 0, Source::kShared>(left, right, a_rows);
  EXPECT_EQ(shared, (Multiply<kN, 0, Source::kRegisters>(left, right, a_rows)));
  const DeviceVector<uint16_t> a_device(a_rows, stream());
  const DeviceVector<uint16_t> b_device(b_rows, stream());
  const DeviceVector<float> tile(16 * 8, stream());
  for (int m = 0; m < 64; m += 16)
    for (int n = 0; n < kN; n += 8) {
      Run(MultiplyBf16<false>, {.grid = {1}, .block = 32, .shared_bytes = 24 * 64 * 2},
          static_cast<const uint16_t*>(a_device.data()) + m * 64,
          static_cast<const uint16_t*>(b_device.data()) + n * 64, tile.data());
      const std::vector<float> found = tile.Download();
      for (int i = 0; i < 16 * 8; ++i)
        EXPECT_EQ(found[i], shared[(m + i / 8) * kN + n + i % 8]) << m << " " << n << " " << i;
    }
}

// ---- What the emulation shows and refuses -------------------------------------------------------

#ifdef DI_CUDA_EMULATED

// Both blocks forget to wait for their copies.
__global__ void ForgetToWait(const uint4* in, uint32_t* out) {
  uint4* stage = DynamicShared<uint4>();
  CopyAsync16(stage, in);
  CommitCopies();
  out[2 * blockIdx.x] = stage->x;
  WaitCopies<0>();
  out[2 * blockIdx.x + 1] = stage->x;
}
// Both blocks refill a tile that an instruction under way still reads.
__global__ void RefillTooEarly(float* out) {
  uint16_t* tile = DynamicShared<uint16_t>();
  for (int i = static_cast<int>(threadIdx.x); i < 64 * 64; i += 128) tile[i] = 0x3f80;
  __syncthreads();
  const uint64_t descriptor = SharedDescriptor(tile, 0, 1024, Swizzle::k128Bytes);
  float sums[4];
  WarpgroupFence();
  WarpgroupMmaShared<0>(sums, descriptor, descriptor, false);
  WarpgroupCommit();
  for (int i = static_cast<int>(threadIdx.x); i < 64 * 64; i += 128) tile[i] = 0;
  __syncthreads();
  WarpgroupWait<0>();
  if (threadIdx.x == 0) out[blockIdx.x] = sums[0];
}

TEST_F(DevicePrimitivesTest, OneOfTwoBlocksShowsAMissingWait) {
  const DeviceVector<uint32_t> in(std::vector<uint32_t>(4, 7), stream());
  const DeviceVector<uint32_t> out(4, stream());
  Run(ForgetToWait, {.grid = {2}, .block = 1, .shared_bytes = 16},
      reinterpret_cast<const uint4*>(in.data()), out.data());
  const std::vector<uint32_t> found = out.Download();
  EXPECT_EQ(found[1], 7u);
  EXPECT_EQ(found[3], 7u);
  EXPECT_EQ((found[0] == 7u) + (found[2] == 7u), 1) << found[0] << " " << found[2];
}

TEST_F(DevicePrimitivesTest, OneOfTwoBlocksShowsATileThatIsRefilledTooEarly) {
  const DeviceVector<float> out(2, stream());
  Run(RefillTooEarly, {.grid = {2}, .block = 128, .shared_bytes = 64 * 64 * 2}, out.data());
  const std::vector<float> found = out.Download();
  EXPECT_EQ((found[0] == 16.0f) + (found[1] == 16.0f), 1) << found[0] << " " << found[1];
}

__global__ void WaitForNobody() {
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) BarrierInit(&barrier, 2);
  __syncthreads();
  if (threadIdx.x == 0) BarrierArrive(&barrier);
  BarrierWait(&barrier, 0);
}
__global__ void SkipABarrier() {
  if (threadIdx.x < 32) NamedBarrierSync(1, 64);
}
__global__ void UseABarrierWithoutInit() {
  BarrierArrive(DynamicShared<Barrier>());
}
__global__ void CopyMisaligned(const unsigned char* global) {
  CopyAsync16(DynamicShared<unsigned char>() + 8, global);
}
__global__ void WriteBehindSharedMemory() {
  DynamicShared<unsigned char>()[100] = 0;
}

using EmulationDeathTest = DevicePrimitivesTest;

TEST_F(EmulationDeathTest, ADeadlockEndsWithTheKernelsNameAndWhoWaits) {
  EXPECT_DEATH(Run(WaitForNobody, {.grid = {1}, .block = 64}),
               "test kernel.*deadlock(.|\n)*threads 0 to 63: BarrierWait");
  EXPECT_DEATH(Run(SkipABarrier, {.grid = {1}, .block = 64}),
               "deadlock(.|\n)*threads 0 to 31: NamedBarrierSync(.|\n)*threads 32 to 63: returned");
}

TEST_F(EmulationDeathTest, MistakesThatTheHardwareWouldHideAreNamed) {
  EXPECT_DEATH(Run(UseABarrierWithoutInit, {.grid = {1}, .block = 32, .shared_bytes = 64}),
               "BarrierArrive with a barrier that was not initialised");
  const DeviceVector<unsigned char> global(64, stream());
  EXPECT_DEATH(Run(CopyMisaligned, {.grid = {1}, .block = 32, .shared_bytes = 64}, global.data()),
               "CopyAsync16 to shared with address .*, not a multiple of 16");
  EXPECT_DEATH(Run(WriteBehindSharedMemory, {.grid = {1}, .block = 32, .shared_bytes = 100}),
               "wrote behind its 100 bytes of dynamic shared memory, at 100");
}

#endif

}  // namespace
}  // namespace deepinfer::cuda
