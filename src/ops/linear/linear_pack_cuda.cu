// Packs linear weights for the GPU: the stored rows go through two page-locked buffers to the
// device, where a kernel writes the layout of cuda_pack.h. Bound by PCIe (55 GB/s): host threads
// copy rows into one buffer while the other one is on its way, and the kernel (one lane gathers the
// 8 or 16 bytes of its fragments from two rows that are in the L2) runs behind the copy.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

#include "base/ceil_div.h"
#include "device.cuh"
#include "ops/linear/cuda_layout.h"
#include "ops/linear/cuda_pack.h"
#include "ops/linear/linear_impl.h"
#include "ops/linear/linear_pack.h"
#include "tensor/cuda_device.h"

namespace deepinfer {

// Makes LinearWeights of packed memory.
class CudaLinearPacker {
 public:
  static LinearWeight Make(const LinearSource& source, CudaLinearWeight packed) {
    LinearWeight weight;
    weight.format_ = source.format;
    weight.n_ = source.n;
    weight.k_ = source.k;
    weight.packed_ = std::make_unique<LinearWeight::Packed>();
    weight.packed_->layout = LinearLayout::kCuda;
    weight.packed_->cuda = std::make_shared<const CudaLinearWeight>(std::move(packed));
    return weight;
  }
};

namespace cuda {
namespace {

constexpr int64_t kTileOutputs = kCudaStripOutputs * kCudaTileStrips;
constexpr int64_t kStagingBytes = int64_t{16} << 20;
constexpr int kPackThreads = 256;
constexpr int kUnitsPerBlock = kPackThreads / 32;

// Some rows of one weight, as stored, and where their strips go.
struct PackJob {
  const uint8_t* codes = nullptr;
  const uint8_t* scales = nullptr;
  uint8_t* strips = nullptr;
  int64_t row_bytes = 0;
  int64_t scale_row_bytes = 0;
  int64_t strip_bytes = 0;
  int64_t k = 0;
  int64_t padded_k = 0;
  int rows = 0;  // that exist; the strips reach to the next multiple of 64
  int scale_bias = 0;
};

// Block (strip, eight units): a warp per unit. The blocks of a strip's first units also write its
// scales. Sets *found_nan for an E4M3 NaN.
template <WeightFormat kFormat>
__global__ void PackKernel(PackJob job, int* found_nan) {
  const int strip = static_cast<int>(blockIdx.x);
  uint8_t* out = job.strips + strip * job.strip_bytes;
  const int first_row = strip * static_cast<int>(kCudaStripOutputs);
  constexpr int64_t kColumns = CudaUnitColumns(kFormat);
  const int64_t unit = static_cast<int64_t>(blockIdx.y) * kUnitsPerBlock + WarpId();
  const int lane = LaneId();
  if (unit * kColumns < job.padded_k) {
    const int64_t offset = kFormat == WeightFormat::kBf16       ? unit * kColumns * 2
                           : kFormat == WeightFormat::kFp8Block ? unit * kColumns
                                                                : unit * kColumns / 2;
    const int row = first_row + lane / 4;
    const uint8_t* low = row < job.rows ? job.codes + row * job.row_bytes + offset : nullptr;
    const uint8_t* high =
        row + 8 < job.rows ? job.codes + (row + 8) * job.row_bytes + offset : nullptr;
    const int64_t left = job.k - unit * kColumns;
    uint32_t words[4];
    CudaPackLane(kFormat, lane, low, high, left < kColumns ? left : kColumns, words);
    *reinterpret_cast<uint4*>(out + CudaUnitOffset(kFormat, unit) + 16 * lane) =
        uint4{words[0], words[1], words[2], words[3]};
    if (kFormat == WeightFormat::kFp8Block) {
      bool nan = false;
      for (uint32_t word : words) {
        for (int fragment = 0; fragment < 2; ++fragment) {
          const uint32_t magnitudes = (CudaFp8Get(fragment, word) >> 4) & 0x007f007fu;
          nan = nan || (magnitudes & 0xffffu) == 0x7fu || magnitudes >> 16 == 0x7fu;
        }
      }
      if (nan) *found_nan = 1;
    }
  }
  if (kFormat == WeightFormat::kBf16 || blockIdx.y != 0) return;
  // Zero where there is no scale; then the codes are zero as well.
  constexpr bool kFp4 = kFormat == WeightFormat::kFp4Group;
  const auto field = [&](int row, int64_t block) -> uint32_t {
    if (row >= job.rows || block >= job.k / 32) return 0u;
    const int64_t scale_row = kFp4 ? row : row / 32;
    return static_cast<uint8_t>(job.scales[scale_row * job.scale_row_bytes + block] +
                                job.scale_bias);
  };
  constexpr int kWords = kFp4 ? 8 : 1;
  for (int64_t i = threadIdx.x; i < job.padded_k / kColumns * kWords; i += kPackThreads) {
    const int g = static_cast<int>(i % kWords);
    const int row = first_row + g;
    const int64_t of = i / kWords;
    const uint32_t word = kFp4
                              ? CudaFp4ScaleWord(field(row, 2 * of), field(row + 8, 2 * of),
                                                 field(row, 2 * of + 1), field(row + 8, 2 * of + 1))
                              : CudaScalePair(field(row, of), field(row, of));
    *reinterpret_cast<uint32_t*>(out + CudaScaleWordOffset(kFormat, of, g)) = word;
  }
}

Status LaunchPack(WeightFormat format, const PackJob& job, int strips, int* found_nan,
                  Stream& stream) {
  LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(strips);
  config.grid.y =
      static_cast<uint32_t>(CeilDiv(job.padded_k / CudaUnitColumns(format), kUnitsPerBlock));
  config.block = kPackThreads;
  switch (format) {
    case WeightFormat::kBf16:
      return Launch("PackKernel", &PackKernel<WeightFormat::kBf16>, config, stream, job, found_nan);
    case WeightFormat::kFp8Block:
      return Launch("PackKernel", &PackKernel<WeightFormat::kFp8Block>, config, stream, job,
                    found_nan);
    case WeightFormat::kFp4Group:
      return Launch("PackKernel", &PackKernel<WeightFormat::kFp4Group>, config, stream, job,
                    found_nan);
  }
  return {};
}

// Two page-locked buffers that packing calls share, one call at a time. They are kept for the life
// of the process: locking the pages takes longer than packing a small weight.
struct PinnedStaging {
  std::mutex mutex;
  Buffer buffers[2];
};
PinnedStaging& SharedStaging() {
  static PinnedStaging& staging = *new PinnedStaging;
  return staging;
}

Status GrowPinned(int64_t bytes, Buffer* buffer) {
  if (buffer->bytes() >= bytes) return {};
  *buffer = Buffer();
  DI_ASSIGN_OR_RETURN(*buffer, Buffer::AllocatePinned(bytes));
  return {};
}

struct Event {
  ~Event() {
    if (event != nullptr) DestroyEvent(event);
  }
  void* event = nullptr;
  bool recorded = false;
};

// Copies rows [begin, end) of a view, contiguously.
void CopyRows(const TensorView& view, int64_t begin, int64_t end, uint8_t* to, ThreadPool& pool) {
  const int64_t element = DTypeBytes(view.dtype());
  const int64_t row_bytes = view.row_size() * element;
  const auto* from = static_cast<const uint8_t*>(view.data());
  pool.ParallelFor(end - begin, [&](int64_t first, int64_t last, int) {
    if (view.contiguous()) {
      std::memcpy(to + first * row_bytes, from + (begin + first) * row_bytes,
                  static_cast<size_t>((last - first) * row_bytes));
      return;
    }
    for (int64_t row = first; row < last; ++row) {
      std::memcpy(to + row * row_bytes, from + (begin + row) * view.row_stride() * element,
                  static_cast<size_t>(row_bytes));
    }
  });
}

}  // namespace

Result<std::vector<LinearWeight>> PackLinearStack(std::span<const LinearSource> sources,
                                                  Stream& stream) {
  std::vector<LinearWeight> weights;
  if (sources.empty()) return weights;
  const LinearSource& first = sources[0];
  const WeightFormat format = first.format;
  DI_ASSIGN_OR_RETURN(const int output_exponent, CudaOutputExponent(sources, stream.pool()));

  CudaLinearWeight packed;
  packed.strips = CeilDiv(first.n, kTileOutputs) * kCudaTileStrips;
  packed.strip_bytes = CudaStripBytes(format, first.k);
  packed.bytes = packed.strips * packed.strip_bytes;
  packed.padded_k = CudaPaddedK(format, first.k);
  packed.output_exponent = output_exponent;
  packed.segments = SegmentsOf(format, first.n, first.k);
  DI_ASSIGN_OR_RETURN(Buffer memory,
                      Buffer::Allocate(stream.device(), packed.bytes * std::ssize(sources)));
  auto* data = static_cast<uint8_t*>(memory.data());

  // Rows per piece: whole tiles.
  const int64_t row_bytes = first.weight.row_size() * DTypeBytes(first.weight.dtype());
  const int64_t scale_row_bytes = format == WeightFormat::kBf16 ? 0 : first.k / 32;
  const int64_t tile_bytes = kTileOutputs * (row_bytes + scale_row_bytes);
  const int64_t tiles = CeilDiv(first.n, kTileOutputs);
  const int64_t piece_tiles = std::clamp<int64_t>(kStagingBytes / tile_bytes, 1, tiles);
  const int64_t piece_rows = piece_tiles * kTileOutputs;
  const int64_t scales_at = CeilDiv(piece_rows * row_bytes, 256) * 256;
  const int64_t piece_bytes = scales_at + piece_rows * scale_row_bytes;

  PinnedStaging& staging = SharedStaging();
  const std::lock_guard lock(staging.mutex);
  // One on the device is enough: the stream orders copies and kernels.
  DI_ASSIGN_OR_RETURN(const Buffer device_staging, Buffer::Allocate(stream.device(), piece_bytes));
  auto* const on_device = static_cast<uint8_t*>(device_staging.data());
  Event events[2];
  for (int i = 0; i < 2; ++i) {
    DI_RETURN_IF_ERROR(GrowPinned(std::max(piece_bytes, int64_t{1}), &staging.buffers[i]));
    DI_ASSIGN_OR_RETURN(events[i].event, CreateEvent(stream.device().index));
  }
  DI_ASSIGN_OR_RETURN(Buffer found_nan, Buffer::AllocateZeroed(stream.device(), 4));
  void* const cuda_stream = stream.cuda_stream();

  const auto pack_all = [&]() -> Status {
    int piece = 0;
    for (int64_t i = 0; i < std::ssize(sources); ++i) {
      const LinearSource& source = sources[static_cast<size_t>(i)];
      for (int64_t tile = 0; tile < tiles; tile += piece_tiles, ++piece) {
        Event& event = events[piece % 2];
        auto* pinned = static_cast<uint8_t*>(staging.buffers[piece % 2].data());
        if (event.recorded) DI_RETURN_IF_ERROR(SynchronizeEvent(event.event));
        const int64_t begin = tile * kTileOutputs;
        const int64_t end = std::min(source.n, begin + piece_rows);
        CopyRows(source.weight, begin, end, pinned, stream.pool());
        int64_t scale_rows = 0;
        if (format == WeightFormat::kFp4Group) {
          scale_rows = end - begin;
          CopyRows(source.scale, begin, end, pinned + scales_at, stream.pool());
        } else if (format == WeightFormat::kFp8Block) {
          scale_rows = CeilDiv(end, 32) - begin / 32;
          CopyRows(source.scale, begin / 32, CeilDiv(end, 32), pinned + scales_at, stream.pool());
        }
        const int64_t bytes =
            scale_rows > 0 ? scales_at + scale_rows * scale_row_bytes : (end - begin) * row_bytes;
        DI_RETURN_IF_ERROR(CopyToDevice(pinned, on_device, bytes, cuda_stream));
        DI_RETURN_IF_ERROR(RecordEvent(event.event, cuda_stream));
        event.recorded = true;
        const PackJob job{
            .codes = on_device,
            .scales = on_device + scales_at,
            .strips = data + i * packed.bytes + tile * kCudaTileStrips * packed.strip_bytes,
            .row_bytes = row_bytes,
            .scale_row_bytes = scale_row_bytes,
            .strip_bytes = packed.strip_bytes,
            .k = source.k,
            .padded_k = packed.padded_k,
            .rows = static_cast<int>(end - begin),
            .scale_bias = CudaScaleBias(format) - output_exponent};
        const int64_t strips = CeilDiv(end - begin, kTileOutputs) * kCudaTileStrips;
        DI_RETURN_IF_ERROR(LaunchPack(format, job, static_cast<int>(strips),
                                      static_cast<int*>(found_nan.data()), stream));
      }
    }
    return {};
  };
  const Status packing = pack_all();
  // Nothing may be under way when the staging memory goes, whatever happened.
  const Status finished = stream.Synchronize();
  DI_RETURN_IF_ERROR(packing);
  DI_RETURN_IF_ERROR(finished);
  int nan = 0;
  DI_RETURN_IF_ERROR(CopyToHost(found_nan.data(), &nan, 4, cuda_stream));
  DI_RETURN_IF_ERROR(stream.Synchronize());
  if (nan != 0) {
    return Fail(Code::kUnsupported,
                fmt::format("A weight of [{}, {}] has a NaN code; the CUDA kernels take finite "
                            "weights only.",
                            first.n, first.k),
                "weight");
  }

  packed.memory = std::make_shared<const Buffer>(std::move(memory));
  weights.reserve(sources.size());
  for (const LinearSource& source : sources) {
    packed.data = data;
    data += packed.bytes;
    weights.push_back(CudaLinearPacker::Make(source, packed));
  }
  return weights;
}

}  // namespace cuda
}  // namespace deepinfer
