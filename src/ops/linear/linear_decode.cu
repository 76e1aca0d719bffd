// How linears with few rows are cut into items and launched, and the plain kernel that they are
// compared with.
#include "ops/linear/linear_decode.h"

#include <algorithm>
#include <cmath>

#include "base/ceil_div.h"
#include "ops/linear/linear_decode.cuh"
#include "ops/linear/linear_pack.h"

namespace deepinfer::cuda {

// Instantiated in linear_decode_*.cu.
extern template Status LaunchDecodeKernel<WeightFormat::kBf16>(const DecodeWork&,
                                                               const LaunchConfig&, Stream&);
extern template Status LaunchDecodeKernel<WeightFormat::kFp8Block>(const DecodeWork&,
                                                                   const LaunchConfig&, Stream&);
extern template Status LaunchDecodeKernel<WeightFormat::kFp4Group>(const DecodeWork&,
                                                                   const LaunchConfig&, Stream&);

namespace {

constexpr int kRingsBytes = kDecodeWarps * kRingStages * (kRingStageBytes + 8);
// Shared memory of a block of which two fit into a multiprocessor (228 KB, 1 KB for each block),
// and of the largest block.
constexpr int kHalfSharedBytes = 113 * 1024;
constexpr int kMaxSharedBytes = 227 * 1024;
constexpr int kMinXBytes = 36 * 1024;

int Streams(const DecodeProblem& problem) {
  return problem.strips_per_item * (problem.up == nullptr ? 1 : 2);
}

// Cuts the problems for items of `block_rows` rows; the number of items of ungrouped work.
int64_t CutProblems(DecodeWork& work) {
  const int most_streams = kDecodeWarps * StripsPerWarp(work.block_rows);
  int64_t items = 0;
  for (int i = 0; i < work.num_problems; ++i) {
    DecodeProblem& problem = work.problems[i];
    const int sides = problem.up == nullptr ? 1 : 2;
    // A group of 32 outputs that is quantised stays together.
    const int least_strips = problem.quantize ? 2 : StripsPerWarp(work.block_rows);
    // Warps on different segments need different columns of x at a time.
    const int most_places = std::max(1, kMaxDecodeRows / work.block_rows);
    problem.segments_per_round =
        std::min({problem.segments, most_places, most_streams / (sides * least_strips)});
    problem.strips_per_item = least_strips;
    while (2 * Streams(problem) * problem.segments_per_round <= most_streams)
      problem.strips_per_item *= 2;
    problem.strip_blocks =
        static_cast<int>(CeilDiv(CeilDiv(problem.n, kCudaStripOutputs), problem.strips_per_item));
    problem.first_item = static_cast<int>(items);
    items += problem.strip_blocks * CeilDiv(problem.rows, work.block_rows);
  }
  return items;
}

// The smallest block of rows that holds so many.
int BlockRowsFor(int64_t rows) {
  return rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
}

// Rows per block for groups whose sizes only the device knows. Small blocks save nothing (an item
// with few rows takes the instructions of a small one), so blocks are as large as shared memory for
// two blocks per multiprocessor allows, unless groups are likely to have more rows.
int GroupBlockRows(int64_t rows, int64_t groups) {
  return rows / groups > 24 ? 64 : std::min(32, BlockRowsFor(rows));
}

}  // namespace

Status LaunchDecode(WeightFormat format, DecodeWork work, Stream& stream) {
  int64_t rows = 0;
  for (int i = 0; i < work.num_problems; ++i) rows = std::max<int64_t>(rows, work.problems[i].rows);
  work.block_rows = work.groups > 0 ? GroupBlockRows(rows, work.groups) : BlockRowsFor(rows);
  int64_t items = CutProblems(work);
  if (work.groups > 0) {
    // At most: every group has rows, and a block that is not full.
    const int64_t row_blocks =
        std::min(rows, work.groups + CeilDiv(rows, int64_t{work.block_rows}));
    items = row_blocks * work.problems[0].strip_blocks;
  } else {
    // Smaller blocks of rows read weights more often, from the L2, but keep more of the GPU busy.
    while (work.block_rows > 8 && items < stream.sm_count()) {
      work.block_rows /= 2;
      items = CutProblems(work);
    }
  }
  work.items = static_cast<int>(items);

  int streams = 1;
  int places = 1;
  bool many_rounds = false;
  for (int i = 0; i < work.num_problems; ++i) {
    const DecodeProblem& problem = work.problems[i];
    streams = std::max(streams, Streams(problem));
    places = std::max(places, problem.segments_per_round);
    many_rounds = many_rounds || problem.segments > problem.segments_per_round;
  }
  const int block_rows = work.block_rows;
  work.sum_stride = streams * static_cast<int>(kCudaStripOutputs) + 4;
  work.sum_bytes = block_rows * work.sum_stride * 4;
  const int x_rows = block_rows == 8 ? static_cast<int>(std::min<int64_t>(8, rows)) : block_rows;
  const int least_x_bytes = std::max(2 * places * x_rows * kXPitch, places * work.sum_bytes);
  work.x_bytes = std::max(least_x_bytes, kMinXBytes);
  const auto shared_bytes = [&] {
    const int64_t bytes =
        kRingsBytes + kMaxDecodeRows * 4 + work.x_bytes + (many_rounds ? work.sum_bytes : 0) +
        (work.groups > 0 ? 12 * (int64_t{work.groups} + 1) + 8 * kDecodeWarps : 0);
    return CeilDiv(bytes, 16) * 16;
  };
  if (shared_bytes() > kMaxSharedBytes) {
    return Fail(
        Code::kUnsupported,
        fmt::format("A grouped linear has {} groups; the CUDA kernels take fewer.", work.groups),
        "group_offsets");
  }
  work.shared_bytes = static_cast<int>(shared_bytes());

  LaunchConfig config;
  const int64_t per_multiprocessor = work.shared_bytes <= kHalfSharedBytes ? 2 : 1;
  config.grid.x = static_cast<uint32_t>(std::min(items, per_multiprocessor * stream.sm_count()));
  config.block = kDecodeThreads;
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
      const int field = strip[CudaScaleOffset(kFormat, problem.padded_k, in_strip, block)];
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
