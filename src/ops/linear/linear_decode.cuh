// The kernel for linears with few rows per weight. It is bound by the weights' bytes: below about
// 30 rows a multiprocessor has time to convert codes to bf16 and multiply them while the bytes
// arrive.
//
// A block of eight warps takes items: some neighbouring strips of 16 outputs, up to 64 rows. Each
// warp walks one strip (and segment of K) as a sequential stream: one lane copies pieces of 2 KB
// into the warp's ring in shared memory (bulk copies, kRingStages under way per warp, about 70 KB
// per block), all lanes read their fragments from there (16 bytes per lane and unit), convert them
// and multiply them with x (mma.sync, weights are A). The ring runs ahead over the ends of segments
// and items, so that the memory never waits for a block's epilogue; before the kernel in front has
// ended it already loads the first weights. Rows of x are copied to shared memory by all warps, 256
// columns at a time or all at once, and read with ldmatrix. With more than eight rows x would be
// most of what shared memory delivers, so a warp walks two strips that use the same fragments of x.
//
// Numbers: a segment's sum takes k16 steps in ascending order from zero; sums of segments are added
// in ascending order, through shared memory. So a row's bits do not depend on other rows, nor on
// how items and segments are distributed over warps.
#pragma once

#include <algorithm>
#include <type_traits>

#include "device.cuh"
#include "ops/linear/cuda_layout.h"
#include "ops/linear/linear_decode.h"
#include "ops/quantize/group_quantize.cuh"

namespace deepinfer::cuda {

inline constexpr int kDecodeWarps = 8;
inline constexpr int kDecodeThreads = 32 * kDecodeWarps;
inline constexpr int kRingStages = 4;
// Four units of 512 bytes, and scales of FP4.
inline constexpr int kRingStageBytes = 2176;
inline constexpr int kXStageColumns = 256;
// Rows of x are 16 bytes more apart than they are long, so that the eight rows that ldmatrix reads
// at a time are in different banks.
inline constexpr int kXPitch = 2 * kXStageColumns + 16;

// Columns of a stage of the ring.
template <WeightFormat kFormat>
inline constexpr int kRingColumns = static_cast<int>(4 * CudaUnitColumns(kFormat));

// What a block works on.
struct DecodeItem {
  int problem = 0;
  int group = 0;
  int strip_block = 0;
  int first_row = 0;  // of y
  int rows = 0;
};

// Groups that have rows, in shared memory: with `first_item` of each and of the end.
struct GroupTable {
  const int* first_item;
  const int* group;
  const int* first_row;
  int count;
  int items;
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
    found.group = table.group[low];
    first_item = table.first_item[low];
    first_row = table.first_row[low];
    end_row = table.first_row[low + 1];
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

// What one warp of an item works on in one round: strips that share their columns of x. No columns:
// nothing.
template <int kStrips>
struct WarpSegment {
  const uint8_t* strip[kStrips] = {};
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
  const int streams = (problem.up == nullptr ? 1 : 2) * problem.strips_per_item;
  const int slots = streams / kStrips;
  const int place = warp / slots;  // among the segments of the round
  const int slot = warp - place * slots;
  const int segment = round * problem.segments_per_round + place;
  WarpSegment<kStrips> found;
  if (place >= problem.segments_per_round || segment >= problem.segments) return found;
#pragma unroll
  for (int i = 0; i < kStrips; ++i) {
    const int stream = StreamOfWarp<kStrips>(problem, slot, i);
    const bool is_up = stream >= problem.strips_per_item;
    const int strip = item.strip_block * problem.strips_per_item +
                      (is_up ? stream - problem.strips_per_item : stream);
    // A pair of strips of which the first exists is in memory, because strips are padded to tiles.
    if (i == 0 && strip * kCudaStripOutputs >= problem.n) return found;
    found.strip[i] = (is_up ? problem.up + item.group * problem.up_step
                            : problem.weight + item.group * problem.weight_step) +
                     strip * problem.strip_bytes;
  }
  found.begin = segment * problem.segment_columns;
  found.end = min(found.begin + problem.segment_columns, problem.padded_k);
  return found;
}

// The lane that keeps a warp's ring full: where it is in the warp's sequence of streams. Two strips
// take turns.
template <WeightFormat kFormat, int kStrips>
struct RingProducer {
  WarpSegment<kStrips> segment;
  int column = 0;
  int strip = 0;
  int item = 0;
  int round = -1;
  int rounds = 0;
  DecodeItem found;

  __device__ bool NextSegment(const DecodeWork& work, const GroupTable& table, int items) {
    while (true) {
      if (++round >= rounds) {
        if (rounds > 0) item += static_cast<int>(gridDim.x);
        if (item >= items) {
          rounds = 0;
          round = -1;
          return false;
        }
        found = FindItem(work, table, item);
        const DecodeProblem& problem = work.problems[found.problem];
        rounds = (problem.segments + problem.segments_per_round - 1) / problem.segments_per_round;
        round = 0;
      }
      segment = SegmentOfWarp<kStrips>(work.problems[found.problem], found, round,
                                       static_cast<int>(threadIdx.x) / 32);
      column = segment.begin;
      if (column < segment.end) return true;
    }
  }

  // One lane. Fills a stage that nobody reads any more, if there is anything left.
  __device__ void Fill(const DecodeWork& work, const GroupTable& table, int items, uint8_t* stage,
                       Barrier* barrier) {
    if (column >= segment.end && (item >= items || !NextSegment(work, table, items))) return;
    constexpr int kColumns = kRingColumns<kFormat>;
    constexpr int kUnitColumns = static_cast<int>(CudaUnitColumns(kFormat));
    const uint8_t* own = strip == 0 ? segment.strip[0] : segment.strip[kStrips - 1];
    const uint8_t* from = own + CudaUnitOffset(kFormat, column / kUnitColumns);
    if (kFormat == WeightFormat::kFp8Block) {
      const int units = min(kColumns, segment.end - column) / kUnitColumns;
      const uint32_t bytes = static_cast<uint32_t>(units) * 512;
      BarrierArriveExpect(barrier, bytes);
      BulkCopy(stage, from, bytes, barrier);
    } else {
      constexpr uint32_t kBytes = kFormat == WeightFormat::kFp4Group ? 2176 : 2048;
      BarrierArriveExpect(barrier, kBytes);
      BulkCopy(stage, from, kBytes, barrier);
    }
    if (++strip == kStrips) {
      strip = 0;
      column += kColumns;
    }
  }
};

// The scales of FP8 that a warp needs in one round. A stage of the ring has a word of them, which
// is too little for a bulk copy of its own: each lane loads the word of one of 32 stages, and those
// of the next 32 already.
template <int kStrips>
struct Fp8Scales {
  const uint8_t* from[kStrips];
  int end = 0;  // words
  int word = 0;
  uint32_t now[kStrips] = {};
  uint32_t later[kStrips] = {};

  __device__ void Start(const WarpSegment<kStrips>& segment, int padded_k) {
    word = segment.begin / 128;
    end = (segment.end + 127) / 128;
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      from[i] = segment.strip[i] + padded_k / 32 * kCudaUnitBytes;
      now[i] = Load(i, word);
      later[i] = Load(i, word + 32);
    }
  }
  // The words of the next stage of each strip.
  __device__ void Next(int stage, uint32_t (&words)[kStrips]) {
#pragma unroll
    for (int i = 0; i < kStrips; ++i) words[i] = __shfl_sync(0xffffffffu, now[i], stage % 32);
    if (stage % 32 != 31) return;
    word += 32;
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      now[i] = later[i];
      later[i] = Load(i, word + 32);
    }
  }

 private:
  __device__ uint32_t Load(int strip, int first) const {
    const int at = first + LaneId();
    return at < end ? *reinterpret_cast<const uint32_t*>(from[strip] + 4 * at) : 0u;
  }
};

// Two bf16 numbers 2^(field - 127) from byte kByte of a word of exponent fields.
template <int kByte>
__device__ inline uint32_t ScalePair(uint32_t fields) {
  // The byte at the bits 8 ... 15 and 24 ... 31, then one down.
  return __byte_perm(fields, 0, 0x0404u | (kByte << 4) | (kByte << 12)) >> 1;
}

// The A fragments of k16 step kStep of the eight that 64 columns of FP4 (a unit) have ... in bf16.
__device__ inline void ConvertFp4(uint32_t word, uint32_t low_scale, uint32_t high_scale,
                                  uint32_t (&a)[4]) {
  constexpr uint32_t kMask = 0x81c081c0u;
  a[0] = MulBf16x2(word & kMask, low_scale);
  a[1] = MulBf16x2((word << 3) & kMask, high_scale);
  a[2] = MulBf16x2((word << 6) & kMask, low_scale);
  a[3] = MulBf16x2(
      ((word << 1) & 0x80008000u) | ((word >> 5) & 0x01000100u) | ((word >> 4) & 0x00c000c0u),
      high_scale);
}

__device__ inline void ConvertFp8(uint32_t first, uint32_t second, uint32_t scale,
                                  uint32_t (&a)[4]) {
  constexpr uint32_t kSign = 0x80008000u;
  constexpr uint32_t kRest = 0x07f007f0u;
  a[0] = MulBf16x2((first & kSign) | ((first >> 4) & kRest), scale);
  a[1] = MulBf16x2(((first << 8) & kSign) | ((first << 4) & kRest), scale);
  a[2] = MulBf16x2((second & kSign) | ((second >> 4) & kRest), scale);
  a[3] = MulBf16x2(((second << 8) & kSign) | ((second << 4) & kRest), scale);
}

// The A fragments of two k16 steps, 32 columns, of one strip.
struct TwoSteps {
  uint32_t a[2][4];
};

// Block kBlock of 32 columns of the stage of a strip.
template <WeightFormat kFormat, int kBlock>
__device__ inline void LoadTwoSteps(const uint8_t* stage, const uint4& codes, const uint4& fields,
                                    TwoSteps* steps) {
  if constexpr (kFormat == WeightFormat::kFp4Group) {
    constexpr int kUnit = kBlock / 2;
    const uint32_t f = kUnit == 0   ? fields.x
                       : kUnit == 1 ? fields.y
                       : kUnit == 2 ? fields.z
                                    : fields.w;
    const uint32_t low_scale = ScalePair<2 * (kBlock % 2)>(f);
    const uint32_t high_scale = ScalePair<2 * (kBlock % 2) + 1>(f);
    ConvertFp4(kBlock % 2 == 0 ? codes.x : codes.z, low_scale, high_scale, steps->a[0]);
    ConvertFp4(kBlock % 2 == 0 ? codes.y : codes.w, low_scale, high_scale, steps->a[1]);
  } else if constexpr (kFormat == WeightFormat::kFp8Block) {
    const uint32_t scale = ScalePair<kBlock>(fields.x);
    ConvertFp8(codes.x, codes.y, scale, steps->a[0]);
    ConvertFp8(codes.z, codes.w, scale, steps->a[1]);
  } else {
    const uint4 second =
        *reinterpret_cast<const uint4*>(stage + 1024 * kBlock + 512 + 16 * LaneId());
    steps->a[0][0] = codes.x;
    steps->a[0][1] = codes.y;
    steps->a[0][2] = codes.z;
    steps->a[0][3] = codes.w;
    steps->a[1][0] = second.x;
    steps->a[1][1] = second.y;
    steps->a[1][2] = second.z;
    steps->a[1][3] = second.w;
  }
}

// Blocks kBlock ... of 32 columns. `codes` are those of a unit of which the block is a part. x: the
// lane's address for ldmatrix in the first eight rows.
template <WeightFormat kFormat, int kTiles, int kStrips, int kBlock, int kEnd>
__device__ inline void MultiplyBlocks(const uint8_t* stage, uint4 (&codes)[kStrips],
                                      const uint4 (&fields)[kStrips], const uint8_t* x,
                                      float (&sums)[kStrips][kTiles][4]) {
  if constexpr (kBlock < kEnd) {
    // Bytes of a strip's codes for 32 columns.
    constexpr int kBytes = static_cast<int>(kCudaUnitBytes * 32 / CudaUnitColumns(kFormat));
    TwoSteps steps[kStrips];
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      const uint8_t* own = stage + i * kRingStageBytes;
      if constexpr (kBlock * kBytes % kCudaUnitBytes == 0)
        codes[i] = *reinterpret_cast<const uint4*>(own + kBlock * kBytes + 16 * LaneId());
      LoadTwoSteps<kFormat, kBlock>(own, codes[i], fields[i], &steps[i]);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      uint32_t b[4];
      LoadMatrix4(b, x + tile * 8 * kXPitch + 64 * kBlock);
      const uint32_t b0[2] = {b[0], b[1]};
      const uint32_t b1[2] = {b[2], b[3]};
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
        MmaBf16(sums[i][tile], steps[i].a[0], b0);
        MmaBf16(sums[i][tile], steps[i].a[1], b1);
      }
    }
    MultiplyBlocks<kFormat, kTiles, kStrips, kBlock + 1, kEnd>(stage, codes, fields, x, sums);
  }
}

// The stages of a warp's strips, one behind the other, times x. `scales`: of FP8.
template <WeightFormat kFormat, int kTiles, int kStrips>
__device__ inline void MultiplyStages(const uint8_t* stage, const uint8_t* x, int columns,
                                      const uint32_t (&scales)[kStrips],
                                      float (&sums)[kStrips][kTiles][4]) {
  uint4 codes[kStrips] = {};
  uint4 fields[kStrips] = {};
#pragma unroll
  for (int i = 0; i < kStrips; ++i) {
    if (kFormat == WeightFormat::kFp4Group) {
      fields[i] =
          *reinterpret_cast<const uint4*>(stage + i * kRingStageBytes + 2048 + LaneId() / 4 * 16);
    }
    if (kFormat == WeightFormat::kFp8Block) fields[i].x = scales[i];
  }
  constexpr int kBlocks = kRingColumns<kFormat> / 32;
  if (kFormat == WeightFormat::kFp8Block && columns < kRingColumns<kFormat>) {
    // The end of a K that is an odd multiple of 64.
    MultiplyBlocks<kFormat, kTiles, kStrips, 0, kBlocks / 2>(stage, codes, fields, x, sums);
  } else {
    MultiplyBlocks<kFormat, kTiles, kStrips, 0, kBlocks>(stage, codes, fields, x, sums);
  }
}

// Copies one stage of x, columns [256 * stage, ...) of each segment of a round, into shared memory:
// [segment of the round][row place][kXPitch bytes]. Columns beyond k are zero.
__device__ inline void CopyXStage(const DecodeProblem& problem, const int* x_rows, int rows,
                                  int row_places, int round, int stage, uint8_t* shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = LaneId();
  const int copies = problem.segments_per_round * rows;
  for (int i = (warp + stage) % kDecodeWarps; i < copies; i += kDecodeWarps) {
    const int place = i / rows;
    const int row = i - place * rows;
    const int segment = round * problem.segments_per_round + place;
    if (segment >= problem.segments) return;
    const int column = segment * problem.segment_columns + stage * kXStageColumns + 8 * lane;
    const uint16_t* from = problem.x + x_rows[row] * problem.x_stride;
    uint8_t* to = shared + (place * row_places + row) * kXPitch + 16 * lane;
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

// The place of a warp's ring, and where it is read.
struct RingConsumer {
  uint8_t* ring;
  Barrier* barriers;
  int stage = 0;
  uint32_t parity = 0;
};

// Multiplies what one warp has of one round, and writes its sums to the table. Reached by all warps
// of the block, as often as the longest segment of the round needs.
template <WeightFormat kFormat, int kTiles, int kStrips>
__device__ inline void RunRound(const DecodeWork& work, const GroupTable& table, int items,
                                const DecodeProblem& problem, const DecodeItem& item, int round,
                                const int* x_rows, uint8_t* x_shared,
                                RingProducer<kFormat, kStrips>* producer, RingConsumer* consumer) {
  const int warp = UniformWarpId();
  const int lane = LaneId();
  const WarpSegment<kStrips> segment = SegmentOfWarp<kStrips>(problem, item, round, warp);
  const int slots = (problem.up == nullptr ? 1 : 2) * problem.strips_per_item / kStrips;
  const int place = warp / slots;

  float sums[kStrips][kTiles][4] = {};
  Fp8Scales<kStrips> scales;
  if (kFormat == WeightFormat::kFp8Block) scales.Start(segment, problem.padded_k);
  int ring_stages = 0;  // of each strip, that were multiplied
  // Rows that do not exist are columns of the product that nobody reads. Of eight rows the last one
  // is repeated, which saves memory; of more what happens to be there is taken.
  const int row_places = kTiles == 1 ? item.rows : 8 * kTiles;
  const int lane_row = kTiles == 1 ? min(lane % 8, item.rows - 1) : lane % 8;
  const uint8_t* x = x_shared + (place * row_places + lane_row) * kXPitch + lane / 8 * 16;
  const int first_segment = round * problem.segments_per_round;
  const int longest =
      min(problem.segment_columns, problem.padded_k - first_segment * problem.segment_columns);
  const int x_stages = (longest + kXStageColumns - 1) / kXStageColumns;

  // x: all stages of the round at once where they fit, else some stages ahead of the one in use.
  const int stage_bytes = problem.segments_per_round * row_places * kXPitch;
  const int stages_held = work.x_bytes / stage_bytes;
  const bool resident = stages_held >= x_stages;
  const int ring = stages_held >= 3 ? 3 : 2;
  const int ahead = resident ? x_stages : ring - 1;
  for (int stage = 0; stage < ahead; ++stage) {
    if (stage < x_stages)
      CopyXStage(problem, x_rows, item.rows, row_places, round, stage,
                 x_shared + stage * stage_bytes);
    if (!resident) CommitCopies();
  }
  if (resident) {
    CommitCopies();
    WaitCopies<0>();
    __syncthreads();
  }
  int slot = -1;
  for (int stage = 0; stage < x_stages; ++stage) {
    ++slot;
    if (!resident) {
      // The stage has arrived, and everyone is done with the slot that is filled next.
      if (ring == 3) {
        WaitCopies<1>();
      } else {
        WaitCopies<0>();
      }
      __syncthreads();
      if (slot == ring) slot = 0;
      const int next = slot + ahead < ring ? slot + ahead : slot + ahead - ring;
      if (stage + ahead < x_stages)
        CopyXStage(problem, x_rows, item.rows, row_places, round, stage + ahead,
                   x_shared + next * stage_bytes);
      CommitCopies();
    }
    const int begin = segment.begin + stage * kXStageColumns;
    const int end = min(begin + kXStageColumns, segment.end);
    for (int column = begin; column < end; column += kRingColumns<kFormat>) {
      uint32_t words[kStrips] = {};
      if (kFormat == WeightFormat::kFp8Block) scales.Next(ring_stages++, words);
      uint8_t* ring_stage = consumer->ring + consumer->stage * kRingStageBytes;
      Barrier* barrier = consumer->barriers + consumer->stage;
#pragma unroll
      for (int i = 0; i < kStrips; ++i) BarrierWait(barrier + i, consumer->parity);
      MultiplyStages<kFormat, kTiles, kStrips>(
          ring_stage, x + slot * stage_bytes + 2 * (column - begin), end - column, words, sums);
      __syncwarp();
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < kStrips; ++i)
          producer->Fill(work, table, items, ring_stage + i * kRingStageBytes, barrier + i);
      }
      consumer->stage += kStrips;
      if (consumer->stage == kRingStages) {
        consumer->stage = 0;
        consumer->parity ^= 1u;
      }
    }
  }

  // The sums take the memory of x: [place][row of x][stream][16 outputs].
  __syncthreads();
  if (segment.begin >= segment.end) return;
  float* to = reinterpret_cast<float*>(x_shared) + place * (work.sum_bytes / 4) + lane / 4;
#pragma unroll
  for (int i = 0; i < kStrips; ++i) {
    float* stream = to + StreamOfWarp<kStrips>(problem, warp - place * slots, i) * 16;
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

// The sum of an output over the segments of all rounds so far.
__device__ inline float SumSegments(const DecodeWork& work, const DecodeProblem& problem,
                                    const float* sums, const float* earlier, int round, int at) {
  const int first = round * problem.segments_per_round;
  const int count = min(problem.segments_per_round, problem.segments - first);
  float total = round == 0 ? sums[at] : earlier[at] + sums[at];
  for (int i = 1; i < count; ++i) total += sums[i * (work.sum_bytes / 4) + at];
  return total;
}

// After the last round: adds the segments, and writes the item's outputs; a warp per row and 32
// outputs, a lane per output.
__device__ inline void WriteOutputs(const DecodeWork& work, const DecodeProblem& problem,
                                    const DecodeItem& item, const float* sums, const float* earlier,
                                    int round) {
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
    if (exists)
      value = SumSegments(work, problem, sums, earlier, round, at) * problem.weight_factor;
    const int64_t y_row = item.first_row + row;
    const int64_t place = y_row * problem.y_stride + output;
    if (problem.up != nullptr) {
      float up = 0.0f;
      if (exists)
        up = SumSegments(work, problem, sums, earlier, round, at + outputs) * problem.up_factor;
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

// Not the last round: keeps the sums so far.
__device__ inline void KeepSums(const DecodeWork& work, const DecodeProblem& problem,
                                const DecodeItem& item, const float* sums, float* earlier,
                                int round) {
  const int columns = (problem.up == nullptr ? 1 : 2) * problem.strips_per_item * 16;
  for (int i = static_cast<int>(threadIdx.x); i < item.rows * columns; i += kDecodeThreads) {
    const int row = i / columns;
    const int at = row * work.sum_stride + i - row * columns;
    earlier[at] = SumSegments(work, problem, sums, earlier, round, at);
  }
}

// Reads the group offsets and lists the groups that have rows. Shared memory: three arrays of
// groups + 1, and two numbers for each warp. Every thread takes some neighbouring groups.
__device__ inline GroupTable BuildGroupTable(const DecodeWork& work, int* shared) {
  const int capacity = work.groups + 1;
  int* first_item = shared;
  int* group = shared + capacity;
  int* first_row = shared + 2 * capacity;
  int* warp_items = shared + 3 * capacity;
  int* warp_count = warp_items + kDecodeWarps;
  const int lane = LaneId();
  const int warp = WarpId();
  const int each = (work.groups + kDecodeThreads - 1) / kDecodeThreads;
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
  table.items = 0;
  table.count = 0;
  for (int i = 0; i < kDecodeWarps; ++i) {
    if (i == warp) {
      items += table.items;
      count += table.count;
    }
    table.items += warp_items[i];
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
  table.first_item = first_item;
  table.group = group;
  table.first_row = first_row;
  return table;
}

template <WeightFormat kFormat, int kTiles, int kStrips>
__device__ inline void RunItem(const DecodeWork& work, const GroupTable& table, int items,
                               const DecodeItem& item, const int* x_rows, uint8_t* x_shared,
                               RingProducer<kFormat, kStrips>* producer, RingConsumer* consumer) {
  const DecodeProblem& problem = work.problems[item.problem];
  const int rounds =
      (problem.segments + problem.segments_per_round - 1) / problem.segments_per_round;
  const float* sums = reinterpret_cast<const float*>(x_shared);
  float* earlier = reinterpret_cast<float*>(x_shared + work.x_bytes);
  for (int round = 0; round < rounds; ++round) {
    RunRound<kFormat, kTiles, kStrips>(work, table, items, problem, item, round, x_rows, x_shared,
                                       producer, consumer);
    __syncthreads();
    if (round + 1 < rounds) {
      KeepSums(work, problem, item, sums, earlier, round);
    } else {
      WriteOutputs(work, problem, item, sums, earlier, round);
    }
    // The memory of x and sums is free again.
    __syncthreads();
  }
}

template <WeightFormat kFormat, int kMaxTiles, int kStrips>
__global__ void __launch_bounds__(kDecodeThreads, kMaxTiles == 8 ? 1 : 2)
    DecodeKernel(const __grid_constant__ DecodeWork work) {
  // Rings, barriers, row numbers, x or sums, sums of earlier rounds, the table of groups.
  uint8_t* shared = DynamicShared<uint8_t>();
  constexpr int kRingBytes = kRingStages * kRingStageBytes;
  const int warp = UniformWarpId();
  const int lane = LaneId();
  Barrier* barriers = reinterpret_cast<Barrier*>(shared + kDecodeWarps * kRingBytes);
  int* x_rows = reinterpret_cast<int*>(barriers + kDecodeWarps * kRingStages);
  uint8_t* x_shared = reinterpret_cast<uint8_t*>(x_rows + kMaxDecodeRows);
  RingConsumer consumer;
  consumer.ring = shared + warp * kRingBytes;
  consumer.barriers = barriers + warp * kRingStages;
  if (lane == 0) {
    for (int i = 0; i < kRingStages; ++i) BarrierInit(consumer.barriers + i, 1);
    FenceBarrierInit();
  }
  AllowNextKernel();

  GroupTable table = {};
  int items = work.items;
  if (work.groups > 0) {
    WaitForPreviousKernel();
    table = BuildGroupTable(work, reinterpret_cast<int*>(shared + work.shared_bytes) -
                                      3 * (work.groups + 1) - 2 * kDecodeWarps);
    items = table.items;
  }
  __syncwarp();
  // Weights do not depend on the kernel in front.
  RingProducer<kFormat, kStrips> producer;
  producer.item = static_cast<int>(blockIdx.x);
  if (lane == 0) {
    for (int i = 0; i < kRingStages; ++i)
      producer.Fill(work, table, items, consumer.ring + i * kRingStageBytes, consumer.barriers + i);
  }
  __syncwarp();
  if (work.groups == 0) WaitForPreviousKernel();

  for (int index = static_cast<int>(blockIdx.x); index < items;
       index += static_cast<int>(gridDim.x)) {
    const DecodeItem item = FindItem(work, table, index);
    if (static_cast<int>(threadIdx.x) < item.rows) {
      const int row = item.first_row + static_cast<int>(threadIdx.x);
      x_rows[threadIdx.x] = work.row_index == nullptr ? row : work.row_index[row];
    }
    __syncthreads();
    const auto run = [&](auto tiles) {
      RunItem<kFormat, std::min<int>(decltype(tiles)::value, kMaxTiles), kStrips>(
          work, table, items, item, x_rows, x_shared, &producer, &consumer);
    };
    if (kMaxTiles == 1 || item.rows <= 8) {
      run(std::integral_constant<int, 1>());
    } else if (kMaxTiles == 2 || item.rows <= 16) {
      run(std::integral_constant<int, 2>());
    } else if (kMaxTiles == 4 || item.rows <= 32) {
      run(std::integral_constant<int, 4>());
    } else {
      run(std::integral_constant<int, 8>());
    }
  }
}

// Defined per format in linear_decode_*.cu.
template <WeightFormat kFormat>
Status LaunchDecodeKernel(const DecodeWork& work, const LaunchConfig& config, Stream& stream) {
  switch (work.block_rows) {
    case 8:
      return Launch("DecodeKernel", &DecodeKernel<kFormat, 1, StripsPerWarp(8)>, config, stream,
                    work);
    case 16:
      return Launch("DecodeKernel", &DecodeKernel<kFormat, 2, StripsPerWarp(16)>, config, stream,
                    work);
    case 32:
      return Launch("DecodeKernel", &DecodeKernel<kFormat, 4, StripsPerWarp(32)>, config, stream,
                    work);
    default:
      return Launch("DecodeKernel", &DecodeKernel<kFormat, 8, StripsPerWarp(64)>, config, stream,
                    work);
  }
}

}  // namespace deepinfer::cuda
