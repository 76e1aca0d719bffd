// Validation, division of the work among threads, and the choice of the kernel. No arithmetic.
//
// Work is a list of segments (one weight, up to kLinearMaxRows rows) times the weight's tiles of 64
// outputs. Segments times tiles are laid out in order, and each thread takes one contiguous range
// of about equal cost: a thread that gets a range of tiles reads one sequential stream of weights.
// The sum over k is never divided.
#include "ops/linear/linear.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "base/check.h"
#include "ops/linear/linear_impl.h"
#include "ops/linear/linear_kernels.h"
#include "ops/linear/linear_pack.h"
#include "ops/quantize/group_quantize.h"
#include "ops/quantize/quantize.h"
#include "tensor/float_formats.h"

namespace deepinfer {
namespace {

constexpr int64_t kTile = kLinearTileOutputs;
// Rows whose prepared copies of x exist at a time: bounds scratch memory for long prefills.
constexpr int64_t kMaxWaveRows = 2048;
// Reading and converting a tile costs about as much as multiplying it with this many rows.
constexpr int64_t kTileCostRows = 3;
// Below this many elements, preparing x on one thread is cheaper than waking the others.
constexpr int64_t kSerialElements = int64_t{1} << 16;

using TileKernel = void (*)(const LinearTileJob&);

struct Implementation {
  TileKernel kernel = nullptr;
  bool x_is_bf16 = false;
  bool scales_x = false;  // takes single rows of x from LinearScaleRowAvx2
};

Implementation ImplementationFor(const LinearWeight::Packed& packed) {
  switch (packed.level) {
    case CpuLevel::kScalar:
      break;
    case CpuLevel::kAvx2:
      return {&LinearTileAvx2, false, true};
    case CpuLevel::kAvx512:
      return {&LinearTileAvx512, false};
    case CpuLevel::kAvx512Bf16:
      return {&LinearTileAvx512Bf16, true};
    case CpuLevel::kAmx:
      // The AMX kernel multiplies scales into bf16 weights; scales beyond bf16's range take the
      // kernel that does not.
      return {packed.extreme_scales() ? &LinearTileAvx512Bf16 : &LinearTileAmx, true};
  }
  return {};
}

LinearCodes CodesOf(WeightFormat format) {
  switch (format) {
    case WeightFormat::kBf16:
      return LinearCodes::kBf16;
    case WeightFormat::kFp8Block:
      return LinearCodes::kFp8;
    case WeightFormat::kFp4Group:
      return LinearCodes::kFp4;
  }
  return LinearCodes::kBf16;
}

struct Segment {
  const LinearWeight* weight = nullptr;
  int64_t first_row = 0;  // of y
  int64_t rows = 0;
  int64_t cost() const {
    return kTileCostRows + rows;
  }
};

// What one call works on, after validation.
struct Problem {
  TensorView x;
  const int32_t* row_index = nullptr;
  TensorView y;
  int64_t k = 0;
  int64_t padded_k = 0;
};

int64_t XRow(const Problem& problem, int64_t row) {
  return problem.row_index == nullptr ? row : problem.row_index[row];
}

int64_t ByteExtent(const TensorView& view) {
  return view.rows() == 0
             ? 0
             : ((view.rows() - 1) * view.row_stride() + view.row_size()) * DTypeBytes(view.dtype());
}

Status CheckInputs(const TensorView& x, const TensorView& y, int64_t rows, int64_t n, int64_t k,
                   Device device) {
  const auto invalid = [](std::string message, const char* field) {
    return Fail(Code::kInvalidArgument, std::move(message), field);
  };
  if (x.rank() != 2 || x.dtype() != DType::kBf16 || x.dim(1) != k) {
    return invalid(
        fmt::format("The input of a linear is {}; expected BF16 [rows, {}].", x.ToString(), k),
        "x");
  }
  if (y.rank() != 2 || (y.dtype() != DType::kBf16 && y.dtype() != DType::kF32) ||
      y.dim(0) != rows || y.dim(1) != n) {
    return invalid(fmt::format("The output of a linear is {}; expected BF16 or F32 [{}, {}].",
                               y.ToString(), rows, n),
                   "y");
  }
  if (x.device() != device || y.device() != device) {
    return invalid("The input and output of a linear must be in the memory of the stream's device.",
                   "x");
  }
  if ((x.rows() > 0 && x.empty()) || (y.rows() > 0 && y.empty())) {
    return invalid("The input or output of a linear has rows but no memory.", "x");
  }
  const auto* x_begin = static_cast<const char*>(x.data());
  const auto* y_begin = static_cast<const char*>(y.data());
  if (x_begin < y_begin + ByteExtent(y) && y_begin < x_begin + ByteExtent(x)) {
    return invalid("The output of a linear overlaps its input.", "y");
  }
  return {};
}

Status CheckWeight(const LinearWeight& weight, const Stream& stream) {
  if (weight.packed() == nullptr) {
    return Fail(Code::kInvalidArgument, "The weight of a linear has not been packed.", "weight");
  }
  if ((weight.packed()->layout == LinearLayout::kCuda) !=
      (stream.device().kind == DeviceKind::kCuda)) {
    return Fail(Code::kInvalidArgument,
                "The weight of a linear was packed for another device than the stream's.",
                "weight");
  }
  if (stream.device().kind == DeviceKind::kCuda) return {};
  if (weight.packed()->level != stream.cpu_level() && !stream.use_reference()) {
    return Fail(
        Code::kInvalidArgument,
        fmt::format(
            "The weight of a linear was packed for the level {}, but the stream runs at {}.",
            CpuLevelName(weight.packed()->level), CpuLevelName(stream.cpu_level())),
        "weight");
  }
  return {};
}

// Appends rows [first, first + rows) in segments of nearly equal size.
void AppendSegments(const LinearWeight& weight, int64_t first, int64_t rows, int num_threads,
                    std::vector<Segment>* segments) {
  if (rows == 0) return;
  int64_t parts = (rows + kLinearMaxRows - 1) / kLinearMaxRows;
  // With few tiles for many threads, smaller row blocks divide the work more evenly; below 24 rows
  // the conversion of the tile starts to show.
  const int64_t items_wanted = 4 * static_cast<int64_t>(num_threads);
  const int64_t tiles = weight.packed()->tiles;
  if (num_threads > 1 && parts * tiles < items_wanted) {
    parts = std::max(parts, std::min(rows / 24, (items_wanted + tiles - 1) / tiles));
  }
  // Multiples of 12 rows suit the register blocks of all levels.
  const int64_t size = std::min(kLinearMaxRows, ((rows + parts - 1) / parts + 11) / 12 * 12);
  for (int64_t begin = 0; begin < rows; begin += size) {
    segments->push_back({&weight, first + begin, std::min(size, rows - begin)});
  }
}

// Runs segments that together have at most kMaxWaveRows rows (or are one segment).
void RunWave(const Problem& problem, const Segment* segments, size_t count, Stream& stream) {
  // All weights are of one level, and the kernels of one level take the same kind of x.
  const bool x_is_bf16 = ImplementationFor(*segments[0].weight->packed()).x_is_bf16;
  const LinearCodes codes = CodesOf(segments[0].weight->format());
  const bool scales_x =
      ImplementationFor(*segments[0].weight->packed()).scales_x && codes != LinearCodes::kBf16;
  const int64_t first_row = segments[0].first_row;
  const int64_t rows = segments[count - 1].first_row + segments[count - 1].rows - first_row;
  const int64_t element = x_is_bf16 ? 2 : 4;
  // The odd cache line keeps rows of 2^n bytes from falling into the same cache sets.
  const int64_t stride = problem.padded_k + 64 / element;

  ScratchScope scratch(stream);
  const int num_threads = stream.pool().num_threads();
  char* prepared = scratch.Allocate<char>(rows * stride * element);
  const int64_t totals_bytes = kLinearMaxRows * kTile * 4;
  const int64_t per_thread = totals_bytes + kLinearScratchBytes;
  char* thread_scratch = scratch.Allocate<char>(per_thread * num_threads);

  const auto prepare = [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const uint16_t* from =
          reinterpret_cast<const uint16_t*>(problem.x.Row<Bf16>(XRow(problem, first_row + row)));
      char* to = prepared + row * stride * element;
      if (x_is_bf16) {
        std::memcpy(to, from, static_cast<size_t>(2 * problem.k));
      } else {
        Bf16RowToF32Avx2(from, problem.k, reinterpret_cast<float*>(to));
      }
      std::memset(to + problem.k * element, 0,
                  static_cast<size_t>((problem.padded_k - problem.k) * element));
    }
  };
  if (rows * problem.k < kSerialElements) {
    prepare(0, rows, 0);
  } else {
    stream.pool().ParallelFor(rows, prepare);
  }

  int* x_exponents = scratch.Allocate<int>(static_cast<int64_t>(count));
  const auto scale = [&](int64_t begin, int64_t end, int) {
    for (int64_t s = begin; s < end; ++s) {
      x_exponents[s] = kLinearUnscaledX;
      if (segments[s].rows != 1 || !scales_x) continue;
      char* row = prepared + (segments[s].first_row - first_row) * stride * element;
      x_exponents[s] = LinearScaleRowAvx2(codes, reinterpret_cast<float*>(row), problem.padded_k);
    }
  };
  const int64_t num_segments = static_cast<int64_t>(count);
  if (num_segments * problem.k < kSerialElements) {
    scale(0, num_segments, 0);
  } else {
    stream.pool().ParallelFor(num_segments, scale);
  }

  const int64_t n = segments[0].weight->n();
  const int64_t tiles = segments[0].weight->packed()->tiles;
  int64_t total_cost = 0;
  for (size_t s = 0; s < count; ++s) total_cost += segments[s].cost() * tiles;

  const auto run_item = [&](size_t s, int64_t tile, char* own_scratch) {
    const Segment& segment = segments[s];
    const LinearWeight::Packed& packed = *segment.weight->packed();
    LinearTileJob job;
    job.tile = packed.tile(tile);
    job.codes = codes;
    job.blocks = packed.blocks;
    job.min_scale = packed.min_scale;
    job.max_scale = packed.max_scale;
    job.x = prepared + (segment.first_row - first_row) * stride * element;
    job.x_stride = stride;
    job.rows = segment.rows;
    job.x_exponent = x_exponents[s];
    job.totals = reinterpret_cast<float*>(own_scratch);
    job.scratch = own_scratch + totals_bytes;
    ImplementationFor(packed).kernel(job);
    const int64_t outputs = std::min(kTile, n - tile * kTile);
    for (int64_t row = 0; row < segment.rows; ++row) {
      const float* from = job.totals + row * kTile;
      if (problem.y.dtype() == DType::kF32) {
        std::memcpy(problem.y.Row<float>(segment.first_row + row) + tile * kTile, from,
                    static_cast<size_t>(4 * outputs));
      } else {
        Bf16* to = problem.y.Row<Bf16>(segment.first_row + row) + tile * kTile;
        F32RowToBf16Avx2(from, outputs, reinterpret_cast<uint16_t*>(to));
      }
    }
  };
  // Thread t runs the items whose starting cost lies in [t, t + 1) * total / threads.
  stream.pool().Run([&](int worker) {
    const int64_t low = total_cost * worker / num_threads;
    const int64_t high = total_cost * (worker + 1) / num_threads;
    char* own_scratch = thread_scratch + worker * per_thread;
    int64_t start = 0;
    for (size_t s = 0; s < count && start < high; ++s) {
      const int64_t cost = segments[s].cost();
      const auto first_item_from = [&](int64_t bound) {
        return std::clamp<int64_t>((bound - start + cost - 1) / cost, 0, tiles);
      };
      const int64_t end = high <= start ? 0 : first_item_from(high);
      for (int64_t tile = low <= start ? 0 : first_item_from(low); tile < end; ++tile) {
        run_item(s, tile, own_scratch);
      }
      start += cost * tiles;
    }
  });

  for (size_t s = 0; s < count; ++s) {
    for (int32_t output : segments[s].weight->packed()->nan_outputs) {
      for (int64_t row = segments[s].first_row; row < segments[s].first_row + segments[s].rows;
           ++row) {
        const float nan = std::numeric_limits<float>::quiet_NaN();
        if (problem.y.dtype() == DType::kF32) {
          problem.y.Row<float>(row)[output] = nan;
        } else {
          problem.y.Row<Bf16>(row)[output] = F32ToBf16(nan);
        }
      }
    }
  }
}

void RunSegments(const Problem& problem, const std::vector<Segment>& segments, Stream& stream) {
  size_t begin = 0;
  while (begin < segments.size()) {
    size_t end = begin;
    int64_t rows = 0;
    while (end < segments.size() && (end == begin || rows + segments[end].rows <= kMaxWaveRows)) {
      rows += segments[end++].rows;
    }
    RunWave(problem, segments.data() + begin, end - begin, stream);
    begin = end;
  }
}

bool RunsReference(const LinearWeight& weight, const Stream& stream) {
  return stream.use_reference() || weight.packed()->layout == LinearLayout::kRowMajor;
}

Status CheckLinear(const LinearArgs& args, const Stream& stream) {
  if (args.weight == nullptr)
    return Fail(Code::kInvalidArgument, "A linear was called without a weight.", "weight");
  const LinearWeight& weight = *args.weight;
  DI_RETURN_IF_ERROR(CheckWeight(weight, stream));
  DI_RETURN_IF_ERROR(
      CheckInputs(args.x, args.y, args.x.rows(), weight.n(), weight.k(), stream.device()));
  if (args.quantize_y && (args.y.dtype() != DType::kBf16 || weight.n() % kQ8Group != 0)) {
    return Fail(Code::kInvalidArgument,
                fmt::format("The output of a linear, {}, cannot be quantised: that takes BF16 and "
                            "groups of {} outputs.",
                            args.y.ToString(), kQ8Group),
                "y");
  }
  return {};
}

void RunLinear(const LinearArgs& args, Stream& stream) {
  const LinearWeight& weight = *args.weight;
  if (RunsReference(weight, stream)) {
    LinearReferenceRows(weight, args.x, nullptr, 0, args.x.rows(), args.y, stream);
    return;
  }
  const Problem problem{args.x, nullptr, args.y, weight.k(),
                        weight.packed()->blocks * kLinearBlock};
  std::vector<Segment> segments;
  AppendSegments(weight, 0, args.x.rows(), stream.pool().num_threads(), &segments);
  RunSegments(problem, segments, stream);
}

}  // namespace

Status Linear(const LinearArgs& args, Stream& stream) {
  return LinearBatch({&args, 1}, stream);
}

Status LinearBatch(std::span<const LinearArgs> batch, Stream& stream) {
  for (const LinearArgs& args : batch) DI_RETURN_IF_ERROR(CheckLinear(args, stream));
  if (stream.device().kind == DeviceKind::kCuda) return cuda::LinearBatch(batch, stream);
  for (const LinearArgs& args : batch) {
    RunLinear(args, stream);
    if (args.quantize_y) DI_RETURN_IF_ERROR(QuantizeFp8({.x = args.y, .y = args.y}, stream));
  }
  return {};
}

Status GroupedLinear(const GroupedLinearArgs& args, Stream& stream) {
  const auto invalid = [](std::string message, const char* field) {
    return Fail(Code::kInvalidArgument, std::move(message), field);
  };
  const int64_t groups = static_cast<int64_t>(args.weights.size());
  const TensorView& offsets = args.group_offsets;
  if (offsets.empty() || offsets.rank() != 1 || offsets.dtype() != DType::kI32 ||
      offsets.dim(0) != groups + 1) {
    return invalid(fmt::format("The group offsets of a grouped linear are {}; expected I32 [{}].",
                               offsets.ToString(), groups + 1),
                   "group_offsets");
  }
  const int64_t rows = args.y.rows();
  if (stream.device().kind == DeviceKind::kCuda) {
    // Offsets and row numbers are on the device: they are right if the operation that wrote them
    // is.
    for (const LinearWeight* weight : args.weights) {
      if (weight == nullptr) return invalid("A group has no weight.", "weights");
      DI_RETURN_IF_ERROR(CheckWeight(*weight, stream));
    }
    if (groups == 0) return {};
    DI_RETURN_IF_ERROR(CheckInputs(args.x, args.y, rows, args.weights[0]->n(), args.weights[0]->k(),
                                   stream.device()));
    return cuda::GroupedLinear(args, stream);
  }
  const int32_t* offset = offsets.Row<int32_t>(0);
  for (int64_t g = 0; g < groups; ++g) {
    if (offset[g + 1] < offset[g]) {
      return invalid(fmt::format("Group offset {} is {} after {}; offsets must ascend.", g + 1,
                                 offset[g + 1], offset[g]),
                     "group_offsets");
    }
  }
  if (offset[0] != 0 || offset[groups] != rows) {
    return invalid(
        fmt::format("Group offsets run from {} to {}; expected 0 to the number of output rows, {}.",
                    offset[0], offset[groups], rows),
        "group_offsets");
  }
  const LinearWeight* first = nullptr;
  for (int64_t g = 0; g < groups; ++g) {
    const LinearWeight* weight = args.weights[static_cast<size_t>(g)];
    if (offset[g + 1] == offset[g]) continue;
    if (weight == nullptr) {
      return invalid(
          fmt::format("Group {} has {} rows but no weight.", g, offset[g + 1] - offset[g]),
          "weights");
    }
    DI_RETURN_IF_ERROR(CheckWeight(*weight, stream));
    if (first == nullptr) first = weight;
    if (weight->n() != first->n() || weight->k() != first->k() ||
        weight->format() != first->format()) {
      return invalid(fmt::format("Group {} has a weight of [{}, {}]; all weights of a grouped "
                                 "linear must have one shape "
                                 "and format, here [{}, {}].",
                                 g, weight->n(), weight->k(), first->n(), first->k()),
                     "weights");
    }
  }
  if (first == nullptr) return {};
  DI_RETURN_IF_ERROR(CheckInputs(args.x, args.y, rows, first->n(), first->k(), stream.device()));
  const int32_t* row_index = nullptr;
  if (!args.row_index.empty()) {
    if (args.row_index.rank() != 1 || args.row_index.dtype() != DType::kI32 ||
        args.row_index.dim(0) != rows) {
      return invalid(fmt::format("The row index of a grouped linear is {}; expected I32 [{}].",
                                 args.row_index.ToString(), rows),
                     "row_index");
    }
    row_index = args.row_index.Row<int32_t>(0);
    for (int64_t row = 0; row < rows; ++row) {
      if (row_index[row] < 0 || row_index[row] >= args.x.rows()) {
        return invalid(fmt::format("Row index {} is {}; it must be from 0 to {}.", row,
                                   row_index[row], args.x.rows() - 1),
                       "row_index");
      }
    }
  } else if (args.x.rows() < rows) {
    return invalid(
        fmt::format("A grouped linear without a row index has {} input rows for {} output rows.",
                    args.x.rows(), rows),
        "x");
  }

  const Problem problem{args.x, row_index, args.y, first->k(),
                        first->packed()->blocks * kLinearBlock};
  std::vector<Segment> segments;
  for (int64_t g = 0; g < groups; ++g) {
    const LinearWeight* weight = args.weights[static_cast<size_t>(g)];
    if (offset[g + 1] == offset[g]) continue;
    if (RunsReference(*weight, stream)) {
      LinearReferenceRows(*weight, args.x, row_index, offset[g], offset[g + 1], args.y, stream);
    } else {
      AppendSegments(*weight, offset[g], offset[g + 1] - offset[g], stream.pool().num_threads(),
                     &segments);
    }
  }
  RunSegments(problem, segments, stream);
  return {};
}

}  // namespace deepinfer
