#include "ops/linear/linear_pack.h"

#include "ops/linear/cuda_pack.h"
#include "ops/linear/linear_impl.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>
#include <utility>

#include "base/ceil_div.h"
#include "base/check.h"
#include "ops/linear/linear_tile_bytes.h"
#include "tensor/float_formats.h"

namespace deepinfer {
namespace {

constexpr int64_t kTile = kLinearTileOutputs;
constexpr int64_t kBlock = kLinearBlock;
constexpr int64_t kMaxExtent = int64_t{1} << 31;
constexpr uint8_t kScaleNan = 255;
constexpr uint8_t kScaleOne = 127;

// Where a word of four FP4 columns in the kLanes layout has the code of each: exponent and mantissa
// from bit `low` on, and the sign.
struct Fp4Bits {
  int low;
  int sign;
};
constexpr Fp4Bits kFp4Bits[4] = {{6, 15}, {0, 9}, {11, 14}, {3, 10}};

constexpr uint16_t SpreadFp4(int column, int code) {
  return static_cast<uint16_t>(((code & 7) << kFp4Bits[column].low) |
                               ((code >> 3) << kFp4Bits[column].sign));
}

// The bits of a word that a source byte, that is two columns, contributes.
struct Fp4Words {
  constexpr Fp4Words() {
    for (int byte = 0; byte < 256; ++byte) {
      first[byte] = static_cast<uint16_t>(SpreadFp4(0, byte & 15) | SpreadFp4(1, byte >> 4));
      second[byte] = static_cast<uint16_t>(SpreadFp4(2, byte & 15) | SpreadFp4(3, byte >> 4));
    }
  }
  uint16_t first[256] = {};
  uint16_t second[256] = {};
};
constexpr Fp4Words kFp4Words;

// Byte offset, within a group of four columns, of the word of an output in the kLanes layout.
constexpr int64_t Fp4WordOffset(int64_t output) {
  return output / 16 * 32 + output % 8 * 4 + output % 16 / 8 * 2;
}

// Bytes of codes per row in the source.
int64_t RowBytes(WeightFormat format, int64_t k) {
  switch (format) {
    case WeightFormat::kBf16:
      return 2 * k;
    case WeightFormat::kFp8Block:
      return k;
    case WeightFormat::kFp4Group:
      return k / 2;
  }
  return 0;
}

int64_t ScaleRows(WeightFormat format, int64_t n) {
  switch (format) {
    case WeightFormat::kBf16:
      return 0;
    case WeightFormat::kFp8Block:
      return CeilDiv(n, kBlock);
    case WeightFormat::kFp4Group:
      return n;
  }
  return 0;
}

int64_t TileBytes(WeightFormat format, int64_t blocks) {
  switch (format) {
    case WeightFormat::kBf16:
      return blocks * kBf16BlockBytes;
    case WeightFormat::kFp8Block:
      return Fp8HeaderBytes(blocks) + blocks * kFp8BlockBytes;
    case WeightFormat::kFp4Group:
      return blocks * kFp4BlockBytes;
  }
  return 0;
}

// Byte offset of a bf16 or FP8 code in its tile.
int64_t Bf16Offset(int64_t output, int64_t k) {
  return ((k / 2) * kTile + output) * 4 + (k % 2) * 2;
}

int64_t Fp8Offset(LinearLayout layout, int64_t blocks, int64_t output, int64_t k) {
  const int64_t header = Fp8HeaderBytes(blocks);
  if (layout == LinearLayout::kPairs) return header + (k / 2) * 2 * kTile + output * 2 + k % 2;
  return header + k / 4 * 4 * kTile + output * 4 + k % 4;
}

// Byte offset in its tile of the codes of a column and the others of its group of 4 (kLanes) or 8
// (kPairs).
int64_t Fp4GroupOffset(LinearLayout layout, int64_t k) {
  const int64_t columns = layout == LinearLayout::kPairs ? 8 : 4;
  return k / kBlock * (kTile + kBlock * kTile / 2) + kTile +
         k % kBlock / columns * columns * kTile / 2;
}

int Fp4Code(LinearLayout layout, const uint8_t* tile, int64_t output, int64_t k) {
  const uint8_t* group = tile + Fp4GroupOffset(layout, k);
  if (layout == LinearLayout::kPairs) {
    // Bit position within the dword of eight columns.
    const int64_t bit = (k % 2) * 16 + (k % 8) / 2 * 4;
    return (group[output * 4 + bit / 8] >> (bit % 8)) & 15;
  }
  uint16_t word = 0;
  std::memcpy(&word, group + Fp4WordOffset(output), 2);
  const Fp4Bits bits = kFp4Bits[k % 4];
  return ((word >> bits.low) & 7) | (((word >> bits.sign) & 1) << 3);
}

int64_t Fp4ScaleOffset(int64_t output, int64_t block) {
  return block * (kTile + kBlock * kTile / 2) + output;
}

Status CheckSource(const LinearSource& source) {
  const auto invalid = [](std::string message, const char* field) {
    return Fail(Code::kInvalidArgument, std::move(message), field);
  };
  if (source.n < 1 || source.n >= kMaxExtent || source.k < 1 || source.k >= kMaxExtent) {
    return invalid(
        fmt::format("A linear weight has n = {} and k = {}; both must be from 1 to 2^31 - 1.",
                    source.n, source.k),
        "weight");
  }
  const bool quantised = source.format != WeightFormat::kBf16;
  if (quantised && source.k % kBlock != 0) {
    return invalid(
        fmt::format("A quantised linear weight has k = {}; it must be a multiple of 32.", source.k),
        "weight");
  }
  DType dtype = DType::kBf16;
  int64_t columns = source.k;
  if (source.format == WeightFormat::kFp8Block) dtype = DType::kFp8E4M3;
  if (source.format == WeightFormat::kFp4Group) {
    dtype = DType::kFp4x2;
    columns = source.k / 2;
  }
  const auto check = [&](const TensorView& view, DType want_dtype, int64_t want_rows,
                         int64_t want_columns, const char* field) -> Status {
    const TensorView want(static_cast<const void*>(nullptr), want_dtype, {want_rows, want_columns});
    if (view.empty() || view.rank() != 2 || view.dtype() != want_dtype ||
        view.dim(0) != want_rows || view.dim(1) != want_columns) {
      return invalid(fmt::format("The {} of a linear is {}; expected {} for n = {}, k = {}.", field,
                                 view.empty() ? "missing" : view.ToString(), want.ToString(),
                                 source.n, source.k),
                     field);
    }
    if (view.device().kind != DeviceKind::kCpu) {
      return invalid(fmt::format("The {} of a linear must be in host memory to be packed.", field),
                     field);
    }
    return {};
  };
  DI_RETURN_IF_ERROR(check(source.weight, dtype, source.n, columns, "weight"));
  if (quantised) {
    DI_RETURN_IF_ERROR(check(source.scale, DType::kE8M0, ScaleRows(source.format, source.n),
                             source.k / kBlock, "scale"));
  } else if (!source.scale.empty()) {
    return invalid("A bf16 linear weight has no scale, but one was given.", "scale");
  }
  return {};
}

const uint8_t* WeightRow(const LinearSource& source, int64_t row) {
  return static_cast<const uint8_t*>(source.weight.data()) +
         row * source.weight.row_stride() * DTypeBytes(source.weight.dtype());
}

const uint8_t* ScaleRow(const LinearSource& source, int64_t row) {
  return static_cast<const uint8_t*>(source.scale.data()) + row * source.scale.row_stride();
}

uint8_t KernelScale(uint8_t scale) {
  return scale == kScaleNan ? kScaleOne : scale;
}

uint8_t KernelFp8(uint8_t code) {
  return (code & 0x7f) == 0x7f ? 0 : code;
}

// Fills one tile from rows [64 * index, ...) of the source. Missing rows read from `zeros`.
void FillTile(const LinearSource& source, LinearLayout layout, int64_t blocks, int64_t index,
              const std::vector<uint8_t>& zeros, uint8_t* tile) {
  const int64_t first = index * kTile;
  const int64_t outputs = std::min(kTile, source.n - first);
  const uint8_t* rows[kTile];
  for (int64_t i = 0; i < kTile; ++i)
    rows[i] = i < outputs ? WeightRow(source, first + i) : zeros.data();

  if (source.format == WeightFormat::kBf16) {
    for (int64_t pair = 0; pair < blocks * kBlock / 2; ++pair) {
      uint8_t* to = tile + Bf16Offset(0, 2 * pair);
      const int64_t bytes = std::clamp<int64_t>(2 * source.k - 4 * pair, 0, 4);
      for (int64_t i = 0; i < kTile; ++i) {
        if (bytes == 4) {
          std::memcpy(to + 4 * i, rows[i] + 4 * pair, 4);
        } else {
          std::memset(to + 4 * i, 0, 4);
          if (bytes == 2) std::memcpy(to + 4 * i, rows[i] + 4 * pair, 2);
        }
      }
    }
    return;
  }

  if (source.format == WeightFormat::kFp8Block) {
    std::memset(tile, kScaleOne, static_cast<size_t>(Fp8HeaderBytes(blocks)));
    for (int64_t half = 0; half < 2 && half * kBlock < outputs; ++half) {
      const uint8_t* scales = ScaleRow(source, first / kBlock + half);
      for (int64_t block = 0; block < blocks; ++block)
        tile[2 * block + half] = KernelScale(scales[block]);
    }
    if (layout == LinearLayout::kPairs) {
      for (int64_t k = 0; k < source.k; k += 2) {
        uint8_t* to = tile + Fp8Offset(layout, blocks, 0, k);
        for (int64_t i = 0; i < kTile; ++i) {
          to[2 * i] = KernelFp8(rows[i][k]);
          to[2 * i + 1] = KernelFp8(rows[i][k + 1]);
        }
      }
      return;
    }
    for (int64_t k = 0; k < source.k; k += 4) {
      uint8_t* to = tile + Fp8Offset(layout, blocks, 0, k);
      for (int64_t i = 0; i < kTile; ++i) {
        for (int64_t c = 0; c < 4; ++c) to[4 * i + c] = KernelFp8(rows[i][k + c]);
      }
    }
    return;
  }

  for (int64_t i = 0; i < kTile; ++i) {
    const uint8_t* scales = i < outputs ? ScaleRow(source, first + i) : nullptr;
    for (int64_t block = 0; block < blocks; ++block) {
      tile[Fp4ScaleOffset(i, block)] = scales == nullptr ? kScaleOne : KernelScale(scales[block]);
    }
  }
  if (layout == LinearLayout::kPairs) {
    for (int64_t k = 0; k < source.k; k += 8) {
      uint8_t* to = tile + Fp4GroupOffset(layout, k);
      for (int64_t i = 0; i < kTile; ++i) {
        const uint8_t* from = rows[i] + k / 2;  // byte b: column k + 2b low, k + 2b + 1 high
        to[4 * i + 0] = static_cast<uint8_t>((from[0] & 15) | (from[1] << 4));
        to[4 * i + 1] = static_cast<uint8_t>((from[2] & 15) | (from[3] << 4));
        to[4 * i + 2] = static_cast<uint8_t>((from[0] >> 4) | (from[1] & 0xf0));
        to[4 * i + 3] = static_cast<uint8_t>((from[2] >> 4) | (from[3] & 0xf0));
      }
    }
    return;
  }
  for (int64_t k = 0; k < source.k; k += 4) {
    uint8_t* to = tile + Fp4GroupOffset(layout, k);
    for (int64_t i = 0; i < kTile; ++i) {
      const uint8_t* from = rows[i] + k / 2;
      const uint16_t word =
          static_cast<uint16_t>(kFp4Words.first[from[0]] | kFp4Words.second[from[1]]);
      std::memcpy(to + Fp4WordOffset(i), &word, 2);
    }
  }
}

// Whether an output has a NaN scale, or NaN code of FP8, in its row.
bool HasNan(const LinearSource& source, int64_t output) {
  if (source.format == WeightFormat::kBf16) return false;
  const int64_t blocks = source.k / kBlock;
  const uint8_t* scales =
      ScaleRow(source, source.format == WeightFormat::kFp8Block ? output / kBlock : output);
  if (std::memchr(scales, kScaleNan, static_cast<size_t>(blocks)) != nullptr) return true;
  if (source.format == WeightFormat::kFp4Group) return false;
  const uint8_t* codes = WeightRow(source, output);
  return std::memchr(codes, 0x7f, static_cast<size_t>(source.k)) != nullptr ||
         std::memchr(codes, 0xff, static_cast<size_t>(source.k)) != nullptr;
}

void SetScaleRange(const LinearSource& source, LinearWeight::Packed* packed) {
  uint8_t low = kScaleOne;
  uint8_t high = kScaleOne;
  for (int64_t row = 0; row < ScaleRows(source.format, source.n); ++row) {
    const uint8_t* scales = ScaleRow(source, row);
    for (int64_t block = 0; block < source.k / kBlock; ++block) {
      low = std::min(low, KernelScale(scales[block]));
      high = std::max(high, KernelScale(scales[block]));
    }
  }
  packed->min_scale = low;
  packed->max_scale = high;
}

LinearSource RowMajorSource(const LinearWeight& weight) {
  const LinearWeight::Packed& packed = *weight.packed();
  const int64_t k = weight.k();
  const uint8_t* data = static_cast<const uint8_t*>(packed.data.data());
  LinearSource source{
      .format = weight.format(), .n = weight.n(), .k = k, .weight = {}, .scale = {}};
  switch (weight.format()) {
    case WeightFormat::kBf16:
      source.weight = TensorView(data, DType::kBf16, {weight.n(), k});
      return source;
    case WeightFormat::kFp8Block:
      source.weight = TensorView(data, DType::kFp8E4M3, {weight.n(), k});
      break;
    case WeightFormat::kFp4Group:
      source.weight = TensorView(data, DType::kFp4x2, {weight.n(), k / 2});
      break;
  }
  source.scale = TensorView(data + weight.n() * RowBytes(weight.format(), k), DType::kE8M0,
                            {ScaleRows(weight.format(), weight.n()), k / kBlock});
  return source;
}

}  // namespace

LinearLayout LinearLayoutOf(CpuLevel level) {
  switch (level) {
    case CpuLevel::kScalar:
      return LinearLayout::kRowMajor;
    case CpuLevel::kAvx2:
      return LinearLayout::kLanes;
    case CpuLevel::kAvx512:
    case CpuLevel::kAvx512Bf16:
    case CpuLevel::kAmx:
      return LinearLayout::kPairs;
  }
  return LinearLayout::kRowMajor;
}

LinearWeight::LinearWeight() = default;
LinearWeight::LinearWeight(LinearWeight&&) noexcept = default;
LinearWeight& LinearWeight::operator=(LinearWeight&&) noexcept = default;
LinearWeight::~LinearWeight() = default;

int64_t LinearWeight::bytes() const {
  if (packed_ == nullptr) return 0;
  if (packed_->cuda != nullptr) return packed_->cuda->bytes;
  const int64_t slack = packed_->layout == LinearLayout::kRowMajor ? 0 : kLinearTileSlack;
  return packed_->data.bytes() - slack;
}

int64_t LinearTiledBytes(WeightFormat format, int64_t n, int64_t k) {
  return CeilDiv(n, kTile) * TileBytes(format, CeilDiv(k, kBlock)) + kLinearTileSlack;
}

Result<std::vector<LinearWeight>> PackLinearStack(std::span<const LinearSource> sources,
                                                  Stream& stream) {
  for (const LinearSource& source : sources) {
    DI_RETURN_IF_ERROR(CheckSource(source));
    if (source.format != sources[0].format || source.n != sources[0].n ||
        source.k != sources[0].k) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("A weight of [{}, {}] cannot be packed together with one of [{}, {}] "
                              "or of another format.",
                              source.n, source.k, sources[0].n, sources[0].k),
                  "weight");
    }
  }
  if (stream.device().kind == DeviceKind::kCuda) return cuda::PackLinearStack(sources, stream);
  std::vector<LinearWeight> weights;
  for (const LinearSource& source : sources) {
    DI_ASSIGN_OR_RETURN(LinearWeight weight, PackLinearWeight(source, stream));
    weights.push_back(std::move(weight));
  }
  return weights;
}

Result<LinearWeight> PackLinearWeight(const LinearSource& source, Stream& stream) {
  DI_RETURN_IF_ERROR(CheckSource(source));
  if (stream.device().kind == DeviceKind::kCuda) {
    DI_ASSIGN_OR_RETURN(std::vector<LinearWeight> weights,
                        cuda::PackLinearStack({&source, 1}, stream));
    return std::move(weights[0]);
  }
  LinearWeight weight;
  weight.format_ = source.format;
  weight.n_ = source.n;
  weight.k_ = source.k;
  weight.packed_ = std::make_unique<LinearWeight::Packed>();
  LinearWeight::Packed& packed = *weight.packed_;
  packed.level = stream.cpu_level();
  packed.layout = LinearLayoutOf(packed.level);
  packed.blocks = CeilDiv(source.k, kBlock);
  packed.tiles = CeilDiv(source.n, kTile);
  packed.tile_bytes = TileBytes(source.format, packed.blocks);

  if (packed.layout == LinearLayout::kRowMajor) {
    const int64_t row_bytes = RowBytes(source.format, source.k);
    const int64_t scale_rows = ScaleRows(source.format, source.n);
    const int64_t scale_row_bytes = source.k / kBlock;
    DI_ASSIGN_OR_RETURN(
        packed.data,
        Buffer::Allocate(stream.device(), source.n * row_bytes + scale_rows * scale_row_bytes));
    uint8_t* to = static_cast<uint8_t*>(packed.data.data());
    for (int64_t row = 0; row < source.n; ++row, to += row_bytes) {
      std::memcpy(to, WeightRow(source, row), static_cast<size_t>(row_bytes));
    }
    for (int64_t row = 0; row < scale_rows; ++row, to += scale_row_bytes) {
      std::memcpy(to, ScaleRow(source, row), static_cast<size_t>(scale_row_bytes));
    }
    return weight;
  }

  DI_ASSIGN_OR_RETURN(
      packed.data,
      Buffer::Allocate(stream.device(), LinearTiledBytes(source.format, source.n, source.k)));
  uint8_t* data = static_cast<uint8_t*>(packed.data.data());
  const std::vector<uint8_t> zeros(static_cast<size_t>(RowBytes(source.format, source.k)));
  std::mutex mutex;
  stream.pool().ParallelFor(packed.tiles, [&](int64_t begin, int64_t end, int) {
    std::vector<int32_t> nan_outputs;
    for (int64_t tile = begin; tile < end; ++tile) {
      FillTile(source, packed.layout, packed.blocks, tile, zeros, data + tile * packed.tile_bytes);
      for (int64_t output = tile * kTile; output < std::min(source.n, (tile + 1) * kTile);
           ++output) {
        if (HasNan(source, output)) nan_outputs.push_back(static_cast<int32_t>(output));
      }
    }
    if (nan_outputs.empty()) return;
    std::lock_guard lock(mutex);
    packed.nan_outputs.insert(packed.nan_outputs.end(), nan_outputs.begin(), nan_outputs.end());
  });
  std::sort(packed.nan_outputs.begin(), packed.nan_outputs.end());
  SetScaleRange(source, &packed);
  return weight;
}

void UnpackLinearOutput(const LinearSource& source, int64_t output, std::span<float> codes,
                        std::span<float> scales) {
  DI_CHECK_EQ(static_cast<int64_t>(codes.size()), source.k);
  DI_CHECK_EQ(static_cast<int64_t>(scales.size()), CeilDiv(source.k, kBlock));
  const uint8_t* row = WeightRow(source, output);
  if (source.format == WeightFormat::kBf16) {
    for (size_t k = 0; k < codes.size(); ++k) {
      uint16_t bits = 0;
      std::memcpy(&bits, row + 2 * k, 2);
      codes[k] = Bf16ToF32(Bf16{bits});
    }
    std::fill(scales.begin(), scales.end(), 1.0f);
    return;
  }
  const bool fp8 = source.format == WeightFormat::kFp8Block;
  for (size_t k = 0; k < codes.size(); ++k) {
    codes[k] = fp8 ? E4M3ToF32(row[k]) : E2M1ToF32((row[k / 2] >> (k % 2 * 4)) & 15);
  }
  const uint8_t* scale_row = ScaleRow(source, fp8 ? output / kBlock : output);
  for (size_t block = 0; block < scales.size(); ++block)
    scales[block] = E8M0ToF32(scale_row[block]);
}

void UnpackLinearOutput(const LinearWeight& weight, int64_t output, std::span<float> codes,
                        std::span<float> scales) {
  DI_CHECK(weight.packed() != nullptr && output >= 0 && output < weight.n());
  const LinearWeight::Packed& packed = *weight.packed();
  if (packed.layout == LinearLayout::kRowMajor) {
    UnpackLinearOutput(RowMajorSource(weight), output, codes, scales);
    return;
  }
  const uint8_t* tile = packed.tile(output / kTile);
  const int64_t lane = output % kTile;
  for (size_t index = 0; index < codes.size(); ++index) {
    const int64_t k = static_cast<int64_t>(index);
    switch (weight.format()) {
      case WeightFormat::kBf16: {
        uint16_t bits = 0;
        std::memcpy(&bits, tile + Bf16Offset(lane, k), 2);
        codes[index] = Bf16ToF32(Bf16{bits});
        break;
      }
      case WeightFormat::kFp8Block:
        codes[index] = E4M3ToF32(tile[Fp8Offset(packed.layout, packed.blocks, lane, k)]);
        break;
      case WeightFormat::kFp4Group:
        codes[index] = E2M1ToF32(static_cast<uint8_t>(Fp4Code(packed.layout, tile, lane, k)));
        break;
    }
  }
  for (size_t index = 0; index < scales.size(); ++index) {
    const int64_t block = static_cast<int64_t>(index);
    switch (weight.format()) {
      case WeightFormat::kBf16:
        scales[index] = 1.0f;
        break;
      case WeightFormat::kFp8Block:
        scales[index] = E8M0ToF32(tile[2 * block + lane / kBlock]);
        break;
      case WeightFormat::kFp4Group:
        scales[index] = E8M0ToF32(tile[Fp4ScaleOffset(lane, block)]);
        break;
    }
  }
  if (std::binary_search(packed.nan_outputs.begin(), packed.nan_outputs.end(),
                         static_cast<int32_t>(output))) {
    std::fill(scales.begin(), scales.end(), std::numeric_limits<float>::quiet_NaN());
  }
}

}  // namespace deepinfer
