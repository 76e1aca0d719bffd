// Choosing the best entries and candidate blocks of each row on a GPU, from the scores and the
// maxima of every 8 consecutive scores.
//
// Two levels, exact: the k best entries lie in the k best blocks by maximum (ties to the lower
// block at the first level and to the lower entry at the second keep this true: an entry that is
// chosen outside these blocks would be preceded, in order of score and index, by one entry of each
// of them). So a row costs one read of its maxima, an eighth of its scores, and a gather of k
// blocks of 32 bytes. A layer's candidate blocks are chosen from the same maxima.
//
// A block per row and output. A selection of k of n values:
//
// 1. The values are divided into 4,096 groups, eight per thread, whose maxima stay in registers. A
//    histogram of these finds a bound: the lower edge of the bin of the k-th largest maximum. At
//    least k values are not below it, and where values are in no particular order few more than k.
// 2. A second pass over the values (from the L1) keeps those not below the bound in a list, in
//    shared memory, and counts them in a second, finer histogram.
// 3. The list is divided: above the bin of the k-th value all are chosen, below it none, those in
//    it are ranked one by one by value and index. While a bin has too many for that, it is divided
//    again; of equal values in the end the first are taken.
// 4. Chosen indices are bits of a map, which is written in ascending order.
//
// Where the list is too small (values in an order that defeats the groups), the passes of 3. read
// all values instead.
//
// Bound by latency: eleven block barriers and two reads of memory per level; bytes are 4 per block
// of 8 scores. Two blocks fit into a multiprocessor. The code is small on purpose: with few rows
// every instruction is fetched for the first time.
#include <algorithm>
#include <cfloat>

#include "ops/indexer/indexer_cuda.cuh"

namespace deepinfer::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kBinBits = 11;
constexpr int kBins = 1 << kBinBits;
constexpr int kBinsPerThread = kBins / kThreads;
constexpr int kThreadGroups = 8;  // four components of two kinds of vectors
constexpr int kVectorsUnderWay = 4;
constexpr int kMaxTopK = kThreadGroups * kThreads;  // groups are at least as many
constexpr int kWarpList = 512;                      // values that a warp keeps
constexpr int kMaxMembers = 256;                    // of a bin, that are ranked one by one
constexpr int kMaxSharedBytes = 227 * 1024;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr uint32_t kLowestKey = 0x007fffffu;  // of -inf

// Ascending in the score; both zeros are equal, NaN is the lowest of all together with -inf. Never
// 0.
__device__ inline uint32_t OrderedKey(float score) {
  const uint32_t bits = __float_as_uint(__fadd_rn(score, 0.0f));  // -0 becomes +0
  const uint32_t key = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  constexpr uint32_t kHighest = 0xff800000u;  // key of +inf
  return key < kLowestKey || key > kHighest ? kLowestKey : key;
}

// The float with this key, for keys from that of -inf to that of +inf.
__device__ inline float FloatOfKey(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

struct Candidate {
  uint32_t key;
  int index;
};

struct SelectionScratch {
  uint32_t histogram[2][kBins];
  Candidate list[kWarps][kWarpList];
  Candidate members[kMaxMembers];
  uint32_t warp_low[kWarps];
  uint32_t warp_high[kWarps];
  int warp_sums[kWarps];
  int warp_equal[kWarps];
  int bin;
  int above;
  int in_bin;
  int num_members;
  int overflow;
};

// The rest of shared memory. Maps have a bit per value.
struct SelectionMemory {
  SelectionScratch* scratch;
  uint32_t* chosen_map;
  uint32_t* equal_map;
  int32_t* best_blocks;  // [topk]
  int32_t* chosen;       // [topk or candidate blocks]
};

__device__ inline int InclusiveWarpSum(int value, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// The sum of the values of the warps before this one.
__device__ inline int SumOfWarpsBefore(const int* values, int warp, int lane) {
  const int inclusive = InclusiveWarpSum(lane < kWarps ? values[lane] : 0, lane);
  const int before = __shfl_sync(kAllLanes, inclusive, max(warp - 1, 0));
  return warp == 0 ? 0 : before;
}
static_assert(kWarps <= 32, "a lane per warp");

// The sum over all threads of the block, for all of them.
__device__ inline int BlockSum(int value, SelectionScratch& scratch) {
  value = __reduce_add_sync(kAllLanes, value);
  if (LaneId() == 0) scratch.warp_sums[WarpId()] = value;
  __syncthreads();
  const int lane = LaneId();
  const int sum = __reduce_add_sync(kAllLanes, lane < kWarps ? scratch.warp_sums[lane] : 0);
  __syncthreads();
  return sum;
}

// Finds the bin, counted from the top, in which the `need`-th value of a histogram lies.
__device__ inline void FindBin(const uint32_t* histogram, int need, SelectionScratch& scratch) {
  const int lane = LaneId();
  const int warp = WarpId();
  const int first = kBins - kBinsPerThread * (static_cast<int>(threadIdx.x) + 1);
  int counts[kBinsPerThread];
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) {
    counts[i] = static_cast<int>(histogram[first + i]);
    sum += counts[i];
  }
  int inclusive = InclusiveWarpSum(sum, lane);
  if (lane == 31) scratch.warp_sums[warp] = inclusive;
  __syncthreads();
  inclusive += SumOfWarpsBefore(scratch.warp_sums, warp, lane);
  int above = inclusive - sum;
  if (above < need && need <= inclusive) {
#pragma unroll
    for (int i = kBinsPerThread - 1; i >= 0; --i) {
      if (above < need && need <= above + counts[i]) {
        scratch.bin = first + i;
        scratch.above = above;
        scratch.in_bin = counts[i];
      }
      above += counts[i];
    }
  }
  __syncthreads();
}

// The values of a selection, four consecutive ones at a time. Those beyond the end are anything.
//
// An array, whose rows are aligned to 16 bytes or not.
struct ArrayValues {
  const float* values;
  int n;
  bool aligned;
  int newest;  // -1, or the index that is always chosen

  __device__ float4 Four(int i) const {
    float v[4] = {};
    if (aligned) {
      const float4 vector = *reinterpret_cast<const float4*>(values + i);
      v[0] = vector.x;
      v[1] = vector.y;
      v[2] = vector.z;
      v[3] = vector.w;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = i + j < n ? values[i + j] : 0.0f;
    }
    if (newest >= 0) {
      // Infinity is reserved for the newest block, which a tie must not push out.
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = i + j == newest ? INFINITY : fminf(v[j], FLT_MAX);
    }
    return make_float4(v[0], v[1], v[2], v[3]);
  }
};

// The scores of some blocks of eight positions. kListed: they lie by entry, positions count entries
// of candidate blocks.
template <bool kListed>
struct GatheredValues {
  const float* scores;
  const int32_t* best_blocks;  // null: all
  const int32_t* candidates;   // null: positions are entries
  int candidate_block_size;
  int n;

  __device__ int Position(int i) const {
    const int block = best_blocks == nullptr ? i / kScoreBlock : best_blocks[i / kScoreBlock];
    return block * kScoreBlock + i % kScoreBlock;
  }
  __device__ int Entry(int position) const {
    if (candidates == nullptr) return position;
    return candidates[position / candidate_block_size] * candidate_block_size +
           position % candidate_block_size;
  }
  __device__ float4 Four(int i) const {
    const int position = Position(i);
    if constexpr (kListed) {
      float v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = i + j < n ? scores[Entry(position + j)] : 0.0f;
      return make_float4(v[0], v[1], v[2], v[3]);
    } else {
      return *reinterpret_cast<const float4*>(scores + position);
    }
  }
};

__device__ inline float Component(const float4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Calls use(index, value) for all values of a thread. Lanes of a warp call together, with an index
// of n or more where there is none.
template <class Values, class Use>
__device__ inline void ForEachValue(const Values& values, const Use& use) {
  int i = 4 * static_cast<int>(threadIdx.x);
  float4 next = {};
  if (i < values.n) next = values.Four(i);
#pragma unroll 1
  for (int first = 0; first < values.n; first += 4 * kThreads, i += 4 * kThreads) {
    const float4 v = next;
    if (i + 4 * kThreads < values.n) next = values.Four(i + 4 * kThreads);
#pragma unroll
    for (int j = 0; j < 4; ++j) use(i + j, Component(v, j));
  }
}

// What Decide() is called with: the values that a warp has kept, or, where lists were too small,
// all.
struct ListedCandidates {
  const Candidate* list;
  int count;

  template <class Use>
  __device__ void operator()(const Use& use) const {
#pragma unroll 1
    for (int i = LaneId(); i < count; i += 32) use(list[i].key, list[i].index);
  }
};

template <class Values>
struct AllValues {
  Values values;

  template <class Use>
  __device__ void operator()(const Use& use) const {
    ForEachValue(values, [&](int i, float value) {
      if (i < values.n) use(OrderedKey(value), i);
    });
  }
};

// The range of keys that are still undecided, [low, low + range], of which `need` are chosen, as
// are all above. kAllOf: all of the range.
struct Undecided {
  uint32_t low;
  uint32_t range;
  int need;

  static constexpr int kAllOf = 0x7fffffff;
  __device__ int Shift() const {
    return max(0, 32 - __clz(static_cast<int>(range)) - kBinBits);
  }
  __device__ bool Has(uint32_t key) const {
    return key >= low && key - low <= range;
  }
};

// 1.: the range from the bound to the highest key. The second histogram and the maps are zero
// afterwards.
template <class Values>
__device__ inline Undecided FindBound(const Values& values, int k, const SelectionMemory& memory) {
  SelectionScratch& scratch = *memory.scratch;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = LaneId();
  const int n = values.n;
#pragma unroll 1
  for (int i = thread; i < 2 * kBins; i += kThreads) scratch.histogram[0][i] = 0;
  for (int i = thread; i < CeilDiv(n, 32); i += kThreads) {
    memory.chosen_map[i] = 0;
    memory.equal_map[i] = 0;
  }
  if (thread == 0) {
    scratch.num_members = 0;
    scratch.overflow = 0;
  }
  float largest[kThreadGroups];
#pragma unroll
  for (int g = 0; g < kThreadGroups; ++g) largest[g] = -INFINITY;
#pragma unroll 1
  for (int first = 0; first < n; first += kVectorsUnderWay * 4 * kThreads) {
    float4 vectors[kVectorsUnderWay] = {};
#pragma unroll
    for (int j = 0; j < kVectorsUnderWay; ++j) {
      const int i = first + 4 * (j * kThreads + thread);
      if (i < n) vectors[j] = values.Four(i);
    }
#pragma unroll
    for (int j = 0; j < kVectorsUnderWay; ++j) {
      const int i = first + 4 * (j * kThreads + thread);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float& group = largest[j % 2 * 4 + c];
        if (i + c < n) group = fmaxf(group, Component(vectors[j], c));  // ignores NaN
      }
    }
  }
  uint32_t keys[kThreadGroups];  // 0: the group is empty
#pragma unroll
  for (int g = 0; g < kThreadGroups; ++g) {
    const int first_of_group = 4 * (g / 4 * kThreads + thread) + g % 4;
    keys[g] = first_of_group < n ? OrderedKey(largest[g]) : 0;
  }
  // The smallest of at least k maxima of larger groups is a first bound, and far from the lowest
  // value. Where there are not so many, the lowest maximum is.
  uint32_t high = 0;
  uint32_t low = 0xffffffffu;
#pragma unroll
  for (int g = 0; g < kThreadGroups; ++g) {
    high = max(high, keys[g]);
    if (keys[g] != 0) low = min(low, keys[g]);
  }
  if (k <= kThreads && n >= 4 * kThreads) low = high;
  low = __reduce_min_sync(kAllLanes, low);
  high = __reduce_max_sync(kAllLanes, high);
  if (lane == 0) {
    scratch.warp_low[WarpId()] = low;
    scratch.warp_high[WarpId()] = high;
  }
  __syncthreads();
  low = __reduce_min_sync(kAllLanes, lane < kWarps ? scratch.warp_low[lane] : 0xffffffffu);
  high = __reduce_max_sync(kAllLanes, lane < kWarps ? scratch.warp_high[lane] : 0u);
  Undecided undecided = {low, high - low, k};
  const int shift = undecided.Shift();
#pragma unroll
  for (int g = 0; g < kThreadGroups; ++g) {
    if (keys[g] >= low) atomicAdd(&scratch.histogram[0][(keys[g] - low) >> shift], 1u);
  }
  __syncthreads();
  FindBin(scratch.histogram[0], k, scratch);
  undecided.low = low + (static_cast<uint32_t>(scratch.bin) << shift);
  undecided.range = high - undecided.low;
  return undecided;
}

// 2.: returns how many values the warp keeps.
template <class Values>
__device__ inline int KeepCandidates(const Values& values, const Undecided& undecided,
                                     SelectionScratch& scratch) {
  const uint32_t lower_lanes = (1u << LaneId()) - 1u;
  const int shift = undecided.Shift();
  const float bound = FloatOfKey(undecided.low);
  const bool all = undecided.low == kLowestKey;  // NaN as well
  Candidate* const list = scratch.list[WarpId()];
  int count = 0;
  ForEachValue(values, [&](int i, float value) {
    const bool keep = i < values.n && (value >= bound || all);
    const uint32_t lanes = __ballot_sync(kAllLanes, keep);
    if (lanes == 0) return;
    const int place = count + __popc(lanes & lower_lanes);
    if (keep) {
      const uint32_t key = OrderedKey(value);
      if (place < kWarpList) list[place] = {key, i};
      atomicAdd(&scratch.histogram[1][(key - undecided.low) >> shift], 1u);
    }
    count += __popc(lanes);
  });
  if (count > kWarpList) scratch.overflow = 1;
  return count;
}

// 3. and 4.: for_each(use) calls use(key, index) for all values not below the bound; their second
// histogram is there. Writes the chosen indices in ascending order to memory.chosen.
// Not inlined: the usual way is one copy for all selections of the kernel.
template <class ForEach>
[[gnu::noinline]] __device__ void Decide(int n, Undecided undecided, ForEach for_each,
                                         SelectionMemory memory) {
  SelectionScratch& scratch = *memory.scratch;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = LaneId();
  const int warp = WarpId();
  bool ranks = false;
  while (true) {
    const int shift = undecided.Shift();
    FindBin(scratch.histogram[1], undecided.need, scratch);
    undecided.need -= scratch.above;
    undecided.low += static_cast<uint32_t>(scratch.bin) << shift;
    undecided.range = (1u << shift) - 1u;
    const int in_bin = scratch.in_bin;
    if (undecided.need == in_bin) {
      undecided.need = Undecided::kAllOf;
      break;
    }
    ranks = in_bin <= kMaxMembers;
    if (ranks || undecided.range == 0) break;
#pragma unroll 1
    for (int i = thread; i < kBins; i += kThreads) scratch.histogram[1][i] = 0;
    __syncthreads();
    const int next_shift = undecided.Shift();
    for_each([&](uint32_t key, int) {
      if (undecided.Has(key))
        atomicAdd(&scratch.histogram[1][(key - undecided.low) >> next_shift], 1u);
    });
    __syncthreads();
  }
  for_each([&](uint32_t key, int index) {
    if (key < undecided.low) return;
    if (key - undecided.low > undecided.range || undecided.need == Undecided::kAllOf) {
      atomicOr(&memory.chosen_map[index / 32], 1u << (index % 32));
    } else if (ranks) {
      scratch.members[atomicAdd(&scratch.num_members, 1)] = {key, index};
    } else {
      atomicOr(&memory.equal_map[index / 32], 1u << (index % 32));
    }
  });
  __syncthreads();
  if (ranks && undecided.need != Undecided::kAllOf) {
    const int members = scratch.num_members;
    if (thread < members) {
      const Candidate own = scratch.members[thread];
      int before = 0;
      for (int i = 0; i < members; ++i) {
        const Candidate other = scratch.members[i];
        before += other.key > own.key || (other.key == own.key && other.index < own.index) ? 1 : 0;
      }
      if (before < undecided.need)
        atomicOr(&memory.chosen_map[own.index / 32], 1u << (own.index % 32));
    }
    __syncthreads();
  }

  // Every thread writes the bits of some neighbouring words, of equal values the first ones.
  const int words = CeilDiv(n, 32);
  const int each = CeilDiv(words, kThreads);
  const int first = min(words, thread * each);
  const int end = min(words, first + each);
  int chosen = 0;
  int equal = 0;
#pragma unroll 1
  for (int w = first; w < end; ++w) {
    chosen += __popc(memory.chosen_map[w]);
    equal += __popc(memory.equal_map[w]);
  }
  const int inclusive_chosen = InclusiveWarpSum(chosen, lane);
  const int inclusive_equal = InclusiveWarpSum(equal, lane);
  if (lane == 31) {
    scratch.warp_sums[warp] = inclusive_chosen;
    scratch.warp_equal[warp] = inclusive_equal;
  }
  __syncthreads();
  int chosen_before = inclusive_chosen - chosen + SumOfWarpsBefore(scratch.warp_sums, warp, lane);
  int equal_before = inclusive_equal - equal + SumOfWarpsBefore(scratch.warp_equal, warp, lane);
#pragma unroll 1
  for (int w = first; w < end; ++w) {
    uint32_t bits = memory.chosen_map[w];
    uint32_t equal_bits = memory.equal_map[w];
    int place = chosen_before + min(equal_before, undecided.need);
    chosen_before += __popc(bits);
    while (equal_bits != 0) {
      const uint32_t bit = equal_bits & (0u - equal_bits);
      if (equal_before++ < undecided.need) bits |= bit;
      equal_bits ^= bit;
    }
    while (bits != 0) {
      memory.chosen[place++] = 32 * w + __ffs(static_cast<int>(bits)) - 1;
      bits &= bits - 1;
    }
  }
  __syncthreads();
}

// The k best of the values, 1 <= k < n, ties to the lower index, in ascending order of index to
// memory.chosen.
template <class Values>
__device__ inline void SelectBest(const Values& values, int k, const SelectionMemory& memory) {
  SelectionScratch& scratch = *memory.scratch;
  const Undecided undecided = FindBound(values, k, memory);
  const int count = KeepCandidates(values, undecided, scratch);
  __syncthreads();
  if (scratch.overflow == 0) {
    Decide(values.n, undecided, ListedCandidates{scratch.list[WarpId()], count}, memory);
  } else {
    Decide(values.n, undecided, AllValues<Values>{values}, memory);
  }
}

__host__ __device__ inline int MapWords(const IndexerProblem& problem) {
  const int by_block = problem.score_stride / kScoreBlock;
  const int values = max(max(by_block, problem.topk * kScoreBlock),
                         problem.candidates_out == nullptr ? 0 : problem.candidate_maxima_stride);
  return (values + 31) / 32;
}

__host__ __device__ inline int ChosenCapacity(const IndexerProblem& problem) {
  return max(problem.topk, problem.candidates_out == nullptr ? 0 : problem.num_candidates_out);
}

__host__ __device__ inline int64_t SelectionBytes(const IndexerProblem& problem) {
  return static_cast<int64_t>(sizeof(SelectionScratch)) +
         int64_t{4} * (2 * MapWords(problem) + problem.topk + ChosenCapacity(problem));
}

__device__ inline SelectionMemory LayOut(const IndexerProblem& problem) {
  SelectionMemory memory;
  memory.scratch = DynamicShared<SelectionScratch>();
  memory.chosen_map = reinterpret_cast<uint32_t*>(memory.scratch + 1);
  memory.equal_map = memory.chosen_map + MapWords(problem);
  memory.best_blocks = reinterpret_cast<int32_t*>(memory.equal_map + MapWords(problem));
  memory.chosen = memory.best_blocks + problem.topk;
  return memory;
}

__device__ inline void SelectCandidates(const IndexerProblem& problem, int row, int n_vis,
                                        const SelectionMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x);
  int32_t* out = problem.candidates_out + row * problem.candidates_out_stride;
  const int wanted = problem.num_candidates_out;
  const int count = CeilDiv(n_vis, problem.candidate_block_size);
  for (int i = thread; i < wanted; i += kThreads) {
    if (count <= wanted || i >= count) out[i] = i < count ? i : -1;
  }
  if (count <= wanted || wanted == 0) return;
  const int stride = problem.candidate_maxima_stride;
  const ArrayValues values = {
      problem.candidate_maxima + static_cast<int64_t>(row - problem.row_begin) * stride, count,
      stride % 4 == 0, count - 1};
  SelectBest(values, wanted, memory);
  for (int i = thread; i < wanted; i += kThreads) out[i] = memory.chosen[i];
}

// `n` of the row's positions are visible.
template <bool kListed>
[[gnu::noinline]] __device__ void SelectPositions(const IndexerProblem& problem, int row, int n,
                                                  SelectionMemory memory) {
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t wave_row = row - problem.row_begin;
  int32_t* out = problem.selected + row * problem.selected_stride;
  const int topk = problem.topk;
  const int score_blocks = CeilDiv(n, kScoreBlock);
  const bool all_blocks = score_blocks <= topk;
  GatheredValues<kListed> gathered = {
      problem.scores + wave_row * problem.score_stride, all_blocks ? nullptr : memory.best_blocks,
      problem.candidates == nullptr ? nullptr
                                    : problem.candidates + row * problem.candidates_stride,
      problem.candidate_block_size, n};
  for (int i = thread; i < topk; i += kThreads) {
    if (n <= topk || i >= n) out[i] = i < n ? gathered.Entry(i) : -1;
  }
  if (n <= topk || topk == 0) return;

  // First level: the best blocks.
  if (!all_blocks) {
    const ArrayValues maxima = {problem.maxima + wave_row * (problem.score_stride / kScoreBlock),
                                score_blocks, true, -1};
    SelectBest(maxima, topk, memory);
    for (int i = thread; i < topk; i += kThreads) memory.best_blocks[i] = memory.chosen[i];
    __syncthreads();
    // Only the last block can be partial.
    const bool has_last = memory.best_blocks[topk - 1] == score_blocks - 1;
    gathered.n = topk * kScoreBlock - (has_last ? score_blocks * kScoreBlock - n : 0);
  }
  // Second level: the best entries of these blocks.
  SelectBest(gathered, topk, memory);
  for (int i = thread; i < topk; i += kThreads)
    out[i] = gathered.Entry(gathered.Position(memory.chosen[i]));
}

__device__ inline void SelectEntries(const IndexerProblem& problem, int row, int n_vis,
                                     const SelectionMemory& memory) {
  if (problem.candidates == nullptr) {
    SelectPositions<false>(problem, row, n_vis, memory);
    return;
  }
  const int32_t* candidates = problem.candidates + row * problem.candidates_stride;
  int visible = 0;
  for (int i = static_cast<int>(threadIdx.x); i < problem.num_candidates; i += kThreads) {
    const int block = candidates[i];
    if (block >= 0) {
      visible +=
          min(max(n_vis - block * problem.candidate_block_size, 0), problem.candidate_block_size);
    }
  }
  const int n = BlockSum(visible, *memory.scratch);
  if (problem.compact) {
    SelectPositions<false>(problem, row, n, memory);
  } else {
    SelectPositions<true>(problem, row, n, memory);
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    SelectionKernel(const __grid_constant__ IndexerProblem problem) {
  AllowNextKernel();
  const SelectionMemory memory = LayOut(problem);
  const int row = problem.row_begin + static_cast<int>(blockIdx.x);
  WaitForPreviousKernel();
  const int n_vis = VisibleEntries(problem, row);
  if (blockIdx.y == 1) {
    SelectCandidates(problem, row, n_vis, memory);
  } else {
    SelectEntries(problem, row, n_vis, memory);
  }
}

}  // namespace

bool SelectionSupported(const IndexerProblem& problem) {
  return problem.topk <= kMaxTopK && problem.num_candidates_out <= kMaxTopK &&
         SelectionBytes(problem) <= kMaxSharedBytes;
}

Status LaunchSelection(const IndexerProblem& problem, Stream& stream) {
  LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(problem.row_end - problem.row_begin);
  config.grid.y = problem.candidates_out != nullptr ? 2 : 1;
  config.block = kThreads;
  config.overlap_previous = true;
  config.shared_bytes = static_cast<int>(SelectionBytes(problem));
  return Launch("IndexerSelection", SelectionKernel, config, stream, problem);
}

}  // namespace deepinfer::cuda
