// The kernel of linear_prefill.h.
//
// Bound: tensor cores. A tile is 128 outputs (gated: 64 of gate and of up) and up to 256 rows of x
// (tokens). Weights are the A operand in registers and tokens its N, so that 4- and 8-bit codes
// become bf16 in the registers of the lane that multiplies them: the packed layout (cuda_pack.h) is
// in the order of fragments. A block has three warpgroups:
//
//   Two of consumers, 64 outputs each; a warp owns one strip of 16. The instruction is as wide as
//   the tile, because a warp's time is spent on issuing conversions (about 6 clocks for each of 30
//   instructions per k16 step), which must stay below the 128 clocks that 256 columns take for each
//   of the two warpgroups. Fragments are converted while the steps before them are multiplied.
//
//   One of producers: rows of x in pieces of 16 bytes, gathered by row_index, into a ring of stages
//   of 64 columns in the 128-byte swizzle, announced by the copies themselves; and weights, a chunk
//   of four units of every strip, by bulk copies.
//
// Blocks are persistent, one per multiprocessor, and take tiles in order: tokens first, so that
// tiles that run at the same time share weights in the L2, in bands of token tiles whose x stays
// there too. The rows of a unit (a group, or all) are cut into about equal tiles, which run as 64,
// 128, 192 or 256 columns of the instruction. The last round of tiles is cut along the tokens where
// that gives more blocks work.
//
// Weights whose K has several segments, two ways with the same bits:
//   * Chained: a block takes the segments of a tile in turn and keeps totals beside the
//     accumulators, half of them in registers and half in shared memory, which leaves room for 192
//     tokens.
//   * Split: a segment is an item of its own, so that few rows fill the device. Its sums go to a
//     workspace (which stays in the L2), and the warpgroup that arrives last adds all of a tile in
//     ascending order and stores it.
#pragma once

#include <cstdint>

#include "device.cuh"
#include "ops/linear/linear.h"
#include "ops/linear/linear_convert.cuh"
#include "ops/quantize/group_quantize.cuh"
#include "warpgroup.cuh"

namespace deepinfer::cuda::prefill {

inline constexpr int kConsumerWarpgroups = 2;
inline constexpr int kConsumerWarps = 4 * kConsumerWarpgroups;
inline constexpr int kThreads = 128 * (kConsumerWarpgroups + 1);
inline constexpr int kStageColumns = 64;
inline constexpr int kRowBytes = 2 * kStageColumns;  // of a stage
inline constexpr int kMaxStages = 16;
inline constexpr int kBandTokenTiles = 8;
inline constexpr int kMaxProblems = 16;
inline constexpr int kMaxParts = 4;  // of a tile, along the tokens
// Rows on the way to y: so many at a time, of 64 outputs; the padding spreads rows over the banks.
inline constexpr int kPieceTokens = 32;
inline constexpr int kStagingRowBytes = 144;

// One weight with its rows, or a stack of weights with rows in groups.
struct Problem {
  const uint16_t* x;
  int64_t x_stride;  // elements, a multiple of 8
  const uint8_t* weight;
  const uint8_t* up_weight;  // gated kernels only; `weight` is the gate then
  int64_t weight_stride;     // bytes from one group's weight to the next one's
  int64_t strip_bytes;
  void* y;
  int64_t y_stride;  // elements
  int rows;          // of a single weight
  int n;
  int k;
  int padded_k;
  int strips;
  int segment_columns;
  float output_scale;
  bool y_is_float;
  bool y_in_pieces;  // y can be stored in pieces of 16 bytes
  bool quantize_y;
};

struct Params {
  Problem problems[kMaxProblems];
  int units = 0;        // groups, or problems
  int tile_tokens = 0;  // the most per tile: a multiple of 64, at most those of the kernel's shape
  // Split: segments of every problem, their sums, and a counter of arrivals per tile, part and
  // warpgroup, zero between launches. Otherwise 1.
  int segments = 1;
  float4* segment_sums = nullptr;
  int32_t* arrivals = nullptr;
  // Groups of problem 0; null: every problem is a unit of its own.
  const int32_t* group_offsets = nullptr;
  const int32_t* row_index = nullptr;
  // Gated kernels.
  const float* row_weight = nullptr;
  float limit = 0.0f;
  bool reference_numerics = false;
};

template <WeightFormat kFormatOf, bool kGatedOf, bool kTotalsOf>
struct Shape {
  static constexpr WeightFormat kFormat = kFormatOf;
  static constexpr bool kGated = kGatedOf;
  static constexpr bool kTotals = kTotalsOf;
  static constexpr int kTokens = kTotals ? 192 : 256;
  // Outputs of y per tile.
  static constexpr int kTileOutputs = kGated ? 64 : 128;
  // Four units of a strip and their scales.
  static constexpr int kChunkBytes = static_cast<int>(CudaChunkBytes(kFormat));
  static constexpr int kChunkColumns = static_cast<int>(CudaChunkColumns(kFormat));
  static constexpr int kChunkStages = kChunkColumns / kStageColumns;
  static constexpr int kChunkSlots = 3;
  static constexpr int kXBytes = 5 * kTokens * kRowBytes;
  // Of a warpgroup: rows on the way to y, and until then half of its totals.
  static constexpr int kStagingBytes =
      kTotals ? kTokens / 4 * 128 * 4 : kPieceTokens * kStagingRowBytes;

  // Shared memory, in this order: stages of x, chunks of weights, staging, and what follows.
  static constexpr int kWeightsAt = kXBytes;
  static constexpr int kStagingAt = kWeightsAt + kChunkSlots * kConsumerWarps * kChunkBytes;
  static constexpr int kBarriersAt = kStagingAt + kConsumerWarpgroups * kStagingBytes;
  static constexpr int kListsAt = kBarriersAt + 8 * (2 * kMaxStages + 2 * kChunkSlots);
  static constexpr int SharedBytes(int units) {
    return kListsAt + 4 * (kListWords + 3 * units);
  }
  static constexpr int kListWords = 6;
};

// ---- Tiles ---------------------------------------------------------------------------

// How tiles become items, which blocks take in order: a tile's segments one after the other; from
// tile `whole` on a tile is cut into parts along its tokens, so that the last round of items fills
// more blocks.
struct TileCut {
  int whole = 0;
  int parts = 1;
  int items = 0;
};
constexpr TileCut CutTiles(int tiles, int segments, int tile_tokens, int blocks) {
  TileCut cut;
  cut.whole = tiles;
  cut.items = tiles * segments;
  const int rest = cut.items % blocks;
  if (rest == 0) return cut;
  const int whole = (cut.items - rest) / segments;
  const int rounds = (cut.items + blocks - 1) / blocks;
  for (int parts = kMaxParts; parts > 1; --parts) {
    // Parts are multiplied as multiples of 64 rows, which must not be more than the tile's.
    const int part_tokens = ((tile_tokens + parts - 1) / parts + 63) / 64 * 64;
    const int items = (whole + (tiles - whole) * parts) * segments;
    if (parts * part_tokens > tile_tokens || (items + blocks - 1) / blocks > rounds) continue;
    cut.whole = whole;
    cut.parts = parts;
    cut.items = items;
    break;
  }
  return cut;
}

struct Tile {
  int problem;
  int unit;
  int row;   // first one, of y
  int rows;  // none: nothing to do
  int output_tile;
  int first_column;
  int end_column;
  // Split only.
  int index;  // of all tiles
  int segment;
  int part;
  int parts;
};

// The tiles of all units: lists in shared memory.
template <class S>
class TileList {
 public:
  // By all threads of the block.
  __device__ static void Build(const Params& params) {
    int* const tiles = Tiles();
    for (int unit = static_cast<int>(threadIdx.x); unit < params.units; unit += kThreads) {
      const bool grouped = params.group_offsets != nullptr;
      const int first = grouped ? params.group_offsets[unit] : 0;
      const int rows =
          grouped ? params.group_offsets[unit + 1] - first : params.problems[unit].rows;
      FirstRow(params, unit) = first;
      Rows(params, unit) = rows;
      tiles[unit + 1] = TokenTiles(params, rows) * OutputTiles(params, grouped ? 0 : unit);
    }
    __syncthreads();
    if (WarpId() == 0) {
      // Each lane sums a run of units.
      const int run = (params.units + 31) / 32;
      const int begin = min(LaneId() * run, params.units);
      const int end = min(begin + run, params.units);
      int sum = 0;
      for (int unit = begin; unit < end; ++unit) sum += tiles[unit + 1];
      int before = sum;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, before, distance);
        if (LaneId() >= distance) before += other;
      }
      before -= sum;
      for (int unit = begin; unit < end; ++unit) {
        before += tiles[unit + 1];
        tiles[unit + 1] = before;
      }
      if (LaneId() == 31) {
        const TileCut cut =
            CutTiles(before, params.segments, params.tile_tokens, static_cast<int>(gridDim.x));
        Lists()[0] = cut.items;
        Lists()[1] = cut.whole;
        Lists()[2] = cut.parts;
        tiles[0] = 0;
      }
    }
    __syncthreads();
  }

  // Items per block, those without rows included.
  __device__ static int Rounds() {
    return (Lists()[0] + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  }
  // The block's item of a round. Blocks move by one from round to round, so that a pattern of large
  // and small tiles (a group of one and a half, say) does not give some blocks all the large ones.
  __device__ static Tile At(const Params& params, int round) {
    const int blocks = static_cast<int>(gridDim.x);
    const int item = round * blocks + (static_cast<int>(blockIdx.x) + round) % blocks;
    if (item >= Lists()[0]) return {};
    const int whole = Lists()[1];
    const int* const tiles = Tiles();
    Tile result;
    int in_order = item / params.segments;  // of tiles, then of parts
    result.segment = item - in_order * params.segments;
    result.part = 0;
    result.parts = 1;
    if (in_order >= whole) {
      result.parts = Lists()[2];
      const int after = in_order - whole;
      in_order = whole + after / result.parts;
      result.part = after % result.parts;
    }
    result.index = in_order;
    int low = 0;
    int high = params.units;  // tiles[low] <= in_order < tiles[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (tiles[middle] <= in_order) {
        low = middle;
      } else {
        high = middle;
      }
    }
    result.unit = low;
    result.problem = params.group_offsets != nullptr ? 0 : low;
    const Problem& problem = params.problems[result.problem];
    const int unit_rows = Rows(params, low);
    const int tile_rows = TileRows(params, unit_rows);
    const int output_tiles = OutputTiles(params, result.problem);
    const int in_unit = in_order - tiles[low];
    const int band = in_unit / (kBandTokenTiles * output_tiles);
    const int in_band = in_unit - band * kBandTokenTiles * output_tiles;
    const int band_tiles =
        min(kBandTokenTiles, TokenTiles(params, unit_rows) - band * kBandTokenTiles);
    result.output_tile = in_band / band_tiles;
    const int first =
        (band * kBandTokenTiles + in_band - result.output_tile * band_tiles) * tile_rows;
    const int part_rows = (tile_rows + result.parts - 1) / result.parts;
    const int skipped = result.part * part_rows;
    result.row = FirstRow(params, low) + first + skipped;
    result.rows = min(part_rows, min(tile_rows, unit_rows - first) - skipped);
    result.first_column = 0;
    result.end_column = problem.padded_k;
    if (params.segments > 1) {
      result.first_column = result.segment * problem.segment_columns;
      result.end_column = min(result.first_column + problem.segment_columns, problem.padded_k);
    }
    return result;
  }

 private:
  // Items, whole tiles, parts of the others (and what JoinSegments keeps there); tiles before each
  // unit and all, each unit's first row, and its rows.
  __device__ static int* Lists() {
    return reinterpret_cast<int*>(DynamicShared<unsigned char>() + S::kListsAt);
  }
  __device__ static int* Tiles() {
    return Lists() + S::kListWords - 1;
  }
  __device__ static int& FirstRow(const Params& params, int unit) {
    return Tiles()[params.units + 1 + unit];
  }
  __device__ static int& Rows(const Params& params, int unit) {
    return Tiles()[2 * params.units + 1 + unit];
  }
  // Tiles of a unit are about equal, a multiple of 64 rows each.
  __device__ static int TileRows(const Params& params, int rows) {
    const int tiles = (rows + params.tile_tokens - 1) / params.tile_tokens;
    if (tiles <= 1) return params.tile_tokens;
    return min(params.tile_tokens, ((rows + tiles - 1) / tiles + 63) / 64 * 64);
  }
  __device__ static int TokenTiles(const Params& params, int rows) {
    const int tile_rows = TileRows(params, rows);
    return (rows + tile_rows - 1) / tile_rows;
  }
  __device__ static int OutputTiles(const Params& params, int problem) {
    return (params.problems[problem].n + S::kTileOutputs - 1) / S::kTileOutputs;
  }
};

// ---- Rings ----------------------------------------------------------------------------

struct Ring {
  int slot = 0;
  uint32_t parity = 0;
  __device__ void Advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1u;
    }
  }
};

// Slots of x: as many stages of the launch's tiles as fit.
template <class S>
struct XRing {
  int stage_bytes;
  int stages;
  __device__ explicit XRing(const Params& params)
      : stage_bytes(params.tile_tokens * kRowBytes),
        stages(min(kMaxStages, S::kXBytes / stage_bytes)) {}
};

template <class S>
__device__ inline unsigned char* WeightSlot(int slot) {
  return DynamicShared<unsigned char>() + S::kWeightsAt + slot * (kConsumerWarps * S::kChunkBytes);
}

template <class S>
struct Barriers {
  // Full: an arrival per producer thread, or one and bytes. Empty: one per consumer warp.
  __device__ static Barrier* XFull(int slot) {
    return At(slot);
  }
  __device__ static Barrier* XEmpty(int slot) {
    return At(kMaxStages + slot);
  }
  __device__ static Barrier* WeightsFull(int slot) {
    return At(2 * kMaxStages + slot);
  }
  __device__ static Barrier* WeightsEmpty(int slot) {
    return At(2 * kMaxStages + S::kChunkSlots + slot);
  }
  __device__ static void Init() {
    for (int slot = 0; slot < kMaxStages; ++slot) {
      BarrierInit(XFull(slot), 128);
      BarrierInit(XEmpty(slot), kConsumerWarps);
    }
    for (int slot = 0; slot < S::kChunkSlots; ++slot) {
      BarrierInit(WeightsFull(slot), 1);
      BarrierInit(WeightsEmpty(slot), kConsumerWarps);
    }
    FenceBarrierInit();
  }

 private:
  __device__ static Barrier* At(int index) {
    return reinterpret_cast<Barrier*>(DynamicShared<unsigned char>() + S::kBarriersAt) + index;
  }
};

// ---- Producers -----------------------------------------------------------------------

// The strip of a consumer warp in a tile, from the tile's first column on.
template <class S>
__device__ inline const uint8_t* StripOf(const Params& params, const Tile& tile, int warp) {
  const Problem& problem = params.problems[tile.problem];
  const bool up = S::kGated && warp % 4 >= 2;
  const uint8_t* weight = up ? problem.up_weight : problem.weight;
  if (params.group_offsets != nullptr) weight += problem.weight_stride * tile.unit;
  const int strip = S::kGated ? tile.output_tile * 4 + warp / 4 * 2 + warp % 2
                              : tile.output_tile * kConsumerWarps + warp;
  // Beyond the last output: any strip, not stored.
  return weight + problem.strip_bytes * min(strip, problem.strips - 1);
}

// Copies x and weights for all tiles of the block.
template <class S>
__device__ inline void Produce(const Params& params) {
  // A thread copies one piece of every 16th row; the swizzle is the same for all of them.
  constexpr int kSteps = S::kTokens / 16;
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int lane = LaneId();
  const bool copies_weights = UniformWarpId() == kConsumerWarps;
  const int piece = thread % 8;
  const int first_row = thread / 8;
  unsigned char* const target =
      DynamicShared<unsigned char>() + first_row * kRowBytes + ((piece ^ (first_row % 8)) * 16);
  const XRing<S> ring(params);
  Ring x;
  Ring weights;
  const int rounds = TileList<S>::Rounds();
  for (int round = 0; round < rounds; ++round) {
    const Tile tile = TileList<S>::At(params, round);
    if (tile.rows <= 0) continue;
    const Problem& problem = params.problems[tile.problem];
    // A lane of the first warp for each consumer warp.
    const uint8_t* strip = nullptr;
    if (copies_weights && lane < kConsumerWarps) {
      strip = StripOf<S>(params, tile, lane) +
              static_cast<int64_t>(tile.first_column / S::kChunkColumns) * S::kChunkBytes;
    }
    uint32_t offsets[kSteps];  // of rows in pieces of 16 bytes
    const auto stride = static_cast<uint32_t>(problem.x_stride / 8);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = tile.row + min(first_row + 16 * i, tile.rows - 1);
      const int x_row = params.row_index == nullptr ? row : params.row_index[row];
      offsets[i] = static_cast<uint32_t>(x_row) * stride + static_cast<uint32_t>(piece);
    }
    const int steps = (tile.rows + 15) / 16;
    const auto* const first = reinterpret_cast<const unsigned char*>(problem.x);
    const int inside_k = problem.k;
    int chunk_stage = 0;
    for (int k = tile.first_column; k < tile.end_column; k += kStageColumns) {
      if (copies_weights && chunk_stage == 0) {
        BarrierWait(Barriers<S>::WeightsEmpty(weights.slot), weights.parity ^ 1u);
        Barrier* const full = Barriers<S>::WeightsFull(weights.slot);
        if (lane == 0) BarrierArriveExpect(full, kConsumerWarps * S::kChunkBytes);
        __syncwarp();
        if (lane < kConsumerWarps) {
          BulkCopy(WeightSlot<S>(weights.slot) + lane * S::kChunkBytes, strip, S::kChunkBytes,
                   full);
          strip += S::kChunkBytes;
        }
        weights.Advance(S::kChunkSlots);
      }
      chunk_stage = chunk_stage + 1 == S::kChunkStages ? 0 : chunk_stage + 1;
      BarrierWait(Barriers<S>::XEmpty(x.slot), x.parity ^ 1u);
      unsigned char* const stage = target + x.slot * ring.stage_bytes;
      const unsigned char* const column = first + 2 * k;
      if (k + kStageColumns <= inside_k) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          if (i < steps)
            CopyAsync16(stage + i * 16 * kRowBytes,
                        column + static_cast<uint64_t>(offsets[i]) * 16u);
        }
      } else {
        // Columns beyond k are zero; the address must be readable all the same.
        const bool inside = k + 8 * piece < inside_k;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          if (i < steps)
            CopyAsync16OrZero(stage + i * 16 * kRowBytes,
                              inside ? column + static_cast<uint64_t>(offsets[i]) * 16u : first,
                              inside);
        }
      }
      BarrierArriveOnCopies(Barriers<S>::XFull(x.slot));
      x.Advance(ring.stages);
    }
  }
}

// ---- Fragments ------------------------------------------------------------------------

__device__ inline uint4 LoadShared16(const unsigned char* shared) {
  return *reinterpret_cast<const uint4*>(shared);
}
// What a lane needs of a stage (64 columns of a chunk) for its four k16 steps. The words of bf16
// are fragments themselves. A stage is a chunk there, so that the loop over chunks loads into the
// registers that it loaded into before, of which those of the last two steps may still be read:
// they are loaded by LoadRest, when the first group of the stage has been issued and everything in
// front of it has ended.
template <WeightFormat kFormat>
class StageCodes {
 public:
  __device__ void Load(const unsigned char* chunk, int lane, int stage) {
    if constexpr (kFormat == WeightFormat::kFp4Group) {
      words_[0] = LoadShared16(chunk + 512 * stage + 16 * lane);
      scales_.x = *reinterpret_cast<const uint32_t*>(chunk + 2048 + 16 * (lane / 4) + 4 * stage);
    } else if constexpr (kFormat == WeightFormat::kFp8Block) {
#pragma unroll
      for (int unit = 0; unit < 2; ++unit)
        words_[unit] = LoadShared16(chunk + 512 * (2 * stage + unit) + 16 * lane);
      scales_ = *reinterpret_cast<const uint2*>(chunk + 2048 + 8 * stage);
    } else {
#pragma unroll
      for (int step = 0; step < 2; ++step)
        words_[step] = LoadShared16(chunk + 512 * step + 16 * lane);
    }
  }
  __device__ void LoadRest(const unsigned char* chunk, int lane) {
    if constexpr (kFormat == WeightFormat::kBf16) {
#pragma unroll
      for (int step = 2; step < 4; ++step)
        words_[step] = LoadShared16(chunk + 512 * step + 16 * lane);
    }
  }

  template <int kStep>
  __device__ void Fragment(uint32_t (&a)[4]) const {
    if constexpr (kFormat == WeightFormat::kFp4Group) {
      ConvertFp4<kStep % 2>(kStep < 2 ? words_[0].x : words_[0].z,
                            kStep < 2 ? words_[0].y : words_[0].w, Fp4Scales<kStep / 2>(scales_.x),
                            a);
    } else if constexpr (kFormat == WeightFormat::kFp8Block) {
      const uint4 words = words_[kStep / 2];
      ConvertFp8(kStep % 2 == 0 ? words.x : words.z, kStep % 2 == 0 ? words.y : words.w,
                 kStep / 2 == 0 ? scales_.x : scales_.y, a);
    } else {
      a[0] = words_[kStep].x;
      a[1] = words_[kStep].y;
      a[2] = words_[kStep].z;
      a[3] = words_[kStep].w;
    }
  }

 private:
  static constexpr int kWords = kFormat == WeightFormat::kFp4Group   ? 1
                                : kFormat == WeightFormat::kFp8Block ? 2
                                                                     : 4;
  uint4 words_[kWords] = {};
  uint2 scales_ = {0, 0};  // FP4: of the stage's unit, in the first word; FP8: of its two units
};

// ---- Results --------------------------------------------------------------------------

__device__ inline void Unpack8(uint4 words, float (&values)[8]) {
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = Bf16LowToFloat(pairs[i]);
    values[2 * i + 1] = Bf16HighToFloat(pairs[i]);
  }
}
// Q8 of 8 outputs per lane; four lanes have a group.
__device__ inline uint4 Quantize8(const float (&values)[8]) {
  const Q8Scale scale(LaneGroupMax<4>(Amax(values)));
  return make_uint4(Q8Grid(values[0], values[1], scale), Q8Grid(values[2], values[3], scale),
                    Q8Grid(values[4], values[5], scale), Q8Grid(values[6], values[7], scale));
}

// A piece of the accumulators (32 tokens, 64 outputs), rounded to bf16, as rows of tokens in
// `staging`. A warp writes its 16 outputs. `piece` is the same for all threads.
template <int kPiece = 0, int kSize>
__device__ __forceinline__ void StagePiece(const float (&d)[kSize], int piece, float scale,
                                           unsigned char* staging, int warp, int lane) {
  if constexpr ((kPiece + 1) * (kPieceTokens / 2) < kSize) {
    if (piece != kPiece) {
      StagePiece<kPiece + 1>(d, piece, scale, staging, warp, lane);
      return;
    }
  }
  unsigned char* const target =
      staging + (lane / 16 * 8 + lane % 8) * kStagingRowBytes + (warp % 4) * 32 + lane / 8 % 2 * 16;
#pragma unroll
  for (int j = 0; j < kPieceTokens / 16; ++j) {
    const float* const from = &d[kPiece * (kPieceTokens / 2) + 8 * j];
    const uint32_t matrices[4] = {FloatsToBf16x2(from[0] * scale, from[1] * scale),
                                  FloatsToBf16x2(from[2] * scale, from[3] * scale),
                                  FloatsToBf16x2(from[4] * scale, from[5] * scale),
                                  FloatsToBf16x2(from[6] * scale, from[7] * scale)};
    StoreMatrix4Transposed(target + j * 16 * kStagingRowBytes, matrices);
  }
}

// 8 outputs of a row of y, of which those below n exist.
__device__ inline void StoreOutputs(const Problem& problem, int row, int output, uint4 words) {
  auto* const y = static_cast<uint16_t*>(problem.y) + row * problem.y_stride + output;
  if (problem.y_in_pieces) {
    if (output < problem.n) *reinterpret_cast<uint4*>(y) = words;
    return;
  }
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (output + i < problem.n) y[i] = static_cast<uint16_t>(pairs[i / 2] >> (16 * (i % 2)));
}

template <int kTokens>
__device__ inline void StoreTile(const Params& params, const Tile& tile,
                                 const float (&sums)[kTokens / 2], unsigned char* staging,
                                 int warp) {
  const Problem& problem = params.problems[tile.problem];
  const float scale = problem.output_scale;
  const int lane = LaneId();
  const int warpgroup = warp / 4;
  const int thread = (warp % 4) * 32 + lane;
  const int output = tile.output_tile * 128 + warpgroup * 64;
  if (problem.y_is_float) {
    auto* const y = static_cast<float*>(problem.y);
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) {
      const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const int column = output + (warp % 4) * 16 + lane / 4 + i / 2 % 2 * 8;
      if (row < tile.rows && column < problem.n)
        y[(tile.row + row) * problem.y_stride + column] = sums[i] * scale;
    }
    return;
  }
  const int pieces = (tile.rows + kPieceTokens - 1) / kPieceTokens;
#pragma unroll 1
  for (int piece = 0; piece < pieces; ++piece) {
    StagePiece(sums, piece, scale, staging, warp, lane);
    NamedBarrierSync(1 + warpgroup, 128);
#pragma unroll
    for (int i = 0; i < kPieceTokens / 16; ++i) {
      const int row_in_piece = thread / 8 + 16 * i;
      const int row = piece * kPieceTokens + row_in_piece;
      uint4 words = LoadShared16(staging + row_in_piece * kStagingRowBytes + thread % 8 * 16);
      if (problem.quantize_y) {
        float values[8];
        Unpack8(words, values);
        words = Quantize8(values);
      }
      if (row < tile.rows) StoreOutputs(problem, tile.row + row, output + thread % 8 * 8, words);
    }
    NamedBarrierSync(1 + warpgroup, 128);
  }
}

// Rows of `staging` are 32 outputs of gate, then the same of up.
template <int kTokens>
__device__ inline void StoreGatedTile(const Params& params, const Tile& tile,
                                      const float (&sums)[kTokens / 2], unsigned char* staging,
                                      int warp) {
  const Problem& problem = params.problems[tile.problem];
  const float scale = problem.output_scale;
  const int lane = LaneId();
  const int warpgroup = warp / 4;
  const int thread = (warp % 4) * 32 + lane;
  const int output = tile.output_tile * 64 + warpgroup * 32 + thread % 4 * 8;
  const float limit = params.limit;
  const unsigned char* const from = staging + thread / 4 * kStagingRowBytes + thread % 4 * 16;
  const int pieces = (tile.rows + kPieceTokens - 1) / kPieceTokens;
#pragma unroll 1
  for (int piece = 0; piece < pieces; ++piece) {
    const int row = piece * kPieceTokens + thread / 4;
    const float row_weight =
        params.row_weight == nullptr || row >= tile.rows ? 1.0f : params.row_weight[tile.row + row];
    StagePiece(sums, piece, scale, staging, warp, lane);
    NamedBarrierSync(1 + warpgroup, 128);
    float gate[8];
    float up[8];
    Unpack8(LoadShared16(from), gate);
    Unpack8(LoadShared16(from + 64), up);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      // As in ops/moe, to the bit; comparisons that leave NaN as it is.
      const float g = limit < gate[j] ? limit : gate[j];
      const float u = up[j] < -limit ? -limit : limit < up[j] ? limit : up[j];
      const float silu = g / (1.0f + expf(-g));
      const float a = row_weight * (silu * u);
      gate[j] = params.reference_numerics ? Bf16ToFloat(FloatToBf16(a)) : a;
    }
    const uint4 words = Quantize8(gate);
    if (row < tile.rows) StoreOutputs(problem, tile.row + row, output, words);
    NamedBarrierSync(1 + warpgroup, 128);
  }
}

// ---- Consumers -----------------------------------------------------------------------

struct Rings {
  Ring x;
  Ring weights;
  bool lead = true;  // the first stages of the first warpgroup are still to come
};

// The second warpgroup begins when the first one has multiplied two stages (a chunk, if that is
// less), so that the tensor cores have work while either of them stores its tile.
inline constexpr int kLeadBarrier = 1 + kConsumerWarpgroups;

template <int kSize>
__device__ inline void SetZero(float (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) d[i] = 0.0f;
}

// Sums of the segments that have ended: half of them in registers, half in the warpgroup's shared
// memory, which has no other use before the tile is stored.
template <class S, int kTokens>
class Totals {
 public:
  __device__ explicit Totals(int warp)
      : shared_(reinterpret_cast<float4*>(DynamicShared<unsigned char>() + S::kStagingAt +
                                          warp / 4 * S::kStagingBytes) +
                static_cast<int>(threadIdx.x) % 128) {}

  __device__ void Add(const float (&sums)[kTokens / 2]) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) first_[i] = any_ ? first_[i] + sums[i] : sums[i];
#pragma unroll
    for (int i = 0; i < kHalf / 4; ++i) {
      float4 total = {};
      if (any_) total = shared_[128 * i];
      total.x += sums[kHalf + 4 * i];
      total.y += sums[kHalf + 4 * i + 1];
      total.z += sums[kHalf + 4 * i + 2];
      total.w += sums[kHalf + 4 * i + 3];
      shared_[128 * i] = total;
    }
    any_ = true;
  }
  // Adds the totals, if there are any, to the last segment's sums.
  __device__ void AddTo(float (&sums)[kTokens / 2]) const {
    if (any_) {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) sums[i] += first_[i];
#pragma unroll
      for (int i = 0; i < kHalf / 4; ++i) {
        const float4 total = shared_[128 * i];
        sums[kHalf + 4 * i] += total.x;
        sums[kHalf + 4 * i + 1] += total.y;
        sums[kHalf + 4 * i + 2] += total.z;
        sums[kHalf + 4 * i + 3] += total.w;
      }
    }
    // Other threads are about to write rows there.
    NamedBarrierSync(1 + static_cast<int>(threadIdx.x) / 128, 128);
  }

 private:
  static constexpr int kHalf = kTokens / 4;
  float4* shared_;
  float first_[kHalf] = {};
  bool any_ = false;
};

// The place of a segment's sums in the workspace: a tile has room for tile_tokens, parts share it.
// In the order of accumulators, 16 bytes per thread.
template <int kTokens>
__device__ inline float4* SegmentSums(const Params& params, const Tile& tile, int segment,
                                      int warpgroup) {
  constexpr int kWarpgroupVectors = kTokens * 64 / 4;
  const int tile_vectors = params.tile_tokens * 128 / 4;
  return params.segment_sums +
         (static_cast<int64_t>(tile.index) * params.segments + segment) * tile_vectors +
         tile.part * (tile_vectors / tile.parts) + warpgroup * kWarpgroupVectors +
         static_cast<int>(threadIdx.x) % 128;
}

// Leaves the sums of a segment in the workspace. The warpgroup that is the last one of the tile's
// gets the sums of all segments, added in ascending order.
template <class S, int kTokens>
__device__ inline bool JoinSegments(const Params& params, const Tile& tile,
                                    float (&sums)[kTokens / 2], int warp) {
  constexpr int kVectors = kTokens / 8;
  const int warpgroup = warp / 4;
  const int barrier = 1 + warpgroup;
  float4* const mine = SegmentSums<kTokens>(params, tile, tile.segment, warpgroup);
#pragma unroll
  for (int i = 0; i < kVectors; ++i)
    __stcg(mine + 128 * i,
           make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
  __threadfence();
  NamedBarrierSync(barrier, 128);
  int* const is_last =
      reinterpret_cast<int*>(DynamicShared<unsigned char>() + S::kListsAt) + 3 + warpgroup;
  if (threadIdx.x % 128 == 0) {
    int32_t* const arrivals =
        params.arrivals + (tile.index * kMaxParts + tile.part) * kConsumerWarpgroups + warpgroup;
    const bool last = atomicAdd(arrivals, 1) == params.segments - 1;
    if (last) atomicExch(arrivals, 0);  // for the next launch
    *is_last = last ? 1 : 0;
  }
  NamedBarrierSync(barrier, 128);
  if (*is_last == 0) return false;
  __threadfence();
  const float4* from = SegmentSums<kTokens>(params, tile, 0, warpgroup);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const float4 value = __ldcg(from + 128 * i);
    sums[4 * i] = value.x;
    sums[4 * i + 1] = value.y;
    sums[4 * i + 2] = value.z;
    sums[4 * i + 3] = value.w;
  }
  for (int segment = 1; segment < params.segments; ++segment) {
    from = SegmentSums<kTokens>(params, tile, segment, warpgroup);
    constexpr int kBatch = kVectors < 16 ? kVectors : 16;
#pragma unroll
    for (int begin = 0; begin < kVectors; begin += kBatch) {
      float4 values[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (begin + i < kVectors) values[i] = __ldcg(from + 128 * (begin + i));
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (begin + i >= kVectors) continue;
        sums[4 * (begin + i)] += values[i].x;
        sums[4 * (begin + i) + 1] += values[i].y;
        sums[4 * (begin + i) + 2] += values[i].z;
        sums[4 * (begin + i) + 3] += values[i].w;
      }
    }
  }
  return true;
}

// One tile with room for kTokens rows, of which tile.rows exist: what the others are multiplied
// with does not matter.
template <class S, int kTokens>
__device__ __forceinline__ void MultiplyTile(const Params& params, const Tile& tile, int warp,
                                             Rings& rings) {
  const Problem& problem = params.problems[tile.problem];
  const int lane = LaneId();
  const XRing<S> ring(params);
  float sums[kTokens / 2];
  SetZero(sums);
  [[maybe_unused]] Totals<S, kTokens> totals(warp);
  int used_slot = -1;  // the stage before, still being read
  int segment_left = problem.segment_columns;
  const uint64_t first_stage =
      SharedDescriptor(DynamicShared<unsigned char>(), 16, 8 * kRowBytes, Swizzle::k128Bytes);

  for (int column = tile.first_column; column < tile.end_column; column += S::kChunkColumns) {
    BarrierWait(Barriers<S>::WeightsFull(rings.weights.slot), rings.weights.parity);
    const unsigned char* const chunk = WeightSlot<S>(rings.weights.slot) + warp * S::kChunkBytes;
    StageCodes<S::kFormat> codes;
    codes.Load(chunk, lane, 0);
    const auto multiply_stage = [&]<int kStage>() {
      BarrierWait(Barriers<S>::XFull(rings.x.slot), rings.x.parity);
      FenceAsyncProxy();
      const uint64_t x =
          AdvanceDescriptor(first_stage, static_cast<uint32_t>(rings.x.slot * ring.stage_bytes));
      StageCodes<S::kFormat> next;
      const auto multiply_group = [&]<int kGroup>() {
        // Two k16 steps, converted while the group before is multiplied.
        constexpr int kFirst = 2 * kGroup;
        uint32_t a[2][4];
        codes.template Fragment<kFirst>(a[0]);
        codes.template Fragment<kFirst + 1>(a[1]);
        WarpgroupFence();
#pragma unroll
        for (int step = 0; step < 2; ++step)
          WarpgroupMmaRegisters<0>(
              sums, a[step], AdvanceDescriptor(x, static_cast<uint32_t>(32 * (kFirst + step))),
              true);
        WarpgroupCommit();
        // The next stage's codes, a group ahead of their use.
        if constexpr (kGroup == 0 && kStage + 1 < S::kChunkStages)
          next.Load(chunk, lane, kStage + 1);
        WarpgroupWait<1>();
        if constexpr (kGroup == 0) codes.LoadRest(chunk, lane);
        // Everything that reads the stage before has ended.
        if (kGroup == 0 && used_slot >= 0 && lane == 0)
          BarrierArrive(Barriers<S>::XEmpty(used_slot));
      };
      multiply_group.template operator()<0>();
      multiply_group.template operator()<1>();
      if constexpr (kStage + 1 < S::kChunkStages) codes = next;
      used_slot = rings.x.slot;
      rings.x.Advance(ring.stages);
    };
    multiply_stage.template operator()<0>();
    if constexpr (S::kChunkStages >= 2) multiply_stage.template operator()<1>();
    if (rings.lead) {
      rings.lead = false;
      if (warp < 4) NamedBarrierArrive(kLeadBarrier, 32 * kConsumerWarps);
    }
    if constexpr (S::kChunkStages >= 4) {
      multiply_stage.template operator()<2>();
      multiply_stage.template operator()<3>();
    }
    __syncwarp();
    if (lane == 0) BarrierArrive(Barriers<S>::WeightsEmpty(rings.weights.slot));
    rings.weights.Advance(S::kChunkSlots);
    if constexpr (S::kTotals) {
      segment_left -= S::kChunkColumns;
      if (segment_left <= 0 && column + S::kChunkColumns < tile.end_column) {
        segment_left = problem.segment_columns;
        WarpgroupWait<0>();
        WarpgroupFenceRegisters(sums);
        totals.Add(sums);
        SetZero(sums);
      }
    }
  }
  WarpgroupWait<0>();
  WarpgroupFenceRegisters(sums);
  if (lane == 0) BarrierArrive(Barriers<S>::XEmpty(used_slot));
  if constexpr (S::kTotals) {
    totals.AddTo(sums);
  } else if (params.segments > 1) {
    if (!JoinSegments<S, kTokens>(params, tile, sums, warp)) return;
  }
  unsigned char* const staging =
      DynamicShared<unsigned char>() + S::kStagingAt + warp / 4 * S::kStagingBytes;
  if constexpr (S::kGated) {
    StoreGatedTile<kTokens>(params, tile, sums, staging, warp);
  } else {
    StoreTile<kTokens>(params, tile, sums, staging, warp);
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1)
    PrefillKernel(const __grid_constant__ Params params) {
  if (threadIdx.x == 0) Barriers<S>::Init();
  WaitForPreviousKernel();
  AllowNextKernel();  // its blocks take the room of those that have ended
  TileList<S>::Build(params);
  const int warp = UniformWarpId();
  // 168 registers per thread at the launch: 2 * 232 + 40 of three times that.
  if (warp >= kConsumerWarps) {
    DecreaseRegisters<40>();
    Produce<S>(params);
  } else {
    IncreaseRegisters<232>();
    Rings rings;
    const int rounds = TileList<S>::Rounds();
    for (int round = 0; round < rounds; ++round) {
      const Tile tile = TileList<S>::At(params, round);
      if (tile.rows <= 0) continue;
      if (rings.lead && warp >= 4) NamedBarrierSync(kLeadBarrier, 32 * kConsumerWarps);
      if (tile.rows <= 64) {
        MultiplyTile<S, 64>(params, tile, warp, rings);
      } else if (tile.rows <= 128) {
        MultiplyTile<S, 128>(params, tile, warp, rings);
      } else if (tile.rows <= 192) {
        MultiplyTile<S, 192>(params, tile, warp, rings);
      } else if constexpr (S::kTokens > 192) {
        MultiplyTile<S, 256>(params, tile, warp, rings);
      }
    }
  }
}

// ---- Launches ------------------------------------------------------------------------

// One launch, of the kernel with totals (`chained`) or without; instantiated per format in
// linear_prefill_*.cu.
template <WeightFormat kFormat>
Status LaunchPrefillKernel(bool gated, bool chained, const Params& params, Stream& stream);
template <>
Status LaunchPrefillKernel<WeightFormat::kBf16>(bool gated, bool chained, const Params& params,
                                                Stream& stream);
template <>
Status LaunchPrefillKernel<WeightFormat::kFp8Block>(bool gated, bool chained, const Params& params,
                                                    Stream& stream);
template <>
Status LaunchPrefillKernel<WeightFormat::kFp4Group>(bool gated, bool chained, const Params& params,
                                                    Stream& stream);

template <class S>
Status LaunchShape(const Params& params, Stream& stream) {
  return Launch(S::kGated ? "PrefillGatedLinear" : "PrefillLinear", &PrefillKernel<S>,
                {.grid = {static_cast<uint32_t>(stream.sm_count() > 1 ? stream.sm_count() : 1)},
                 .block = kThreads,
                 .shared_bytes = S::SharedBytes(params.units),
                 .overlap_previous = true},
                stream, params);
}

}  // namespace deepinfer::cuda::prefill
