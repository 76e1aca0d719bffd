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
// columns at a time or all at once, and read with ldmatrix.
//
// Numbers: a segment's sum takes k16 steps in ascending order from zero; sums of segments are added
// in ascending order, through shared memory. So a row's bits do not depend on other rows, nor on
// how items and segments are distributed over warps.
#pragma once

#include "device.cuh"
#include "ops/linear/cuda_layout.h"
#include "ops/linear/linear_decode.h"
#include "ops/quantize/group_quantize.cuh"

namespace deepinfer::cuda {

inline constexpr int kDecodeWarps = 8;
inline constexpr int kDecodeThreads = 32 * kDecodeWarps;
inline constexpr int kRingStages = 4;
// Four units of 512 bytes, and scales.
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

// What one warp of an item works on in one round; no columns: nothing.
struct WarpSegment {
  const uint8_t* strip = nullptr;
  int begin = 0;  // columns
  int end = 0;
};

__device__ inline WarpSegment SegmentOfWarp(const DecodeProblem& problem, const DecodeItem& item,
                                            int round, int warp) {
  const int sides = problem.up == nullptr ? 1 : 2;
  const int streams = sides * problem.strips_per_item;
  const int place = warp / streams;  // among the segments of the round
  const int stream = warp - place * streams;
  const bool is_up = stream >= problem.strips_per_item;
  const int strip = item.strip_block * problem.strips_per_item +
                    (is_up ? stream - problem.strips_per_item : stream);
  const int segment = round * problem.segments_per_round + place;
  WarpSegment found;
  if (place >= problem.segments_per_round || segment >= problem.segments ||
      strip * kCudaStripOutputs >= problem.n)
    return found;
  found.strip = (is_up ? problem.up + item.group * problem.up_step
                       : problem.weight + item.group * problem.weight_step) +
                strip * problem.strip_bytes;
  found.begin = segment * problem.segment_columns;
  found.end = min(found.begin + problem.segment_columns, problem.padded_k);
  return found;
}

// The lane that keeps a warp's ring full: where it is in the warp's sequence of streams.
template <WeightFormat kFormat>
struct RingProducer {
  WarpSegment segment;
  int column = 0;
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
      segment = SegmentOfWarp(work.problems[found.problem], found, round,
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
    const uint8_t* from = segment.strip + CudaUnitOffset(kFormat, column / kUnitColumns);
    if (kFormat == WeightFormat::kFp8Block) {
      const int units = min(kColumns, segment.end - column) / kUnitColumns;
      const uint8_t* scales = segment.strip +
                              work.problems[found.problem].padded_k / kUnitColumns * 512 +
                              column / kUnitColumns / 16 * 16;
      BarrierArriveExpect(barrier, static_cast<uint32_t>(units * 512 + 16));
      BulkCopy(stage, from, static_cast<uint32_t>(units * 512), barrier);
      BulkCopy(stage + 2048, scales, 16, barrier);
    } else {
      constexpr uint32_t kBytes = kFormat == WeightFormat::kFp4Group ? 2176 : 2048;
      BarrierArriveExpect(barrier, kBytes);
      BulkCopy(stage, from, kBytes, barrier);
    }
    column += kColumns;
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

// Two k16 steps. x: the lane's address for ldmatrix in the first tile of eight rows.
template <int kTiles>
__device__ inline void MultiplyTwoSteps(const uint32_t (&a0)[4], const uint32_t (&a1)[4],
                                        const uint8_t* const (&x)[kTiles], int x_bytes,
                                        float (&sums)[kTiles][4]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    uint32_t b[4];
    LoadMatrix4(b, x[tile] + x_bytes);
    const uint32_t b0[2] = {b[0], b[1]};
    const uint32_t b1[2] = {b[2], b[3]};
    MmaBf16(sums[tile], a0, b0);
    MmaBf16(sums[tile], a1, b1);
  }
}

// A stage of the ring times x. `x_bytes`: where its first column is in a row of x. `scale_byte`
// (FP8): which of the 16 scales of the stage is the first.
template <WeightFormat kFormat, int kTiles>
__device__ inline void MultiplyStage(const uint8_t* stage, const uint8_t* const (&x)[kTiles],
                                     int x_bytes, int columns, int scale_byte,
                                     float (&sums)[kTiles][4]) {
  const int lane = LaneId();
  uint32_t a0[4];
  uint32_t a1[4];
  if constexpr (kFormat == WeightFormat::kFp4Group) {
    const uint4 fields = *reinterpret_cast<const uint4*>(stage + 2048 + lane / 4 * 16);
    const uint32_t unit_fields[4] = {fields.x, fields.y, fields.z, fields.w};
#pragma unroll
    for (int unit = 0; unit < 4; ++unit) {
      const uint4 w = *reinterpret_cast<const uint4*>(stage + 512 * unit + 16 * lane);
      const uint32_t f = unit_fields[unit];
      ConvertFp4(w.x, ScalePair<0>(f), ScalePair<1>(f), a0);
      ConvertFp4(w.y, ScalePair<0>(f), ScalePair<1>(f), a1);
      MultiplyTwoSteps(a0, a1, x, x_bytes + 128 * unit, sums);
      ConvertFp4(w.z, ScalePair<2>(f), ScalePair<3>(f), a0);
      ConvertFp4(w.w, ScalePair<2>(f), ScalePair<3>(f), a1);
      MultiplyTwoSteps(a0, a1, x, x_bytes + 128 * unit + 64, sums);
    }
  } else if constexpr (kFormat == WeightFormat::kFp8Block) {
    const uint32_t f = *reinterpret_cast<const uint32_t*>(stage + 2048 + scale_byte);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && columns <= 64) break;
      const uint8_t* at = stage + 1024 * half + 16 * lane;
      const uint4 w0 = *reinterpret_cast<const uint4*>(at);
      const uint4 w1 = *reinterpret_cast<const uint4*>(at + 512);
      const uint32_t scale0 = half == 0 ? ScalePair<0>(f) : ScalePair<2>(f);
      const uint32_t scale1 = half == 0 ? ScalePair<1>(f) : ScalePair<3>(f);
      ConvertFp8(w0.x, w0.y, scale0, a0);
      ConvertFp8(w0.z, w0.w, scale0, a1);
      MultiplyTwoSteps(a0, a1, x, x_bytes + 128 * half, sums);
      ConvertFp8(w1.x, w1.y, scale1, a0);
      ConvertFp8(w1.z, w1.w, scale1, a1);
      MultiplyTwoSteps(a0, a1, x, x_bytes + 128 * half + 64, sums);
    }
  } else {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const uint8_t* at = stage + 1024 * pair + 16 * lane;
      const uint4 w0 = *reinterpret_cast<const uint4*>(at);
      const uint4 w1 = *reinterpret_cast<const uint4*>(at + 512);
      const uint32_t first[4] = {w0.x, w0.y, w0.z, w0.w};
      const uint32_t second[4] = {w1.x, w1.y, w1.z, w1.w};
      MultiplyTwoSteps(first, second, x, x_bytes + 64 * pair, sums);
    }
  }
}

// Copies one stage of x, columns [256 * stage, ...) of each segment of a round, into shared memory:
// [segment of the round][row][kXPitch bytes]. Columns beyond k are zero.
__device__ inline void CopyXStage(const DecodeProblem& problem, const int* x_rows, int rows,
                                  int round, int stage, uint8_t* shared) {
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
    uint8_t* to = shared + i * kXPitch + 16 * lane;
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
template <WeightFormat kFormat, int kTiles>
__device__ inline void RunRound(const DecodeWork& work, const GroupTable& table, int items,
                                const DecodeProblem& problem, const DecodeItem& item, int round,
                                const int* x_rows, uint8_t* x_shared,
                                RingProducer<kFormat>* producer, RingConsumer* consumer) {
  const int warp = UniformWarpId();
  const int lane = LaneId();
  const WarpSegment segment = SegmentOfWarp(problem, item, round, warp);
  const int streams = (problem.up == nullptr ? 1 : 2) * problem.strips_per_item;
  const int place = warp / streams;

  float sums[kTiles][4];
  const uint8_t* x[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    for (float& sum : sums[tile]) sum = 0.0f;
    // Rows that do not exist repeat the last one: columns of the product that nobody reads.
    const int row = min(8 * tile + lane % 8, item.rows - 1);
    x[tile] = x_shared + (place * item.rows + row) * kXPitch + lane / 8 * 16;
  }
  const int first_segment = round * problem.segments_per_round;
  const int longest =
      min(problem.segment_columns, problem.padded_k - first_segment * problem.segment_columns);
  const int x_stages = (longest + kXStageColumns - 1) / kXStageColumns;

  // x: all stages of the round at once where they fit, else some stages ahead of the one in use.
  const int stage_bytes = problem.segments_per_round * item.rows * kXPitch;
  const int slots = work.x_bytes / stage_bytes;
  const bool resident = slots >= x_stages;
  const int ring = slots >= 3 ? 3 : 2;
  const int ahead = resident ? x_stages : ring - 1;
  for (int stage = 0; stage < ahead; ++stage) {
    if (stage < x_stages)
      CopyXStage(problem, x_rows, item.rows, round, stage, x_shared + stage * stage_bytes);
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
        CopyXStage(problem, x_rows, item.rows, round, stage + ahead, x_shared + next * stage_bytes);
      CommitCopies();
    }
    const int begin = segment.begin + stage * kXStageColumns;
    const int end = min(begin + kXStageColumns, segment.end);
    for (int column = begin; column < end; column += kRingColumns<kFormat>) {
      uint8_t* ring_stage = consumer->ring + consumer->stage * kRingStageBytes;
      Barrier* barrier = consumer->barriers + consumer->stage;
      BarrierWait(barrier, consumer->parity);
      MultiplyStage<kFormat, kTiles>(ring_stage, x, slot * stage_bytes + 2 * (column - begin),
                                     end - column, column / 32 % 16, sums);
      __syncwarp();
      if (lane == 0) producer->Fill(work, table, items, ring_stage, barrier);
      if (++consumer->stage == kRingStages) {
        consumer->stage = 0;
        consumer->parity ^= 1u;
      }
    }
  }

  // The sums take the memory of x: [place][row of x][stream][16 outputs].
  __syncthreads();
  if (segment.begin >= segment.end) return;
  float* to = reinterpret_cast<float*>(x_shared) + place * (work.sum_bytes / 4) +
              (warp - place * streams) * 16 + lane / 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int row = 8 * tile + 2 * (lane % 4);
    to[row * work.sum_stride] = sums[tile][0];
    to[(row + 1) * work.sum_stride] = sums[tile][1];
    to[row * work.sum_stride + 8] = sums[tile][2];
    to[(row + 1) * work.sum_stride + 8] = sums[tile][3];
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
// groups + 1, and two numbers.
__device__ inline GroupTable BuildGroupTable(const DecodeWork& work, int* shared) {
  GroupTable table;
  const int capacity = work.groups + 1;
  int* first_item = shared;
  int* group = shared + capacity;
  int* first_row = shared + 2 * capacity;
  int* totals = shared + 3 * capacity;
  if (WarpId() == 0) {
    const int lane = LaneId();
    int count = 0;
    int items = 0;
    for (int base = 0; base < work.groups; base += 32) {
      const int g = base + lane;
      const int begin = g < work.groups ? work.group_offsets[g] : 0;
      const int rows = g < work.groups ? work.group_offsets[g + 1] - begin : 0;
      const int own_items =
          (rows + work.block_rows - 1) / work.block_rows * work.problems[0].strip_blocks;
      // Sums over the lanes up to this one.
      int before_items = own_items;
      int before_count = rows > 0 ? 1 : 0;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other_items = __shfl_up_sync(0xffffffffu, before_items, distance);
        const int other_count = __shfl_up_sync(0xffffffffu, before_count, distance);
        if (lane >= distance) {
          before_items += other_items;
          before_count += other_count;
        }
      }
      if (rows > 0) {
        const int place = count + before_count - 1;
        first_item[place] = items + before_items - own_items;
        group[place] = g;
        first_row[place] = begin;
      }
      items += __shfl_sync(0xffffffffu, before_items, 31);
      count += __shfl_sync(0xffffffffu, before_count, 31);
    }
    if (lane == 0) {
      first_row[count] = work.group_offsets[work.groups];
      totals[0] = count;
      totals[1] = items;
    }
  }
  __syncthreads();
  table.first_item = first_item;
  table.group = group;
  table.first_row = first_row;
  table.count = totals[0];
  table.items = totals[1];
  return table;
}

template <WeightFormat kFormat, int kTiles>
__device__ inline void RunItem(const DecodeWork& work, const GroupTable& table, int items,
                               const DecodeItem& item, const int* x_rows, uint8_t* x_shared,
                               RingProducer<kFormat>* producer, RingConsumer* consumer) {
  const DecodeProblem& problem = work.problems[item.problem];
  const int rounds =
      (problem.segments + problem.segments_per_round - 1) / problem.segments_per_round;
  const float* sums = reinterpret_cast<const float*>(x_shared);
  float* earlier = reinterpret_cast<float*>(x_shared + work.x_bytes);
  for (int round = 0; round < rounds; ++round) {
    RunRound<kFormat, kTiles>(work, table, items, problem, item, round, x_rows, x_shared, producer,
                              consumer);
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

template <WeightFormat kFormat, int kMaxTiles>
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
    table = BuildGroupTable(
        work, reinterpret_cast<int*>(shared + work.shared_bytes) - 3 * (work.groups + 1) - 2);
    items = table.items;
  }
  __syncwarp();
  // Weights do not depend on the kernel in front.
  RingProducer<kFormat> producer;
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
    if (kMaxTiles == 1 || item.rows <= 8) {
      RunItem<kFormat, 1>(work, table, items, item, x_rows, x_shared, &producer, &consumer);
    } else if (kMaxTiles == 2 || item.rows <= 16) {
      RunItem<kFormat, (kMaxTiles < 2 ? kMaxTiles : 2)>(work, table, items, item, x_rows, x_shared,
                                                        &producer, &consumer);
    } else if (kMaxTiles == 4 || item.rows <= 32) {
      RunItem<kFormat, (kMaxTiles < 4 ? kMaxTiles : 4)>(work, table, items, item, x_rows, x_shared,
                                                        &producer, &consumer);
    } else {
      RunItem<kFormat, kMaxTiles>(work, table, items, item, x_rows, x_shared, &producer, &consumer);
    }
  }
}

// Defined per format in linear_decode_*.cu.
template <WeightFormat kFormat>
Status LaunchDecodeKernel(const DecodeWork& work, const LaunchConfig& config, Stream& stream) {
  switch (work.block_rows) {
    case 8:
      return Launch("DecodeKernel", &DecodeKernel<kFormat, 1>, config, stream, work);
    case 16:
      return Launch("DecodeKernel", &DecodeKernel<kFormat, 2>, config, stream, work);
    case 32:
      return Launch("DecodeKernel", &DecodeKernel<kFormat, 4>, config, stream, work);
    default:
      return Launch("DecodeKernel", &DecodeKernel<kFormat, 8>, config, stream, work);
  }
}

}  // namespace deepinfer::cuda
