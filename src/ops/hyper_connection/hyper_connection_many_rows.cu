// The boundary for more rows than clusters take (hyper_connection_cuda.cu says what it computes and
// how a row is cut). Bound: bytes, 102.4 KB per row.
//
// A block keeps its slice of fn, as in the cluster's kernel. Two warps take tiles of 8 rows of this
// slice one after another, each of them half of its units; nothing is shared with the block's other
// warps. A lane's loads of the next unit are under way while it works on one, and the next tile's
// rows are announced to the L2 as pieces of 640 bytes, so that the memory sees more than the 64
// bytes of a row that a unit has. The rows are the narrow operand of the matrix instruction.
//
// Instructions: about 600 per warp and unit, so 3,000 per scheduler and 16 rows of a slice, where
// the memory takes 5,400 clocks; 3,200 clocks of shared memory go into fn.
//
// Norms and coefficients need all blocks of a row. Each block leaves its sums in scratch memory and
// the collapsed rows in place of y. kFused: the blocks run at once (a cooperative launch), and a
// warp that has left its sums normalises the tile before, whose other blocks are ready by then: the
// collapsed rows go through the L2. Otherwise a second launch does this.
#include "ops/hyper_connection/hyper_connection_cuda.cuh"

#include "base/ceil_div.h"
#include "tensor/cuda_device.h"

namespace deepinfer::cuda::hc {
namespace {

constexpr int kRows = 8;  // of a tile
constexpr int kPairs = 8;
constexpr int kThreads = 64 * kPairs;
// Tiles of 8 outputs of one part of fn, [output tile][part], in pairs: the left operand of the
// matrix instruction. The last has no second.
constexpr int kFnTiles = kParts * kOutputTiles;
constexpr int kFnPairs = (kFnTiles + 1) / 2;
constexpr int kStreamFragments = kFnPairs * 2 * 32;
constexpr int kUnitFragments = kStreams * kStreamFragments;
constexpr int kPartialSums = kOutputs + 1;    // the products, squares of the streams
constexpr int kSumStride = kPartialSums + 2;  // odd: rows in different banks
constexpr int kFinishTiles = 4;  // whose coefficients a block of the second launch computes
constexpr int kMaxFinishThreads = kMaxRanks * kMaxUnitsPerBlock * kUnitChannels / kLaneChannels;

struct ManyRowsParams {
  Params p;
  int tiles;
  float* sums;     // [tile][rank][kRows][kPartialSums]
  float* squares;  // [tile][kRows][rank]: of the collapsed rows
  int* arrivals;   // [tile]: blocks that have left their sums; kFused only
};

// What a pair of warps has in shared memory.
struct PairShared {
  float coefficients[2][kRows][kCoefficientStride];
  float sums[kRows][kSumStride];  // of the second half
};

int SharedBytes(const Partition& partition) {
  return partition.units_per_block * kUnitFragments * 16 +
         kPairs * static_cast<int>(sizeof(PairShared));
}

// The coefficients of a tile's rows, by a warp, from the sums of all blocks.
__device__ inline void WriteTileCoefficients(const ManyRowsParams& params, int tile,
                                             float (*shared)[kCoefficientStride]) {
  const Params& p = params.p;
  const int ranks = p.partition.ranks;
  const float* source = params.sums + static_cast<int64_t>(tile) * ranks * (kRows * kPartialSums);
  for (int index = LaneId(); index < kRows * kPartialSums; index += 32) {
    float sum = 0.0f;
#pragma unroll 16
    for (int r = 0; r < ranks; ++r) sum += __ldcg(source + r * (kRows * kPartialSums) + index);
    shared[index / kPartialSums][index % kPartialSums] = sum;
  }
  __syncwarp();
  const int row = tile * kRows + LaneId();
  if (LaneId() < kRows && row < p.rows) WriteCoefficientsOfThread(p, row, shared[LaneId()]);
  __syncwarp();
}

// What a row of collapsed values is multiplied by.
__device__ inline float TileNormScale(const ManyRowsParams& params, int tile, int row_of_tile) {
  const int ranks = params.p.partition.ranks;
  const float* squares =
      params.squares + (static_cast<int64_t>(tile) * kRows + row_of_tile) * ranks;
  float sum = 0.0f;
#pragma unroll 16
  for (int r = 0; r < ranks; ++r) sum += __ldcg(squares + r);
  return NormScale(params.p, sum);
}

// One of the warps: half of a block's units.
template <bool kExpand, bool kFused, bool kPrefetch>
class HalfSlice {
 public:
  __device__ explicit HalfSlice(const ManyRowsParams& params)
      : params_(params),
        p_(params.p),
        lane_(LaneId()),
        group_(lane_ / 4),
        quad_(lane_ % 4),
        pair_(WarpId() / 2),
        half_(WarpId() % 2),
        rank_(static_cast<int>(blockIdx.x) & (p_.partition.ranks - 1)) {
    const int units_per_block = p_.partition.units_per_block;
    const int half_units = p_.partition.HalfUnits();
    const int units = min(units_per_block, p_.partition.units - rank_ * units_per_block);
    begin_ = half_ == 0 ? 0 : half_units;
    end_ = half_ == 0 ? min(half_units, units) : units;
    fragments_ = DynamicShared<uint4>();
    shared_ = reinterpret_cast<PairShared*>(fragments_ + units_per_block * kUnitFragments) + pair_;
    channel_ = rank_ * units_per_block * kUnitChannels + quad_ * kLaneChannels;
  }

  // By all warps of the block: fn in three parts.
  __device__ void PrepareWeights() const {
    const int units_per_block = p_.partition.units_per_block;
    const int units = min(units_per_block, p_.partition.units - rank_ * units_per_block);
    for (int i = WarpId(); i < units * kStreams; i += kThreads / 32) {
      const int unit = i / kStreams;
      const int s = i % kStreams;
      uint4* const to = fragments_ + unit * kUnitFragments + s * kStreamFragments + lane_;
      uint4 top = {};
      PrepareFragments(p_, s, channel_ + unit * kUnitChannels, lane_,
                       [&](int part, int j, const uint4& words) {
                         const int tile = j * kParts + part;
                         if (tile % 2 == 0) top = words;
                         if (tile % 2 == 0 && tile + 1 < kFnTiles) return;
                         const uint4 bottom = tile % 2 == 0 ? uint4{} : words;
                         to[tile / 2 * 64] = {top.x, bottom.x, top.y, bottom.y};
                         to[tile / 2 * 64 + 32] = {top.z, bottom.z, top.w, bottom.w};
                       });
    }
  }

  __device__ void Run() const {
    const int ranks_log2 = p_.partition.ranks_log2;
    const int groups = static_cast<int>(gridDim.x) >> ranks_log2;
    const int step = kPairs * groups;
    const int first = pair_ * groups + (static_cast<int>(blockIdx.x) >> ranks_log2);
    if (first >= params_.tiles) return;  // both warps of the pair
    LaneRow next = {};
    if (begin_ < end_) Load(first, begin_, next);
    CopyCoefficients(first, 0);
    CommitCopies();
    int buffer = 0;
    int previous = -1;
    for (int tile = first; tile < params_.tiles; tile += step, buffer ^= 1) {
      WaitCopies<0>();
      PairSync();  // the coefficients of this tile are here, the other buffer is free
      const bool more = tile + step < params_.tiles;
      if (more) CopyCoefficients(tile + step, buffer ^ 1);
      CommitCopies();
      if (kPrefetch && more) PrefetchTile(tile + step);
      RunTile(tile, more ? tile + step : -1, buffer, next);
      if constexpr (kFused) {
        // The coefficients of this tile have been read.
        if (previous >= 0) Finish(previous, buffer);
        previous = tile;
      }
    }
    if constexpr (kFused) Finish(previous, buffer);
  }

 private:
  __device__ void PairSync() const {
    NamedBarrierSync(1 + pair_, 64);
  }

  __device__ void Load(int tile, int unit, LaneRow& out) const {
    const int64_t row = tile * kRows + group_;
    if (row >= p_.rows) {
      out = {};
      return;
    }
    const int channel = channel_ + unit * kUnitChannels;
    const uint16_t* streams = p_.streams + row * p_.streams_stride + channel;
    if constexpr (kExpand)
      out.x = *reinterpret_cast<const uint4*>(p_.x + row * p_.x_stride + channel);
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      out.streams[s] =
          *reinterpret_cast<const uint4*>(streams + static_cast<int64_t>(s) * p_.hidden);
    }
  }

  // To the L2: the block's channels of a tile's rows, a row of a stream or of x per lane of the
  // pair.
  __device__ void PrefetchTile(int tile) const {
    const int index = lane_ + 32 * half_;
    const int source = index / kRows;
    const int64_t row = tile * kRows + index % kRows;
    if (source >= kStreams + (kExpand ? 1 : 0) || row >= p_.rows) return;
    const int first = rank_ * p_.partition.units_per_block * kUnitChannels;
    const int channels = min(p_.partition.units_per_block * kUnitChannels, p_.hidden - first);
    const uint16_t* from = source < kStreams ? p_.streams + row * p_.streams_stride +
                                                   static_cast<int64_t>(source) * p_.hidden
                                             : p_.x + row * p_.x_stride;
    PrefetchL2(from + first, static_cast<uint32_t>(2 * channels));
  }

  // By the pair: post, comb and pre of a tile's rows.
  __device__ void CopyCoefficients(int tile, int buffer) const {
    const int index = lane_ + 32 * half_;
    if (index >= kRows * kCoefficientPieces) return;
    const int row_of_tile = index / kCoefficientPieces;
    const int piece = index % kCoefficientPieces;
    if (!kExpand && piece != kCoefficientPieces - 1) return;
    const int64_t row = tile * kRows + row_of_tile;
    const bool valid = row < p_.rows;
    const int64_t from_row = valid ? row : 0;
    const float* const source = piece == kCoefficientPieces - 1 ? p_.pre + from_row * p_.pre_stride
                                : piece == 0
                                    ? p_.post + from_row * p_.post_stride
                                    : p_.comb + from_row * p_.comb_stride + 4 * (piece - 1);
    CopyAsync16OrZero(shared_->coefficients[buffer][row_of_tile] + 4 * piece, source, valid);
  }

  // Everything up to the tile's sums. `next` has the first unit's values, and gets those of tile
  // `next_tile`.
  __device__ void RunTile(int tile, int next_tile, int buffer, LaneRow& next) const {
    const int64_t row = tile * kRows + group_;
    const auto* c = reinterpret_cast<const float4*>(shared_->coefficients[buffer][group_]);
    ExpandCoefficients expand;
    float pre[kStreams];
    if constexpr (kExpand) {
      Unpack4(expand.post, c[0]);
#pragma unroll
      for (int i = 0; i < kStreams; ++i) Unpack4(expand.comb[i], c[1 + i]);
    }
    Unpack4(pre, c[kCoefficientPieces - 1]);

    float totals[kOutputTiles][2] = {};  // output 8 j + group_ of rows 2 quad_ + i
    LaneSquares total_squares;
    for (int unit = begin_; unit < end_; ++unit) {
      LaneRow current = next;
      if (unit + 1 < end_) {
        Load(tile, unit + 1, next);
      } else if (next_tile >= 0) {
        Load(next_tile, begin_, next);
      }
      uint4 collapsed;
      LaneSquares squares;
      ExpandAndCollapse<kExpand, true, true>(expand, pre, current, collapsed, squares);
      if (row < p_.rows) {
        const int channel = channel_ + unit * kUnitChannels;
        if constexpr (kExpand) StoreStreams(p_, row, channel, current);
        StoreVector(p_.y + row * p_.y_stride + channel, collapsed);
      }
      total_squares.streams += QuadSum(squares.streams);
      total_squares.collapsed += QuadSum(squares.collapsed);
      Multiply(fragments_ + unit * kUnitFragments + lane_, current, totals);
    }
    LeaveSums(tile, totals, total_squares);
  }

  // Adds the unit's products.
  __device__ void Multiply(const uint4* fragments, const LaneRow& row,
                           float (&totals)[kOutputTiles][2]) const {
    float sums[kFnPairs][4] = {};
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      const uint4& b = row.streams[s];
      const uint32_t first[2] = {b.x, b.y};
      const uint32_t second[2] = {b.z, b.w};
#pragma unroll
      for (int pair = 0; pair < kFnPairs; ++pair) {
        const uint4 f = fragments[s * kStreamFragments + pair * 64];
        const uint4 g = fragments[s * kStreamFragments + pair * 64 + 32];
        const uint32_t first_weights[4] = {f.x, f.y, f.z, f.w};
        const uint32_t second_weights[4] = {g.x, g.y, g.z, g.w};
        MmaBf16(sums[pair], first_weights, first);
        MmaBf16(sums[pair], second_weights, second);
      }
    }
#pragma unroll
    for (int j = 0; j < kOutputTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto sum = [&](int part) {
          const int tile = j * kParts + part;
          return sums[tile / 2][2 * (tile % 2) + i];
        };
        totals[j][i] += (sum(2) + sum(1)) + sum(0);
      }
    }
  }

  // The second half's sums go to the first, which adds and leaves them.
  __device__ void LeaveSums(int tile, const float (&totals)[kOutputTiles][2],
                            const LaneSquares& squares) const {
    if (half_ == 1) {
#pragma unroll
      for (int j = 0; j < kOutputTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) shared_->sums[2 * quad_ + i][8 * j + group_] = totals[j][i];
      }
      if (quad_ == 0) {
        shared_->sums[group_][kStreamSquares] = squares.streams;
        shared_->sums[group_][kCollapsedSquares] = squares.collapsed;
      }
    }
    PairSync();
    if (half_ == 1) return;
    const int ranks = p_.partition.ranks;
    float* const sums =
        params_.sums + (static_cast<int64_t>(tile) * ranks + rank_) * (kRows * kPartialSums);
#pragma unroll
    for (int j = 0; j < kOutputTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums[(2 * quad_ + i) * kPartialSums + 8 * j + group_] =
            totals[j][i] + shared_->sums[2 * quad_ + i][8 * j + group_];
      }
    }
    if (quad_ == 0) {
      sums[group_ * kPartialSums + kStreamSquares] =
          squares.streams + shared_->sums[group_][kStreamSquares];
      params_.squares[(static_cast<int64_t>(tile) * kRows + group_) * ranks + rank_] =
          squares.collapsed + shared_->sums[group_][kCollapsedSquares];
    }
    if constexpr (kFused) {
      __syncwarp();
      if (lane_ == 0) {
        __threadfence();
        atomicAdd(params_.arrivals + tile, 1);
      }
    }
  }

  // Norms of the half's units of a tile, when all blocks have left their sums; in one of the blocks
  // also the coefficients, for which it takes the memory of a buffer.
  __device__ void Finish(int tile, int buffer) const {
    if (lane_ == 0) {
      const volatile int* arrivals = params_.arrivals + tile;
      while (*arrivals < p_.partition.ranks) __nanosleep(100);
      __threadfence();
    }
    __syncwarp();
    const int64_t row = tile * kRows + group_;
    const bool valid = row < p_.rows;
    uint4 collapsed[kMaxUnitsPerBlock / 2] = {};
#pragma unroll
    for (int i = 0; i < kMaxUnitsPerBlock / 2; ++i) {
      const int channel = channel_ + (begin_ + i) * kUnitChannels;
      if (valid && begin_ + i < end_)
        collapsed[i] = *reinterpret_cast<const uint4*>(p_.y + row * p_.y_stride + channel);
    }
    const float r = TileNormScale(params_, tile, group_);
#pragma unroll
    for (int i = 0; i < kMaxUnitsPerBlock / 2; ++i) {
      if (begin_ + i >= end_) continue;
      const int channel = channel_ + (begin_ + i) * kUnitChannels;
      NormaliseChannels(p_, row, channel, valid, r, collapsed[i],
                        __ldg(reinterpret_cast<const uint4*>(p_.weight + channel)));
    }
    if (half_ == 1 && (tile & (p_.partition.ranks - 1)) == rank_)
      WriteTileCoefficients(params_, tile, shared_->coefficients[buffer]);
  }

  const ManyRowsParams& params_;
  const Params& p_;
  const int lane_;
  const int group_;  // row of the tile
  const int quad_;   // which 8 channels of a unit
  const int pair_;
  const int half_;
  const int rank_;
  int begin_;  // units of the block
  int end_;
  uint4* fragments_;    // [unit][stream][part][output tile][lane]
  PairShared* shared_;  // of the pair
  int channel_;         // of the lane in the block's first unit
};

template <bool kExpand, bool kFused, bool kPrefetch>
__global__ void __launch_bounds__(kThreads, 1)
    SliceKernel(const __grid_constant__ ManyRowsParams params) {
  AllowNextKernel();
  const HalfSlice<kExpand, kFused, kPrefetch> half(params);
  half.PrepareWeights();
  __syncthreads();
  WaitForPreviousKernel();
  half.Run();
}

// The second launch: first the blocks for coefficients, which take longest, then a block per row
// for the norm, a thread per eight channels.
__global__ void __launch_bounds__(kMaxFinishThreads, 2)
    FinishKernel(const __grid_constant__ ManyRowsParams params) {
  AllowNextKernel();
  const Params& p = params.p;
  const int thread = static_cast<int>(threadIdx.x);
  const int mix_blocks = (params.tiles + kFinishTiles - 1) / kFinishTiles;
  const int block = static_cast<int>(blockIdx.x);
  if (block < mix_blocks) {
    __shared__ float sums[kFinishTiles][kRows][kCoefficientStride];
    WaitForPreviousKernel();
    const int tile = block * kFinishTiles + WarpId();
    if (WarpId() < kFinishTiles && tile < params.tiles)
      WriteTileCoefficients(params, tile, sums[WarpId()]);
    return;
  }
  const int row = block - mix_blocks;
  const int channel = thread * kLaneChannels;
  const bool valid = channel < p.hidden;  // four lanes of a group of 32 agree
  uint4 weight = {};
  uint4 collapsed = {};
  if (valid) weight = __ldg(reinterpret_cast<const uint4*>(p.weight + channel));
  WaitForPreviousKernel();
  if (valid) collapsed = *reinterpret_cast<const uint4*>(p.y + row * p.y_stride + channel);
  NormaliseChannels(p, row, channel, valid, TileNormScale(params, row / kRows, row % kRows),
                    collapsed, weight);
}

template <bool kExpand, bool kFused, bool kPrefetch>
Status LaunchVariant(const char* name, const Params& p, Stream& stream) {
  const Partition& partition = p.partition;
  ManyRowsParams params = {};
  params.p = p;
  params.tiles = static_cast<int>(CeilDiv(p.rows, kRows));
  ScratchScope scratch(stream);
  params.sums =
      scratch.Allocate<float>(int64_t{params.tiles} * partition.ranks * kRows * kPartialSums);
  params.squares = scratch.Allocate<float>(int64_t{params.tiles} * partition.ranks * kRows);
  LaunchConfig slices;
  slices.block = kThreads;
  slices.shared_bytes = SharedBytes(partition);
  const int groups = std::clamp(stream.sm_count() / partition.ranks, 1, params.tiles);
  slices.grid.x = static_cast<uint32_t>(groups * partition.ranks);
  if constexpr (kFused) {
    params.arrivals = scratch.Allocate<int>(params.tiles);
    DI_RETURN_IF_ERROR(
        cuda::FillBytes(params.arrivals, 0, int64_t{4} * params.tiles, stream.cuda_stream()));
    slices.cooperative = true;
    return Launch(name, &SliceKernel<kExpand, true, kPrefetch>, slices, stream, params);
  } else {
    slices.overlap_previous = true;
    DI_RETURN_IF_ERROR(
        Launch(name, &SliceKernel<kExpand, false, kPrefetch>, slices, stream, params));
    LaunchConfig finish;
    finish.block = std::max(32 * kFinishTiles, (p.hidden / kLaneChannels + 31) / 32 * 32);
    finish.grid.x = static_cast<uint32_t>(p.rows + CeilDiv(params.tiles, kFinishTiles));
    finish.overlap_previous = true;
    return Launch(name, &FinishKernel, finish, stream, params);
  }
}

}  // namespace

template <bool kExpand>
Status LaunchManyRows(const char* name, const Params& params, Stream& stream) {
  switch (many_rows_variant) {
    case 0:
      return LaunchVariant<kExpand, false, false>(name, params, stream);
    case 1:
      return LaunchVariant<kExpand, false, true>(name, params, stream);
    case 2:
      return LaunchVariant<kExpand, true, false>(name, params, stream);
    default:
      return LaunchVariant<kExpand, true, true>(name, params, stream);
  }
}
template Status LaunchManyRows<false>(const char*, const Params&, Stream&);
template Status LaunchManyRows<true>(const char*, const Params&, Stream&);

}  // namespace deepinfer::cuda::hc
