// Times of hyper-connections, routing and the element-wise parts of the mixture of experts on one
// GPU, at the published model's shapes: microseconds per launch inside a replayed graph, bytes that
// must move over time, and that as a share of 4.3 TB/s, what a copy kernel reaches on an H200
// (cudaMemcpy uses a copy engine, which is slower: 2.8 TB/s).
//
// A graph is a chain of launches, each over its own weights: boundaries go round 128 sets of fn
// (252 MB) and as many sets of streams as exceed the second-level cache four times, but work on one
// set where rows are few, as a decode step does; then every launch depends on the one before.
// Launches overlap as in the model. Reported is the median of the replays.
//
//   mhc_cuda_bench [part of a case's name]
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "ops/hyper_connection/hyper_connection.h"
#include "ops/hyper_connection/hyper_connection_impl.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_test_util.h"
#include "ops/moe/moe.h"
#include "tensor/copy.h"
#include "tensor/cuda_device.h"
#include "tensor/float_formats.h"
#include "tensor/stream.h"

namespace deepinfer {
namespace {

constexpr int64_t kCacheBytes = int64_t{50} << 20;
constexpr double kCopyRate = 4.3e12;  // bytes read and written per second
constexpr int64_t kHidden = 5120;
constexpr int64_t kChain = 128;
constexpr int64_t kFewRows = 256;
constexpr int kReplays = 31;

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

class Bench {
 public:
  Bench(Stream& stream, std::string filter) : stream_(stream), filter_(std::move(filter)) {
    uint64_t state = 1;
    for (size_t i = 0; i < kBlock; ++i) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      const float value = static_cast<float>(state >> 40) * 0x1p-22f - 2.0f;
      bf16_.push_back(F32ToBf16(value).bits);
      f32_.push_back(value);
    }
    begin_ = Check(cuda::CreateEvent(0));
    end_ = Check(cuda::CreateEvent(0));
  }
  ~Bench() {
    cuda::DestroyEvent(begin_);
    cuda::DestroyEvent(end_);
  }

  bool Wants(const std::string& name) const {
    return name.find(filter_) != std::string::npos;
  }

  // Numbers in (-2, 2), or zeros for integers.
  TensorView Tensor(DType dtype, std::initializer_list<int64_t> shape) {
    const TensorView extent(static_cast<void*>(nullptr), dtype, shape);
    const int64_t bytes = extent.num_elements() * DTypeBytes(dtype);
    buffers_.push_back(Check(Buffer::Allocate(stream_.device(), bytes)));
    void* const data = buffers_.back().data();
    if (dtype == DType::kI32) {
      Check(cuda::FillBytes(data, 0, bytes, stream_.cuda_stream()));
    } else {
      const bool wide = dtype == DType::kF32;
      const void* const block = wide ? static_cast<const void*>(f32_.data()) : bf16_.data();
      const auto block_bytes = static_cast<int64_t>(kBlock) * (wide ? 4 : 2);
      for (int64_t at = 0; at < bytes; at += block_bytes) {
        Check(cuda::CopyToDevice(block, static_cast<char*>(data) + at,
                                 std::min(block_bytes, bytes - at), stream_.cuda_stream()));
      }
    }
    Check(stream_.Synchronize());
    return buffers_.back().View(dtype, shape);
  }
  void FreeTensors() {
    Check(stream_.Synchronize());
    buffers_.clear();
  }

  // `launch(i)` puts launch i of the chain into the stream. `goal`: the project's floor and target.
  void Time(const std::string& name, int64_t rows, int64_t bytes, int64_t launches,
            const std::function<Status(int64_t)>& launch, const char* goal = "") {
    const double us = Median(launch, launches);
    const double rate = static_cast<double>(bytes) / (us * 1e-6);
    fmt::print("{:<28} {:>6} rows {:>9.2f} us {:>9.1f} GB/s {:>6.1f} % BW  {}\n", name, rows, us,
               rate * 1e-9, 100.0 * rate / kCopyRate, goal);
    std::fflush(stdout);
  }
  Stream& stream() {
    return stream_;
  }

 private:
  double Median(const std::function<Status(int64_t)>& launch, int64_t launches) {
    Check(launch(0));
    Check(stream_.Synchronize());
    Check(cuda::BeginCapture(stream_.cuda_stream()));
    for (int64_t i = 0; i < launches; ++i) Check(launch(i));
    void* const graph = Check(cuda::EndCapture(stream_.cuda_stream()));
    std::vector<double> us;
    for (int replay = 0; replay < 5 + kReplays; ++replay) {
      Check(cuda::RecordEvent(begin_, stream_.cuda_stream()));
      Check(cuda::LaunchGraph(graph, stream_.cuda_stream()));
      Check(cuda::RecordEvent(end_, stream_.cuda_stream()));
      Check(stream_.Synchronize());
      if (replay < 5) continue;
      us.push_back(1e3 * Check(cuda::ElapsedMilliseconds(begin_, end_)) /
                   static_cast<double>(launches));
    }
    cuda::DestroyGraph(graph);
    std::sort(us.begin(), us.end());
    return us[us.size() / 2];
  }

  static constexpr size_t kBlock = size_t{1} << 20;
  Stream& stream_;
  std::string filter_;
  std::vector<uint16_t> bf16_;
  std::vector<float> f32_;
  std::vector<Buffer> buffers_;
  void* begin_ = nullptr;
  void* end_ = nullptr;
};

int64_t Sets(int64_t bytes) {
  return 4 * kCacheBytes / bytes + 1;
}

void BenchBoundary(Bench& bench) {
  if (!bench.Wants("boundary") && !bench.Wants("expand")) return;
  std::vector<TensorView> fn;
  for (int64_t i = 0; i < kChain; ++i) fn.push_back(bench.Tensor(DType::kF32, {24, 4 * kHidden}));
  const TensorView base = bench.Tensor(DType::kF32, {24});
  const TensorView scale = bench.Tensor(DType::kF32, {3});
  const TensorView weight = bench.Tensor(DType::kBf16, {kHidden});
  for (int64_t rows : {1, 8, 16, 64, 128, 256, 512, 1024, 4096}) {
    const int64_t sets = rows <= kFewRows ? 1 : Sets(rows * 102400);
    std::vector<HcBoundaryArgs> args;
    for (int64_t i = 0; i < sets; ++i) {
      HcBoundaryArgs set;
      set.expand.x = bench.Tensor(DType::kBf16, {rows, kHidden});
      set.expand.post = bench.Tensor(DType::kF32, {rows, 4});
      set.expand.comb = bench.Tensor(DType::kF32, {rows, 16});
      set.expand.streams = bench.Tensor(DType::kBf16, {rows, 4, kHidden});
      set.mix.streams = set.expand.streams;
      set.mix.base = base;
      set.mix.scale = scale;
      set.mix.pre = bench.Tensor(DType::kF32, {rows, 4});
      set.mix.post = set.expand.post;
      set.mix.comb = set.expand.comb;
      set.collapse.streams = set.expand.streams;
      set.collapse.pre = bench.Tensor(DType::kF32, {rows, 4});
      set.collapse.weight = weight;
      set.collapse.y = bench.Tensor(DType::kBf16, {rows, kHidden});
      set.collapse.y_grid = bench.Tensor(DType::kBf16, {rows, kHidden});
      args.push_back(set);
    }
    const auto boundary = [&](int64_t i, int64_t num_fn) {
      HcBoundaryArgs set = args[static_cast<size_t>(i % sets)];
      set.mix.fn = fn[static_cast<size_t>(i % num_fn)];
      return HcBoundary(set, bench.stream());
    };
    // x and four streams in, four streams and y out; the copy of y on the Q8 grid is not counted.
    const int64_t bytes = rows * 102400;
    const int64_t launches = rows <= kFewRows ? kChain : std::max<int64_t>(sets, 8);
    const char* const goal = rows <= 8      ? "(10 / 5 us)"
                             : rows >= 1024 ? "(60 / 80 %)"
                             : rows >= 256  ? "(- / 60 %)"
                                            : "";
    if (bench.Wants("boundary")) {
      bench.Time(
          "boundary", rows, bytes, launches, [&](int64_t i) { return boundary(i, kChain); }, goal);
      if (rows <= kFewRows)
        bench.Time("boundary, fn in L2", rows, bytes, launches,
                   [&](int64_t i) { return boundary(i, 1); });
    }
    if (bench.Wants("expand")) {
      bench.Time("expand alone", rows, rows * 2 * kHidden * 9, launches, [&](int64_t i) {
        return HcExpand(args[static_cast<size_t>(i % sets)].expand, bench.stream());
      });
    }
  }
  bench.FreeTensors();
}

void BenchRoute(Bench& bench) {
  constexpr int64_t kExperts = 384;
  constexpr int64_t kChosen = 6;
  if (!bench.Wants("route:")) return;
  const TensorView bias = bench.Tensor(DType::kF32, {kExperts});
  for (int64_t rows : {1, 8, 64, 256, 1024, 4096}) {
    RouterSelectArgs select;
    select.logits = bench.Tensor(DType::kF32, {rows, kExperts});
    select.bias = bias;
    select.experts = bench.Tensor(DType::kI32, {rows, kChosen});
    select.weights = bench.Tensor(DType::kF32, {rows, kChosen});
    GroupByExpertArgs group;
    group.experts = select.experts;
    group.weights = select.weights;
    group.num_experts = kExperts;
    group.row_index = bench.Tensor(DType::kI32, {rows * kChosen});
    group.grouped_weight = bench.Tensor(DType::kF32, {rows * kChosen});
    group.group_offsets = bench.Tensor(DType::kI32, {kExperts + 1});
    group.slot_position = bench.Tensor(DType::kI32, {rows, kChosen});
    bench.Time("route: with map", rows, rows * 4 * (kExperts + 5 * kChosen), kChain,
               [&](int64_t) { return RouteExperts(select, group, bench.stream()); });
    bench.Time("route: select alone", rows, rows * 4 * (kExperts + 2 * kChosen), kChain,
               [&](int64_t) { return RouterSelect(select, bench.stream()); });
  }
  bench.FreeTensors();
}

// Scores, selection and map, over weights that exceed the second-level cache together; and the same
// through the general linear.
void BenchRouter(Bench& bench) {
  constexpr int64_t kExperts = 384;
  constexpr int64_t kChosen = 6;
  constexpr int64_t kWeights = 56;
  if (!bench.Wants("router")) return;
  const testing::StoredWeight stored =
      testing::RandomWeight(WeightFormat::kBf16, kExperts, kHidden, 1);
  std::vector<LinearWeight> weights;
  for (int64_t i = 0; i < kWeights; ++i)
    weights.push_back(Check(PackLinearWeight(stored.source, bench.stream())));
  const TensorView bias = bench.Tensor(DType::kF32, {kExperts});
  for (int64_t rows : {1, 8, 16, 32, 64, 128, 256, 512}) {
    RouteArgs args;
    args.x = bench.Tensor(DType::kBf16, {rows, kHidden});
    args.select.bias = bias;
    args.select.experts = bench.Tensor(DType::kI32, {rows, kChosen});
    args.select.weights = bench.Tensor(DType::kF32, {rows, kChosen});
    args.group.experts = args.select.experts;
    args.group.weights = args.select.weights;
    args.group.num_experts = kExperts;
    args.group.row_index = bench.Tensor(DType::kI32, {rows * kChosen});
    args.group.grouped_weight = bench.Tensor(DType::kF32, {rows * kChosen});
    args.group.group_offsets = bench.Tensor(DType::kI32, {kExperts + 1});
    args.group.slot_position = bench.Tensor(DType::kI32, {rows, kChosen});
    const TensorView logits = bench.Tensor(DType::kF32, {rows, kExperts});
    const int64_t bytes = kExperts * kHidden * 2 + rows * kHidden * 2;
    bench.Time(
        "router", rows, bytes, kChain,
        [&](int64_t i) {
          RouteArgs set = args;
          set.weight = &weights[static_cast<size_t>(i % kWeights)];
          return Route(set, bench.stream());
        },
        rows <= 256 ? "(- / 6 us)" : "");
    bench.Time("router: linear and routing", rows, bytes, kChain, [&](int64_t i) -> Status {
      DI_RETURN_IF_ERROR(
          Linear({.x = args.x, .weight = &weights[static_cast<size_t>(i % kWeights)], .y = logits},
                 bench.stream()));
      RouterSelectArgs select = args.select;
      select.logits = logits;
      return RouteExperts(select, args.group, bench.stream());
    });
  }
  bench.FreeTensors();
}

void BenchCombine(Bench& bench) {
  constexpr int64_t kChosen = 6;
  if (!bench.Wants("combine")) return;
  for (int64_t rows : {1, 8, 64, 256, 4096}) {
    const int64_t bytes = rows * 2 * kHidden * (kChosen + 2);
    const int64_t sets = std::min<int64_t>(Sets(bytes), 32);
    std::vector<int32_t> positions;
    for (int64_t i = 0; i < rows * kChosen; ++i)
      positions.push_back(static_cast<int32_t>(i % kChosen * rows + i / kChosen));
    const TensorView slot_position = bench.Tensor(DType::kI32, {rows, kChosen});
    Check(CopyToDevice(positions.data(), slot_position, bench.stream()));
    Check(bench.stream().Synchronize());
    std::vector<MoeCombineArgs> args;
    for (int64_t i = 0; i < sets; ++i) {
      args.push_back({.routed = bench.Tensor(DType::kBf16, {rows * kChosen, kHidden}),
                      .slot_position = slot_position,
                      .experts = slot_position,
                      .shared = bench.Tensor(DType::kBf16, {rows, kHidden}),
                      .y = bench.Tensor(DType::kBf16, {rows, kHidden})});
    }
    bench.Time("combine", rows, bytes, rows <= kFewRows ? kChain : 16, [&](int64_t i) {
      return MoeCombine(args[static_cast<size_t>(i % sets)], bench.stream());
    });
    bench.FreeTensors();
  }
}

void BenchSwiglu(Bench& bench) {
  constexpr int64_t kChannels = 2304;
  if (!bench.Wants("swiglu")) return;
  for (int64_t rows : {6, 384, 24576}) {
    const int64_t bytes = rows * 2 * kChannels * 3;
    const int64_t sets = std::min<int64_t>(Sets(bytes), 32);
    const TensorView weight = bench.Tensor(DType::kF32, {rows});
    std::vector<SwigluArgs> args;
    for (int64_t i = 0; i < sets; ++i) {
      args.push_back({.gate = bench.Tensor(DType::kBf16, {rows, kChannels}),
                      .up = bench.Tensor(DType::kBf16, {rows, kChannels}),
                      .row_weight = weight,
                      .out = bench.Tensor(DType::kBf16, {rows, kChannels})});
    }
    bench.Time("swiglu", rows, bytes, rows <= 384 ? kChain : 16, [&](int64_t i) {
      return Swiglu(args[static_cast<size_t>(i % sets)], bench.stream());
    });
    bench.FreeTensors();
  }
}

int Main(const std::string& filter) {
  const auto stream = Check(Stream::CreateCuda(0, 1));
  Bench bench(*stream, filter);
  BenchBoundary(bench);
  BenchRoute(bench);
  BenchRouter(bench);
  BenchCombine(bench);
  BenchSwiglu(bench);
  return 0;
}

}  // namespace
}  // namespace deepinfer

int main(int argc, char** argv) {
  return deepinfer::Main(argc > 1 ? argv[1] : "");
}
