// How linears with few rows are cut into items and launched, and the plain kernel that they are
// compared with.
#include "ops/linear/linear_decode.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/ceil_div.h"
#include "ops/linear/linear_decode.cuh"
#include "ops/linear/linear_pack.h"

namespace deepinfer::cuda {

// Instantiated in linear_decode_*.cu.
extern template Status LaunchDecodeKernel<WeightFormat::kBf16>(const DecodeWork&, LaunchConfig,
                                                               Stream&);
extern template Status LaunchDecodeKernel<WeightFormat::kFp8Block>(const DecodeWork&, LaunchConfig,
                                                                   Stream&);
extern template Status LaunchDecodeKernel<WeightFormat::kFp4Group>(const DecodeWork&, LaunchConfig,
                                                                   Stream&);

namespace {

// Shared memory of a block of which so many fit into a multiprocessor (228 KB, 1 KB for each
// block).
constexpr int SharedBytesFor(int blocks) {
  return 228 * 1024 / blocks - 1024;
}
// Chunks in a warp's ring.
constexpr int kMaxRingChunks = 4;
constexpr int kMinRingChunks = 3;
constexpr int kMaxXSlots = 16;
// Stages of x that are worth a chunk of the ring.
constexpr int kWantedXSlots = 4;

int Streams(const DecodeProblem& problem) {
  return problem.strips_per_item * (problem.up == nullptr ? 1 : 2);
}

// Cuts the problems for items of `block_rows` rows; the number of items of ungrouped work.
int64_t CutProblems(WeightFormat format, DecodeWork& work) {
  const int strips = StripsPerWarp(format, work.block_rows);
  const int most_streams = kDecodeWarps * strips;
  int64_t items = 0;
  for (int i = 0; i < work.num_problems; ++i) {
    DecodeProblem& problem = work.problems[i];
    const int sides = problem.up == nullptr ? 1 : 2;
    // A group of 32 outputs that is quantised stays together.
    const int least_strips = problem.quantize ? 2 : strips;
    // Warps on different segments need different columns of x at a time.
    const int most_places = kMaxXRows / work.block_rows;
    problem.segments_per_round =
        std::min({problem.segments, most_places, most_streams / (sides * least_strips)});
    problem.rounds = CeilDiv(problem.segments, problem.segments_per_round);
    problem.strips_per_item = least_strips;
    while (2 * Streams(problem) * problem.segments_per_round <= most_streams)
      problem.strips_per_item *= 2;
    problem.slot_shift = std::countr_zero(static_cast<unsigned>(Streams(problem) / strips));
    problem.direct = problem.segments == 1 && problem.up == nullptr && !problem.quantize;
    problem.strip_blocks =
        static_cast<int>(CeilDiv(CeilDiv(problem.n, kCudaStripOutputs), problem.strips_per_item));
    problem.first_item = static_cast<int>(items);
    items += problem.strip_blocks * CeilDiv(problem.rows, work.block_rows);
  }
  return items;
}

// Shares out the shared memory for `blocks` blocks per multiprocessor; false where too little is
// left for the rings.
bool ShareMemory(WeightFormat format, int64_t rows, int blocks, DecodeWork& work) {
  const int strips = StripsPerWarp(format, work.block_rows);
  const int chunk_bytes = static_cast<int>(CudaChunkBytes(format));
  const int x_rows = work.block_rows == 8 ? static_cast<int>(std::min<int64_t>(8, rows)) : 16;
  int places = 1;
  int streams = 1;
  int segments = 0;  // of problems that need the table of sums
  for (int i = 0; i < work.num_problems; ++i) {
    const DecodeProblem& problem = work.problems[i];
    places = std::max(places, problem.segments_per_round);
    if (problem.direct) continue;
    streams = std::max(streams, Streams(problem));
    segments = std::max(segments, problem.segments);
  }
  work.x_slot_bytes = places * x_rows * DecodeXPitch(format);
  work.sum_stride = streams * static_cast<int>(kCudaStripOutputs) + 4;
  work.sum_floats = work.block_rows * work.sum_stride;
  work.table_floats = segments * work.sum_floats;
  const int ring_slot_bytes = kDecodeWarps * (strips * chunk_bytes + 8);
  const int x_slot_bytes = work.x_slot_bytes + 16;
  const int64_t table_bytes =
      work.groups > 0 ? 12 * (int64_t{work.groups} + 1) + 8 * (kDecodeWarps + 1) : 0;
  const int64_t left = SharedBytesFor(blocks) - 4 * work.table_floats - 16 - table_bytes;

  const auto fits = [&](int ring_slots, int x_slots) {
    return int64_t{ring_slots} * ring_slot_bytes + int64_t{x_slots} * x_slot_bytes <= left;
  };
  const int least_ring_slots = CeilDiv(kMinRingChunks, strips);
  work.ring_slots = kMaxRingChunks / strips;
  while (work.ring_slots > least_ring_slots && !fits(work.ring_slots, kWantedXSlots))
    --work.ring_slots;
  work.x_slots = 2;
  if (!fits(work.ring_slots, work.x_slots)) return false;
  while (work.x_slots < kMaxXSlots && fits(work.ring_slots, work.x_slots + 1)) ++work.x_slots;
  work.shared_bytes =
      static_cast<int>(CeilDiv(4 * work.table_floats + 16 + table_bytes +
                                   work.ring_slots * ring_slot_bytes + work.x_slots * x_slot_bytes,
                               16) *
                       16);
  return true;
}

}  // namespace

Status LaunchDecode(WeightFormat format, DecodeWork work, Stream& stream) {
  int64_t rows = 0;
  for (int i = 0; i < work.num_problems; ++i) rows = std::max<int64_t>(rows, work.problems[i].rows);
  // Only the device knows the sizes of groups. Items of 16 rows lose nothing on groups with fewer.
  work.block_rows = rows <= 8 ? 8 : 16;
  int64_t items = CutProblems(format, work);
  if (work.groups > 0) {
    // At most: every group has rows, and a block that is not full.
    const int64_t row_blocks =
        std::min(rows, work.groups + CeilDiv(rows, int64_t{work.block_rows}));
    items = row_blocks * work.problems[0].strip_blocks;
  } else if (work.block_rows > 8 && items < stream.sm_count()) {
    // Smaller blocks of rows read weights more often, from the L2, but keep more of the GPU busy.
    work.block_rows = 8;
    items = CutProblems(format, work);
  }
  work.items = static_cast<int>(items);
  work.aligned_x = true;
  for (int i = 0; i < work.num_problems; ++i) work.aligned_x &= work.problems[i].aligned_x;

  int blocks = kDecodeBlocks;
  while (!ShareMemory(format, rows, blocks, work)) {
    if (--blocks > 0) continue;
    return Fail(
        Code::kUnsupported,
        fmt::format("A grouped linear has {} groups; the CUDA kernels take fewer.", work.groups),
        "group_offsets");
  }

  LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(std::min<int64_t>(items, blocks * stream.sm_count()));
  config.shared_bytes = work.shared_bytes;
  config.overlap_previous = true;
  switch (format) {
    case WeightFormat::kBf16:
      return LaunchDecodeKernel<WeightFormat::kBf16>(work, config, stream);
    case WeightFormat::kFp8Block:
      return LaunchDecodeKernel<WeightFormat::kFp8Block>(work, config, stream);
    case WeightFormat::kFp4Group:
      return LaunchDecodeKernel<WeightFormat::kFp4Group>(work, config, stream);
  }
  return {};
}

DecodeProblem DecodeProblemOf(const LinearWeight& weight, const TensorView& x,
                              const TensorView& y) {
  const CudaLinearWeight& packed = *weight.packed()->cuda;
  DecodeProblem problem;
  problem.weight = packed.data;
  problem.x = static_cast<const uint16_t*>(x.data());
  problem.y = y.data();
  problem.x_stride = x.row_stride();
  problem.y_stride = y.row_stride();
  problem.strip_bytes = packed.strip_bytes;
  problem.weight_factor = std::ldexp(1.0f, packed.output_exponent);
  problem.rows = static_cast<int>(y.rows());
  problem.n = static_cast<int>(weight.n());
  problem.k = static_cast<int>(weight.k());
  problem.padded_k = static_cast<int>(packed.padded_k);
  problem.segments = static_cast<int>(packed.segments.count);
  problem.segment_columns = static_cast<int>(packed.segments.columns);
  problem.vector_x = problem.k % 8 == 0 && problem.x_stride % 8 == 0 &&
                     reinterpret_cast<uintptr_t>(x.data()) % 16 == 0;
  problem.aligned_x = problem.vector_x && problem.padded_k == problem.k &&
                      x.rows() * problem.x_stride < int64_t{1} << 31;
  problem.y_is_f32 = y.dtype() == DType::kF32;
  return problem;
}

Result<int64_t> WeightStep(std::span<const LinearWeight* const> weights) {
  const CudaLinearWeight& first = *weights[0]->packed()->cuda;
  if (weights.size() == 1) return 0;
  const int64_t step = weights[1]->packed()->cuda->data - first.data;
  for (size_t i = 1; i < weights.size(); ++i) {
    const CudaLinearWeight& weight = *weights[i]->packed()->cuda;
    if (weight.memory != first.memory ||
        weight.data != first.data + static_cast<int64_t>(i) * step ||
        weight.output_exponent != first.output_exponent) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("Weight {} of a grouped linear does not follow the others in memory; "
                              "weights that are used together must be packed together, in order.",
                              i),
                  "weights");
    }
  }
  return step;
}

// ---- The plain kernel
// ----------------------------------------------------------------------------

namespace {

// A thread per row (y) and output (x).
template <WeightFormat kFormat>
__global__ void ReferenceKernel(const __grid_constant__ DecodeWork work, int problem_index) {
  WaitForPreviousKernel();
  const DecodeProblem& problem = work.problems[problem_index];
  const int output = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  if (output >= problem.n) return;
  const uint8_t* weight = problem.weight;
  if (work.groups > 0) {
    int group = 0;
    while (work.group_offsets[group + 1] <= row) ++group;
    weight += group * problem.weight_step;
  }
  const int in_strip = output % static_cast<int>(kCudaStripOutputs);
  const uint8_t* strip =
      weight + output / static_cast<int>(kCudaStripOutputs) * problem.strip_bytes;
  const int x_row = work.row_index == nullptr ? row : work.row_index[row];
  const uint16_t* x = problem.x + x_row * problem.x_stride;
  float total = 0.0f;
  for (int block = 0; 32 * block < problem.k; ++block) {
    float sum = 0.0f;
    for (int k = 32 * block; k < min(32 * block + 32, problem.k); ++k) {
      const uint32_t code = CudaCodeAt(kFormat, strip, in_strip, k);
      float value = Bf16ToFloat(static_cast<uint16_t>(code));
      if (kFormat == WeightFormat::kFp8Block) {
        value = std::bit_cast<float>((code & 0x7fu) << 20) * 0x1p120f;
        if ((code & 0x80u) != 0) value = -value;
      } else if (kFormat == WeightFormat::kFp4Group) {
        value = std::bit_cast<float>((code & 7u) << 22) * 0x1p126f;
        if ((code & 8u) != 0) value = -value;
      }
      sum += Bf16ToFloat(x[k]) * value;
    }
    float scale = 1.0f;
    if (kFormat != WeightFormat::kBf16) {
      const int field = CudaScaleFieldAt(kFormat, strip, in_strip, block);
      scale = ldexpf(1.0f, field - CudaScaleBias(kFormat) - 127);
    }
    total += sum * (scale * problem.weight_factor);
  }
  const int64_t place = row * problem.y_stride + output;
  if (problem.y_is_f32) {
    static_cast<float*>(problem.y)[place] = total;
  } else {
    static_cast<uint16_t*>(problem.y)[place] = FloatToBf16(total);
  }
}

template <WeightFormat kFormat>
Status LaunchReference(const DecodeWork& work, Stream& stream) {
  for (int i = 0; i < work.num_problems; ++i) {
    LaunchConfig config;
    config.grid.x = static_cast<uint32_t>(CeilDiv(work.problems[i].n, 128));
    config.grid.y = static_cast<uint32_t>(work.problems[i].rows);
    config.block = 128;
    DI_RETURN_IF_ERROR(
        Launch("LinearReference", &ReferenceKernel<kFormat>, config, stream, work, i));
  }
  return {};
}

}  // namespace

Status LaunchLinearReference(WeightFormat format, const DecodeWork& work, Stream& stream) {
  switch (format) {
    case WeightFormat::kBf16:
      return LaunchReference<WeightFormat::kBf16>(work, stream);
    case WeightFormat::kFp8Block:
      return LaunchReference<WeightFormat::kFp8Block>(work, stream);
    case WeightFormat::kFp4Group:
      return LaunchReference<WeightFormat::kFp4Group>(work, stream);
  }
  return {};
}

}  // namespace deepinfer::cuda
