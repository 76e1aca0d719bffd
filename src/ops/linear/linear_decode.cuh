// The kernel for linears with few rows per weight. It is bound by the weights' bytes, as long as a
// multiprocessor has the instructions to convert codes to bf16 and multiply them while the bytes
// arrive: at full speed it gets 17 bytes and issues four instructions per clock, 125 for the 1,024
// FP4 codes of a unit, of which half may be integer or logic; 59 are used, see linear_convert.cuh.
//
// A block has eight warps that multiply and one that copies x. It takes items: some neighbouring
// strips of 16 outputs, up to 16 rows. Each warp walks one strip (and segment of K) as a sequential
// stream: one lane copies chunks of 2 KB with their scales into the warp's ring in shared memory
// (bulk copies, several under way per warp), all lanes read their fragments from there (16 bytes
// per lane and unit), convert them and multiply them with x (mma.sync, weights are A). The ring
// runs ahead over the ends of segments and items, so that the memory never waits for an epilogue;
// before the kernel in front has ended it already loads the first weights. The warp for x runs
// ahead as well, through a ring of stages that all warps read, each as long as a chunk; it works
// out where its pieces are before the loop, because a single warp is easily slower than the eight
// that multiply. Nothing in the loop over K waits for the whole block. With more than eight rows of
// FP4 x would be most of what shared memory delivers, so a warp walks two strips that use the same
// fragments of x.
//
// Outputs that one warp has alone are stored from its registers. Others (several segments, gate and
// up, groups that are quantised) meet in shared memory.
//
// Numbers: a segment's sum takes k16 steps in ascending order from zero; sums of segments are added
// in ascending order. So a row's bits do not depend on other rows, nor on how items and segments
// are distributed over warps.
#pragma once

#include <algorithm>
#include <type_traits>

#include "device.cuh"
#include "ops/linear/cuda_layout.h"
#include "ops/linear/linear_convert.cuh"
#include "ops/linear/linear_decode.h"
#include "ops/quantize/group_quantize.cuh"

namespace deepinfer::cuda {

inline constexpr int kBlockWarps = kDecodeWarps + 1;
inline constexpr int kBlockThreads = 32 * kBlockWarps;

// A stage of the ring and of x: four units.
template <WeightFormat kFormat>
inline constexpr int kStageColumns = static_cast<int>(CudaChunkColumns(kFormat));
template <WeightFormat kFormat>
inline constexpr int kChunkBytes = static_cast<int>(CudaChunkBytes(kFormat));
// Rows of x are 16 bytes more apart than they are long, so that the eight rows that ldmatrix reads
// at a time are in different banks.
template <WeightFormat kFormat>
inline constexpr int kXPitch = DecodeXPitch(kFormat);

// Places for rows of x in a stage: of eight rows those that exist, to save memory.
__device__ inline int RowPlaces(int rows) {
  return rows <= 8 ? rows : 16;
}

// What a block works on.
struct DecodeItem {
  int problem = 0;
  int group = 0;
  int strip_block = 0;
  int first_row = 0;  // of y
  int rows = 0;
};

// Groups that have rows, in shared memory: lists of capacity groups + 1, with the end behind the
// last one. In registers only what the loops over items need.
struct GroupTable {
  const int* first_item = nullptr;
  int count = 0;
  __device__ const int* Group(const DecodeWork& work) const {
    return first_item + work.groups + 1;
  }
  __device__ const int* FirstRow(const DecodeWork& work) const {
    return first_item + 2 * (work.groups + 1);
  }
};

__device__ inline DecodeItem FindItem(const DecodeWork& work, const GroupTable& table, int item) {
  DecodeItem found;
  int first_item = 0;
  int first_row = 0;
  int end_row = 0;
  if (work.groups > 0) {
    int low = 0;
    int high = table.count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (table.first_item[middle] <= item) {
        low = middle;
      } else {
        high = middle;
      }
    }
    found.group = table.Group(work)[low];
    first_item = table.first_item[low];
    first_row = table.FirstRow(work)[low];
    end_row = table.FirstRow(work)[low + 1];
  } else {
    while (found.problem + 1 < work.num_problems &&
           work.problems[found.problem + 1].first_item <= item)
      ++found.problem;
    first_item = work.problems[found.problem].first_item;
    end_row = work.problems[found.problem].rows;
  }
  // Blocks of rows of one strip block follow each other: all but the first find it in the L2.
  const int row_blocks = (end_row - first_row + work.block_rows - 1) / work.block_rows;
  const int index = item - first_item;
  found.strip_block = row_blocks > 1 ? index / row_blocks : index;
  found.first_row = first_row + (index - found.strip_block * row_blocks) * work.block_rows;
  found.rows = min(work.block_rows, end_row - found.first_row);
  return found;
}

// Reads the group offsets and lists the groups that have rows. Shared memory: three arrays of
// groups + 1, and two numbers for each warp. Every thread takes some neighbouring groups.
__device__ inline GroupTable BuildGroupTable(const DecodeWork& work, int* shared, int* all_items) {
  const int capacity = work.groups + 1;
  int* first_item = shared;
  int* group = shared + capacity;
  int* first_row = shared + 2 * capacity;
  int* warp_items = shared + 3 * capacity;
  int* warp_count = warp_items + kBlockWarps;
  const int lane = LaneId();
  const int warp = WarpId();
  const int each = (work.groups + kBlockThreads - 1) / kBlockThreads;
  const int first = static_cast<int>(threadIdx.x) * each;
  const int end = min(first + each, work.groups);
  const auto items_of = [&](int rows) {
    return (rows + work.block_rows - 1) / work.block_rows * work.problems[0].strip_blocks;
  };
  int own_items = 0;
  int own_count = 0;
  for (int g = first; g < end; ++g) {
    const int rows = work.group_offsets[g + 1] - work.group_offsets[g];
    own_items += items_of(rows);
    own_count += rows > 0 ? 1 : 0;
  }
  // Sums over the lanes up to this one, then over the warps in front.
  int items = own_items;
  int count = own_count;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other_items = __shfl_up_sync(0xffffffffu, items, distance);
    const int other_count = __shfl_up_sync(0xffffffffu, count, distance);
    if (lane >= distance) {
      items += other_items;
      count += other_count;
    }
  }
  if (lane == 31) {
    warp_items[warp] = items;
    warp_count[warp] = count;
  }
  __syncthreads();
  items -= own_items;
  count -= own_count;
  GroupTable table;
  table.first_item = first_item;
  *all_items = 0;
  for (int i = 0; i < kBlockWarps; ++i) {
    if (i == warp) {
      items += *all_items;
      count += table.count;
    }
    *all_items += warp_items[i];
    table.count += warp_count[i];
  }
  for (int g = first; g < end; ++g) {
    const int begin = work.group_offsets[g];
    const int rows = work.group_offsets[g + 1] - begin;
    if (rows == 0) continue;
    first_item[count] = items;
    group[count] = g;
    first_row[count] = begin;
    items += items_of(rows);
    ++count;
  }
  if (threadIdx.x == 0) first_row[table.count] = work.group_offsets[work.groups];
  __syncthreads();
  return table;
}

// What one warp of an item works on in one round: strips that share their columns of x. No columns:
// nothing.
template <int kStrips>
struct WarpSegment {
  const uint8_t* strip[kStrips] = {};
  int output[kStrips] = {};  // the first one of each strip
  int segment = 0;
  int begin = 0;  // columns
  int end = 0;
};

// The streams of an item, strips of `weight` and then those of `up`, are dealt to warps: one to
// each, or two, gate and up of the same outputs or two neighbours.
template <int kStrips>
__device__ inline int StreamOfWarp(const DecodeProblem& problem, int slot, int strip) {
  if (kStrips == 1) return slot;
  return problem.up == nullptr ? 2 * slot + strip : slot + strip * problem.strips_per_item;
}

template <int kStrips>
__device__ inline WarpSegment<kStrips> SegmentOfWarp(const DecodeProblem& problem,
                                                     const DecodeItem& item, int round, int warp) {
  const int place = warp >> problem.slot_shift;  // among the segments of the round
  const int slot = warp - (place << problem.slot_shift);
  WarpSegment<kStrips> found;
  found.segment = round * problem.segments_per_round + place;
  if (place >= problem.segments_per_round || found.segment >= problem.segments) return found;
#pragma unroll
  for (int i = 0; i < kStrips; ++i) {
    const int stream = StreamOfWarp<kStrips>(problem, slot, i);
    const bool is_up = stream >= problem.strips_per_item;
    const int strip = item.strip_block * problem.strips_per_item +
                      (is_up ? stream - problem.strips_per_item : stream);
    found.output[i] = strip * static_cast<int>(kCudaStripOutputs);
    // A pair of strips of which the first exists is in memory, because strips are padded to tiles.
    if (i == 0 && found.output[0] >= problem.n) return found;
    found.strip[i] = (is_up ? problem.up + item.group * problem.up_step
                            : problem.weight + item.group * problem.weight_step) +
                     strip * problem.strip_bytes;
  }
  found.begin = found.segment * problem.segment_columns;
  found.end = min(found.begin + problem.segment_columns, problem.padded_k);
  return found;
}

// Stages of x in one round: those of its longest segment.
template <WeightFormat kFormat>
__device__ inline int StagesOfRound(const DecodeProblem& problem, int round) {
  const int first = round * problem.segments_per_round * problem.segment_columns;
  return min(problem.segment_columns, problem.padded_k - first) / kStageColumns<kFormat>;
}

// A place in a ring of stages: which one, and the parity of its barrier.
struct RingPlace {
  int slot = 0;
  uint32_t parity = 0;
  __device__ void Advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1u;
    }
  }
};

// The lane that keeps a warp's ring full: where it is in the warp's sequence of streams.
template <WeightFormat kFormat, int kStrips>
struct RingFiller {
  const uint8_t* next[kStrips] = {};
  int stages = 0;  // left of the segment
  // The next segment to look at.
  int item = 0;
  int round = 0;

  // False: there is no more.
  __device__ bool NextSegment(const DecodeWork& work, const GroupTable& table, int items) {
    for (; item < items; item += static_cast<int>(gridDim.x), round = 0) {
      const DecodeItem found = FindItem(work, table, item);
      const DecodeProblem& problem = work.problems[found.problem];
      while (round < problem.rounds) {
        const WarpSegment<kStrips> segment =
            SegmentOfWarp<kStrips>(problem, found, round++, static_cast<int>(threadIdx.x) / 32);
        if (segment.begin >= segment.end) continue;
        stages = (segment.end - segment.begin) / kStageColumns<kFormat>;
#pragma unroll
        for (int i = 0; i < kStrips; ++i) {
          next[i] =
              segment.strip[i] + segment.begin / kStageColumns<kFormat> * kChunkBytes<kFormat>;
        }
        return true;
      }
    }
    return false;
  }

  // One lane. Fills a stage that nobody reads any more, if there is anything left.
  __device__ void Fill(const DecodeWork& work, const GroupTable& table, int items, uint8_t* stage,
                       Barrier* barrier) {
    if (stages == 0 && !NextSegment(work, table, items)) return;
    --stages;
    BarrierArriveExpect(barrier, kStrips * kChunkBytes<kFormat>);
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      BulkCopy(stage + i * kChunkBytes<kFormat>, next[i], kChunkBytes<kFormat>, barrier);
      next[i] += kChunkBytes<kFormat>;
    }
  }
};

// The A fragments of two k16 steps, 32 columns, of one strip.
struct TwoSteps {
  uint32_t a[2][4];
};

// Block kBlock of 32 columns of a chunk, from the lane's codes of the unit (units, for bf16) and
// the chunk's scales.
template <WeightFormat kFormat, int kBlock>
__device__ inline void ConvertTwoSteps(const uint4 (&codes)[4], const uint4& scales,
                                       TwoSteps* steps) {
  if constexpr (kFormat == WeightFormat::kFp4Group) {
    constexpr int kUnit = kBlock / 2;
    const uint4& unit = codes[kUnit];
    const uint32_t word = kUnit == 0   ? scales.x
                          : kUnit == 1 ? scales.y
                          : kUnit == 2 ? scales.z
                                       : scales.w;
    const uint32_t pair = Fp4Scales<kBlock % 2>(word);
    const uint32_t first = kBlock % 2 == 0 ? unit.x : unit.z;
    const uint32_t second = kBlock % 2 == 0 ? unit.y : unit.w;
    ConvertFp4<0>(first, second, pair, steps->a[0]);
    ConvertFp4<1>(first, second, pair, steps->a[1]);
  } else if constexpr (kFormat == WeightFormat::kFp8Block) {
    const uint4& unit = codes[kBlock];
    const uint32_t scale = kBlock == 0   ? scales.x
                           : kBlock == 1 ? scales.y
                           : kBlock == 2 ? scales.z
                                         : scales.w;
    ConvertFp8(unit.x, unit.y, scale, steps->a[0]);
    ConvertFp8(unit.z, unit.w, scale, steps->a[1]);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4& unit = codes[2 * kBlock + i];
      steps->a[i][0] = unit.x;
      steps->a[i][1] = unit.y;
      steps->a[i][2] = unit.z;
      steps->a[i][3] = unit.w;
    }
  }
}

// Blocks kBlock ... of 32 columns of a stage. x: the lane's address for ldmatrix in the first eight
// rows.
template <WeightFormat kFormat, int kTiles, int kStrips, int kBlock>
__device__ inline void MultiplyBlocks(const uint8_t* stage, uint4 (&codes)[kStrips][4],
                                      const uint4 (&scales)[kStrips], const uint8_t* x,
                                      float (&sums)[kStrips][kTiles][4]) {
  constexpr int kBlocks = kStageColumns<kFormat> / 32;
  if constexpr (kBlock < kBlocks) {
    TwoSteps steps[kStrips];
    uint32_t b[kTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      LoadMatrix4(b[tile], x + tile * 8 * kXPitch<kFormat> + 64 * kBlock);
#pragma unroll
    for (int i = 0; i < kStrips; ++i)
      ConvertTwoSteps<kFormat, kBlock>(codes[i], scales[i], &steps[i]);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint32_t pair[2] = {b[tile][2 * step], b[tile][2 * step + 1]};
#pragma unroll
        for (int i = 0; i < kStrips; ++i) MmaBf16(sums[i][tile], steps[i].a[step], pair);
      }
    }
    MultiplyBlocks<kFormat, kTiles, kStrips, kBlock + 1>(stage, codes, scales, x, sums);
  }
}

// A chunk of each of the warp's strips, one behind the other, times x.
template <WeightFormat kFormat, int kTiles, int kStrips>
__device__ inline void MultiplyStage(const uint8_t* stage, const uint8_t* x,
                                     float (&sums)[kStrips][kTiles][4]) {
  uint4 codes[kStrips][4];
  uint4 scales[kStrips] = {};
#pragma unroll
  for (int i = 0; i < kStrips; ++i) {
    const uint8_t* chunk = stage + i * kChunkBytes<kFormat>;
    const uint8_t* chunk_scales = chunk + kCudaChunkUnits * kCudaUnitBytes;
    if constexpr (kFormat == WeightFormat::kFp4Group) chunk_scales += LaneId() / 4 * 16;
    if constexpr (kFormat != WeightFormat::kBf16)
      scales[i] = *reinterpret_cast<const uint4*>(chunk_scales);
#pragma unroll
    for (int unit = 0; unit < 4; ++unit)
      codes[i][unit] = *reinterpret_cast<const uint4*>(chunk + 512 * unit + 16 * LaneId());
  }
  MultiplyBlocks<kFormat, kTiles, kStrips, 0>(stage, codes, scales, x, sums);
}

// ---- The warp that copies x
// ----------------------------------------------------------------------

// x in any place and with any K, in pieces of 16 bytes or less. One stage, columns [stage *
// kStageColumns, ...) of each segment of a round, into shared memory: [segment of the round][row
// place][kXPitch bytes]. Columns beyond k are zero. x_row: the row of x of the lane's row.
template <WeightFormat kFormat>
__device__ inline void CopyXStage(const DecodeProblem& problem, int rows, int x_row, int round,
                                  int stage, uint8_t* shared) {
  constexpr int kPieces = kStageColumns<kFormat> / 8;  // of 16 bytes per row
  constexpr int kRowsAtOnce = 32 / kPieces;
  const int piece = LaneId() % kPieces;
  const int first_row = LaneId() / kPieces;
  const int row_places = RowPlaces(rows);
  for (int place = 0; place < problem.segments_per_round; ++place) {
    const int segment = round * problem.segments_per_round + place;
    if (segment >= problem.segments) return;
    const int column =
        segment * problem.segment_columns + stage * kStageColumns<kFormat> + 8 * piece;
    uint8_t* to = shared + (place * row_places + first_row) * kXPitch<kFormat> + 16 * piece;
    for (int row = 0; row < rows; row += kRowsAtOnce, to += kRowsAtOnce * kXPitch<kFormat>) {
      const int from_row = __shfl_sync(0xffffffffu, x_row, (row + first_row) % 32);
      if (row + first_row >= rows) continue;
      const uint16_t* from = problem.x + from_row * problem.x_stride;
      if (problem.vector_x) {
        const bool valid = column < problem.k;
        CopyAsync16OrZero(to, from + (valid ? column : 0), valid);
        continue;
      }
      uint32_t words[4];
      for (int j = 0; j < 4; ++j) {
        const uint32_t low = column + 2 * j < problem.k ? from[column + 2 * j] : 0u;
        const uint32_t high = column + 2 * j + 1 < problem.k ? from[column + 2 * j + 1] : 0u;
        words[j] = low | (high << 16);
      }
      *reinterpret_cast<uint4*>(to) = uint4{words[0], words[1], words[2], words[3]};
    }
  }
}

// Rows of x that are aligned and have no columns beyond k: a lane knows where each of its pieces is
// before a round's first stage, so that a copy takes three instructions.
template <WeightFormat kFormat>
__device__ inline void CopyAlignedX(const DecodeWork& work, const GroupTable& table, int items,
                                    uint8_t* shared, Barrier* full, Barrier* empty) {
  constexpr int kPieces = kStageColumns<kFormat> / 8;  // of 16 bytes per row
  constexpr int kRowsAtOnce = 32 / kPieces;
  constexpr int kRowsOfGroup = 4 * kRowsAtOnce;  // copies are grouped by four
  // FP4 has one segment.
  constexpr int kGroups =
      (kFormat == WeightFormat::kFp4Group ? kMaxDecodeRows : kMaxXRows) / kRowsOfGroup;
  const int lane = LaneId();
  const int first_row = lane / kPieces;
  uint8_t* const own_shared = shared + first_row * kXPitch<kFormat> + lane % kPieces * 16;
  RingPlace ring;
  for (int index = static_cast<int>(blockIdx.x); index < items;
       index += static_cast<int>(gridDim.x)) {
    const DecodeItem item = FindItem(work, table, index);
    const DecodeProblem& problem = work.problems[item.problem];
    const int y_row = item.first_row + min(lane, item.rows - 1);
    const int x_row = work.row_index == nullptr ? y_row : work.row_index[y_row];
    const uint32_t x_row_offset = static_cast<uint32_t>(x_row * problem.x_stride);
    const int row_places = RowPlaces(item.rows);
    const int inverse = 65536 / row_places + 1;  // exact for what is divided here
    for (int round = 0; round < problem.rounds; ++round) {
      const int first_segment = round * problem.segments_per_round;
      const int segments = min(problem.segments_per_round, problem.segments - first_segment);
      const int rows = segments * row_places;
      uint32_t offsets[kGroups][4] = {};
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        if (i * kRowsOfGroup >= rows) break;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int place_row = first_row + i * kRowsOfGroup + j * kRowsAtOnce;
          const int place = place_row * inverse >> 16;
          // Rows beyond the item's are the last one again: nobody reads them.
          const uint32_t row_offset =
              __shfl_sync(0xffffffffu, x_row_offset, place_row - place * row_places);
          offsets[i][j] = 2 * (row_offset + (first_segment + place) * problem.segment_columns);
        }
      }
      // The last segment may be shorter than the others.
      const int last_column = (first_segment + segments - 1) * problem.segment_columns;
      const int last_stages =
          min(problem.segment_columns, problem.padded_k - last_column) / kStageColumns<kFormat>;
      const int stages = StagesOfRound<kFormat>(problem, round);
      const uint8_t* from = reinterpret_cast<const uint8_t*>(problem.x) + lane % kPieces * 16;
      for (int stage = 0; stage < stages; ++stage) {
        const int stage_rows = stage < last_stages ? rows : rows - row_places;
        uint8_t* const to = own_shared + ring.slot * work.x_slot_bytes;
        BarrierWait(empty + ring.slot, ring.parity ^ 1u);
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          if (i * kRowsOfGroup >= stage_rows) break;
          // Without conditions where all rows exist.
          if ((i + 1) * kRowsOfGroup <= stage_rows) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              CopyAsync16(to + (i * kRowsOfGroup + j * kRowsAtOnce) * kXPitch<kFormat>,
                          from + offsets[i][j]);
            }
          } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const int row = i * kRowsOfGroup + j * kRowsAtOnce;
              if (first_row + row < stage_rows)
                CopyAsync16(to + row * kXPitch<kFormat>, from + offsets[i][j]);
            }
          }
        }
        // Arrives when this lane's copies have landed.
        BarrierArriveOnCopies(full + ring.slot);
        from += 2 * kStageColumns<kFormat>;
        ring.Advance(work.x_slots);
      }
    }
  }
}

template <WeightFormat kFormat>
__device__ inline void CopyX(const DecodeWork& work, const GroupTable& table, int items,
                             uint8_t* shared, Barrier* full, Barrier* empty) {
  RingPlace ring;
  for (int index = static_cast<int>(blockIdx.x); index < items;
       index += static_cast<int>(gridDim.x)) {
    const DecodeItem item = FindItem(work, table, index);
    const DecodeProblem& problem = work.problems[item.problem];
    const int row = item.first_row + min(LaneId(), item.rows - 1);
    const int x_row = work.row_index == nullptr ? row : work.row_index[row];
    for (int round = 0; round < problem.rounds; ++round) {
      const int stages = StagesOfRound<kFormat>(problem, round);
      for (int stage = 0; stage < stages; ++stage) {
        BarrierWait(empty + ring.slot, ring.parity ^ 1u);
        CopyXStage<kFormat>(problem, item.rows, x_row, round, stage,
                            shared + ring.slot * work.x_slot_bytes);
        // Arrives when this lane's copies have landed.
        if (problem.vector_x) {
          BarrierArriveOnCopies(full + ring.slot);
        } else {
          BarrierArrive(full + ring.slot);
        }
        ring.Advance(work.x_slots);
      }
    }
  }
}

// ---- The warps that multiply
// ---------------------------------------------------------------------

// The sum of an output over all segments.
__device__ inline float SumSegments(const DecodeWork& work, const DecodeProblem& problem,
                                    const float* sums, int at) {
  float total = sums[at];
  for (int i = 1; i < problem.segments; ++i) total += sums[i * work.sum_floats + at];
  return total;
}

// Adds the segments and writes the item's outputs: a warp per row and 32 outputs, a lane per
// output.
__device__ inline void WriteOutputs(const DecodeWork& work, const DecodeProblem& problem,
                                    const DecodeItem& item, const float* sums) {
  const int outputs = problem.strips_per_item * 16;
  const int pieces = (outputs + 31) / 32;
  const int lane = LaneId();
  for (int i = WarpId(); i < item.rows * pieces; i += kDecodeWarps) {
    const int row = i / pieces;
    const int in_item = (i - row * pieces) * 32 + lane;
    const int output = item.strip_block * outputs + in_item;
    const bool exists = in_item < outputs && output < problem.n;
    const int at = row * work.sum_stride + in_item;
    float value = 0.0f;
    if (exists) value = SumSegments(work, problem, sums, at) * problem.weight_factor;
    const int64_t y_row = item.first_row + row;
    const int64_t place = y_row * problem.y_stride + output;
    if (problem.up != nullptr) {
      float up = 0.0f;
      if (exists) up = SumSegments(work, problem, sums, at + outputs) * problem.up_factor;
      const float gate = Bf16ToFloat(FloatToBf16(value));
      up = Bf16ToFloat(FloatToBf16(up));
      // Comparisons in this form keep NaN visible.
      const float g = gate > work.limit ? work.limit : gate;
      const float u = up > work.limit ? work.limit : up < -work.limit ? -work.limit : up;
      const float silu = g / (1.0f + expf(-g));
      const float weight = work.row_weight == nullptr ? 1.0f : work.row_weight[y_row];
      value = weight * (silu * u);
      if (work.reference_numerics) value = Bf16ToFloat(FloatToBf16(value));
    } else if (problem.y_is_f32) {
      if (exists) static_cast<float*>(problem.y)[place] = value;
      continue;
    } else if (!problem.quantize) {
      if (exists) static_cast<uint16_t*>(problem.y)[place] = FloatToBf16(value);
      continue;
    } else {
      value = Bf16ToFloat(FloatToBf16(value));
    }
    const Q8Scale scale(LaneGroupMax<32>(fabsf(value)));
    const uint32_t pair = Q8Grid(value, 0.0f, scale);
    if (exists) static_cast<uint16_t*>(problem.y)[place] = static_cast<uint16_t>(pair);
  }
}

// Outputs that the warp has alone, from its registers.
template <int kTiles, int kStrips>
__device__ inline void StoreSums(const DecodeProblem& problem, const DecodeItem& item,
                                 const WarpSegment<kStrips>& segment,
                                 const float (&sums)[kStrips][kTiles][4]) {
  const int lane = LaneId();
#pragma unroll
  for (int i = 0; i < kStrips; ++i) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = 8 * tile + 2 * (lane % 4) + j % 2;
        const int output = segment.output[i] + lane / 4 + j / 2 * 8;
        if (row >= item.rows || output >= problem.n) continue;
        const float value = sums[i][tile][j] * problem.weight_factor;
        const int64_t place = (item.first_row + row) * problem.y_stride + output;
        if (problem.y_is_f32) {
          static_cast<float*>(problem.y)[place] = value;
        } else {
          static_cast<uint16_t*>(problem.y)[place] = FloatToBf16(value);
        }
      }
    }
  }
}

// Sums of a segment into the table [segment][row][stream][16 outputs].
template <int kTiles, int kStrips>
__device__ inline void KeepSums(const DecodeWork& work, const DecodeProblem& problem,
                                const WarpSegment<kStrips>& segment, int warp,
                                const float (&sums)[kStrips][kTiles][4], float* table) {
  const int lane = LaneId();
  const int slot = warp & ((1 << problem.slot_shift) - 1);
  float* to = table + segment.segment * work.sum_floats + lane / 4;
#pragma unroll
  for (int i = 0; i < kStrips; ++i) {
    float* stream = to + StreamOfWarp<kStrips>(problem, slot, i) * 16;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float* row = stream + (8 * tile + 2 * (lane % 4)) * work.sum_stride;
      row[0] = sums[i][tile][0];
      row[work.sum_stride] = sums[i][tile][1];
      row[8] = sums[i][tile][2];
      row[work.sum_stride + 8] = sums[i][tile][3];
    }
  }
}

// What a warp that multiplies keeps from item to item, and its places in shared memory.
template <WeightFormat kFormat, int kStrips>
struct Multiplier {
  uint8_t* ring;
  Barrier* ring_full;
  const uint8_t* x;
  Barrier* x_full;  // and behind them those of empty stages
  float* sums;
  Barrier* sums_free;
  RingPlace ring_place;
  RingPlace x_place;
  uint32_t sums_parity = 0;
  RingFiller<kFormat, kStrips> filler;

  __device__ uint8_t* RingSlot(int slot) const {
    return ring + slot * kStrips * kChunkBytes<kFormat>;
  }

  template <int kTiles>
  __device__ void Run(const DecodeWork& work, const GroupTable& table, int items,
                      const DecodeItem& item) {
    const DecodeProblem& problem = work.problems[item.problem];
    const int warp = UniformWarpId();
    const int lane = LaneId();
    // Rows that do not exist are columns of the product that nobody reads. Of eight rows the last
    // one is repeated; of more what happens to be there is taken.
    const int lane_row = kTiles == 1 ? min(lane % 8, item.rows - 1) : lane % 8;
    const int row_places = kTiles == 1 ? item.rows : 8 * kTiles;
    for (int round = 0; round < problem.rounds; ++round) {
      const WarpSegment<kStrips> segment = SegmentOfWarp<kStrips>(problem, item, round, warp);
      const int place = warp >> problem.slot_shift;
      const uint8_t* const own_x =
          x + (place * row_places + lane_row) * kXPitch<kFormat> + lane / 8 * 16;
      float segment_sums[kStrips][kTiles][4] = {};
      const int stages = StagesOfRound<kFormat>(problem, round);
      const int own_stages = (segment.end - segment.begin) / kStageColumns<kFormat>;
      for (int stage = 0; stage < own_stages; ++stage) {
        BarrierWait(x_full + x_place.slot, x_place.parity);
        BarrierWait(ring_full + ring_place.slot, ring_place.parity);
        uint8_t* const ring_stage = RingSlot(ring_place.slot);
        MultiplyStage<kFormat, kTiles, kStrips>(
            ring_stage, own_x + x_place.slot * work.x_slot_bytes, segment_sums);
        __syncwarp();
        if (lane == 0) {
          BarrierArrive(x_full + x_place.slot + work.x_slots);
          filler.Fill(work, table, items, ring_stage, ring_full + ring_place.slot);
        }
        x_place.Advance(work.x_slots);
        ring_place.Advance(work.ring_slots);
      }
      // Stages of other warps' longer segments.
      for (int stage = own_stages; stage < stages; ++stage) {
        BarrierWait(x_full + x_place.slot, x_place.parity);
        __syncwarp();
        if (lane == 0) BarrierArrive(x_full + x_place.slot + work.x_slots);
        x_place.Advance(work.x_slots);
      }
      const bool has_segment = segment.begin < segment.end;
      if (problem.direct) {
        if (has_segment) StoreSums<kTiles, kStrips>(problem, item, segment, segment_sums);
      } else {
        // Everyone has read the sums of the item before.
        if (round == 0) BarrierWait(sums_free, sums_parity ^ 1u);
        if (has_segment)
          KeepSums<kTiles, kStrips>(work, problem, segment, warp, segment_sums, sums);
      }
    }
    if (problem.direct) return;
    NamedBarrierSync(1, 32 * kDecodeWarps);
    WriteOutputs(work, problem, item, sums);
    __syncwarp();
    if (lane == 0) BarrierArrive(sums_free);
    sums_parity ^= 1u;
  }
};

template <WeightFormat kFormat, int kMaxTiles>
__global__ void __launch_bounds__(kBlockThreads, kDecodeBlocks)
    DecodeKernel(const __grid_constant__ DecodeWork work) {
  // Rings, stages of x, sums, barriers, the table of groups.
  constexpr int kStrips = StripsPerWarp(kFormat, 8 * kMaxTiles);
  uint8_t* shared = DynamicShared<uint8_t>();
  const int warp = UniformWarpId();
  const int lane = LaneId();
  const int ring_bytes = work.ring_slots * kStrips * kChunkBytes<kFormat>;
  uint8_t* const x_shared = shared + kDecodeWarps * ring_bytes;
  float* const sums = reinterpret_cast<float*>(x_shared + work.x_slots * work.x_slot_bytes);
  Barrier* const sums_free = reinterpret_cast<Barrier*>(sums + work.table_floats);
  Barrier* const x_full = sums_free + 1;
  Barrier* const x_empty = x_full + work.x_slots;
  Barrier* const ring_full = x_empty + work.x_slots;
  if (warp == kDecodeWarps) {
    if (lane == 0) BarrierInit(sums_free, kDecodeWarps);
    for (int i = lane; i < work.x_slots; i += 32) {
      BarrierInit(x_full + i, 32);
      BarrierInit(x_empty + i, kDecodeWarps);
    }
    FenceBarrierInit();
  } else if (lane == 0) {
    for (int i = 0; i < work.ring_slots; ++i)
      BarrierInit(ring_full + warp * work.ring_slots + i, 1);
    FenceBarrierInit();
  }
  AllowNextKernel();

  GroupTable table = {};
  int items = work.items;
  if (work.groups > 0) {
    WaitForPreviousKernel();
    table = BuildGroupTable(work,
                            reinterpret_cast<int*>(shared + work.shared_bytes) -
                                3 * (work.groups + 1) - 2 * kBlockWarps,
                            &items);
  }
  __syncwarp();
  Multiplier<kFormat, kStrips> multiplier;
  multiplier.ring = shared + warp * ring_bytes;
  multiplier.ring_full = ring_full + warp * work.ring_slots;
  multiplier.filler.item = static_cast<int>(blockIdx.x);
  // Weights do not depend on the kernel in front.
  if (warp < kDecodeWarps && lane == 0) {
    for (int i = 0; i < work.ring_slots; ++i) {
      multiplier.filler.Fill(work, table, items, multiplier.RingSlot(i), multiplier.ring_full + i);
    }
  }
  __syncthreads();
  if (work.groups == 0) WaitForPreviousKernel();
  if (warp == kDecodeWarps) {
    if (work.aligned_x) {
      CopyAlignedX<kFormat>(work, table, items, x_shared, x_full, x_empty);
    } else {
      CopyX<kFormat>(work, table, items, x_shared, x_full, x_empty);
    }
    return;
  }
  multiplier.x = x_shared;
  multiplier.x_full = x_full;
  multiplier.sums = sums;
  multiplier.sums_free = sums_free;
  for (int index = static_cast<int>(blockIdx.x); index < items;
       index += static_cast<int>(gridDim.x)) {
    const DecodeItem item = FindItem(work, table, index);
    if (kMaxTiles == 1 || item.rows <= 8) {
      multiplier.template Run<1>(work, table, items, item);
    } else {
      multiplier.template Run<kMaxTiles>(work, table, items, item);
    }
  }
}

// Defined per format in linear_decode_*.cu.
template <WeightFormat kFormat>
Status LaunchDecodeKernel(const DecodeWork& work, LaunchConfig config, Stream& stream) {
  config.block = kBlockThreads;
  return work.block_rows == 8
             ? Launch("DecodeKernel", &DecodeKernel<kFormat, 1>, config, stream, work)
             : Launch("DecodeKernel", &DecodeKernel<kFormat, 2>, config, stream, work);
}

}  // namespace deepinfer::cuda
