// The kernel of linear_prefill.h.
//
// Bound: tensor cores. A tile of 256 outputs x 128 rows of x (tokens) takes 2 * 256 * 128 FLOPs per
// column and moves 256 * (0.53 FP4 | 1.03 FP8) + 128 * 2 bytes from the L2: 170 or 126 FLOPs per
// byte, where the chip has about 140 FLOPs per byte of L2 bandwidth.
//
// Weights are the A operand in registers and tokens its N, so that 4- and 8-bit codes become bf16
// in the registers of the lane that multiplies them: the packed layout (cuda_pack.h) is in the
// order of fragments. A block has three warpgroups:
//
//   Two of consumers, 128 outputs each, as two blocks of 64. A warp owns one strip of 16 outputs of
//   each block, and copies the strips itself, a chunk of four units at a time, by bulk copies into
//   a ring that nobody else uses: it knows when a chunk has been read, so there is no barrier for
//   that, and the ring runs ahead into the next tile. Every k16 step is a wgmma group of its own: a
//   warpgroup converts the next step's fragment while up to three earlier ones are queued. The
//   second warpgroup runs a chunk behind the first one, so that one multiplies while the other
//   stores its tile or adds a segment.
//
//   One of producers, which copies rows of x in pieces of 16 bytes, gathered by row_index, into a
//   ring of stages of 64 columns in the 128-byte swizzle.
//
// Blocks are persistent, one per multiprocessor, and take tiles in order: tokens first, so that
// tiles that run at the same time share weights in the L2, in bands of 16 token tiles whose x stays
// there too. The rows of a unit (a group, or all) are cut into about equal tiles, which run as 64,
// 96 or 128 columns of the instruction. When the last round of tiles would fill at most half of the
// blocks, its tiles are halved along the tokens.
//
// Measured before: four steps converted, then four issued, and stages announced only when the ring
// had wrapped around, reached 517 TFLOP/s with FP4 at 1536 rows per expert, gate and up, where
// cuBLASLt's bf16 product had 819 (H200, December 2026).
//
// Weights whose K has several segments keep totals beside the accumulators, of one block of outputs
// in registers and of the other one in shared memory; that leaves room for 96 tokens. All totals in
// registers spill 40 of them; all in shared memory cost too many stages, or twice the traffic at
// the end of a segment, of which some have 512 columns.
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
inline constexpr int kBlocks = 2;  // of 64 outputs per warpgroup
inline constexpr int kStageColumns = 64;
inline constexpr int kRowBytes = 2 * kStageColumns;  // of a stage
inline constexpr int kBandTokenTiles = 16;
inline constexpr int kMaxProblems = 16;
// A row of 64 outputs in shared memory on the way to y; the padding spreads rows over the banks.
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
  int tile_tokens = 0;  // the most per tile, at most those of the kernel's shape
  // Groups of problem 0; null: every problem is a unit of its own.
  const int32_t* group_offsets = nullptr;
  const int32_t* row_index = nullptr;
  // Gated kernels.
  const float* row_weight = nullptr;
  float limit = 0.0f;
  bool reference_numerics = false;
};

// What a consumer warp has to know to issue copies of weights: kept in shared memory, because
// registers are scarce and only one lane needs it.
struct WeightCursor {
  const uint8_t* next[kBlocks];  // chunk
  int columns_left;              // of the tile that is being copied
  int round;                     // of the tile after it
};

template <WeightFormat kFormatOf, bool kGatedOf, bool kTotalsOf>
struct Shape {
  static constexpr WeightFormat kFormat = kFormatOf;
  static constexpr bool kGated = kGatedOf;
  static constexpr bool kTotals = kTotalsOf;
  static constexpr int kTokens = kTotals ? 96 : 128;
  // k16 steps of a warpgroup whose fragments may still be read while it converts the next one.
  static constexpr int kStepsInFlight = kTotals ? 2 : 3;
  // Outputs of y per tile.
  static constexpr int kTileOutputs = kGated ? 128 : 256;
  // Four units of a strip and their scales.
  static constexpr int kChunkBytes = static_cast<int>(CudaChunkBytes(kFormat));
  static constexpr int kChunkColumns = static_cast<int>(CudaChunkColumns(kFormat));
  static constexpr int kChunkSlots = kFormat == WeightFormat::kFp4Group ? 2 : 3;
  static constexpr int kStageBytes = kTokens * kRowBytes;
  static constexpr int kStages = kTotals ? 6 : (kFormat == WeightFormat::kFp4Group ? 7 : 5);
  // Of a warpgroup: rows on the way to y, and until then totals of its second block.
  static constexpr int kStagingBytes = kTotals ? kTokens * 64 * 4 : kTokens * kStagingRowBytes;

  // Shared memory, in this order: stages of x, chunks of weights, staging, and what follows.
  static constexpr int kWeightsAt = kStages * kStageBytes;
  static constexpr int kStagingAt =
      kWeightsAt + kConsumerWarps * kChunkSlots * kBlocks * kChunkBytes;
  static constexpr int kBarriersAt = kStagingAt + kConsumerWarpgroups * kStagingBytes;
  static constexpr int kCursorsAt = kBarriersAt + 8 * (2 * kStages + kConsumerWarps * kChunkSlots);
  static constexpr int kListsAt =
      kCursorsAt + kConsumerWarps * static_cast<int>(sizeof(WeightCursor));
  static constexpr int SharedBytes(int units) {
    return kListsAt + 4 * (3 + 3 * units);
  }
};

// ---- Tiles ---------------------------------------------------------------------------

struct Tile {
  int problem;
  int unit;
  int row;   // first one, of y
  int rows;  // none: nothing to do
  int output_tile;
};

// The tiles of all units: lists in shared memory.
template <class S>
class TileList {
 public:
  // By all threads of the block.
  __device__ static void Build(const Params& params) {
    int* const tiles = Lists() + 2;
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
        const int blocks = static_cast<int>(gridDim.x);
        const int rest = before % blocks;
        const int whole = 2 * rest <= blocks ? before - rest : before;
        Lists()[0] = whole + 2 * (before - whole);
        Lists()[1] = whole;
        tiles[0] = 0;
      }
    }
    __syncthreads();
  }

  // Tiles per block, those without rows included.
  __device__ static int Rounds() {
    return (Lists()[0] + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  }
  // The block's tile of a round. Blocks move by one from round to round, so that a pattern of large
  // and small tiles (a group of one and a half, say) does not give some blocks all the large ones.
  __device__ static Tile At(const Params& params, int round) {
    const int blocks = static_cast<int>(gridDim.x);
    const int index = round * blocks + (static_cast<int>(blockIdx.x) + round) % blocks;
    if (index >= Lists()[0]) return {};
    const int whole = Lists()[1];
    const int* const tiles = Lists() + 2;
    const bool halved = index >= whole;
    const int tile = halved ? whole + (index - whole) / 2 : index;
    int low = 0;
    int high = params.units;  // tiles[low] <= tile < tiles[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (tiles[middle] <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    Tile result;
    result.unit = low;
    result.problem = params.group_offsets != nullptr ? 0 : low;
    const int unit_rows = Rows(params, low);
    const int tile_rows = TileRows(params, unit_rows);
    const int output_tiles = OutputTiles(params, result.problem);
    const int in_unit = tile - tiles[low];
    const int band = in_unit / (kBandTokenTiles * output_tiles);
    const int in_band = in_unit - band * kBandTokenTiles * output_tiles;
    const int band_tiles =
        min(kBandTokenTiles, TokenTiles(params, unit_rows) - band * kBandTokenTiles);
    result.output_tile = in_band / band_tiles;
    int first = (band * kBandTokenTiles + in_band - result.output_tile * band_tiles) * tile_rows;
    int rows = min(tile_rows, unit_rows - first);
    if (halved) {
      const bool second = ((index - whole) & 1) != 0;
      const int half = tile_rows / 2;
      first += second ? half : 0;
      rows = second ? rows - half : min(rows, half);
    }
    result.row = FirstRow(params, low) + first;
    result.rows = rows;
    return result;
  }

 private:
  // Tiles to take, tiles that are not halved; tiles before each unit and all, each unit's first
  // row, and its rows.
  __device__ static int* Lists() {
    return reinterpret_cast<int*>(DynamicShared<unsigned char>() + S::kListsAt);
  }
  __device__ static int& FirstRow(const Params& params, int unit) {
    return Lists()[3 + params.units + unit];
  }
  __device__ static int& Rows(const Params& params, int unit) {
    return Lists()[3 + 2 * params.units + unit];
  }
  // Tiles of a unit are about equal, a multiple of 32 rows each.
  __device__ static int TileRows(const Params& params, int rows) {
    const int tiles = (rows + params.tile_tokens - 1) / params.tile_tokens;
    if (tiles <= 1) return params.tile_tokens;
    return min(params.tile_tokens, ((rows + tiles - 1) / tiles + 31) / 32 * 32);
  }
  __device__ static int TokenTiles(const Params& params, int rows) {
    const int tile_rows = TileRows(params, rows);
    return (rows + tile_rows - 1) / tile_rows;
  }
  __device__ static int OutputTiles(const Params& params, int problem) {
    return (params.problems[problem].n + S::kTileOutputs - 1) / S::kTileOutputs;
  }
};

// ---- Barriers -------------------------------------------------------------------------

struct Ring {
  int slot = 0;
  uint32_t parity = 0;
  template <int kSlots>
  __device__ void Advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1u;
    }
  }
};

template <class S>
struct Barriers {
  // Full: an arrival per producer warp. Empty: one per consumer warp.
  __device__ static Barrier* XFull(int slot) {
    return At(slot);
  }
  __device__ static Barrier* XEmpty(int slot) {
    return At(S::kStages + slot);
  }
  __device__ static Barrier* WeightsFull(int warp, int slot) {
    return At(2 * S::kStages + warp * S::kChunkSlots + slot);
  }
  __device__ static void Init() {
    for (int slot = 0; slot < S::kStages; ++slot) {
      BarrierInit(XFull(slot), 4);
      BarrierInit(XEmpty(slot), kConsumerWarps);
    }
    for (int warp = 0; warp < kConsumerWarps; ++warp)
      for (int slot = 0; slot < S::kChunkSlots; ++slot) BarrierInit(WeightsFull(warp, slot), 1);
    FenceBarrierInit();
  }

 private:
  __device__ static Barrier* At(int index) {
    return reinterpret_cast<Barrier*>(DynamicShared<unsigned char>() + S::kBarriersAt) + index;
  }
};

// ---- Producers -----------------------------------------------------------------------

template <class S>
__device__ inline void CopyRows(const Params& params) {
  // A thread copies one piece of every 16th row; the swizzle is the same for all of them.
  constexpr int kSteps = S::kTokens / 16;
  // Stages under way beside the one being issued. They cover the latency of the L2; more would hold
  // back stages that have landed: one is announced when the slot of the stage kLag after it is
  // free, and so a warpgroup can be kStages - kLag - 1 stages ahead of the other one, which is what
  // lets it multiply while that one stores its tile or the producers look up the next one.
  constexpr int kLag = 2;
  // Without anything consumed, kStages - kLag stages are announced: one warpgroup's lead.
  static_assert(S::kChunkColumns / kStageColumns <= S::kStages - kLag);
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int piece = thread % 8;
  const int first_row = thread / 8;
  unsigned char* const target =
      DynamicShared<unsigned char>() + first_row * kRowBytes + ((piece ^ (first_row % 8)) * 16);
  Ring ring;
  int issued = 0;
  int landed_slot = 0;
  // Copies of the oldest stage have landed: tell the consumers.
  const auto arrive = [&] {
    FenceAsyncProxy();
    __syncwarp();
    if (LaneId() == 0) BarrierArrive(Barriers<S>::XFull(landed_slot));
    landed_slot = landed_slot + 1 == S::kStages ? 0 : landed_slot + 1;
  };
  const int rounds = TileList<S>::Rounds();
  for (int round = 0; round < rounds; ++round) {
    const Tile tile = TileList<S>::At(params, round);
    if (tile.rows <= 0) continue;
    const Problem& problem = params.problems[tile.problem];
    uint32_t offsets[kSteps];  // of rows in pieces of 16 bytes
    const auto stride = static_cast<uint32_t>(problem.x_stride / 8);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = tile.row + min(first_row + 16 * i, tile.rows - 1);
      const int x_row = params.row_index == nullptr ? row : params.row_index[row];
      offsets[i] = static_cast<uint32_t>(x_row) * stride + static_cast<uint32_t>(piece);
    }
    const int steps = (tile.rows - first_row + 15) / 16;
    const auto* column = reinterpret_cast<const unsigned char*>(problem.x);
    for (int k = 0; k < problem.padded_k; k += kStageColumns) {
      BarrierWait(Barriers<S>::XEmpty(ring.slot), ring.parity ^ 1u);
      unsigned char* const stage = target + ring.slot * S::kStageBytes;
      const bool inside = k + 8 * piece < problem.k;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (i < steps) {
          const unsigned char* source = column + static_cast<uint64_t>(offsets[i]) * 16u;
          // Columns beyond k are zero; the address must be readable all the same.
          CopyAsync16OrZero(stage + i * 16 * kRowBytes,
                            inside ? source : reinterpret_cast<const unsigned char*>(problem.x),
                            inside);
        }
      }
      CommitCopies();
      column += kRowBytes;
      ring.Advance<S::kStages>();
      if (++issued > kLag) {
        WaitCopies<kLag>();
        arrive();
      }
    }
  }
  WaitCopies<0>();
  for (int i = min(issued, kLag); i > 0; --i) arrive();
}

// ---- Weights -------------------------------------------------------------------------

// The two strips of each consumer warp, a chunk of both at a time, ahead of their use.
template <class S>
class WeightStream {
 public:
  // By each consumer warp.
  __device__ static void Begin(const Params& params, int warp) {
    if (LaneId() == 0) {
      WeightCursor& cursor = Cursor(warp);
      cursor.columns_left = 0;
      cursor.round = 0;
    }
    for (int slot = 0; slot < S::kChunkSlots; ++slot) Issue(params, warp, slot);
  }

  // The chunk that was issued longest ago.
  __device__ static const unsigned char* Wait(int warp, const Ring& ring) {
    BarrierWait(Barriers<S>::WeightsFull(warp, ring.slot), ring.parity);
    return Slot(warp, ring.slot);
  }

  // Copies the next chunk into a slot that all lanes have read.
  __device__ static void Issue(const Params& params, int warp, int slot) {
    if (LaneId() != 0) return;
    WeightCursor& cursor = Cursor(warp);
    if (cursor.columns_left <= 0 && !NextTile(params, warp, cursor)) return;
    Barrier* const full = Barriers<S>::WeightsFull(warp, slot);
    BarrierArriveExpect(full, kBlocks * S::kChunkBytes);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      BulkCopy(Slot(warp, slot) + block * S::kChunkBytes, cursor.next[block], S::kChunkBytes, full);
      cursor.next[block] += S::kChunkBytes;
    }
    cursor.columns_left -= S::kChunkColumns;
  }

 private:
  __device__ static bool NextTile(const Params& params, int warp, WeightCursor& cursor) {
    const int rounds = TileList<S>::Rounds();
    Tile tile = {};
    while (tile.rows <= 0 && cursor.round < rounds) tile = TileList<S>::At(params, cursor.round++);
    if (tile.rows <= 0) return false;
    const Problem& problem = params.problems[tile.problem];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const uint8_t* weight = S::kGated && block == 1 ? problem.up_weight : problem.weight;
      if (params.group_offsets != nullptr) weight += problem.weight_stride * tile.unit;
      const int first = S::kGated ? tile.output_tile * 8 + warp / 4 * 4
                                  : tile.output_tile * 16 + warp / 4 * 8 + block * 4;
      // Beyond the last output: any strip, not stored.
      const int strip = min(first + warp % 4, problem.strips - 1);
      cursor.next[block] = weight + problem.strip_bytes * strip;
    }
    cursor.columns_left = problem.padded_k;
    return true;
  }
  __device__ static WeightCursor& Cursor(int warp) {
    return reinterpret_cast<WeightCursor*>(DynamicShared<unsigned char>() + S::kCursorsAt)[warp];
  }
  __device__ static unsigned char* Slot(int warp, int slot) {
    return DynamicShared<unsigned char>() + S::kWeightsAt +
           (warp * S::kChunkSlots + slot) * kBlocks * S::kChunkBytes;
  }
};

// ---- Fragments ------------------------------------------------------------------------

__device__ inline uint4 LoadShared16(const unsigned char* shared) {
  return *reinterpret_cast<const uint4*>(shared);
}
// What a lane needs of a block's stage (64 columns of a chunk) for its four k16 steps.
template <WeightFormat kFormat, int kStage>
class StageCodes {
 public:
  __device__ StageCodes(const unsigned char* chunk, int lane) {
    if constexpr (kFormat == WeightFormat::kFp4Group) {
      words_[0] = LoadShared16(chunk + 512 * kStage + 16 * lane);
      scales_ = *reinterpret_cast<const uint32_t*>(chunk + 2048 + 16 * (lane / 4) + 4 * kStage);
    } else if constexpr (kFormat == WeightFormat::kFp8Block) {
#pragma unroll
      for (int unit = 0; unit < 2; ++unit)
        words_[unit] = LoadShared16(chunk + 512 * (2 * kStage + unit) + 16 * lane);
      fp8_scales_ = *reinterpret_cast<const uint2*>(chunk + 2048 + 8 * kStage);
    } else {
#pragma unroll
      for (int step = 0; step < 4; ++step)
        words_[step] = LoadShared16(chunk + 512 * step + 16 * lane);
    }
  }

  template <int kStep>
  __device__ void Fragment(uint32_t (&a)[4]) const {
    if constexpr (kFormat == WeightFormat::kFp4Group) {
      ConvertFp4<kStep % 2>(kStep < 2 ? words_[0].x : words_[0].z,
                            kStep < 2 ? words_[0].y : words_[0].w, Fp4Scales<kStep / 2>(scales_),
                            a);
    } else if constexpr (kFormat == WeightFormat::kFp8Block) {
      const uint4 words = words_[kStep / 2];
      ConvertFp8(kStep % 2 == 0 ? words.x : words.z, kStep % 2 == 0 ? words.y : words.w,
                 kStep / 2 == 0 ? fp8_scales_.x : fp8_scales_.y, a);
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
  uint4 words_[kWords];
  uint32_t scales_ = 0;        // FP4: of the stage's unit
  uint2 fp8_scales_ = {0, 0};  // of its two units
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

// Accumulators of tokens [kFirst, kFirst + kCount) of a block of 64 outputs, rounded to bf16, as
// rows of tokens in `staging`. A warp writes its 16 outputs.
template <int kFirst, int kCount, int kSize>
__device__ inline void StageTransposed(const float (&d)[kSize], float scale, unsigned char* staging,
                                       int warp, int lane) {
  unsigned char* const target =
      staging + (lane / 16 * 8 + lane % 8) * kStagingRowBytes + (warp % 4) * 32 + lane / 8 % 2 * 16;
#pragma unroll
  for (int j = 0; j < kCount / 16; ++j) {
    const float* const from = &d[kFirst / 2 + 8 * j];
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
                                 const float (&sums)[kBlocks][kTokens / 2], unsigned char* staging,
                                 int warp) {
  const Problem& problem = params.problems[tile.problem];
  const float scale = problem.output_scale;
  const int lane = LaneId();
  const int warpgroup = warp / 4;
  const int thread = (warp % 4) * 32 + lane;
  const int piece = thread % 8;
  const int first = thread / 8;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const int output = tile.output_tile * 256 + warpgroup * 128 + block * 64;
    if (problem.y_is_float) {
      auto* const y = static_cast<float*>(problem.y);
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) {
        const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
        const int column = output + (warp % 4) * 16 + lane / 4 + i / 2 % 2 * 8;
        if (row < tile.rows && column < problem.n)
          y[(tile.row + row) * problem.y_stride + column] = sums[block][i] * scale;
      }
      continue;
    }
    StageTransposed<0, kTokens>(sums[block], scale, staging, warp, lane);
    NamedBarrierSync(1 + warpgroup, 128);
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) {
      const int row = first + 16 * i;
      uint4 words = LoadShared16(staging + row * kStagingRowBytes + piece * 16);
      if (problem.quantize_y) {
        float values[8];
        Unpack8(words, values);
        words = Quantize8(values);
      }
      if (row < tile.rows) StoreOutputs(problem, tile.row + row, output + 8 * piece, words);
    }
    NamedBarrierSync(1 + warpgroup, 128);
  }
}

template <int kTokens>
__device__ inline void StoreGatedTile(const Params& params, const Tile& tile,
                                      const float (&sums)[kBlocks][kTokens / 2],
                                      unsigned char* staging, int warp) {
  constexpr int kHalf = kTokens / 2;
  const Problem& problem = params.problems[tile.problem];
  const float scale = problem.output_scale;
  const int lane = LaneId();
  const int warpgroup = warp / 4;
  const int thread = (warp % 4) * 32 + lane;
  const int piece = thread % 8;
  const int first = thread / 8;
  const int output = tile.output_tile * 128 + warpgroup * 64 + 8 * piece;
  const auto store_half = [&](int half) {
    NamedBarrierSync(1 + warpgroup, 128);
#pragma unroll
    for (int i = 0; i < kHalf / 16; ++i) {
      const unsigned char* const from = staging + (first + 16 * i) * kStagingRowBytes + piece * 16;
      float gate[8];
      float up[8];
      Unpack8(LoadShared16(from), gate);
      Unpack8(LoadShared16(from + kHalf * kStagingRowBytes), up);
      const int row = half * kHalf + first + 16 * i;
      const float row_weight = params.row_weight == nullptr || row >= tile.rows
                                   ? 1.0f
                                   : params.row_weight[tile.row + row];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        // As in ops/moe, to the bit; comparisons that leave NaN as it is.
        const float limit = params.limit;
        const float g = limit < gate[j] ? limit : gate[j];
        const float u = up[j] < -limit ? -limit : limit < up[j] ? limit : up[j];
        const float silu = g / (1.0f + expf(-g));
        const float a = row_weight * (silu * u);
        gate[j] = params.reference_numerics ? Bf16ToFloat(FloatToBf16(a)) : a;
      }
      const uint4 words = Quantize8(gate);
      if (row < tile.rows) StoreOutputs(problem, tile.row + row, output, words);
    }
    NamedBarrierSync(1 + warpgroup, 128);
  };
  StageTransposed<0, kHalf>(sums[0], scale, staging, warp, lane);
  StageTransposed<0, kHalf>(sums[1], scale, staging + kHalf * kStagingRowBytes, warp, lane);
  store_half(0);
  StageTransposed<kHalf, kHalf>(sums[0], scale, staging, warp, lane);
  StageTransposed<kHalf, kHalf>(sums[1], scale, staging + kHalf * kStagingRowBytes, warp, lane);
  store_half(1);
}

// ---- Consumers -----------------------------------------------------------------------

struct Rings {
  Ring x;
  Ring weights;
  bool lead = true;  // the first chunk of the first warpgroup is still to come
};

// The second warpgroup begins when the first one has multiplied a chunk, and stays that far behind:
// so the tensor cores have work while either of them stores its tile. The ring has announced as
// many stages by then.
inline constexpr int kLeadBarrier = 1 + kConsumerWarpgroups;

template <int kSize>
__device__ inline void SetZero(float (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) d[i] = 0.0f;
}

// Sums of the segments that have ended: of the first block in registers, of the second one in the
// warpgroup's shared memory, which has no other use before the tile is stored.
template <class S, int kTokens>
class Totals {
 public:
  __device__ explicit Totals(int warp)
      : shared_(reinterpret_cast<float4*>(DynamicShared<unsigned char>() + S::kStagingAt +
                                          warp / 4 * S::kStagingBytes) +
                static_cast<int>(threadIdx.x) % 128) {}

  __device__ void Add(const float (&sums)[kBlocks][kTokens / 2]) {
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) first_[i] = any_ ? first_[i] + sums[0][i] : sums[0][i];
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
      float4 total = {};
      if (any_) total = shared_[128 * i];
      total.x += sums[1][4 * i];
      total.y += sums[1][4 * i + 1];
      total.z += sums[1][4 * i + 2];
      total.w += sums[1][4 * i + 3];
      shared_[128 * i] = total;
    }
    any_ = true;
  }
  // Adds the totals, if there are any, to the last segment's sums.
  __device__ void AddTo(float (&sums)[kBlocks][kTokens / 2]) const {
    if (any_) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) sums[0][i] += first_[i];
#pragma unroll
      for (int i = 0; i < kTokens / 8; ++i) {
        const float4 total = shared_[128 * i];
        sums[1][4 * i] += total.x;
        sums[1][4 * i + 1] += total.y;
        sums[1][4 * i + 2] += total.z;
        sums[1][4 * i + 3] += total.w;
      }
    }
    // Other threads are about to write rows there.
    NamedBarrierSync(1 + static_cast<int>(threadIdx.x) / 128, 128);
  }

 private:
  float4* shared_;
  float first_[kTokens / 2] = {};
  bool any_ = false;
};

// One tile with room for kTokens rows, of which tile.rows exist: what the others are multiplied
// with does not matter.
template <class S, int kTokens>
__device__ __forceinline__ void MultiplyTile(const Params& params, const Tile& tile, int warp,
                                             Rings& rings) {
  const Problem& problem = params.problems[tile.problem];
  const int lane = LaneId();
  float sums[kBlocks][kTokens / 2];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) SetZero(sums[block]);
  [[maybe_unused]] Totals<S, kTokens> totals(warp);
  int used_slot = -1;  // the stage before, still being read
  int segment_left = problem.segment_columns;
  const uint64_t first_stage =
      SharedDescriptor(DynamicShared<unsigned char>(), 16, 8 * kRowBytes, Swizzle::k128Bytes);

  for (int column = 0; column < problem.padded_k; column += S::kChunkColumns) {
    const unsigned char* const chunk = WeightStream<S>::Wait(warp, rings.weights);
    const auto multiply_stage = [&]<int kStage>() {
      BarrierWait(Barriers<S>::XFull(rings.x.slot), rings.x.parity);
      const uint64_t x =
          AdvanceDescriptor(first_stage, static_cast<uint32_t>(rings.x.slot * S::kStageBytes));
      const auto multiply_block = [&]<int kBlock>() {
        const StageCodes<S::kFormat, kStage> codes(chunk + kBlock * S::kChunkBytes, lane);
        const auto multiply_step = [&]<int kStep>() {
          uint32_t a[4];
          codes.template Fragment<kStep>(a);
          WarpgroupFence();
          WarpgroupMmaRegisters<0>(sums[kBlock], a,
                                   AdvanceDescriptor(x, static_cast<uint32_t>(32 * kStep)), true);
          WarpgroupCommit();
          WarpgroupWait<S::kStepsInFlight>();
          // Everything that reads the stage before has ended.
          if (kBlock == 0 && kStep == S::kStepsInFlight - 1 && used_slot >= 0 && lane == 0)
            BarrierArrive(Barriers<S>::XEmpty(used_slot));
        };
        multiply_step.template operator()<0>();
        multiply_step.template operator()<1>();
        multiply_step.template operator()<2>();
        multiply_step.template operator()<3>();
      };
      multiply_block.template operator()<0>();
      multiply_block.template operator()<1>();
      used_slot = rings.x.slot;
      rings.x.template Advance<S::kStages>();
    };
    multiply_stage.template operator()<0>();
    if constexpr (S::kChunkColumns >= 128) multiply_stage.template operator()<1>();
    if constexpr (S::kChunkColumns >= 256) {
      multiply_stage.template operator()<2>();
      multiply_stage.template operator()<3>();
    }
    if (rings.lead) {
      rings.lead = false;
      if (warp < 4) NamedBarrierArrive(kLeadBarrier, 32 * kConsumerWarps);
    }
    __syncwarp();
    WeightStream<S>::Issue(params, warp, rings.weights.slot);
    rings.weights.template Advance<S::kChunkSlots>();
    if constexpr (S::kTotals) {
      segment_left -= S::kChunkColumns;
      if (segment_left <= 0 && column + S::kChunkColumns < problem.padded_k) {
        segment_left = problem.segment_columns;
        WarpgroupWait<0>();
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) WarpgroupFenceRegisters(sums[block]);
        totals.Add(sums);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) SetZero(sums[block]);
      }
    }
  }
  WarpgroupWait<0>();
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) WarpgroupFenceRegisters(sums[block]);
  if (lane == 0) BarrierArrive(Barriers<S>::XEmpty(used_slot));
  if constexpr (S::kTotals) totals.AddTo(sums);
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
  TileList<S>::Build(params);
  const int warp = UniformWarpId();
  if (warp >= kConsumerWarps) {
    DecreaseRegisters<24>();
    CopyRows<S>(params);
  } else {
    IncreaseRegisters<240>();
    WeightStream<S>::Begin(params, warp);
    Rings rings;
    const int rounds = TileList<S>::Rounds();
    for (int round = 0; round < rounds; ++round) {
      const Tile tile = TileList<S>::At(params, round);
      if (tile.rows <= 0) continue;
      if (rings.lead && warp >= 4) NamedBarrierSync(kLeadBarrier, 32 * kConsumerWarps);
      if (tile.rows <= 64) {
        MultiplyTile<S, 64>(params, tile, warp, rings);
      } else if (tile.rows <= 96) {
        MultiplyTile<S, 96>(params, tile, warp, rings);
      } else if constexpr (S::kTokens > 96) {
        MultiplyTile<S, S::kTokens>(params, tile, warp, rings);
      }
    }
  }
}

}  // namespace deepinfer::cuda::prefill
