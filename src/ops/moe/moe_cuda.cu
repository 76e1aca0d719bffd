// The parts of the mixture of experts around the expert linears on a GPU.
//
// Routing: 4 bytes per logit in, nothing else that counts; latency decides. Up to kTeamRows rows
// four warps select for one row: a lane has three of 384 scores, so that the exponentials take a
// quarter of the time; order-preserving integers of the biased scores are in registers, and a warp
// finds its own best with one integer maximum and one minimum over the warp per expert. The rank
// among the four warps' candidates is a count of the larger ones. With more rows the GPU is full
// and a warp selects for one row alone. Grouping is a stable counting sort: every warp has a
// contiguous piece of the (row, slot) pairs and a histogram of its own in shared memory, in which a
// pair finds its rank among the equal experts before it; histograms are summed over the warps of a
// block and, through distributed shared memory, over the blocks of a cluster. Integers only, so the
// number of blocks does not matter to the result. Up to kFusedRows rows both are one launch of one
// block; above that selection is spread over the GPU first. One cluster for both at once was slower
// at 64 rows and more (7.9 us, and 26 us at 1024 rows, on an H200): 16 multiprocessors have too few
// units for the exponentials, and launching a cluster costs as much as launching a second kernel.
//
// MoeCombine and Swiglu: bound by memory, 16 bytes per thread and operand, all loads before the
// first use.
#include <algorithm>
#include <cmath>

#include "device.cuh"
#include "ops/moe/moe_impl.h"
#include "ops/moe/router_scores.h"
#include "ops/quantize/group_quantize.cuh"

namespace deepinfer::cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kLaneChannels = 8;
constexpr int kElementThreads = 256;
constexpr int kRouteWarps = 16;
constexpr int kRouteThreads = 32 * kRouteWarps;
constexpr int kSelectWarps = 4;
constexpr int kTeamWarps = 4;  // that select for one row
constexpr int kTeams = kRouteWarps / kTeamWarps;
constexpr int kMaxExperts = 1024;
constexpr int kMaxChosen = 32;
constexpr int kFusedRows = 8;
constexpr int kTeamRows = 1024;
constexpr int kGroupPairs = 128;  // that a warp sorts before a block more is worth its launch

struct RouteParams {
  int rows;
  int k;
  // Selection.
  int logit_experts;
  const float* logits;
  int64_t logits_stride;
  int segments;  // of which logits are sums
  int64_t segment_stride;
  const float* bias;
  float gate_temp;
  float scale;
  // Both.
  int* experts;
  int64_t experts_stride;
  float* weights;
  int64_t weights_stride;
  // Grouping.
  int num_experts;
  int* row_index;
  float* grouped_weight;
  int* group_offsets;
  int* slot_position;
  int64_t slot_position_stride;
  int* arrivals;  // of blocks that have selected; null: one block
};

// ---- Selection
// -------------------------------------------------------------------------------------

__device__ inline float SqrtSoftplus(float z) {
  return sqrtf(z > 20.0f ? z : log1pf(expf(z)));
}

// Integers in the order of floats; at least 0x007fffff (minus infinity), so that 0 is free for
// those already taken. Both zeros are the same; NaN counts as minus infinity.
__device__ inline uint32_t OrderedBits(float x) {
  if (x != x) return 0x007fffffu;
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// A lane's logits, from expert `first` on, where `from` is: 32 apart. kSegments: they are sums,
// whose loads all come before the first addition.
template <bool kSegments, int kPerLane>
__device__ inline void LoadLogits(const RouteParams& p, const float* from, int first,
                                  float (&logit)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    logit[i] = first + 32 * i < p.logit_experts ? from[32 * i] : 0.0f;
  if constexpr (kSegments) {
    float more[kMaxScoreSegments - 1][kPerLane];
#pragma unroll
    for (int s = 1; s < kMaxScoreSegments; ++s) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const bool exists = s < p.segments && first + 32 * i < p.logit_experts;
        more[s - 1][i] = exists ? from[s * p.segment_stride + 32 * i] : 0.0f;
      }
    }
#pragma unroll
    for (int s = 1; s < kMaxScoreSegments; ++s) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (s < p.segments) logit[i] += more[s - 1][i];
      }
    }
  }
}

struct Choice {
  int expert = -1;
  float weight = 0.0f;
};

// Shared memory of those who select for a row.
struct SelectShared {
  float* scores;         // [experts]
  uint64_t* candidates;  // [warp][k], of a team
  int* chosen;           // [k], of a team
};

__host__ __device__ inline int SelectSharedBytes(int experts, int k, int warps) {
  return warps == 1 ? 4 * experts : (4 * experts + 7) / 8 * 8 + 8 * warps * k + (4 * k + 7) / 8 * 8;
}

__device__ inline SelectShared SelectLayout(void* memory, int experts, int k, int warps) {
  SelectShared shared = {static_cast<float*>(memory), nullptr, nullptr};
  shared.candidates =
      reinterpret_cast<uint64_t*>(static_cast<char*>(memory) + (4 * experts + 7) / 8 * 8);
  shared.chosen = reinterpret_cast<int*>(shared.candidates + warps * k);
  return shared;
}

// The choice for slot `lane` of a row, by warp `member` of kWarps, whose first gets the result.
// The warp's experts begin at `first_expert`, its lanes' are 32 apart. Teams wait for each other at
// named barrier `barrier`.
template <int kPerLane, int kWarps, bool kSegments>
__device__ inline Choice SelectExperts(const RouteParams& p, int row, const float (&bias)[kPerLane],
                                       const SelectShared& shared, int member, int barrier) {
  const int lane = LaneId();
  const int first_expert = member * 32 * kPerLane + lane;
  float logit[kPerLane];
  LoadLogits<kSegments>(p, p.logits + row * p.logits_stride + first_expert, first_expert, logit);
  uint32_t order[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = first_expert + 32 * i;
    const float score = SqrtSoftplus(logit[i] / p.gate_temp);
    const bool exists = expert < p.logit_experts;
    if (exists) shared.scores[expert] = score;
    order[i] = exists ? OrderedBits(score + bias[i]) : 0;
  }
  // The warp's best in order, slot by slot; 0 where it has no more.
  uint32_t own_order = 0;
  int own_expert = 0;
  for (int slot = 0; slot < p.k; ++slot) {
    uint32_t best = 0;
    int best_expert = first_expert;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (order[i] > best) {
        best = order[i];
        best_expert = first_expert + 32 * i;
      }
    }
    const uint32_t largest = __reduce_max_sync(kAllLanes, best);
    const int expert = static_cast<int>(
        __reduce_min_sync(kAllLanes, best == largest ? static_cast<unsigned>(best_expert)
                                                     : static_cast<unsigned>(kMaxExperts)));
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) order[i] = expert == first_expert + 32 * i ? 0 : order[i];
    if (lane == slot) {
      own_order = largest;
      own_expert = expert;
    }
  }
  if constexpr (kWarps > 1) {
    // Keys are larger for larger biased scores, then for smaller experts, and differ.
    if (lane < p.k) {
      shared.candidates[member * p.k + lane] =
          static_cast<uint64_t>(own_order) << 32 | static_cast<uint32_t>(kMaxExperts - own_expert);
    }
    NamedBarrierSync(barrier, 32 * kWarps);
    if (member == 0) {
      const int candidates = kWarps * p.k;
      for (int i = lane; i < candidates; i += 32) {
        const uint64_t key = shared.candidates[i];
        int rank = 0;
#pragma unroll 8
        for (int j = 0; j < candidates; ++j) rank += shared.candidates[j] > key ? 1 : 0;
        if (rank < p.k) shared.chosen[rank] = kMaxExperts - static_cast<int>(key & 0xffffffffu);
      }
      __syncwarp();
      own_expert = shared.chosen[min(lane, p.k - 1)];
    }
  }
  __syncwarp();
  Choice choice;
  if (member == 0) {
    if (lane < p.k) choice = {own_expert, shared.scores[own_expert]};
    float sum = 0.0f;
    for (int slot = 0; slot < p.k; ++slot) sum += __shfl_sync(kAllLanes, choice.weight, slot);
    choice.weight = choice.weight / (sum + 1e-20f) * p.scale;
  }
  return choice;
}

template <int kPerLane>
__device__ inline void LoadBias(const RouteParams& p, int member, float (&bias)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = member * 32 * kPerLane + LaneId() + 32 * i;
    bias[i] = expert < p.logit_experts ? __ldg(p.bias + expert) : 0.0f;
  }
}

__device__ inline void StoreChoice(const RouteParams& p, int64_t row, const Choice& choice) {
  const int slot = LaneId();
  if (slot >= p.k) return;
  p.experts[row * p.experts_stride + slot] = choice.expert;
  p.weights[row * p.weights_stride + slot] = choice.weight;
}

// A row per warp.
template <int kPerLane>
__global__ void __launch_bounds__(32 * kSelectWarps)
    SelectKernel(const __grid_constant__ RouteParams p) {
  AllowNextKernel();
  float bias[kPerLane];
  LoadBias(p, 0, bias);
  WaitForPreviousKernel();
  const int row = static_cast<int>(blockIdx.x) * kSelectWarps + WarpId();
  if (row >= p.rows) return;
  float* scores = DynamicShared<float>() + WarpId() * p.logit_experts;
  const SelectShared shared = {scores, nullptr, nullptr};
  StoreChoice(p, row, SelectExperts<kPerLane, 1, false>(p, row, bias, shared, 0, 0));
}

// A row per block, which is a team.
template <int kPerLane>
__global__ void __launch_bounds__(32 * kTeamWarps)
    TeamSelectKernel(const __grid_constant__ RouteParams p) {
  AllowNextKernel();
  const int member = WarpId();
  float bias[kPerLane];
  LoadBias(p, member, bias);
  const SelectShared shared =
      SelectLayout(DynamicShared<uint64_t>(), p.logit_experts, p.k, kTeamWarps);
  WaitForPreviousKernel();
  const int row = static_cast<int>(blockIdx.x);
  const Choice choice = SelectExperts<kPerLane, kTeamWarps, false>(p, row, bias, shared, member, 1);
  if (member == 0) StoreChoice(p, row, choice);
}

// ---- Grouping
// --------------------------------------------------------------------------------------

__device__ inline int LoadClusterInt(const int* shared, uint32_t rank) {
  return __float_as_int(LoadClusterFloat(reinterpret_cast<const float*>(shared), rank));
}

// By one warp: counts become exclusive sums, in ascending order; `total` becomes the sum of all.
__device__ inline void ExclusiveSums(int* counts, int n, int* total) {
  const int lane = LaneId();
  const int each = (n + 31) / 32;
  const int first = min(n, lane * each);
  const int end = min(n, first + each);
  int own = 0;
  for (int i = first; i < end; ++i) own += counts[i];
  int inclusive = own;
#pragma unroll
  for (int delta = 1; delta < 32; delta *= 2) {
    const int other = __shfl_up_sync(kAllLanes, inclusive, static_cast<unsigned>(delta));
    if (lane >= delta) inclusive += other;
  }
  *total = __shfl_sync(kAllLanes, inclusive, 31);
  int sum = inclusive - own;
  for (int i = first; i < end; ++i) {
    const int count = counts[i];
    counts[i] = sum;
    sum += count;
  }
}

// A pair (row, slot). A warp sorts those of whole rows, 32 at once.
struct Pair {
  bool valid = false;
  int row = 0;
  int slot = 0;
  int expert = -1;
  float weight = 0.0f;
  int rank = 0;  // among the warp's pairs of this expert
};

__host__ __device__ inline int GroupSharedBytes(int num_experts) {
  return (4 * (3 + kRouteWarps) * num_experts + 7) / 8 * 8;
}

// Whether this block is the last of the grid to get here. What the blocks wrote before is then
// visible to it.
__device__ inline bool ArrivesLast(int* arrivals) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(arrivals, 1) == static_cast<int>(gridDim.x) - 1;
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// kPerLane 0: one cluster, without selection. Otherwise teams select first; the block that is ready
// last groups all rows.
template <int kPerLane>
__global__ void __launch_bounds__(kRouteThreads, 1)
    GroupKernel(const __grid_constant__ RouteParams p) {
  AllowNextKernel();
  const int blocks = kPerLane == 0 ? static_cast<int>(gridDim.x) : 1;
  const int rank = kPerLane == 0 ? static_cast<int>(blockIdx.x) : 0;
  const int warp = WarpId();
  const int lane = LaneId();
  const int thread = static_cast<int>(threadIdx.x);
  int* const counts = reinterpret_cast<int*>(DynamicShared<uint64_t>());  // [expert], of the block
  int* const base = counts + p.num_experts;                               // [expert]
  int* const in_blocks_before = base + p.num_experts;                     // [expert]
  int* const histograms = in_blocks_before + p.num_experts;               // [warp][expert]
  int* const histogram = histograms + warp * p.num_experts;
  for (int expert = lane; expert < p.num_experts; expert += 32) histogram[expert] = 0;
  if constexpr (kPerLane != 0) {
    const int team = warp / kTeamWarps;
    const int member = warp % kTeamWarps;
    float bias[kPerLane];
    LoadBias(p, member, bias);
    auto* const memory = reinterpret_cast<char*>(DynamicShared<uint64_t>()) +
                         GroupSharedBytes(p.num_experts) +
                         team * SelectSharedBytes(p.logit_experts, p.k, kTeamWarps);
    const SelectShared shared = SelectLayout(memory, p.logit_experts, p.k, kTeamWarps);
    WaitForPreviousKernel();
    const int step = static_cast<int>(gridDim.x) * kTeams;
    for (int row = static_cast<int>(blockIdx.x) * kTeams + team; row < p.rows; row += step) {
      const Choice choice =
          SelectExperts<kPerLane, kTeamWarps, true>(p, row, bias, shared, member, 1 + team);
      if (member == 0) StoreChoice(p, row, choice);
      NamedBarrierSync(1 + team, 32 * kTeamWarps);  // the next row overwrites the scores
    }
    if (gridDim.x == 1) {
      __syncthreads();
    } else if (!ArrivesLast(p.arrivals)) {
      return;
    }
  } else {
    __syncwarp();
    WaitForPreviousKernel();
  }

  const int rows_per_warp = (p.rows + blocks * kRouteWarps - 1) / (blocks * kRouteWarps);
  const int first_row = (rank * kRouteWarps + warp) * rows_per_warp;
  const int warp_rows = min(rows_per_warp, max(0, p.rows - first_row));
  const int pairs = warp_rows * p.k;
  const int batches = (pairs + 31) / 32;

  const auto place = [&](int batch) {
    Pair pair;
    const int index = batch * 32 + lane;
    pair.valid = index < pairs;
    pair.row = first_row + index / p.k;
    pair.slot = index % p.k;
    return pair;
  };
  const auto load = [&](Pair& pair) {
    if (!pair.valid) return;
    pair.expert = p.experts[pair.row * p.experts_stride + pair.slot];
    pair.weight = p.weights[pair.row * p.weights_stride + pair.slot];
    if (pair.expert < 0 || pair.expert >= p.num_experts) __trap();
  };

  Pair pair;
  Pair next = place(0);
  load(next);
  for (int batch = 0; batch < batches; ++batch) {
    pair = next;
    if (batch + 1 < batches) {
      next = place(batch + 1);
      load(next);
    }
    const unsigned equal = __match_any_sync(kAllLanes, pair.expert);
    const int before = __popc(equal & ((1u << lane) - 1u));
    const int earlier = pair.valid ? histogram[pair.expert] : 0;
    __syncwarp();
    if (pair.valid && before == 0) histogram[pair.expert] = earlier + __popc(equal);
    __syncwarp();
    pair.rank = earlier + before;
    // Kept where the position will go; the last batch stays in registers.
    if (pair.valid && batch + 1 < batches)
      p.slot_position[pair.row * p.slot_position_stride + pair.slot] = pair.rank;
  }
  __syncthreads();

  // Histograms become sums over the warps before.
  for (int expert = thread; expert < p.num_experts; expert += kRouteThreads) {
    int count[kRouteWarps];
#pragma unroll
    for (int w = 0; w < kRouteWarps; ++w) count[w] = histograms[w * p.num_experts + expert];
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kRouteWarps; ++w) {
      histograms[w * p.num_experts + expert] = sum;
      sum += count[w];
    }
    counts[expert] = sum;
  }
  if constexpr (kPerLane == 0) {
    ClusterSync();
  } else {
    __syncthreads();
  }

  // Sums over the blocks, and over those before this one.
  for (int expert = thread; expert < p.num_experts; expert += kRouteThreads) {
    int sum = counts[expert];
    int earlier = 0;
    if constexpr (kPerLane == 0) {
      sum = 0;
      for (int r = 0; r < blocks; ++r) {
        const int count = LoadClusterInt(counts + expert, static_cast<uint32_t>(r));
        earlier += r < rank ? count : 0;
        sum += count;
      }
    }
    base[expert] = sum;
    in_blocks_before[expert] = earlier;
  }
  __syncthreads();
  if constexpr (kPerLane == 0) ClusterArrive();  // this block reads no other's memory any more
  if (warp == 0) {
    int total = 0;
    ExclusiveSums(base, p.num_experts, &total);
    if (rank == 0 && lane == 0) p.group_offsets[p.num_experts] = total;
  }
  __syncthreads();
  const auto position_of = [&](int expert, int among) {
    return base[expert] + in_blocks_before[expert] + histogram[expert] + among;
  };
  if (rank == 0) {
    for (int expert = thread; expert < p.num_experts; expert += kRouteThreads)
      p.group_offsets[expert] = base[expert];
  }

  for (int batch = 0; batch < batches; ++batch) {
    if (batch + 1 < batches) {
      Pair reloaded = place(batch);
      load(reloaded);
      if (!reloaded.valid) continue;
      int* const slot_position =
          p.slot_position + reloaded.row * p.slot_position_stride + reloaded.slot;
      const int position = position_of(reloaded.expert, *slot_position);
      p.row_index[position] = reloaded.row;
      p.grouped_weight[position] = reloaded.weight;
      *slot_position = position;
    } else if (pair.valid) {
      const int position = position_of(pair.expert, pair.rank);
      p.row_index[position] = pair.row;
      p.grouped_weight[position] = pair.weight;
      p.slot_position[pair.row * p.slot_position_stride + pair.slot] = position;
    }
  }
  if constexpr (kPerLane == 0) ClusterWait();  // others may still read this block's counts
}

// ---- Element-wise operations
// -----------------------------------------------------------------------

__device__ inline void Unpack(const uint4& v, float (&out)[kLaneChannels]) {
  out[0] = Bf16LowToFloat(v.x);
  out[1] = Bf16HighToFloat(v.x);
  out[2] = Bf16LowToFloat(v.y);
  out[3] = Bf16HighToFloat(v.y);
  out[4] = Bf16LowToFloat(v.z);
  out[5] = Bf16HighToFloat(v.z);
  out[6] = Bf16LowToFloat(v.w);
  out[7] = Bf16HighToFloat(v.w);
}

__device__ inline uint4 Pack(const float (&x)[kLaneChannels]) {
  return make_uint4(FloatsToBf16x2(x[0], x[1]), FloatsToBf16x2(x[2], x[3]),
                    FloatsToBf16x2(x[4], x[5]), FloatsToBf16x2(x[6], x[7]));
}

struct SwigluParams {
  int64_t rows;
  int channels;
  const uint16_t* gate;
  int64_t gate_stride;
  const uint16_t* up;
  int64_t up_stride;
  const float* row_weight;  // null: 1
  float limit;
  uint16_t* out;
  int64_t out_stride;
  bool rounded;
};

__global__ void __launch_bounds__(kElementThreads)
    SwigluKernel(const __grid_constant__ SwigluParams p) {
  AllowNextKernel();
  WaitForPreviousKernel();
  const int pieces = p.channels / kLaneChannels;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kElementThreads + threadIdx.x;
  const int64_t row = index / pieces;
  const int channel = static_cast<int>(index - row * pieces) * kLaneChannels;
  const bool valid = row < p.rows;  // four lanes of a group of 32 agree
  uint4 gate = {};
  uint4 up = {};
  float weight = 1.0f;
  if (valid) {
    gate = LoadStreaming(p.gate + row * p.gate_stride + channel);
    up = LoadStreaming(p.up + row * p.up_stride + channel);
    if (p.row_weight != nullptr) weight = p.row_weight[row];
  }
  float g[kLaneChannels];
  float u[kLaneChannels];
  Unpack(gate, g);
  Unpack(up, u);
  float value[kLaneChannels];
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    // Comparisons that leave NaN as it is.
    const float clamped_gate = p.limit < g[i] ? p.limit : g[i];
    const float clamped_up = u[i] < -p.limit ? -p.limit : p.limit < u[i] ? p.limit : u[i];
    const float silu = clamped_gate / (1.0f + expf(-clamped_gate));
    value[i] = weight * (silu * clamped_up);
  }
  if (p.rounded) Unpack(Pack(value), value);
  const Q8Scale scale(LaneGroupMax<4>(Amax(value)));
  if (!valid) return;
  *reinterpret_cast<uint4*>(p.out + row * p.out_stride + channel) =
      make_uint4(Q8Grid(value[0], value[1], scale), Q8Grid(value[2], value[3], scale),
                 Q8Grid(value[4], value[5], scale), Q8Grid(value[6], value[7], scale));
}

struct CombineParams {
  int64_t rows;
  int channels;
  int k;
  const uint16_t* routed;
  int64_t routed_stride;
  const int* slot_position;
  int64_t slot_position_stride;
  const int* experts;
  int64_t experts_stride;
  const uint16_t* shared;
  int64_t shared_stride;
  uint16_t* y;
  int64_t y_stride;
};

__device__ inline void Add(const uint4& v, float (&sum)[kLaneChannels]) {
  float x[kLaneChannels];
  Unpack(v, x);
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) sum[i] += x[i];
}

// The shared expert, then kBatch slots at a time, whose loads are under way together.
template <int kBatch>
__global__ void __launch_bounds__(kElementThreads)
    CombineKernel(const __grid_constant__ CombineParams p) {
  AllowNextKernel();
  WaitForPreviousKernel();
  const int pieces = p.channels / kLaneChannels;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kElementThreads + threadIdx.x;
  const int64_t row = index / pieces;
  if (row >= p.rows) return;
  const int channel = static_cast<int>(index - row * pieces) * kLaneChannels;
  const int* positions = p.slot_position + row * p.slot_position_stride;
  float sum[kLaneChannels];
  Unpack(LoadStreaming(p.shared + row * p.shared_stride + channel), sum);
  for (int first = 0; first < p.k; first += kBatch) {
    uint4 values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < p.k)
        values[i] = LoadStreaming(p.routed + positions[first + i] * p.routed_stride + channel);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < p.k) Add(values[i], sum);
    }
  }
  *reinterpret_cast<uint4*>(p.y + row * p.y_stride + channel) = Pack(sum);
}

// The order of the reference profile: routed outputs by expert, from zero, then the shared expert.
__global__ void __launch_bounds__(kElementThreads)
    CombineByExpertKernel(const __grid_constant__ CombineParams p) {
  AllowNextKernel();
  WaitForPreviousKernel();
  const int pieces = p.channels / kLaneChannels;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kElementThreads + threadIdx.x;
  const int64_t row = index / pieces;
  if (row >= p.rows) return;
  const int channel = static_cast<int>(index - row * pieces) * kLaneChannels;
  const int* positions = p.slot_position + row * p.slot_position_stride;
  const int* experts = p.experts + row * p.experts_stride;
  float sum[kLaneChannels] = {};
  int last = -1;  // slot
  for (int step = 0; step < p.k; ++step) {
    int best = -1;
    for (int slot = 0; slot < p.k; ++slot) {
      const bool later = last < 0 || experts[slot] > experts[last] ||
                         (experts[slot] == experts[last] && slot > last);
      if (later && (best < 0 || experts[slot] < experts[best])) best = slot;
    }
    last = best;
    Add(LoadStreaming(p.routed + positions[best] * p.routed_stride + channel), sum);
  }
  Add(LoadStreaming(p.shared + row * p.shared_stride + channel), sum);
  *reinterpret_cast<uint4*>(p.y + row * p.y_stride + channel) = Pack(sum);
}

// ---- Launches
// --------------------------------------------------------------------------------------

template <class T>
T* Data(const TensorView& view) {
  return static_cast<T*>(view.data());
}

// kUnsupported unless 16-byte accesses reach all channels of all rows.
Status ExpectVectors(const TensorView& view, const char* op, const char* name) {
  const auto address = reinterpret_cast<uintptr_t>(view.data());
  if (address % 16 == 0 && view.row_stride() % kLaneChannels == 0 &&
      view.row_size() % kLaneChannels == 0)
    return {};
  return Fail(
      Code::kUnsupported,
      fmt::format("{} on a GPU needs 16-byte aligned rows of whole 16-byte pieces; '{}' ({}, "
                  "stride {}) has others.",
                  op, name, view.ToString(), view.row_stride()),
      name);
}

Status ExpectFew(int64_t experts, int64_t k, const char* op) {
  if (experts <= kMaxExperts && k <= kMaxChosen) return {};
  return Fail(
      Code::kUnsupported,
      fmt::format("{} on a GPU takes at most {} experts, {} of them per row; not {} and {}.", op,
                  kMaxExperts, kMaxChosen, experts, k),
      "experts");
}

void SetSelect(const RouterSelectArgs& args, RouteParams& params) {
  params.rows = static_cast<int>(args.experts.rows());
  params.k = static_cast<int>(args.experts.dim(1));
  if (!args.logits.empty()) {
    params.logit_experts = static_cast<int>(args.logits.dim(1));
    params.logits = Data<float>(args.logits);
    params.logits_stride = args.logits.row_stride();
  }
  params.segments = 1;
  params.bias = Data<float>(args.bias);
  params.gate_temp = args.gate_temp;
  params.scale = args.scale;
  params.experts = Data<int>(args.experts);
  params.experts_stride = args.experts.row_stride();
  params.weights = Data<float>(args.weights);
  params.weights_stride = args.weights.row_stride();
}

void SetGroup(const GroupByExpertArgs& args, RouteParams& params) {
  params.rows = static_cast<int>(args.experts.rows());
  params.k = static_cast<int>(args.experts.dim(1));
  params.experts = Data<int>(args.experts);
  params.experts_stride = args.experts.row_stride();
  params.weights = Data<float>(args.weights);
  params.weights_stride = args.weights.row_stride();
  params.num_experts = static_cast<int>(args.num_experts);
  params.row_index = Data<int>(args.row_index);
  params.grouped_weight = Data<float>(args.grouped_weight);
  params.group_offsets = Data<int>(args.group_offsets);
  params.slot_position = Data<int>(args.slot_position);
  params.slot_position_stride = args.slot_position.row_stride();
}

int GroupBlocks(int64_t pairs) {
  int blocks = 1;
  while (blocks < 16 && int64_t{blocks} * kRouteWarps * kGroupPairs < pairs) blocks *= 2;
  return blocks;
}

template <int kPerLane>
Status LaunchGroup(const char* name, const RouteParams& params, Stream& stream) {
  LaunchConfig config;
  if constexpr (kPerLane == 0) {
    config.cluster = GroupBlocks(int64_t{params.rows} * params.k);
    config.grid.x = static_cast<uint32_t>(config.cluster);
  } else if (params.arrivals != nullptr) {
    config.grid.x = static_cast<uint32_t>((params.rows + kTeams - 1) / kTeams);
  }
  config.block = kRouteThreads;
  config.shared_bytes =
      GroupSharedBytes(params.num_experts) +
      (kPerLane == 0 ? 0 : kTeams * SelectSharedBytes(params.logit_experts, params.k, kTeamWarps));
  config.overlap_previous = true;
  return Launch(name, &GroupKernel<kPerLane>, config, stream, params);
}

// kPerLane: of a warp that selects alone.
template <int kPerLane>
Status LaunchSelect(const RouteParams& params, Stream& stream) {
  LaunchConfig config;
  config.overlap_previous = true;
  if (params.rows <= kTeamRows) {
    config.grid.x = static_cast<uint32_t>(params.rows);
    config.block = 32 * kTeamWarps;
    config.shared_bytes = SelectSharedBytes(params.logit_experts, params.k, kTeamWarps);
    return Launch("RouterSelect", &TeamSelectKernel<kPerLane / kTeamWarps>, config, stream, params);
  }
  config.grid.x = static_cast<uint32_t>((params.rows + kSelectWarps - 1) / kSelectWarps);
  config.block = 32 * kSelectWarps;
  config.shared_bytes = kSelectWarps * SelectSharedBytes(params.logit_experts, params.k, 1);
  return Launch("RouterSelect", &SelectKernel<kPerLane>, config, stream, params);
}

// Both in one launch: one block, or where `arrivals` is a zero one block for each kTeams rows.
Status LaunchSelectAndGroup(const RouteParams& params, Stream& stream) {
  DI_RETURN_IF_ERROR(ExpectFew(params.num_experts, params.k, "RouteExperts"));
  if (params.logit_experts <= 128)
    return LaunchGroup<4 / kTeamWarps>("RouteExperts", params, stream);
  if (params.logit_experts <= 384)
    return LaunchGroup<12 / kTeamWarps>("RouteExperts", params, stream);
  return LaunchGroup<kMaxExperts / 32 / kTeamWarps>("RouteExperts", params, stream);
}

LaunchConfig ElementLaunch(int64_t rows, int64_t channels) {
  LaunchConfig config;
  config.block = kElementThreads;
  config.grid.x = static_cast<uint32_t>((rows * (channels / kLaneChannels) + kElementThreads - 1) /
                                        kElementThreads);
  config.overlap_previous = true;
  return config;
}

}  // namespace

Status RouterSelect(const RouterSelectArgs& args, Stream& stream) {
  RouteParams params = {};
  SetSelect(args, params);
  DI_RETURN_IF_ERROR(ExpectFew(params.logit_experts, params.k, "RouterSelect"));
  if (params.logit_experts <= 128) return LaunchSelect<4>(params, stream);
  if (params.logit_experts <= 384) return LaunchSelect<12>(params, stream);
  return LaunchSelect<kMaxExperts / 32>(params, stream);
}

Status GroupByExpert(const GroupByExpertArgs& args, Stream& stream) {
  RouteParams params = {};
  SetGroup(args, params);
  DI_RETURN_IF_ERROR(ExpectFew(params.num_experts, params.k, "GroupByExpert"));
  return LaunchGroup<0>("GroupByExpert", params, stream);
}

Status RouteExperts(const RouterSelectArgs& select, const GroupByExpertArgs& group,
                    Stream& stream) {
  if (select.logits.rows() > kFusedRows) {
    DI_RETURN_IF_ERROR(cuda::RouterSelect(select, stream));  // spread over the GPU
    return cuda::GroupByExpert(group, stream);
  }
  RouteParams params = {};
  SetSelect(select, params);
  SetGroup(group, params);
  return LaunchSelectAndGroup(params, stream);
}

Status Route(const RouteArgs& args, Stream& stream) {
  const int64_t rows = args.x.rows();
  ScratchScope scratch(stream);
  if (!TakesRouterScores(args.x, *args.weight, stream)) {
    RouterSelectArgs select = args.select;
    select.logits = scratch.Tensor(DType::kF32, {rows, args.weight->n()});
    DI_RETURN_IF_ERROR(Linear({.x = args.x, .weight = args.weight, .y = select.logits}, stream));
    return cuda::RouteExperts(select, args.group, stream);
  }
  RouteParams params = {};
  SetSelect(args.select, params);
  SetGroup(args.group, params);
  RouterScores scores = RouterScoresOf(rows, *args.weight);
  scores.sums = scratch.Allocate<float>(scores.segments * scores.segment_stride);
  params.arrivals = scratch.Allocate<int>(1);
  params.logit_experts = static_cast<int>(args.weight->n());
  params.logits = scores.sums;
  params.logits_stride = scores.row_stride;
  params.segments = scores.segments;
  params.segment_stride = scores.segment_stride;
  DI_RETURN_IF_ERROR(LaunchRouterScores(args.x, *args.weight, scores, params.arrivals, stream));
  return LaunchSelectAndGroup(params, stream);
}

Status Swiglu(const SwigluArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(ExpectVectors(args.gate, "Swiglu", "gate"));
  DI_RETURN_IF_ERROR(ExpectVectors(args.up, "Swiglu", "up"));
  DI_RETURN_IF_ERROR(ExpectVectors(args.out, "Swiglu", "out"));
  SwigluParams params = {};
  params.rows = args.gate.rows();
  params.channels = static_cast<int>(args.gate.dim(1));
  params.gate = Data<uint16_t>(args.gate);
  params.gate_stride = args.gate.row_stride();
  params.up = Data<uint16_t>(args.up);
  params.up_stride = args.up.row_stride();
  if (!args.row_weight.empty()) params.row_weight = Data<float>(args.row_weight);
  params.limit = args.limit;
  params.out = Data<uint16_t>(args.out);
  params.out_stride = args.out.row_stride();
  params.rounded = args.numerics == Numerics::kReference;
  return Launch("Swiglu", &SwigluKernel, ElementLaunch(params.rows, params.channels), stream,
                params);
}

Status MoeCombine(const MoeCombineArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(ExpectVectors(args.routed, "MoeCombine", "routed"));
  DI_RETURN_IF_ERROR(ExpectVectors(args.shared, "MoeCombine", "shared"));
  DI_RETURN_IF_ERROR(ExpectVectors(args.y, "MoeCombine", "y"));
  CombineParams params = {};
  params.rows = args.shared.rows();
  params.channels = static_cast<int>(args.shared.dim(1));
  params.k = static_cast<int>(args.slot_position.dim(1));
  params.routed = Data<uint16_t>(args.routed);
  params.routed_stride = args.routed.row_stride();
  params.slot_position = Data<int>(args.slot_position);
  params.slot_position_stride = args.slot_position.row_stride();
  params.experts = Data<int>(args.experts);
  params.experts_stride = args.experts.row_stride();
  params.shared = Data<uint16_t>(args.shared);
  params.shared_stride = args.shared.row_stride();
  params.y = Data<uint16_t>(args.y);
  params.y_stride = args.y.row_stride();
  const LaunchConfig config = ElementLaunch(params.rows, params.channels);
  if (args.numerics == Numerics::kReference)
    return Launch("MoeCombine", &CombineByExpertKernel, config, stream, params);
  if (params.k <= 3) return Launch("MoeCombine", &CombineKernel<3>, config, stream, params);
  return Launch("MoeCombine", &CombineKernel<6>, config, stream, params);
}

}  // namespace deepinfer::cuda
