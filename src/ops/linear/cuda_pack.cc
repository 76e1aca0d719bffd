#include "ops/linear/cuda_pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/ceil_div.h"
#include "base/check.h"
#include "ops/linear/cuda_layout.h"
#include "ops/linear/tune_segments.h"
#include "tensor/float_formats.h"

namespace deepinfer {
namespace {

constexpr int64_t kTileOutputs = kCudaStripOutputs * kCudaTileStrips;

int64_t ScaleRows(const LinearSource& source) {
  return source.format == WeightFormat::kFp8Block ? CeilDiv(source.n, 32) : source.n;
}

const uint8_t* Row(const TensorView& view, int64_t row) {
  return static_cast<const uint8_t*>(view.data()) +
         row * view.row_stride() * DTypeBytes(view.dtype());
}

}  // namespace

int64_t& TuneSegments() {
  static int64_t count = 0;
  return count;
}

LinearSegments SegmentsOf(WeightFormat format, int64_t n, int64_t k) {
  // 132 multiprocessors with eight warps each, one strip and segment per warp.
  constexpr int64_t kWantedWarps = 1056;
  constexpr int64_t kMaxSegments = 8;
  constexpr int64_t kUnit = 256;
  const int64_t strips = CeilDiv(n, kTileOutputs) * kCudaTileStrips;
  const int64_t tuned = TuneSegments();
  const int64_t wanted = format == WeightFormat::kFp4Group ? 1
                         : tuned > 0
                             ? tuned
                             : std::clamp<int64_t>(CeilDiv(kWantedWarps, strips), 1, kMaxSegments);
  LinearSegments segments;
  segments.columns = CeilDiv(CeilDiv(k, wanted), kUnit) * kUnit;
  // Shared experts' gate and up are one product: a block has two strips of each, 32 outputs that
  // are quantised together, so its eight warps are busy with two segments. More would be taken in
  // rounds, each of which waits for its columns of x.
  if (format == WeightFormat::kFp8Block && n == 2304 && k == 5120 && tuned == 0)
    segments.columns = 2560;
  segments.count = CeilDiv(k, segments.columns);
  return segments;
}

int64_t CudaPaddedK(WeightFormat format, int64_t k) {
  return CeilDiv(k, CudaChunkColumns(format)) * CudaChunkColumns(format);
}

int64_t CudaStripBytes(WeightFormat format, int64_t k) {
  return CudaPaddedK(format, k) / CudaChunkColumns(format) * CudaChunkBytes(format);
}

Result<int> CudaOutputExponent(std::span<const LinearSource> sources, ThreadPool& pool) {
  if (sources.empty() || sources[0].format == WeightFormat::kBf16) return 0;
  std::vector<uint8_t> low(static_cast<size_t>(pool.num_threads()), 255);
  std::vector<uint8_t> high(static_cast<size_t>(pool.num_threads()), 0);
  const int64_t scale_rows = ScaleRows(sources[0]);
  const int64_t blocks = sources[0].k / 32;
  pool.ParallelFor(std::ssize(sources) * scale_rows, [&](int64_t begin, int64_t end, int worker) {
    uint8_t least = 255;
    uint8_t most = 0;
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t* row = Row(sources[static_cast<size_t>(i / scale_rows)].scale, i % scale_rows);
      for (int64_t block = 0; block < blocks; ++block) {
        least = std::min(least, row[block]);
        most = std::max(most, row[block]);
      }
    }
    uint8_t& worker_low = low[static_cast<size_t>(worker)];
    uint8_t& worker_high = high[static_cast<size_t>(worker)];
    worker_low = std::min(worker_low, least);
    worker_high = std::max(worker_high, most);
  });
  const int least = *std::min_element(low.begin(), low.end());
  const int most = *std::max_element(high.begin(), high.end());
  if (most == 255) {
    return Fail(Code::kUnsupported,
                "A weight has a NaN scale; the CUDA kernels take finite scales only.", "scale");
  }
  // With exponent e the smallest non-zero product is 2^(least - 127 - e) times 2^-1 (E2M1) or 2^-9
  // (E4M3), which must be a normal number, and the largest factor has the field most + bias - e,
  // which must be at most 254.
  const bool fp4 = sources[0].format == WeightFormat::kFp4Group;
  const int at_most = least - (fp4 ? 2 : 10);
  const int at_least = most + CudaScaleBias(sources[0].format) - 254;
  if (at_least > at_most) {
    return Fail(Code::kUnsupported,
                fmt::format("The scales of a weight reach from 2^{} to 2^{}; the CUDA kernels take "
                            "scales that are at most 2^{} times each other.",
                            least - 127, most - 127, fp4 ? 126 : 124),
                "scale");
  }
  return std::clamp(0, at_least, at_most);
}

std::vector<uint8_t> PackCudaWeightOnHost(const LinearSource& source, int output_exponent) {
  const int64_t strips = CeilDiv(source.n, kTileOutputs) * kCudaTileStrips;
  const int64_t strip_bytes = CudaStripBytes(source.format, source.k);
  const int64_t padded_k = CudaPaddedK(source.format, source.k);
  std::vector<uint8_t> packed(static_cast<size_t>(strips * strip_bytes));
  const int64_t columns = CudaUnitColumns(source.format);
  for (int64_t strip = 0; strip < CeilDiv(source.n, kCudaStripOutputs); ++strip) {
    uint8_t* to = packed.data() + strip * strip_bytes;
    const int64_t first = strip * kCudaStripOutputs;
    for (int64_t unit = 0; unit * columns < source.k; ++unit) {
      // The same bytes for a whole number of columns in all formats.
      const int64_t offset = unit * columns * DTypeBytes(source.weight.dtype()) /
                             (source.format == WeightFormat::kFp4Group ? 2 : 1);
      for (int lane = 0; lane < 32; ++lane) {
        const auto row = [&](int64_t output) {
          return output < source.n ? Row(source.weight, output) + offset : nullptr;
        };
        uint32_t words[4] = {};
        CudaPackLane(source.format, lane, row(first + lane / 4), row(first + lane / 4 + 8),
                     std::min(columns, source.k - unit * columns), words);
        std::memcpy(to + CudaUnitOffset(source.format, unit) + 16 * lane, words, 16);
      }
    }
    if (source.format == WeightFormat::kBf16) continue;
    const bool fp4 = source.format == WeightFormat::kFp4Group;
    // Zero where there is no scale; then the codes are zero as well.
    const auto field = [&](int64_t output, int64_t block) -> uint32_t {
      if (output >= source.n || block >= source.k / 32) return 0;
      return static_cast<uint8_t>(Row(source.scale, fp4 ? output : output / 32)[block] +
                                  CudaScaleBias(source.format) - output_exponent);
    };
    for (int64_t unit = 0; unit * columns < padded_k; ++unit) {
      for (int64_t g = 0; g < (fp4 ? 8 : 1); ++g) {
        const uint32_t word =
            fp4 ? CudaFp4ScaleWord(field(first + g, 2 * unit), field(first + g + 8, 2 * unit),
                                   field(first + g, 2 * unit + 1),
                                   field(first + g + 8, 2 * unit + 1))
                : CudaScalePair(field(first, unit), field(first, unit));
        std::memcpy(to + CudaScaleWordOffset(source.format, unit, g), &word, 4);
      }
    }
  }
  return packed;
}

void UnpackCudaOutput(WeightFormat format, int64_t k, int output_exponent,
                      std::span<const uint8_t> packed, int64_t output, std::span<float> values) {
  DI_CHECK_EQ(std::ssize(values), k);
  const uint8_t* strip = packed.data() + output / kCudaStripOutputs * CudaStripBytes(format, k);
  const int64_t lane = output % kCudaStripOutputs;
  for (int64_t column = 0; column < k; ++column) {
    const uint32_t code = CudaCodeAt(format, strip, lane, column);
    float& value = values[static_cast<size_t>(column)];
    if (format == WeightFormat::kBf16) {
      value = Bf16ToF32(Bf16{static_cast<uint16_t>(code)});
      continue;
    }
    const int field = CudaScaleFieldAt(format, strip, lane, column / 32);
    const float unscaled = format == WeightFormat::kFp8Block
                               ? E4M3ToF32(static_cast<uint8_t>(code))
                               : E2M1ToF32(static_cast<uint8_t>(code));
    value = std::ldexp(unscaled, field - CudaScaleBias(format) - 127 + output_exponent);
  }
}

}  // namespace deepinfer
