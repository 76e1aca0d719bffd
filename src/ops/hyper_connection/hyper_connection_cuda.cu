// Hyper-connections on a GPU. Everything between two sub-layers is one operation: the expand of the
// previous output, the mix of the new streams, the collapse with its RMSNorm and Q8 copy; one
// launch, or two with many rows. hyper_connection_cuda.cuh has the arithmetic of a lane and of a
// row.
//
// Cost per row (hidden 5120): 102.4 KB of memory traffic (x and 4 streams in, 4 streams and two
// outputs out), 0.98 MFLOP of products with fn, which is 1.97 MB of fp32. Many rows are bound by
// memory, few rows by latency.
//
// The products. A bf16 stream times an fp32 weight is computed exactly by tensor cores: the weight
// is the sum of three bf16 numbers (its 24 bits of mantissa cut in three), each product is exact,
// and the three sums are kept apart and added at the end, smallest first.
//
// The partition. The channels are cut into units of 32 (of all four streams: 128 products per
// output). A warp owns a unit, a block `units_per_block` of them, a cluster of up to 16 blocks the
// row. A unit's sums are 8 steps of the matrix instruction; units are added in ascending order
// inside a block, then blocks in ascending order. That depends on the width alone, so a row has the
// same bits in any batch. Sums of squares go the same way.
//
// The pipeline. A cluster takes tiles of 16 rows. A lane loads 16 bytes of each stream: eight
// channels of one row. Which channel is which k of the matrix instruction is free as long as
// streams and fn agree, so these registers, updated in place by the expand, are the operand; fn
// waits in shared memory in the same order, split once per block (184 KB for 30,720 weights). Its
// loads and the split come before the wait for the previous kernel. The norm of the collapsed row
// and the 24 sums need all blocks: partial sums are stored to the blocks that want them (sums of
// row r to block r, squares to all) around a cluster barrier. An arrival there waits for all stores
// of the thread (MEMBAR.ALL.GPU), so the new streams are stored after it. One extra warp per block
// fetches the rows' coefficients and turns sums into new ones (39 dependent normalisations).
//
// That holds up to kClusterRows rows. More take two launches of independent blocks: with many rows
// a cluster's kernel with the next tile's loads under way reached 25 % of the copy bandwidth on an
// H200 (16 blocks, each with a multiprocessor for itself, must fit one of the GPU's groups, and
// every arrival drains loads and stores). The first launch does what a cluster does up to the
// barrier: a block keeps its slice of fn and walks the tiles of a part of the rows, with the next
// tile's loads under way, and stores the collapsed rows in place of y and its partial sums, [block
// of the row][row][26], in scratch memory. The second adds the partial sums in the cluster's order,
// normalises y in place, and computes coefficients of 32 rows per warp, a row per lane. That moves
// 20 KB more per row, most of it in the second-level cache, and 3 KB of sums. Independent pairs of
// warps, each with tiles of 8 rows and all units of the block in turn, took 40 % longer (333
// instead of 240 us for 4,096 rows on an H200); normalising in the same launch, which must be
// cooperative, longer still.
//
// Up to 8 rows are half a tile of one cluster. Their kernel has no second half of rows in its
// registers and keeps two of the three parts of fn there: 184 KB of shared memory take 1,440 cycles
// to read. The rows are the narrow operand of the matrix instruction, which gives the same bits in
// 5 instead of 9 instructions per step.
#include "ops/hyper_connection/hyper_connection_cuda.cuh"

namespace deepinfer::cuda {
namespace hc {
namespace {

constexpr int kTileRows = 16;
constexpr int kFewRows = 8;
constexpr int kClusterRows = 64;  // more rows take two launches without clusters
constexpr int kMaxThreads = 32 * (kMaxUnitsPerBlock + 1);
constexpr int kFinishRows = 32;  // whose coefficients a block of the second launch computes
constexpr int kMaxFinishThreads = kMaxRanks * kMaxUnitsPerBlock * kUnitChannels / kLaneChannels;

__host__ __device__ inline int Tiles(const Params& params) {
  return (params.rows + kTileRows - 1) / kTileRows;
}

// The parts of a block's shared memory.
struct Shared {
  uint4* fragments;     // [units_per_block][stream][part that is kept here][output tile][lane]
  float* partial;       // [2][units_per_block][kTileRows][kRowSums]
  float* sums;          // [2][rows of this block][rank][kOutputs + 1]
  float* squares;       // [2][kTileRows][rank]
  float* coefficients;  // [2][kTileRows][kCoefficientStride]
};

// Which kernel of the family: what it does, and whether it is the one for few rows.
struct Variant {
  bool expand;
  bool mix;
  bool collapse;
  bool few;  // at most kFewRows rows: one tile, half of it
};

// Parts of the weights in shared memory. With few rows registers have room for the other two.
constexpr int SharedParts(Variant variant) {
  return !variant.mix ? 0 : variant.few ? 1 : kParts;
}

constexpr int UnitFragments(Variant variant) {
  return kStreams * SharedParts(variant) * kOutputTiles * 32;
}

__host__ __device__ inline int RowsPerRank(const Partition& partition) {
  return kTileRows >> partition.ranks_log2;
}

template <Variant kVariant>
int SharedBytes(const Partition& partition) {
  const int floats = 2 * (partition.units_per_block * kTileRows * kRowSums +
                          RowsPerRank(partition) * partition.ranks * (kOutputs + 1) +
                          kTileRows * partition.ranks + kTileRows * kCoefficientStride);
  return partition.units_per_block * UnitFragments(kVariant) * 16 + 4 * floats;
}

template <Variant kVariant>
__device__ inline Shared SharedLayout(const Partition& partition) {
  Shared shared;
  shared.fragments = DynamicShared<uint4>();
  shared.coefficients = reinterpret_cast<float*>(shared.fragments + partition.units_per_block *
                                                                        UnitFragments(kVariant));
  shared.squares = shared.coefficients + 2 * kTileRows * kCoefficientStride;
  shared.sums = shared.squares + 2 * kTileRows * partition.ranks;
  shared.partial = shared.sums + 2 * RowsPerRank(partition) * partition.ranks * (kOutputs + 1);
  return shared;
}

// ---- The kernel
// ------------------------------------------------------------------------------------

template <Variant kVariant>
class Block {
 public:
  static constexpr bool kExpand = kVariant.expand;
  static constexpr bool kMix = kVariant.mix;
  static constexpr bool kCollapse = kVariant.collapse;
  static constexpr bool kFew = kVariant.few;
  static constexpr int kHalves = kFew ? 1 : 2;  // rows g and g + 8 of a tile
  static constexpr int kHeldParts = kFew ? kParts - SharedParts(kVariant) : 0;
  // Parts of the weights in registers.
  using Held = uint4[kStreams][kFew ? kHeldParts : 1][kOutputTiles];

  __device__ Block(const Params& params, uint32_t rank)
      : p_(params),
        shared_(SharedLayout<kVariant>(params.partition)),
        rank_(static_cast<int>(rank)),
        warp_(WarpId()),
        lane_(LaneId()),
        group_(lane_ / 4),
        quad_(lane_ % 4),
        unit_(rank_ * params.partition.units_per_block + warp_),
        channel_(unit_ * kUnitChannels + quad_ * kLaneChannels) {}

  __device__ void Run() {
    ClusterArrive();  // the other blocks' shared memory may be written after the first wait
    const bool is_unit_warp = warp_ < p_.partition.units_per_block;
    const bool has_unit = is_unit_warp && unit_ < p_.partition.units;
    uint4 weight = {};
    float base = 0.0f;
    float scale = 0.0f;
    Held held;
    if (has_unit) {
      if constexpr (kMix) PrepareWeights(held);
      if constexpr (kCollapse) weight = __ldg(reinterpret_cast<const uint4*>(p_.weight + channel_));
    } else if (kMix && lane_ < kOutputs) {
      base = p_.base[lane_];
      scale = p_.scale[lane_ < 4 ? 0 : lane_ < 8 ? 1 : 2];
    }
    WaitForPreviousKernel();
    RunTiles(is_unit_warp, has_unit, held, weight, base, scale);
  }

  // The first launch for many rows: everything up to the block's partial sums.
  __device__ void RunSlice() {
    const bool is_unit_warp = warp_ < p_.partition.units_per_block;
    const bool has_unit = is_unit_warp && unit_ < p_.partition.units;
    Held held;  // empty
    if (has_unit) PrepareWeights(held);
    WaitForPreviousKernel();
    const int step = static_cast<int>(gridDim.x) >> p_.partition.ranks_log2;
    const int first = static_cast<int>(blockIdx.x) >> p_.partition.ranks_log2;
    const int tiles = Tiles(p_);
    LaneRow next[kHalves] = {};
    float4 coefficients[3];
    if (has_unit) {
      LoadTile(first, next);
    } else if (!is_unit_warp) {
      LoadCoefficients(first, coefficients);
      StoreCoefficients(0, coefficients);
    }
    __syncthreads();
    int buffer = 0;
    int previous = -1;
    for (int tile = first; tile < tiles; tile += step, buffer ^= 1) {
      const bool next_exists = tile + step < tiles;
      LaneRow current[kHalves];
      if (has_unit) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) current[half] = next[half];
        if (next_exists) LoadTile(tile + step, next);
      } else if (!is_unit_warp && next_exists) {
        LoadCoefficients(tile + step, coefficients);
        StoreCoefficients(buffer ^ 1, coefficients);
      }
      // While the loads are under way.
      if (previous >= 0) StoreRowSums(previous, buffer ^ 1);
      previous = tile;
      if (has_unit) {
        uint4 collapsed[kHalves] = {};
        Process<true>(tile, buffer, held, current, collapsed);
      }
      __syncthreads();  // both buffers: the one before is read before the barrier of this tile
    }
    StoreRowSums(previous, buffer ^ 1);
  }

 private:
  __device__ void PrepareWeights(Held& held) const {
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      PrepareFragments(p_, s, channel_, lane_, [&](int part, int j, const uint4& words) {
        if (part < kHeldParts) {
          held[s][part][j] = words;
        } else {
          *Fragment(s, part, j) = words;
        }
      });
    }
  }

  // Tiles one after another; rarely more than one.
  __device__ void RunTiles(bool is_unit_warp, bool has_unit, const Held& held, const uint4& weight,
                           float base, float scale) {
    const int step = static_cast<int>(gridDim.x) >> p_.partition.ranks_log2;
    const int first = kFew ? 0 : static_cast<int>(blockIdx.x) >> p_.partition.ranks_log2;
    const int tiles = kFew ? 1 : Tiles(p_);
    int buffer = 0;
    for (int tile = first; tile < tiles; tile += kFew ? 1 : step, buffer ^= 1) {
      LaneRow rows[kHalves] = {};
      if (has_unit) {
        LoadTile(tile, rows);
      } else if (!is_unit_warp) {
        float4 coefficients[3];
        LoadCoefficients(tile, coefficients);
        StoreCoefficients(buffer, coefficients);
      }
      __syncthreads();
      uint4 collapsed[kHalves] = {};
      if (has_unit) Process<false>(tile, buffer, held, rows, collapsed);
      // Later tiles find their buffer free: its readers have arrived at the tile in between.
      if (tile == first) ClusterWait();
      __syncthreads();
      Distribute(tile, buffer);
      ClusterArrive();
      if (kExpand && has_unit) StoreTile(tile, rows);  // not before: the arrival awaits all stores
      ClusterWait();
      if (kCollapse && has_unit) Normalise(tile, buffer, weight, collapsed);
      if (kMix && !is_unit_warp) Mix(tile, buffer, base, scale);
    }
  }

  __device__ void StoreTile(int tile, const LaneRow (&rows)[kHalves]) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = tile * kTileRows + group_ + 8 * half;
      if (row < p_.rows) StoreStreams(p_, row, channel_, rows[half]);
    }
  }
  __device__ void LoadTile(int tile, LaneRow (&rows)[kHalves]) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      LoadRow<kExpand>(p_, tile * kTileRows + group_ + 8 * half, channel_, rows[half]);
  }

  // Coefficients of a tile's rows through the extra warp's registers.
  __device__ void LoadCoefficients(int tile, float4 (&pieces)[3]) const {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int index = lane_ + 32 * i;
      const int row = tile * kTileRows + index / kCoefficientPieces;
      const int piece = index % kCoefficientPieces;
      pieces[i] = {};
      if (row >= p_.rows) continue;
      const float* source = nullptr;
      if (piece == kCoefficientPieces - 1) {
        const int64_t source_row = p_.row_index == nullptr ? row : p_.row_index[row];
        if constexpr (kCollapse) source = p_.pre + source_row * p_.pre_stride;
      } else if constexpr (kExpand) {
        source = piece == 0 ? p_.post + row * p_.post_stride
                            : p_.comb + row * p_.comb_stride + 4 * (piece - 1);
      }
      if (source != nullptr) pieces[i] = *reinterpret_cast<const float4*>(source);
    }
  }
  __device__ void StoreCoefficients(int buffer, const float4 (&pieces)[3]) const {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int index = lane_ + 32 * i;
      float* target = shared_.coefficients +
                      (buffer * kTileRows + index / kCoefficientPieces) * kCoefficientStride +
                      4 * (index % kCoefficientPieces);
      *reinterpret_cast<float4*>(target) = pieces[i];
    }
  }

  // Expand, collapse, products and squares of the warp's unit. kStore: streams and collapsed rows
  // go to memory in between.
  template <bool kStore>
  __device__ void Process(int tile, int buffer, const Held& held, LaneRow (&rows)[kHalves],
                          uint4 (&collapsed)[kHalves]) const {
    LaneSquares squares[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (tile * kTileRows + 8 * half >= p_.rows) continue;  // the same for the whole block
      const auto* c = reinterpret_cast<const float4*>(
          shared_.coefficients + (buffer * kTileRows + group_ + 8 * half) * kCoefficientStride);
      ExpandCoefficients expand;
      float pre[kStreams];
      if constexpr (kExpand) {
        Unpack4(expand.post, c[0]);
#pragma unroll
        for (int i = 0; i < kStreams; ++i) Unpack4(expand.comb[i], c[1 + i]);
      }
      if constexpr (kCollapse) Unpack4(pre, c[kCoefficientPieces - 1]);
      ExpandAndCollapse<kExpand, kMix, kCollapse>(expand, pre, rows[half], collapsed[half],
                                                  squares[half]);
    }

    if constexpr (kStore) {
      if constexpr (kExpand) StoreTile(tile, rows);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int row = tile * kTileRows + group_ + 8 * half;
        if (row < p_.rows) StoreVector(p_.y + row * p_.y_stride + channel_, collapsed[half]);
      }
    }

    float* partial = Partial(buffer, warp_);
    if constexpr (kMix && kFew) MultiplyFew(held, rows[0], partial);
    if constexpr (kMix && !kFew) Multiply(rows, partial);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float* row = partial + (group_ + 8 * half) * kRowSums;
      if constexpr (kMix) {
        const float sum = QuadSum(squares[half].streams);
        if (quad_ == 0) row[kStreamSquares] = sum;
      }
      if constexpr (kCollapse) {
        const float sum = QuadSum(squares[half].collapsed);
        if (quad_ == 0) row[kCollapsedSquares] = sum;
      }
    }
  }

  // The unit's products with 16 rows as the left operand.
  __device__ void Multiply(const LaneRow (&rows)[kHalves], float* partial) const {
    float sums[kParts][kOutputTiles][4] = {};
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      const uint4& a = rows[0].streams[s];
      const uint4& b = rows[kHalves - 1].streams[s];
      const uint32_t first[4] = {a.x, b.x, a.y, b.y};
      const uint32_t second[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int j = 0; j < kOutputTiles; ++j) {
          const uint4 f = *Fragment(s, part, j);
          const uint32_t first_weights[2] = {f.x, f.y};
          const uint32_t second_weights[2] = {f.z, f.w};
          MmaBf16(sums[part][j], first, first_weights);
          MmaBf16(sums[part][j], second, second_weights);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int j = 0; j < kOutputTiles; ++j) {
        float2 value;
        value.x = (sums[2][j][2 * half] + sums[1][j][2 * half]) + sums[0][j][2 * half];
        value.y = (sums[2][j][2 * half + 1] + sums[1][j][2 * half + 1]) + sums[0][j][2 * half + 1];
        *reinterpret_cast<float2*>(partial + (group_ + 8 * half) * kRowSums + 8 * j + 2 * quad_) =
            value;
      }
    }
  }

  // The same sums with 8 rows as the right operand and the nine tiles of 8 outputs in pairs as the
  // left one: 5 instructions per step instead of 9, with the same bits.
  __device__ void MultiplyFew(const Held& held, const LaneRow& row, float* partial) const {
    constexpr int kTiles = kParts * kOutputTiles;
    constexpr int kPairs = (kTiles + 1) / 2;
    float sums[kPairs][4] = {};
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      const uint4& b = row.streams[s];
      const uint32_t first[2] = {b.x, b.y};
      const uint32_t second[2] = {b.z, b.w};
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const uint4 top = Weights(held, s, 2 * pair);
        uint4 bottom = {};
        if (2 * pair + 1 < kTiles) bottom = Weights(held, s, 2 * pair + 1);
        const uint32_t first_weights[4] = {top.x, bottom.x, top.y, bottom.y};
        const uint32_t second_weights[4] = {top.z, bottom.z, top.w, bottom.w};
        MmaBf16(sums[pair], first_weights, first);
        MmaBf16(sums[pair], second_weights, second);
      }
    }
#pragma unroll
    for (int j = 0; j < kOutputTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto sum = [&](int part) {
          const int tile = part * kOutputTiles + j;
          return sums[tile / 2][2 * (tile % 2) + i];
        };
        partial[(2 * quad_ + i) * kRowSums + 8 * j + group_] = (sum(2) + sum(1)) + sum(0);
      }
    }
  }
  __device__ uint4 Weights(const Held& held, int s, int tile) const {
    const int part = tile / kOutputTiles;
    const int j = tile % kOutputTiles;
    if (part < kHeldParts) return held[s][part][j];
    return *Fragment(s, part, j);
  }

  // The block's sum of a partial sum, units in ascending order.
  __device__ float AddUnits(int buffer, int index) const {
    const int units = min(p_.partition.units_per_block,
                          p_.partition.units - rank_ * p_.partition.units_per_block);
    float sum = 0.0f;
#pragma unroll
    for (int unit = 0; unit < kMaxUnitsPerBlock; ++unit) {
      if (unit < units) sum += Partial(buffer, unit)[index];
    }
    return sum;
  }

  // The block's sums of a tile to scratch memory.
  __device__ void StoreRowSums(int tile, int buffer) const {
    float* const target =
        p_.row_sums +
        (static_cast<int64_t>(rank_) * p_.rows + static_cast<int64_t>(tile) * kTileRows) * kRowSums;
    const int num_sums = min(kTileRows, p_.rows - tile * kTileRows) * kRowSums;
    for (int index = static_cast<int>(threadIdx.x); index < num_sums;
         index += static_cast<int>(blockDim.x))
      target[index] = AddUnits(buffer, index);
  }

  // Adds the partial sums of the block's units and stores them where they are needed.
  __device__ void Distribute(int tile, int buffer) const {
    const int ranks_log2 = p_.partition.ranks_log2;
    const int ranks = p_.partition.ranks;
    const int rows = min(kTileRows, p_.rows - tile * kTileRows);
    const int num_sums = kMix ? rows * (kOutputs + 1) : 0;
    const int num_squares = kCollapse ? rows << ranks_log2 : 0;
    for (int index = static_cast<int>(threadIdx.x); index < num_sums + num_squares;
         index += static_cast<int>(blockDim.x)) {
      if (index < num_sums) {
        const int row = index / (kOutputs + 1);
        const int output = index % (kOutputs + 1);
        StoreClusterFloat(Sums(buffer, row >> ranks_log2, rank_) + output,
                          static_cast<uint32_t>(row & (ranks - 1)),
                          AddUnits(buffer, row * kRowSums + output));
      } else {
        const int row = (index - num_sums) >> ranks_log2;
        const int target = (index - num_sums) & (ranks - 1);
        StoreClusterFloat(Squares(buffer, row) + rank_, static_cast<uint32_t>(target),
                          AddUnits(buffer, row * kRowSums + kCollapsedSquares));
      }
    }
  }

  // y and its copy on the Q8 grid.
  __device__ void Normalise(int tile, int buffer, const uint4& weight,
                            const uint4 (&collapsed)[kHalves]) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (tile * kTileRows + 8 * half >= p_.rows) continue;
      const int64_t row = tile * kTileRows + group_ + 8 * half;
      const float* squares = Squares(buffer, group_ + 8 * half);
      float sum = 0.0f;
      for (int i = 0; i < p_.partition.ranks; ++i) sum += squares[i];
      NormaliseChannels(p_, row, channel_, row < p_.rows, NormScale(p_, sum), collapsed[half],
                        weight);
    }
  }

  // The coefficients of this block's rows.
  __device__ void Mix(int tile, int buffer, float base, float scale) const {
    for (int i = 0; i < RowsPerRank(p_.partition); ++i) {
      const int row = tile * kTileRows + i * p_.partition.ranks + rank_;
      if (row >= p_.rows) return;
      float sum = 0.0f;
      if (lane_ <= kStreamSquares) {
        for (int r = 0; r < p_.partition.ranks; ++r) sum += Sums(buffer, i, r)[lane_];
      }
      WriteCoefficients(p_, row, sum, base, scale);
    }
  }

  __device__ uint4* Fragment(int s, int part, int j) const {
    return shared_.fragments + warp_ * UnitFragments(kVariant) +
           ((s * SharedParts(kVariant) + part - kHeldParts) * kOutputTiles + j) * 32 + lane_;
  }
  __device__ float* Squares(int buffer, int row) const {
    return shared_.squares + ((buffer * kTileRows + row) << p_.partition.ranks_log2);
  }
  __device__ float* Partial(int buffer, int unit) const {
    return shared_.partial + (buffer * p_.partition.units_per_block + unit) * kTileRows * kRowSums;
  }
  __device__ float* Sums(int buffer, int row, int rank) const {
    return shared_.sums + ((buffer * RowsPerRank(p_.partition) + row) * p_.partition.ranks + rank) *
                              (kOutputs + 1);
  }

  const Params& p_;
  const Shared shared_;
  const int rank_;
  const int warp_;
  const int lane_;
  const int group_;  // row of the tile, and row + 8
  const int quad_;   // which 8 channels of the unit
  const int unit_;
  const int channel_;
};

// Flags one by one, since nvcc does not pass structs to kernel templates.
template <bool kExpand, bool kMix, bool kCollapse, bool kFew>
__global__ void __launch_bounds__(kMaxThreads, 1)
    BoundaryKernel(const __grid_constant__ Params params) {
  AllowNextKernel();
  Block<Variant{kExpand, kMix, kCollapse, kFew}>(params, ClusterRank()).Run();
}

// Many rows, first launch. Blocks of a row are neighbours.
template <bool kExpand>
__global__ void __launch_bounds__(kMaxThreads, 1)
    SliceKernel(const __grid_constant__ Params params) {
  AllowNextKernel();
  const auto ranks = static_cast<uint32_t>(params.partition.ranks);
  Block<Variant{kExpand, true, true, false}>(params, blockIdx.x & (ranks - 1)).RunSlice();
}

// Many rows, second launch: first the blocks for coefficients, which take longest, then a block per
// row for the norm, a thread per eight channels.
__global__ void __launch_bounds__(kMaxFinishThreads, 2)
    FinishKernel(const __grid_constant__ Params params) {
  AllowNextKernel();
  const int thread = static_cast<int>(threadIdx.x);
  const int ranks = params.partition.ranks;
  const int64_t rank_stride = static_cast<int64_t>(params.rows) * kRowSums;
  const int mix_blocks = (params.rows + kFinishRows - 1) / kFinishRows;
  const int block = static_cast<int>(blockIdx.x);
  if (block < mix_blocks) {
    WaitForPreviousKernel();
    __shared__ float sums[kFinishRows][kRowSums + 1];  // odd: rows in different banks
    const int first_row = block * kFinishRows;
    const int rows = min(kFinishRows, params.rows - first_row);
    const float* source = params.row_sums + static_cast<int64_t>(first_row) * kRowSums;
    for (int index = thread; index < rows * kRowSums; index += static_cast<int>(blockDim.x)) {
      float sum = 0.0f;
#pragma unroll 16
      for (int r = 0; r < ranks; ++r) sum += source[r * rank_stride + index];
      sums[index / kRowSums][index % kRowSums] = sum;
    }
    __syncthreads();
    if (thread < rows) WriteCoefficientsOfThread(params, first_row + thread, sums[thread]);
    return;
  }
  const int64_t row = block - mix_blocks;
  const int channel = thread * kLaneChannels;
  const bool valid = channel < params.hidden;  // four lanes of a group of 32 agree
  uint4 weight = {};
  uint4 collapsed = {};
  if (valid) weight = __ldg(reinterpret_cast<const uint4*>(params.weight + channel));
  WaitForPreviousKernel();
  if (valid)
    collapsed = *reinterpret_cast<const uint4*>(params.y + row * params.y_stride + channel);
  const float* source = params.row_sums + row * kRowSums + kCollapsedSquares;
  float sum = 0.0f;
#pragma unroll 16
  for (int r = 0; r < ranks; ++r) sum += source[r * rank_stride];
  NormaliseChannels(params, row, channel, valid, NormScale(params, sum), collapsed, weight);
}

// One thread per eight channels of a row.
__global__ void __launch_bounds__(256) ExpandKernel(const __grid_constant__ Params params) {
  AllowNextKernel();
  WaitForPreviousKernel();
  const int pieces = params.hidden / kLaneChannels;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const int64_t row = index / pieces;
  if (row >= params.rows) return;
  const int channel = static_cast<int>(index - row * pieces) * kLaneChannels;
  LaneRow values;
  LoadRow<true>(params, static_cast<int>(row), channel, values);
  ExpandCoefficients c;
  Unpack4(c.post, *reinterpret_cast<const float4*>(params.post + row * params.post_stride));
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    Unpack4(c.comb[i],
            *reinterpret_cast<const float4*>(params.comb + row * params.comb_stride + 4 * i));
  }
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    uint32_t words[kStreams];
#pragma unroll
    for (int s = 0; s < kStreams; ++s) words[s] = Word(values.streams[s], w);
    ExpandPair(c, Word(values.x, w), words);
#pragma unroll
    for (int s = 0; s < kStreams; ++s) Word(values.streams[s], w) = words[s];
  }
  StoreStreams(params, row, channel, values);
}

// ---- Launches
// --------------------------------------------------------------------------------------

// kUnsupported unless rows of the view begin at multiples of 16 bytes.
Status ExpectAligned(const TensorView& view, const char* name) {
  const auto address = reinterpret_cast<uintptr_t>(view.data());
  if (address % 16 == 0 && view.row_stride() * DTypeBytes(view.dtype()) % 16 == 0) return {};
  return Fail(Code::kUnsupported,
              fmt::format("Hyper-connections on a GPU need 16-byte aligned rows; '{}' ({}, stride "
                          "{}) has others.",
                          name, view.ToString(), view.row_stride()),
              name);
}

template <class T>
T* Data(const TensorView& view) {
  return static_cast<T*>(view.data());
}

Status SetStreams(const TensorView& streams, int64_t rows, Params& params) {
  const int64_t hidden = streams.dim(2);
  if (hidden % kUnitChannels != 0 || hidden > kMaxRanks * kMaxUnitsPerBlock * kUnitChannels) {
    return Fail(
        Code::kUnsupported,
        fmt::format("Hyper-connections on a GPU need a multiple of {} channels, at most {}; "
                    "the streams have {}.",
                    kUnitChannels, kMaxRanks * kMaxUnitsPerBlock * kUnitChannels, hidden),
        "streams");
  }
  DI_RETURN_IF_ERROR(ExpectAligned(streams, "streams"));
  params.rows = static_cast<int>(rows);
  params.hidden = static_cast<int>(hidden);
  params.partition = PartitionOf(hidden);
  params.streams = Data<uint16_t>(streams);
  params.streams_stride = streams.row_stride();
  return {};
}

Status SetExpand(const HcExpandArgs& args, Params& params) {
  DI_RETURN_IF_ERROR(ExpectAligned(args.x, "x"));
  DI_RETURN_IF_ERROR(ExpectAligned(args.post, "post"));
  DI_RETURN_IF_ERROR(ExpectAligned(args.comb, "comb"));
  params.x = Data<uint16_t>(args.x);
  params.x_stride = args.x.row_stride();
  params.post = Data<float>(args.post);
  params.post_stride = args.post.row_stride();
  params.comb = Data<float>(args.comb);
  params.comb_stride = args.comb.row_stride();
  return {};
}

Status SetMix(const HcMixArgs& args, Params& params) {
  DI_RETURN_IF_ERROR(ExpectAligned(args.fn, "fn"));
  DI_RETURN_IF_ERROR(ExpectAligned(args.comb, "comb"));
  params.fn = Data<float>(args.fn);
  params.fn_stride = args.fn.row_stride();
  params.base = Data<float>(args.base);
  params.scale = Data<float>(args.scale);
  params.new_pre = Data<float>(args.pre);
  params.new_pre_stride = args.pre.row_stride();
  params.new_post = Data<float>(args.post);
  params.new_post_stride = args.post.row_stride();
  params.new_comb = Data<float>(args.comb);
  params.new_comb_stride = args.comb.row_stride();
  params.sinkhorn_iterations = static_cast<int>(args.sinkhorn_iterations);
  params.eps = args.eps;
  params.mix_norm_eps = args.norm_eps;
  return {};
}

Status SetCollapse(const HcCollapseNormArgs& args, Params& params) {
  DI_RETURN_IF_ERROR(ExpectAligned(args.pre, "pre"));
  DI_RETURN_IF_ERROR(ExpectAligned(args.weight.Reshape({1, params.hidden}), "weight"));
  DI_RETURN_IF_ERROR(ExpectAligned(args.y, "y"));
  if (!args.y_grid.empty()) DI_RETURN_IF_ERROR(ExpectAligned(args.y_grid, "y_grid"));
  if (!args.row_index.empty()) params.row_index = Data<int>(args.row_index);
  params.pre = Data<float>(args.pre);
  params.pre_stride = args.pre.row_stride();
  params.weight = Data<uint16_t>(args.weight);
  params.y = Data<uint16_t>(args.y);
  params.y_stride = args.y.row_stride();
  params.y_grid = Data<uint16_t>(args.y_grid);
  params.y_grid_stride = args.y_grid.row_stride();
  params.norm_eps = args.norm_eps;
  return {};
}

// As many clusters as run at once, each over tiles of rows in turn.
template <Variant kVariant>
Status LaunchVariant(const char* name, const Params& params, Stream& stream) {
  const auto kernel =
      &BoundaryKernel<kVariant.expand, kVariant.mix, kVariant.collapse, kVariant.few>;
  LaunchConfig config;
  config.block = 32 * (params.partition.units_per_block + 1);
  config.shared_bytes = SharedBytes<kVariant>(params.partition);
  config.cluster = params.partition.ranks;
  config.overlap_previous = true;
  int clusters = 1;
  if (Tiles(params) > 1) {
    struct Answer {
      int device = -1;
      int hidden = 0;
      int clusters = 0;
    };
    thread_local Answer answer;  // the runtime takes microseconds to answer
    if (answer.device != stream.device().index || answer.hidden != params.hidden) {
      DI_ASSIGN_OR_RETURN(const int active, MaxActiveClusters(name, kernel, config));
      answer = {stream.device().index, params.hidden, active};
    }
    clusters = std::min(Tiles(params), answer.clusters);
  }
  config.grid.x = static_cast<uint32_t>(clusters * params.partition.ranks);
  return Launch(name, kernel, config, stream, params);
}

template <bool kExpand>
Status LaunchManyRows(const char* name, Params params, Stream& stream) {
  const Partition& partition = params.partition;
  ScratchScope scratch(stream);
  params.row_sums = scratch.Allocate<float>(int64_t{partition.ranks} * params.rows * kRowSums);
  LaunchConfig slices;
  slices.block = 32 * (partition.units_per_block + 1);
  slices.shared_bytes = SharedBytes<Variant{kExpand, true, true, false}>(partition);
  slices.overlap_previous = true;
  const int groups = std::clamp(stream.sm_count() / partition.ranks, 1, Tiles(params));
  slices.grid.x = static_cast<uint32_t>(groups * partition.ranks);
  DI_RETURN_IF_ERROR(Launch(name, &SliceKernel<kExpand>, slices, stream, params));
  LaunchConfig finish;
  finish.block = (params.hidden / kLaneChannels + 31) / 32 * 32;
  finish.grid.x =
      static_cast<uint32_t>(params.rows + (params.rows + kFinishRows - 1) / kFinishRows);
  finish.overlap_previous = true;
  return Launch(name, &FinishKernel, finish, stream, params);
}

template <bool kExpand, bool kMix, bool kCollapse>
Status LaunchBoundary(const char* name, const Params& params, Stream& stream) {
  if (params.rows == 0) return {};
  if constexpr (kMix) {
    if (params.rows <= kFewRows)
      return LaunchVariant<Variant{kExpand, kMix, kCollapse, true}>(name, params, stream);
  }
  if constexpr (kMix && kCollapse) {
    if (params.rows > kClusterRows) return LaunchManyRows<kExpand>(name, params, stream);
  }
  return LaunchVariant<Variant{kExpand, kMix, kCollapse, false}>(name, params, stream);
}

}  // namespace
}  // namespace hc

Status HcMix(const HcMixArgs& args, Stream& stream) {
  hc::Params params = {};
  DI_RETURN_IF_ERROR(hc::SetStreams(args.streams, args.streams.rows(), params));
  DI_RETURN_IF_ERROR(hc::SetMix(args, params));
  return hc::LaunchBoundary<false, true, false>("HcMix", params, stream);
}

Status HcCollapseNorm(const HcCollapseNormArgs& args, Stream& stream) {
  hc::Params params = {};
  DI_RETURN_IF_ERROR(hc::SetStreams(args.streams, args.y.rows(), params));
  DI_RETURN_IF_ERROR(hc::SetCollapse(args, params));
  return hc::LaunchBoundary<false, false, true>("HcCollapseNorm", params, stream);
}

Status HcExpand(const HcExpandArgs& args, Stream& stream) {
  hc::Params params = {};
  DI_RETURN_IF_ERROR(hc::SetStreams(args.streams, args.streams.rows(), params));
  DI_RETURN_IF_ERROR(hc::SetExpand(args, params));
  const int64_t threads = int64_t{params.rows} * (params.hidden / hc::kLaneChannels);
  LaunchConfig config;
  config.block = 256;
  config.grid.x = static_cast<uint32_t>((threads + 255) / 256);
  config.overlap_previous = true;
  return Launch("HcExpand", &hc::ExpandKernel, config, stream, params);
}

Status HcBoundary(const HcBoundaryArgs& args, Stream& stream) {
  const TensorView& streams = args.mix.streams;
  hc::Params params = {};
  DI_RETURN_IF_ERROR(hc::SetStreams(streams, streams.rows(), params));
  DI_RETURN_IF_ERROR(hc::SetMix(args.mix, params));
  DI_RETURN_IF_ERROR(hc::SetCollapse(args.collapse, params));
  if (args.expand.x.empty())
    return hc::LaunchBoundary<false, true, true>("HcBoundary", params, stream);
  DI_RETURN_IF_ERROR(hc::SetExpand(args.expand, params));
  return hc::LaunchBoundary<true, true, true>("HcBoundary", params, stream);
}

}  // namespace deepinfer::cuda
