// Times of the row operations on one GPU, at the published model's shapes: microseconds per launch
// inside a replayed graph, bytes that must move over time, and that as a share of the device's copy
// bandwidth.
//
// A graph holds launches over different sets of inputs and outputs, so many that together they are
// larger than four times the second-level cache, or kMostLaunches where rows are few: those find
// their inputs in the cache, as they would behind the kernel that made them. Launches overlap as in
// a model. Reported is the median of several timings. Options: --device-gb N and --host-gb N, the
// sizes of the Engram tables (0: leave that part out).
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "ops/embedding/embedding.h"
#include "ops/engram/engram.h"
#include "ops/latent_inputs/latent_inputs.h"
#include "ops/quantize/quantize.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rope/rope.h"
#include "tensor/copy.h"
#include "tensor/cuda_device.h"
#include "tensor/float_formats.h"
#include "tensor/stream.h"

namespace deepinfer {
namespace {

constexpr double kCopyBandwidth = 4.3e12;  // bytes per second, read and written, of an H200
constexpr int64_t kCacheBytes = int64_t{50} << 20;
constexpr int64_t kMostLaunches = 48;
constexpr int64_t kFewestLaunches = 8;

void Check(const Status& status) {
  if (status.has_value()) return;
  fmt::print(stderr, "{}\n", status.error().message);
  std::exit(1);
}
template <class T>
T Check(Result<T> result) {
  if (result.has_value()) return *std::move(result);
  fmt::print(stderr, "{}\n", result.error().message);
  std::exit(1);
}

uint64_t NextRandom(uint64_t& state) {
  uint64_t z = (state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

class Bench {
 public:
  explicit Bench(Stream& stream) : stream_(stream) {
    // A block of bf16 numbers in (-2, 2) that fills all inputs, over and over.
    block_.resize(int64_t{1} << 20);
    uint64_t state = 1;
    for (uint16_t& x : block_) {
      const float unit = static_cast<float>(NextRandom(state) >> 40) * 0x1p-24f;
      x = F32ToBf16(4.0f * unit - 2.0f).bits;
    }
  }

  // Random contents.
  TensorView Tensor(DType dtype, std::initializer_list<int64_t> shape) {
    buffers_.push_back(Check(Buffer::Allocate(
        stream_.device(),
        TensorView(static_cast<void*>(nullptr), dtype, shape).num_elements() * DTypeBytes(dtype))));
    const Buffer& buffer = buffers_.back();
    const int64_t block_bytes = std::ssize(block_) * 2;
    for (int64_t at = 0; at < buffer.bytes(); at += block_bytes) {
      Check(cuda::CopyToDevice(block_.data(), static_cast<char*>(buffer.data()) + at,
                               std::min(block_bytes, buffer.bytes() - at), stream_.cuda_stream()));
    }
    Check(stream_.Synchronize());
    return buffer.View(dtype, shape);
  }
  template <class T>
  TensorView Upload(DType dtype, const std::vector<T>& values,
                    std::initializer_list<int64_t> shape) {
    const TensorView view = Tensor(dtype, shape);
    Check(CopyToDevice(values.data(), view, stream_));
    Check(stream_.Synchronize());
    return view;
  }
  void FreeTensors() {
    Check(stream_.Synchronize());
    buffers_.clear();
  }

  static int64_t Launches(int64_t bytes) {
    return std::clamp(4 * kCacheBytes / std::max<int64_t>(bytes, 1) + 1, kFewestLaunches,
                      kMostLaunches);
  }

  // `launch(i)` puts launch i of a graph into the stream.
  void Time(const std::string& name, int64_t rows, int64_t bytes, int64_t launches,
            const std::function<Status(int64_t)>& launch) {
    Check(launch(0));
    Check(stream_.Synchronize());
    Check(cuda::BeginCapture(stream_.cuda_stream()));
    for (int64_t i = 0; i < launches; ++i) Check(launch(i));
    void* graph = Check(cuda::EndCapture(stream_.cuda_stream()));
    void* begin = Check(cuda::CreateEvent(0));
    void* end = Check(cuda::CreateEvent(0));
    const auto replay = [&](int64_t times) {
      Check(cuda::RecordEvent(begin, stream_.cuda_stream()));
      for (int64_t i = 0; i < times; ++i) Check(cuda::LaunchGraph(graph, stream_.cuda_stream()));
      Check(cuda::RecordEvent(end, stream_.cuda_stream()));
      Check(stream_.Synchronize());
      return 1e3 * Check(cuda::ElapsedMilliseconds(begin, end)) /
             static_cast<double>(times * launches);
    };
    const double first = replay(2);
    const auto times =
        static_cast<int64_t>(2000.0 / (first * static_cast<double>(launches))) + 1;  // 2 ms
    std::vector<double> us;
    for (int i = 0; i < 9; ++i) us.push_back(replay(times));
    std::sort(us.begin(), us.end());
    const double rate = static_cast<double>(bytes) / (us[us.size() / 2] * 1e-6);
    fmt::print("{:<34} {:>6} {:>10.2f} us (min {:>8.2f}) {:>9.1f} GB/s {:>6.1f} %\n", name, rows,
               us[us.size() / 2], us[0], rate * 1e-9, 100.0 * rate / kCopyBandwidth);
    std::fflush(stdout);
    cuda::DestroyEvent(begin);
    cuda::DestroyEvent(end);
    cuda::DestroyGraph(graph);
  }
  Stream& stream() {
    return stream_;
  }

 private:
  Stream& stream_;
  std::vector<uint16_t> block_;
  std::vector<Buffer> buffers_;
};

void BenchLatentInputs(Bench& bench, int64_t rows) {
  constexpr int64_t kRank = 1280;
  constexpr int64_t kDim = 512;
  constexpr int64_t kPairs = 32;
  constexpr int64_t kRecord = 528;
  const int64_t bytes = rows * (4 * kRank + 2 * kDim + 8 * kPairs + 2 * kRecord);
  const int64_t sets = Bench::Launches(bytes);
  const int64_t pages = (rows + 127) / 128;
  std::vector<int32_t> positions, table;
  for (int64_t r = 0; r < rows; ++r) positions.push_back(static_cast<int32_t>(r));
  for (int64_t p = 0; p < pages; ++p) table.push_back(static_cast<int32_t>(p));
  const std::vector<int32_t> zeros(static_cast<size_t>(rows), 0);
  const std::vector<int32_t> zero(1, 0);
  BatchLayout layout;
  layout.positions = bench.Upload(DType::kI32, positions, {rows});
  layout.row_sequence = bench.Upload(DType::kI32, zeros, {rows});
  layout.window_table = bench.Upload(DType::kI32, table, {1, pages});
  layout.window_first_page = bench.Upload(DType::kI32, zero, {1});
  layout.window_begin = bench.Upload(DType::kI32, zero, {1});
  std::vector<LatentInputsArgs> args;
  for (int64_t i = 0; i < sets; ++i) {
    const TensorView joined = bench.Tensor(DType::kBf16, {rows, kRank + kDim});
    args.push_back({.q = joined.Columns(0, kRank),
                    .q_weight = bench.Tensor(DType::kBf16, {kRank}),
                    .q_grid = bench.Tensor(DType::kBf16, {rows, kRank}),
                    .kv = joined.Columns(kRank, kRank + kDim),
                    .kv_weight = bench.Tensor(DType::kBf16, {kDim}),
                    .table = bench.Tensor(DType::kF32, {rows, kPairs, 2}),
                    .records = bench.Tensor(DType::kU8, {rows, kRecord}),
                    .layout = layout,
                    .pages = bench.Tensor(DType::kU8, {pages, 128, kRecord})});
  }
  bench.Time("latent_inputs 1280 + 512", rows, bytes, sets,
             [&](int64_t i) { return LatentInputs(args[static_cast<size_t>(i)], bench.stream()); });
}

void BenchRmsNorm(Bench& bench, int64_t rows, int64_t channels) {
  const int64_t bytes = rows * 4 * channels;
  const int64_t sets = Bench::Launches(bytes);
  const TensorView weight = bench.Tensor(DType::kBf16, {channels});
  std::vector<RmsNormArgs> args;
  for (int64_t i = 0; i < sets; ++i) {
    args.push_back({.x = bench.Tensor(DType::kBf16, {rows, channels}),
                    .weight = weight,
                    .y = bench.Tensor(DType::kBf16, {rows, channels}),
                    .y_grid = {}});
  }
  bench.Time(fmt::format("rms_norm {}", channels), rows, bytes, sets,
             [&](int64_t i) { return RmsNorm(args[static_cast<size_t>(i)], bench.stream()); });
}

void BenchRope(Bench& bench, int64_t rows, bool quantize) {
  const int64_t heads = quantize ? 32 : 64;
  const int64_t channels = quantize ? 128 : 512;
  const int64_t touched = quantize ? 128 : 64;
  const int64_t bytes = rows * (heads * touched * 4 + 256);
  const int64_t sets = Bench::Launches(bytes);
  std::vector<RopeArgs> args;
  for (int64_t i = 0; i < sets; ++i) {
    args.push_back({.x = bench.Tensor(DType::kBf16, {rows, heads, channels}),
                    .table = bench.Tensor(DType::kF32, {rows, 32, 2}),
                    .quantize_q4p = quantize});
  }
  bench.Time(quantize ? "rope + Q4P 32 x 128" : "rope 64 x (64 of 512)", rows, bytes, sets,
             [&](int64_t i) { return Rope(args[static_cast<size_t>(i)], bench.stream()); });
}

void BenchRopeTable(Bench& bench, int64_t rows) {
  std::vector<int32_t> positions;
  for (int64_t r = 0; r < rows; ++r) positions.push_back(static_cast<int32_t>(r * 200 + 77));
  std::vector<float> frequencies;
  for (int i = 0; i < 32; ++i) frequencies.push_back(1.0f / static_cast<float>(i * i * 50 + 1));
  const RopeTableArgs args{.positions = bench.Upload(DType::kI32, positions, {rows}),
                           .scale = 1,
                           .frequencies = bench.Upload(DType::kF32, frequencies, {32}),
                           .table = bench.Tensor(DType::kF32, {rows, 32, 2})};
  bench.Time("rope_table 32 pairs", rows, rows * 260, kMostLaunches,
             [&](int64_t) { return RopeTable(args, bench.stream()); });
}

void BenchQuantize(Bench& bench, int64_t rows) {
  constexpr int64_t kChannels = 8192;
  const int64_t bytes = rows * 4 * kChannels;
  const int64_t sets = Bench::Launches(bytes);
  std::vector<QuantizeFp8Args> args;
  for (int64_t i = 0; i < sets; ++i) {
    args.push_back({.x = bench.Tensor(DType::kBf16, {rows, kChannels}),
                    .y = bench.Tensor(DType::kBf16, {rows, kChannels})});
  }
  bench.Time("quantize 8192", rows, bytes, sets,
             [&](int64_t i) { return QuantizeFp8(args[static_cast<size_t>(i)], bench.stream()); });
}

void BenchEmbedding(Bench& bench, int64_t rows) {
  constexpr int64_t kVocab = 65536;
  constexpr int64_t kHidden = 5120;
  const int64_t bytes = rows * (10 * kHidden + 20);
  const int64_t sets = Bench::Launches(bytes);
  const TensorView table = bench.Tensor(DType::kBf16, {kVocab, kHidden});
  uint64_t state = 5;
  std::vector<EmbeddingArgs> args;
  for (int64_t i = 0; i < sets; ++i) {
    std::vector<int32_t> ids;
    for (int64_t r = 0; r < rows; ++r)
      ids.push_back(static_cast<int32_t>(NextRandom(state) % kVocab));
    args.push_back({.ids = bench.Upload(DType::kI32, ids, {rows}),
                    .table = table,
                    .streams = bench.Tensor(DType::kBf16, {rows, 4, kHidden}),
                    .first_pre = bench.Tensor(DType::kF32, {rows, 4})});
  }
  bench.Time("embedding 5120 to 4 streams", rows, bytes, sets,
             [&](int64_t i) { return Embedding(args[static_cast<size_t>(i)], bench.stream()); });
}

void BenchEngramApply(Bench& bench, int64_t rows) {
  constexpr int64_t kHidden = 5120;
  const int64_t bytes = rows * (5 + 8) * 2 * kHidden;
  const int64_t sets = Bench::Launches(bytes);
  const TensorView q_weight = bench.Tensor(DType::kBf16, {4, kHidden});
  const TensorView k_weight = bench.Tensor(DType::kBf16, {4, kHidden});
  std::vector<EngramApplyArgs> args;
  for (int64_t i = 0; i < sets; ++i) {
    args.push_back({.kv = bench.Tensor(DType::kBf16, {rows, 5 * kHidden}),
                    .q_weight = q_weight,
                    .k_weight = k_weight,
                    .streams = bench.Tensor(DType::kBf16, {rows, 4, kHidden})});
  }
  bench.Time("engram_apply 4 x 5120", rows, bytes, sets,
             [&](int64_t i) { return EngramApply(args[static_cast<size_t>(i)], bench.stream()); });
}

void BenchEngramHash(Bench& bench, int64_t rows) {
  uint64_t state = 3;
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < 4 * rows; ++i)
    ids.push_back(static_cast<int32_t>(NextRandom(state) % 99092));
  std::vector<int64_t> multipliers, primes, offsets;
  for (int i = 0; i < 4; ++i)
    multipliers.push_back(static_cast<int64_t>(NextRandom(state) >> 18) | 1);
  for (int i = 0; i < 24; ++i) {
    primes.push_back(15999989 + 2 * i);
    offsets.push_back(i * int64_t{16000000});
  }
  const EngramHashArgs args{.lookback = bench.Upload(DType::kI32, ids, {rows, 4}),
                            .multipliers = multipliers,
                            .primes = primes,
                            .offsets = offsets,
                            .table_rows = bench.Tensor(DType::kI64, {rows, 24})};
  bench.Time("engram_hash 24", rows, rows * (16 + 192), kMostLaunches,
             [&](int64_t) { return EngramHash(args, bench.stream()); });
}

void BenchEngramGather(Bench& bench, const Buffer& weight, const Buffer& scale, int64_t rows) {
  constexpr int64_t kLookups = 24;
  constexpr int64_t kChannels = 256;
  const int64_t table_rows = weight.bytes() / kChannels;
  const bool host = weight.device().kind == DeviceKind::kCpu;
  const int64_t bytes = rows * kLookups * (kChannels + kChannels / 32 + 2 * kChannels + 8);
  const int64_t sets = host ? kFewestLaunches : Bench::Launches(bytes);
  uint64_t state = 9;
  std::vector<EngramGatherArgs> args;
  for (int64_t i = 0; i < sets; ++i) {
    std::vector<int64_t> index;
    for (int64_t r = 0; r < rows * kLookups; ++r) {
      index.push_back(static_cast<int64_t>(NextRandom(state) % static_cast<uint64_t>(table_rows)));
    }
    args.push_back({.table_rows = bench.Upload(DType::kI64, index, {rows, kLookups}),
                    .weight = weight.View(DType::kFp8E4M3, {table_rows, kChannels}),
                    .scale = scale.View(DType::kE8M0, {table_rows, kChannels / 32}),
                    .out = bench.Tensor(DType::kBf16, {rows, kLookups * kChannels})});
  }
  bench.Time(host ? "engram_gather 24 x 264 B, host" : "engram_gather 24 x 264 B, device", rows,
             bytes, sets,
             [&](int64_t i) { return EngramGather(args[static_cast<size_t>(i)], bench.stream()); });
}

int Main(int argc, char** argv) {
  int64_t device_gb = 8;
  int64_t host_gb = 4;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--device-gb") == 0) device_gb = std::atoll(argv[i + 1]);
    if (std::strcmp(argv[i], "--host-gb") == 0) host_gb = std::atoll(argv[i + 1]);
  }
  const auto stream = Check(Stream::CreateCuda(0, 1));
  const auto properties = Check(cuda::GetDeviceProperties(0));
  fmt::print("{}, {} multiprocessors; share of {:.1f} TB/s\n", properties.name, properties.sm_count,
             kCopyBandwidth * 1e-12);
  Bench bench(*stream);
  constexpr int64_t kRows[] = {1, 256, 4096};
  const auto over_rows = [&](const auto& run) {
    for (const int64_t rows : kRows) {
      run(rows);
      bench.FreeTensors();
    }
  };
  over_rows([&](int64_t rows) { BenchLatentInputs(bench, rows); });
  over_rows([&](int64_t rows) { BenchRmsNorm(bench, rows, 512); });
  over_rows([&](int64_t rows) { BenchRmsNorm(bench, rows, 5120); });
  over_rows([&](int64_t rows) { BenchRope(bench, rows, false); });
  over_rows([&](int64_t rows) { BenchRope(bench, rows, true); });
  over_rows([&](int64_t rows) { BenchRopeTable(bench, rows); });
  over_rows([&](int64_t rows) { BenchQuantize(bench, rows); });
  over_rows([&](int64_t rows) { BenchEmbedding(bench, rows); });
  over_rows([&](int64_t rows) { BenchEngramHash(bench, rows); });
  over_rows([&](int64_t rows) { BenchEngramApply(bench, rows); });
  const auto gather = [&](const Buffer& weight, const Buffer& scale) {
    over_rows([&](int64_t rows) { BenchEngramGather(bench, weight, scale, rows); });
  };
  if (device_gb > 0) {
    const Buffer weight = Check(Buffer::Allocate(stream->device(), device_gb << 30));
    const Buffer scale = Check(Buffer::Allocate(stream->device(), (device_gb << 30) / 32));
    Check(cuda::FillBytes(weight.data(), 0x35, weight.bytes(), stream->cuda_stream()));
    Check(cuda::FillBytes(scale.data(), 0x7a, scale.bytes(), stream->cuda_stream()));
    gather(weight, scale);
  }
  if (host_gb > 0) {
    const Buffer weight = Check(Buffer::AllocatePinned(host_gb << 30));
    const Buffer scale = Check(Buffer::AllocatePinned((host_gb << 30) / 32));
    std::memset(weight.data(), 0x35, static_cast<size_t>(weight.bytes()));
    std::memset(scale.data(), 0x7a, static_cast<size_t>(scale.bytes()));
    gather(weight, scale);
  }
  return 0;
}

}  // namespace
}  // namespace deepinfer

int main(int argc, char** argv) {
  return deepinfer::Main(argc, argv);
}
