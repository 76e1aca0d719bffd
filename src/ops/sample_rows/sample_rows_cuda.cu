// A row is drawn by a cluster of eight blocks, each with an eighth of the vocabulary in shared
// memory: the row is read from memory once (twice where log-probabilities of the raw logits are
// wanted of an edited row), whatever the number of passes. Within a block a warp owns consecutive
// ids, so that sums over warps and blocks are prefix sums in the order of ids.
//
// All sums are integers (row_draw.h), so their order does not matter. The ends of top-k and of the
// nucleus are found digit by digit with histograms of counts or masses: first of the distance from
// the largest logit, which spreads a language model's logits over the bins, then of the logit's
// bits.
//
// Bound: double-precision exponentials, one or two per token, for many rows; for one row about
// ten cluster barriers of a microsecond.
#include "device.cuh"
#include "ops/sample_rows/sample_rows_impl.h"

namespace deepinfer::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kCluster = 8;
constexpr int kBins = 256;
// Weights of up to 2^42 are counted in three parts with 32-bit additions: a block's share of a bin,
// at most 2^18 tokens, does not overflow them.
constexpr int kParts = 3;
constexpr int kPartBits = 14;
constexpr int kSharedLimit = 220 * 1024;
static_assert(kSharedLimit / 4 < (1 << (32 - kPartBits)));
// Bins of the first level cover what has mass.
constexpr float kBinsPerNat = static_cast<float>(kBins) / 29.0f;

struct SampleRowsParams {
  const float* logits;
  int64_t logits_stride;  // floats
  const RowDraw* draws;
  const RowEdit* edits;
  const int32_t* tokens;
  const uint32_t* masks;
  int32_t* sampled;
  SampledRow* out;
  int32_t vocab;
  int32_t mask_words;  // per mask
  int32_t span;        // tokens of a warp, a multiple of 32
};

// What a block tells the others. Each is written once, before a cluster barrier.
struct Exchange {
  uint64_t raw_best;
  uint64_t best;
  uint64_t soft_sum;
  uint64_t mass_sum;
  uint64_t kept_sum;
  uint64_t found_mass;
  uint32_t bad;
  uint32_t ties;
  uint32_t last_tie;  // 1 + its id
  uint32_t found;     // 1 + its id
  uint32_t found_bits;
  uint32_t larger;
};

struct Shared {
  Exchange exchange;
  uint64_t warp_values[kWarps];
  uint64_t warp_masses[kWarps];
  uint64_t scan[kBins / 32];
  uint64_t bin_before;
  uint64_t bin_weight;
  uint32_t bin;
  uint32_t bins[2][kParts][kBins];
};

// Where a prefix of the tokens' order ends: tokens above `bits` belong to it, and the first `ties`
// of those that equal it.
struct Cut {
  uint32_t bits = 0;
  uint64_t ties = 0;
  bool all_ties = true;
};

struct Sum {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const {
    return a + b;
  }
};
struct Larger {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const {
    return a < b ? b : a;
  }
};

// Larger for the better token: the larger logit, then the lower id.
__device__ inline uint64_t TokenKey(float logit, int32_t id) {
  return (static_cast<uint64_t>(OrderedBits(logit)) << 32) | ~static_cast<uint32_t>(id);
}

template <class Combine>
__device__ inline uint64_t WarpReduce(uint64_t value, Combine combine) {
  for (int offset = 16; offset > 0; offset /= 2)
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

// The same for all threads of the block, which must all get here.
template <class Combine>
__device__ inline uint64_t BlockReduce(uint64_t value, Combine combine, Shared& shared) {
  value = WarpReduce(value, combine);
  __syncthreads();
  if (LaneId() == 0) shared.warp_values[WarpId()] = value;
  __syncthreads();
  value = shared.warp_values[0];
  for (int warp = 1; warp < kWarps; ++warp) value = combine(value, shared.warp_values[warp]);
  return value;
}

template <class Combine>
__device__ inline uint64_t ClusterReduce(const uint64_t* mine, Combine combine) {
  uint64_t value = LoadClusterLong(mine, 0);
  for (uint32_t rank = 1; rank < kCluster; ++rank)
    value = combine(value, LoadClusterLong(mine, rank));
  return value;
}

__device__ inline uint64_t WarpInclusiveSum(uint64_t value) {
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t left = __shfl_up_sync(0xffffffffu, value, offset);
    if (LaneId() >= offset) value += left;
  }
  return value;
}

// The block's part of a row, and how its tokens weigh.
struct RowPart {
  const float* edited;  // of this warp, in shared memory
  int32_t first;        // its first id
  int32_t span;
  float largest;
  double inverse_temperature;

  __device__ double Difference(float logit) const {
    return (static_cast<double>(logit) - static_cast<double>(largest)) * inverse_temperature;
  }
  __device__ uint64_t Mass(float logit) const {
    const double difference = Difference(logit);
    return difference >= kNoMassBelow ? DrawMass(ExpNonPositive(difference)) : 0;
  }
  // Grows with the distance from the largest logit.
  __device__ uint32_t Bin(float logit) const {
    const float at = (largest - logit) * (kBinsPerNat * static_cast<float>(inverse_temperature));
    return at < static_cast<float>(kBins - 1) ? static_cast<uint32_t>(at) : kBins - 1;
  }
};

// Finds the end of the prefix whose tokens have at most `limit` weight before them: masses, or one
// each. `phase` counts histograms: two take turns, and the one that is next is empty.
template <bool kByMass>
__device__ Cut FindCut(const RowPart& part, uint64_t limit, Shared& shared, uint32_t* phase) {
  uint64_t before = 0;
  uint64_t weight_here = 0;
  uint32_t first_bin = 0;
  uint32_t prefix = 0;
  for (int level = 0; level <= 4; ++level) {
    auto& bins = shared.bins[*phase & 1u];
    for (int32_t i = LaneId(); i < part.span; i += 32) {
      const float logit = part.edited[i];
      uint32_t bin = part.Bin(logit);
      if (level > 0) {
        if (bin != first_bin) continue;
        const uint32_t bits = OrderedBits(logit);
        if (level > 1 && (bits >> (40 - 8 * level)) != prefix) continue;
        bin = kBins - 1 - ((bits >> (32 - 8 * level)) & 0xffu);
      }
      if constexpr (kByMass) {
        const uint64_t mass = part.Mass(logit);
        for (int k = 0; k < kParts; ++k) {
          const auto value =
              static_cast<uint32_t>(mass >> (k * kPartBits)) & ((1u << kPartBits) - 1u);
          if (value != 0) atomicAdd(&bins[k][bin], value);
        }
      } else {
        atomicAdd(&bins[0][bin], 1u);
      }
    }
    ClusterSync();
    ++*phase;
    for (int i = static_cast<int>(threadIdx.x); i < kParts * kBins; i += kThreads)
      shared.bins[*phase & 1u][i / kBins][i % kBins] = 0;
    uint64_t weight = 0;
    uint64_t inclusive = 0;
    if (threadIdx.x < kBins) {
      for (uint32_t rank = 0; rank < kCluster; ++rank) {
        for (int k = 0; k < (kByMass ? kParts : 1); ++k) {
          weight += static_cast<uint64_t>(LoadClusterWord(&bins[k][threadIdx.x], rank))
                    << (k * kPartBits);
        }
      }
      inclusive = WarpInclusiveSum(weight);
      if (LaneId() == 31) shared.scan[WarpId()] = inclusive;
    }
    if (threadIdx.x == 0) shared.bin = kBins;
    __syncthreads();
    if (threadIdx.x < kBins) {
      uint64_t behind = before + inclusive;
      for (int warp = 0; warp < WarpId(); ++warp) behind += shared.scan[warp];
      if (behind - weight <= limit && limit < behind) {
        shared.bin = threadIdx.x;
        shared.bin_before = behind - weight;
        shared.bin_weight = weight;
      }
    }
    __syncthreads();
    const uint32_t bin = shared.bin;
    if (bin == kBins) return {};  // at the first level: the limit lies behind all tokens
    before = shared.bin_before;
    weight_here = shared.bin_weight;
    if (level == 0) {
      first_bin = bin;
    } else {
      prefix = (prefix << 8) | (kBins - 1 - bin);
    }
    __syncthreads();
  }
  const uint64_t each = kByMass ? part.Mass(OrderedLogit(prefix)) : 1;
  Cut cut;
  cut.bits = prefix;
  cut.ties = (limit - before) / each + 1;
  cut.all_ties = cut.ties * each >= weight_here;
  return cut;
}

__device__ inline Cut Shorter(const Cut& a, const Cut& b) {
  if (a.bits != b.bits) return a.bits > b.bits ? a : b;
  if (a.all_ties) return b;
  if (b.all_ties) return a;
  return a.ties < b.ties ? a : b;
}

// The id of the tie that is the last to stay.
__device__ uint32_t FindLastTie(const RowPart& part, const Cut& cut, Shared& shared) {
  uint64_t mine = 0;
  for (int32_t i = LaneId(); i < part.span; i += 32)
    mine += OrderedBits(part.edited[i]) == cut.bits ? 1 : 0;
  const uint64_t all = BlockReduce(mine, Sum(), shared);
  if (threadIdx.x == 0) shared.exchange.ties = static_cast<uint32_t>(all);
  ClusterSync();
  uint64_t before = 0;
  for (uint32_t rank = 0; rank < ClusterRank(); ++rank)
    before += LoadClusterWord(&shared.exchange.ties, rank);
  for (int warp = 0; warp < WarpId(); ++warp) before += shared.warp_values[warp];
  if (before < cut.ties && cut.ties <= before + shared.warp_values[WarpId()]) {
    for (int32_t begin = 0; begin < part.span; begin += 32) {
      const bool tie = OrderedBits(part.edited[begin + LaneId()]) == cut.bits;
      const uint32_t ties = __ballot_sync(0xffffffffu, tie);
      const uint32_t to_here = __popc(ties & (0xffffffffu >> (31 - LaneId())));
      if (tie && before + to_here == cut.ties)
        shared.exchange.last_tie = 1 + static_cast<uint32_t>(part.first + begin + LaneId());
      before += __popc(ties);
    }
  }
  ClusterSync();
  uint32_t last = 0;
  for (uint32_t rank = 0; rank < kCluster; ++rank)
    last = max(last, LoadClusterWord(&shared.exchange.last_tie, rank));
  return last - 1;
}

__global__ void __launch_bounds__(kThreads, 2) SampleRowsKernel(const SampleRowsParams p) {
  auto* edited = DynamicShared<float>();
  Shared& shared = *reinterpret_cast<Shared*>(edited + kWarps * p.span);
  const int lane = LaneId();
  const uint32_t rank = ClusterRank();
  const int32_t block_first = static_cast<int32_t>(rank) * kWarps * p.span;
  float* const mine = edited + WarpId() * p.span;
  RowPart part;
  part.edited = mine;
  part.first = block_first + WarpId() * p.span;
  part.span = p.span;
  if (threadIdx.x == 0) shared.exchange = Exchange{};
  for (int i = static_cast<int>(threadIdx.x); i < kParts * kBins; i += kThreads)
    shared.bins[0][i / kBins][i % kBins] = 0;
  WaitForPreviousKernel();
  AllowNextKernel();

  const RowDraw draw = p.draws[blockIdx.x / kCluster];
  const float* const raw = p.logits + draw.logit_row * p.logits_stride;
  const uint32_t* const mask =
      draw.mask >= 0 ? p.masks + static_cast<int64_t>(draw.mask) * p.mask_words : nullptr;
  const bool has_edits = draw.edits_begin < draw.edits_end;
  const bool has_excluded = draw.excluded_begin < draw.excluded_end;
  const bool changed = mask != nullptr || has_edits || has_excluded;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  uint64_t raw_best = 0;
  uint64_t not_bad = 0;  // ~id of the first bad logit
#pragma unroll 8
  for (int32_t i = lane; i < p.span; i += 32) {
    const int32_t id = part.first + i;
    float x = -kInfinity;
    if (id < p.vocab) {
      x = raw[id];
      if (!(x < kInfinity)) {
        not_bad = Larger()(not_bad, ~static_cast<uint32_t>(id));
      } else {
        raw_best = Larger()(raw_best, TokenKey(x, id));
      }
      if (mask != nullptr && ((mask[id / 32] >> (id % 32)) & 1u) == 0) x = -kInfinity;
    }
    mine[i] = x;
  }
  const int32_t block_tokens = kWarps * p.span;
  if (has_edits) {
    __syncthreads();
    for (int32_t e = draw.edits_begin + static_cast<int32_t>(threadIdx.x); e < draw.edits_end;
         e += kThreads) {
      const RowEdit edit = p.edits[e];
      const int32_t at = edit.token - block_first;
      if (at >= 0 && at < block_tokens) edited[at] = EditLogit(edited[at], edit);
    }
  }
  if (has_excluded) {
    __syncthreads();
    for (int32_t e = draw.excluded_begin + static_cast<int32_t>(threadIdx.x); e < draw.excluded_end;
         e += kThreads) {
      const int32_t at = p.tokens[e] - block_first;
      if (at >= 0 && at < block_tokens) edited[at] = -kInfinity;
    }
  }
  uint64_t best = raw_best;
  if (changed) {
    __syncthreads();
    best = 0;
    for (int32_t i = lane; i < p.span; i += 32) {
      if (part.first + i < p.vocab) best = Larger()(best, TokenKey(mine[i], part.first + i));
    }
  }
  raw_best = BlockReduce(raw_best, Larger(), shared);
  best = changed ? BlockReduce(best, Larger(), shared) : raw_best;
  not_bad = BlockReduce(not_bad, Larger(), shared);
  if (threadIdx.x == 0) {
    shared.exchange.raw_best = raw_best;
    shared.exchange.best = best;
    shared.exchange.bad = static_cast<uint32_t>(not_bad);
  }
  ClusterSync();
  raw_best = ClusterReduce(&shared.exchange.raw_best, Larger());
  best = ClusterReduce(&shared.exchange.best, Larger());
  uint32_t bad = 0;
  for (uint32_t r = 0; r < kCluster; ++r) bad = max(bad, LoadClusterWord(&shared.exchange.bad, r));

  SampledRow row;
  part.largest = OrderedLogit(static_cast<uint32_t>(best >> 32));
  part.inverse_temperature = draw.inverse_temperature;
  if (bad != 0) {
    row.status = RowStatus::kBadLogit;
    row.token = static_cast<int32_t>(~bad);
    row.logit = raw[row.token];
  } else if (part.largest == -kInfinity) {
    row.status = RowStatus::kNothingLeft;
  }
  const bool reports_raw = draw.report == RowReport::kRaw;
  const bool raw_apart = reports_raw && changed;  // what is reported on is not in shared memory
  if (row.status == RowStatus::kDrawn) {
    const bool draws = draw.given_token < 0 && draw.greedy == 0;
    const bool soft = reports_raw || draw.report == RowReport::kEdited;
    row.largest = reports_raw ? OrderedLogit(static_cast<uint32_t>(raw_best >> 32)) : part.largest;
    const bool one_exponential = draws && soft && !raw_apart && draw.inverse_temperature == 1.0;

    // Sums over everything.
    uint64_t mass_sum = 0;
    uint64_t soft_sum = 0;
    if (draws || soft) {
      for (int32_t i = lane; i < p.span; i += 32) {
        const float logit = mine[i];
        if (draws) {
          const double difference = part.Difference(logit);
          if (difference >= kNoMassBelow) {
            const double exponential = ExpNonPositive(difference);
            mass_sum += DrawMass(exponential);
            if (one_exponential) soft_sum += SoftmaxMass(exponential);
          }
        }
        if (soft && !one_exponential) {
          const int32_t id = part.first + i;
          const float reported = !raw_apart ? logit : id < p.vocab ? raw[id] : -kInfinity;
          const double difference =
              static_cast<double>(reported) - static_cast<double>(row.largest);
          if (difference >= kNoMassBelow) soft_sum += SoftmaxMass(ExpNonPositive(difference));
        }
      }
      mass_sum = WarpReduce(mass_sum, Sum());
      if (lane == 0) shared.warp_masses[WarpId()] = mass_sum;
      mass_sum = BlockReduce(lane == 0 ? mass_sum : 0, Sum(), shared);
      soft_sum = BlockReduce(soft_sum, Sum(), shared);
      if (threadIdx.x == 0) {
        shared.exchange.mass_sum = mass_sum;
        shared.exchange.soft_sum = soft_sum;
      }
      ClusterSync();
      mass_sum = ClusterReduce(&shared.exchange.mass_sum, Sum());
      soft_sum = ClusterReduce(&shared.exchange.soft_sum, Sum());
    }
    row.sum = soft_sum;

    row.token = draw.given_token >= 0 ? draw.given_token
                                      : static_cast<int32_t>(~static_cast<uint32_t>(best));
    float own_edited = part.largest;
    if (draws) {
      // The prefix of the order that stays.
      uint32_t phase = 0;
      Cut cut;
      const bool uses_top_k = draw.top_k > 0 && draw.top_k < p.vocab;
      if (uses_top_k)
        cut = FindCut<false>(part, static_cast<uint64_t>(draw.top_k - 1), shared, &phase);
      if (draw.top_p < 1.0)
        cut = Shorter(cut, FindCut<true>(part, NucleusLimit(draw.top_p, mass_sum), shared, &phase));
      const uint32_t last_tie = cut.all_ties ? 0xffffffffu : FindLastTie(part, cut, shared);
      const bool filtered = uses_top_k || draw.top_p < 1.0 || draw.min_mass > 1;
      const auto kept_mass = [&](int32_t i) -> uint64_t {
        const uint32_t bits = OrderedBits(mine[i]);
        if (bits < cut.bits) return 0;
        if (bits == cut.bits && static_cast<uint32_t>(part.first + i) > last_tie) return 0;
        const uint64_t mass = part.Mass(mine[i]);
        return mass >= draw.min_mass ? mass : 0;
      };
      if (filtered) {
        uint64_t kept = 0;
        for (int32_t i = lane; i < p.span; i += 32) kept += kept_mass(i);
        kept = WarpReduce(kept, Sum());
        __syncthreads();
        if (lane == 0) shared.warp_masses[WarpId()] = kept;
      }
      __syncthreads();
      // Whose interval the random number hits.
      uint64_t block_sum = 0;
      uint64_t warp_before = 0;
      for (int warp = 0; warp < kWarps; ++warp) {
        if (warp < WarpId()) warp_before += shared.warp_masses[warp];
        block_sum += shared.warp_masses[warp];
      }
      if (threadIdx.x == 0) shared.exchange.kept_sum = block_sum;
      ClusterSync();
      uint64_t total = 0;
      uint64_t before = warp_before;
      for (uint32_t r = 0; r < kCluster; ++r) {
        const uint64_t sum = LoadClusterLong(&shared.exchange.kept_sum, r);
        if (r < rank) before += sum;
        total += sum;
      }
      const uint64_t target = __umul64hi(draw.random, total);
      if (before <= target && target < before + shared.warp_masses[WarpId()]) {
        for (int32_t begin = 0; begin < p.span; begin += 32) {
          const uint64_t mass = kept_mass(begin + lane);
          const uint64_t behind = before + WarpInclusiveSum(mass);
          if (behind - mass <= target && target < behind) {
            shared.exchange.found = 1 + static_cast<uint32_t>(part.first + begin + lane);
            shared.exchange.found_mass = mass;
            shared.exchange.found_bits = OrderedBits(mine[begin + lane]);
          }
          before = __shfl_sync(0xffffffffu, behind, 31);
          if (before > target) break;
        }
      }
      ClusterSync();
      for (uint32_t r = 0; r < kCluster; ++r) {
        const uint32_t found = LoadClusterWord(&shared.exchange.found, r);
        if (found == 0) continue;
        row.token = static_cast<int32_t>(found - 1);
        own_edited = OrderedLogit(LoadClusterWord(&shared.exchange.found_bits, r));
        if (draw.report == RowReport::kDrawn) {
          row.mass = LoadClusterLong(&shared.exchange.found_mass, r);
          row.sum = total;
        }
      }
    }

    bool ends = false;
    for (int32_t e = draw.ends_begin + static_cast<int32_t>(threadIdx.x); e < draw.ends_end;
         e += kThreads)
      ends = ends || p.tokens[e] == row.token;
    row.ends = __syncthreads_or(ends ? 1 : 0) != 0 ? 1 : 0;

    if (draw.report == RowReport::kNothing) {
      row.largest = 0.0f;
    } else {
      row.logit = reports_raw || draw.given_token >= 0 ? raw[row.token] : own_edited;
      uint64_t larger = 0;
      for (int32_t i = lane; i < p.span; i += 32) {
        const int32_t id = part.first + i;
        const float reported = !raw_apart ? mine[i] : id < p.vocab ? raw[id] : -kInfinity;
        larger += reported > row.logit ? 1 : 0;
      }
      larger = BlockReduce(larger, Sum(), shared);
      if (threadIdx.x == 0) shared.exchange.larger = static_cast<uint32_t>(larger);
      ClusterSync();
      uint32_t all = 0;
      for (uint32_t r = 0; r < kCluster; ++r) all += LoadClusterWord(&shared.exchange.larger, r);
      row.rank = static_cast<int32_t>(1 + all);
    }
  }
  if (rank == 0 && threadIdx.x == 0) {
    p.out[blockIdx.x / kCluster] = row;
    if (draw.slot >= 0) p.sampled[draw.slot] = row.status == RowStatus::kDrawn ? row.token : 0;
  }
  ClusterSync();  // nobody leaves while others read its shared memory
}

constexpr int kPlaceThreads = 128;

__global__ void PlaceSampledTokensKernel(const int32_t* slots, const int32_t* sampled,
                                         const int32_t* token_map, int32_t* token_ids,
                                         int32_t* lookback, int64_t lookback_stride, int64_t rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kPlaceThreads + threadIdx.x;
  WaitForPreviousKernel();
  AllowNextKernel();
  if (row >= rows) return;
  const int32_t slot = slots[row];
  if (slot < 0) return;
  const int32_t token = sampled[slot];
  token_ids[row] = token;
  lookback[row * lookback_stride] = token_map[token];
}

}  // namespace

Status SampleRows(const SampleRowsArgs& args, Stream& stream) {
  const int64_t vocab = args.logits.dim(1);
  const int64_t warps = int64_t{kCluster} * kWarps;
  const int64_t span = (vocab + warps * 32 - 1) / (warps * 32) * 32;
  const int64_t shared_bytes = kWarps * span * 4 + static_cast<int64_t>(sizeof(Shared));
  if (shared_bytes > kSharedLimit) {
    return Fail(Code::kUnsupported,
                fmt::format("SampleRows: a row of {} logits does not fit the shared memory of {} "
                            "blocks.",
                            vocab, kCluster),
                "logits");
  }
  const SampleRowsParams params{.logits = args.logits.Row<float>(0),
                                .logits_stride = args.logits.row_stride(),
                                .draws = static_cast<const RowDraw*>(args.draws.data()),
                                .edits = static_cast<const RowEdit*>(args.edits.data()),
                                .tokens = static_cast<const int32_t*>(args.tokens.data()),
                                .masks = static_cast<const uint32_t*>(args.masks.data()),
                                .sampled = static_cast<int32_t*>(args.sampled.data()),
                                .out = static_cast<SampledRow*>(args.out.data()),
                                .vocab = static_cast<int32_t>(vocab),
                                .mask_words = static_cast<int32_t>(args.masks.row_stride()),
                                .span = static_cast<int32_t>(span)};
  const LaunchConfig config{.grid = {static_cast<uint32_t>(args.draws.rows() * kCluster)},
                            .block = kThreads,
                            .shared_bytes = static_cast<int>(shared_bytes),
                            .cluster = kCluster,
                            .overlap_previous = true};
  return Launch("SampleRows", SampleRowsKernel, config, stream, params);
}

Status PlaceSampledTokens(const PlaceSampledTokensArgs& args, Stream& stream) {
  const int64_t rows = args.token_ids.rows();
  const LaunchConfig config{
      .grid = {static_cast<uint32_t>((rows + kPlaceThreads - 1) / kPlaceThreads)},
      .block = kPlaceThreads,
      .overlap_previous = true};
  return Launch("PlaceSampledTokens", PlaceSampledTokensKernel, config, stream,
                args.slots.Row<int32_t>(0), args.sampled.Row<int32_t>(0),
                args.token_map.Row<int32_t>(0), args.token_ids.Row<int32_t>(0),
                args.lookback.Row<int32_t>(0), args.lookback.row_stride(), rows);
}

}  // namespace deepinfer::cuda
