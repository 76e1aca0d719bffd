// Choosing the best entries and candidate blocks of each row on a GPU, from the scores and the
// maxima of every 8 consecutive scores.
//
// Two levels, exact: the k best entries lie in the k best blocks by maximum (ties to the lower
// block at the first level and to the lower entry at the second keep this true: an entry that is
// chosen outside these blocks would be preceded, in order of score and index, by one entry of each
// of them). So a row costs one read of its maxima, an eighth of its scores, and a gather of k
// blocks of 32 bytes. A layer's candidate blocks are chosen from the same maxima.
//
// One block of 1024 threads per row and output: keys (scores as ordered integers) stay in
// registers, 16 per thread; longer rows are read again by each pass. A selection is: a lower bound
// of the k-th key and the maximum; a histogram of the keys between, which at the usual
// distributions leaves a few keys in the bin of the k-th (else the bin is divided again, at most
// twice); their ranking; a pass that counts per warp and one that writes in ascending order.
//
// The bound: where all keys are divided into at least k groups, the smallest of the groups' maxima
// is at most the k-th key. With groups of 16 keys two thirds of the keys need not be counted, and
// more in longer rows.
//
// Bound by the latency of eight block barriers and two reads of memory per level: bytes are 4 per
// block of 8 scores.
#include <algorithm>
#include <cfloat>

#include "ops/indexer/indexer_cuda.cuh"

namespace deepinfer::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBinBits = 11;
constexpr int kBins = 1 << kBinBits;
constexpr int kBinsPerThread = kBins / kThreads;
constexpr int kMaxTopK = 4096;
constexpr int kNoLimit = 0x7fffffff;
constexpr int kMaxMembers = 128;  // of a bin, that are ranked one by one

// Ascending in the score; both zeros are equal, NaN is the lowest of all together with -inf. Never
// 0.
__device__ inline uint32_t OrderedKey(float score) {
  const uint32_t bits = __float_as_uint(__fadd_rn(score, 0.0f));  // -0 becomes +0
  const uint32_t key = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  constexpr uint32_t kLowest = 0x007fffffu;   // key of -inf
  constexpr uint32_t kHighest = 0xff800000u;  // key of +inf
  return key < kLowest || key > kHighest ? kLowest : key;
}

struct SelectionScratch {
  uint32_t histogram[kBins];
  uint32_t warp_low[kWarps];
  uint32_t warp_bound[kWarps];
  uint32_t warp_high[kWarps];
  int warp_greater[kWarps];
  int warp_equal[kWarps];
  int bin;
  int above;
  int in_bin;
  int num_members;
  uint32_t members[kMaxMembers];
  uint32_t key;  // the threshold among members, and how many that equal it are chosen
  int equal;
};

__device__ inline int InclusiveWarpSum(int value, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// The sum over all threads of the block, for all of them.
__device__ inline int BlockSum(int value, SelectionScratch& scratch) {
  const int warp = WarpId();
  value = __reduce_add_sync(0xffffffffu, value);
  if (LaneId() == 0) scratch.warp_greater[warp] = value;
  __syncthreads();
  int sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += scratch.warp_greater[w];
  __syncthreads();
  return sum;
}

// The sum of the values of the warps before this one.
__device__ inline int SumOfWarpsBefore(const int* values, int warp, int lane) {
  const int inclusive = InclusiveWarpSum(values[lane], lane);
  const int before = __shfl_sync(0xffffffffu, inclusive, max(warp - 1, 0));
  return warp == 0 ? 0 : before;
}
static_assert(kWarps == 32, "a lane per warp");

// Finds the bin, counted from the top, in which the `need`-th key lies.
__device__ inline void FindBin(int need, SelectionScratch& scratch) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = LaneId();
  const int warp = WarpId();
  int counts[kBinsPerThread];
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) {
    counts[i] = static_cast<int>(scratch.histogram[kBins - 1 - (thread * kBinsPerThread + i)]);
    sum += counts[i];
  }
  int inclusive = InclusiveWarpSum(sum, lane);
  if (lane == 31) scratch.warp_greater[warp] = inclusive;
  __syncthreads();
  inclusive += SumOfWarpsBefore(scratch.warp_greater, warp, lane);
  int above = inclusive - sum;
  if (above < need && need <= inclusive) {
#pragma unroll
    for (int i = 0; i < kBinsPerThread; ++i) {
      if (above < need && need <= above + counts[i]) {
        scratch.bin = kBins - 1 - (thread * kBinsPerThread + i);
        scratch.above = above;
        scratch.in_bin = counts[i];
      }
      above += counts[i];
    }
  }
  __syncthreads();
}

// A thread's keys: of the indices first + 32 j, below `end`. kItems of them in registers, or, where
// kItems is 0, any number, read anew each time.
template <int kItems, class KeyAt>
class ThreadKeys {
 public:
  __device__ ThreadKeys(int n, const KeyAt& key_at) : key_at_(key_at) {
    const int segment = CeilDiv(n, kThreads) * 32;  // per warp
    first_ = WarpId() * segment + LaneId();
    end_ = min(n, (WarpId() + 1) * segment);
    items_ = segment / 32;
    if constexpr (kItems > 0) {
#pragma unroll
      for (int j = 0; j < kItems; ++j) keys_[j] = KeyOf(j);
    }
  }
  // Calls use(index, key, j) for all lanes of a warp alike; the key is 0 where there is none.
  template <class Use>
  __device__ void ForEach(const Use& use) const {
    if constexpr (kItems > 0) {
#pragma unroll
      for (int j = 0; j < kItems; ++j) use(first_ + 32 * j, keys_[j], j);
    } else {
#pragma unroll 4
      for (int j = 0; j < items_; ++j) use(first_ + 32 * j, KeyOf(j), j);
    }
  }

 private:
  __device__ uint32_t KeyOf(int j) const {
    const int i = first_ + 32 * j;
    return i < end_ ? key_at_(i) : 0u;
  }

  const KeyAt& key_at_;
  int first_;
  int end_;
  int items_;
  uint32_t keys_[kItems > 0 ? kItems : 1];
};

template <int kItems, class KeyAt, class Emit>
__device__ void SelectBestOf(int n, int k, const KeyAt& key_at, const Emit& emit,
                             SelectionScratch& scratch) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = LaneId();
  const int warp = WarpId();
  for (int i = thread; i < kBins; i += kThreads) scratch.histogram[i] = 0;
  if (thread == 0) scratch.num_members = 0;
  const ThreadKeys<kItems, KeyAt> keys(n, key_at);
  // Groups of keys, enough of them for k: four of each thread, two, one, or one of two threads.
  uint32_t low = 0xffffffffu;
  uint32_t largest[4] = {0, 0, 0, 0};
  keys.ForEach([&](int, uint32_t key, int j) {
    if (key != 0) low = min(low, key);
    largest[j % 4] = max(largest[j % 4], key);
  });
  const uint32_t even = max(largest[0], largest[2]);
  const uint32_t odd = max(largest[1], largest[3]);
  uint32_t high = max(even, odd);
  uint32_t bound = high;
  if (k > 4 * kThreads) {
    bound = 0;
  } else if (k > 2 * kThreads) {
    bound = min(min(largest[0], largest[1]), min(largest[2], largest[3]));
  } else if (k > kThreads) {
    bound = min(even, odd);
  } else if (k <= kThreads / 2) {
    bound = max(high, __shfl_xor_sync(0xffffffffu, high, 1));
  }
  low = __reduce_min_sync(0xffffffffu, low);
  bound = __reduce_min_sync(0xffffffffu, bound);
  high = __reduce_max_sync(0xffffffffu, high);
  if (lane == 0) {
    scratch.warp_low[warp] = low;
    scratch.warp_bound[warp] = bound;
    scratch.warp_high[warp] = high;
  }
  __syncthreads();
  low = __reduce_min_sync(0xffffffffu, scratch.warp_low[lane]);
  low = max(low, __reduce_min_sync(0xffffffffu, scratch.warp_bound[lane]));
  high = __reduce_max_sync(0xffffffffu, scratch.warp_high[lane]);
  // Keys in [low, low + range] are still undecided; those above are chosen, `need` of these as
  // well.
  uint32_t range = high - low;
  int need = k;
  for (bool first = true; range != 0; first = false) {
    const int shift = max(0, 32 - __clz(static_cast<int>(range)) - kBinBits);
    if (!first) {
      for (int i = thread; i < kBins; i += kThreads) scratch.histogram[i] = 0;
      __syncthreads();
    }
    keys.ForEach([&](int, uint32_t key, int) {
      if (key >= low && key - low <= range) atomicAdd(&scratch.histogram[(key - low) >> shift], 1u);
    });
    __syncthreads();
    FindBin(need, scratch);
    need -= scratch.above;
    low += static_cast<uint32_t>(scratch.bin) << shift;
    range = (1u << shift) - 1u;
    const int in_bin = scratch.in_bin;
    if (need == in_bin) {  // all of the bin: nothing is left to decide
      need = kNoLimit;
      break;
    }
    if (range != 0 && in_bin <= kMaxMembers) {
      // Few are left: each is compared with all.
      keys.ForEach([&](int, uint32_t key, int) {
        if (key >= low && key - low <= range)
          scratch.members[atomicAdd(&scratch.num_members, 1)] = key;
      });
      __syncthreads();
      if (thread < in_bin) {
        const uint32_t key = scratch.members[thread];
        int above = 0;
        int equal = 0;
        for (int i = 0; i < in_bin; ++i) {
          above += scratch.members[i] > key ? 1 : 0;
          equal += scratch.members[i] == key ? 1 : 0;
        }
        if (above < need && need <= above + equal) {  // equal keys write equal values
          scratch.key = key;
          scratch.equal = need - above;
        }
      }
      __syncthreads();
      low = scratch.key;
      need = scratch.equal;
      break;
    }
  }
  // Chosen are keys above `low` and the first `need` that equal it; kNoLimit: all from `low` on, of
  // which those between are above it.
  int greater = 0;
  int equal = 0;
  keys.ForEach([&](int, uint32_t key, int) {
    greater += __popc(__ballot_sync(0xffffffffu, key > low));
    equal += __popc(__ballot_sync(0xffffffffu, key == low));
  });
  if (lane == 0) {
    scratch.warp_greater[warp] = greater;
    scratch.warp_equal[warp] = equal;
  }
  __syncthreads();
  int greater_before = SumOfWarpsBefore(scratch.warp_greater, warp, lane);
  int equal_before = SumOfWarpsBefore(scratch.warp_equal, warp, lane);
  const uint32_t lower_lanes = (1u << lane) - 1u;
  if (greater + equal > 0) {
    keys.ForEach([&](int i, uint32_t key, int) {
      const uint32_t greater_lanes = __ballot_sync(0xffffffffu, key > low);
      const uint32_t equal_lanes = __ballot_sync(0xffffffffu, key == low);
      const int my_greater = greater_before + __popc(greater_lanes & lower_lanes);
      const int my_equal = equal_before + __popc(equal_lanes & lower_lanes);
      if (key > low || (key == low && my_equal < need)) emit(my_greater + min(my_equal, need), i);
      greater_before += __popc(greater_lanes);
      equal_before += __popc(equal_lanes);
    });
  }
  __syncthreads();
}

// Chooses the k best of n keys, 1 <= k < n, ties to the lower index, and calls emit(rank, index)
// for each in ascending order of index. key_at(i) is the key of index i.
template <class KeyAt, class Emit>
__device__ void SelectBest(int n, int k, const KeyAt& key_at, const Emit& emit,
                           SelectionScratch& scratch) {
  if (n <= 4 * kThreads) {
    SelectBestOf<4>(n, k, key_at, emit, scratch);
  } else if (n <= 8 * kThreads) {
    SelectBestOf<8>(n, k, key_at, emit, scratch);
  } else if (n <= 16 * kThreads) {
    SelectBestOf<16>(n, k, key_at, emit, scratch);
  } else {
    SelectBestOf<0>(n, k, key_at, emit, scratch);
  }
}

__global__ void __launch_bounds__(kThreads) SelectionKernel(const IndexerProblem problem) {
  __shared__ SelectionScratch scratch;
  int32_t* best_blocks = DynamicShared<int32_t>();  // [topk]
  const int thread = static_cast<int>(threadIdx.x);
  const int row = problem.row_begin + static_cast<int>(blockIdx.x);
  const int64_t wave_row = row - problem.row_begin;
  WaitForPreviousKernel();
  const int n_vis = VisibleEntries(problem, row);

  if (blockIdx.y == 1) {  // candidate blocks
    int32_t* out = problem.candidates_out + row * problem.candidates_out_stride;
    const int wanted = problem.num_candidates_out;
    const int count = CeilDiv(n_vis, problem.candidate_block_size);
    for (int i = thread; i < wanted; i += kThreads) {
      if (count <= wanted || i >= count) out[i] = i < count ? i : -1;
    }
    if (count <= wanted || wanted == 0) return;
    const float* maxima = problem.candidate_maxima + wave_row * problem.candidate_maxima_stride;
    const auto candidate_key = [&](int i) {
      // Infinity is reserved for the newest block, which a tie must not push out.
      return i == count - 1 ? OrderedKey(INFINITY) : OrderedKey(fminf(maxima[i], FLT_MAX));
    };
    const auto emit = [&](int rank, int i) { out[rank] = i; };
    SelectBest(count, wanted, candidate_key, emit, scratch);
    return;
  }

  int32_t* out = problem.selected + row * problem.selected_stride;
  const int32_t* candidates = problem.candidates == nullptr
                                  ? nullptr
                                  : problem.candidates + row * problem.candidates_stride;
  // Positions to choose from.
  int n = n_vis;
  if (candidates != nullptr) {
    int visible = 0;
    for (int i = thread; i < problem.num_candidates; i += kThreads) {
      const int block = candidates[i];
      if (block >= 0) {
        visible +=
            min(max(n_vis - block * problem.candidate_block_size, 0), problem.candidate_block_size);
      }
    }
    n = BlockSum(visible, scratch);
  }
  const auto entry_at = [&](int position) {
    if (candidates == nullptr) return position;
    return candidates[position / problem.candidate_block_size] * problem.candidate_block_size +
           position % problem.candidate_block_size;
  };
  const int topk = problem.topk;
  for (int i = thread; i < topk; i += kThreads) {
    if (n <= topk || i >= n) out[i] = i < n ? entry_at(i) : -1;
  }
  if (n <= topk || topk == 0) return;

  // First level: the best blocks.
  const int score_blocks = CeilDiv(n, kScoreBlock);
  const bool all_blocks = score_blocks <= topk;
  if (!all_blocks) {
    const float* maxima = problem.maxima + wave_row * (problem.score_stride / kScoreBlock);
    const auto emit = [&](int rank, int i) { best_blocks[rank] = i; };
    SelectBest(
        score_blocks, topk, [&](int i) { return OrderedKey(maxima[i]); }, emit, scratch);
  }
  // Second level: the best entries of these blocks. Only the last block can be partial.
  const int blocks = min(score_blocks, topk);
  const auto position_at = [&](int i) {
    const int block = all_blocks ? i / kScoreBlock : best_blocks[i / kScoreBlock];
    return block * kScoreBlock + i % kScoreBlock;
  };
  const int missing =
      position_at(blocks * kScoreBlock - kScoreBlock) / kScoreBlock == score_blocks - 1
          ? score_blocks * kScoreBlock - n
          : 0;
  const int gathered = blocks * kScoreBlock - missing;
  const float* scores = problem.scores + wave_row * problem.score_stride;
  SelectBest(
      gathered, topk,
      [&](int i) {
        const int position = position_at(i);
        return OrderedKey(scores[problem.compact ? position : entry_at(position)]);
      },
      [&](int rank, int i) { out[rank] = entry_at(position_at(i)); }, scratch);
}

}  // namespace

bool SelectionSupported(const IndexerProblem& problem) {
  return problem.topk <= kMaxTopK;
}

Status LaunchSelection(const IndexerProblem& problem, Stream& stream) {
  LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(problem.row_end - problem.row_begin);
  config.grid.y = problem.candidates_out != nullptr ? 2 : 1;
  config.block = kThreads;
  config.overlap_previous = true;
  config.shared_bytes = static_cast<int>(sizeof(int32_t)) * problem.topk;
  return Launch("IndexerSelection", SelectionKernel, config, stream, problem);
}

}  // namespace deepinfer::cuda
